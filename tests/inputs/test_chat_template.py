import signal
import threading

import pytest
from families import tiny_tokenizer

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs import encoding
from kvcli.inputs.encoding import render_chat_template

CONVERSATION = [{"role": "user", "content": "the fox"}]


def rendered(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return render_chat_template(tokenizer, CONVERSATION, {"mood": "calm"})


def test_the_conversation_and_the_variables_reach_the_template():
    assert rendered("{{ mood }}: {{ messages[0]['content'] }}") == "calm: the fox"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('no system\nrole') }}", "refuses the prompt: no system role"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without an end"),
        ("{{ 'x'.encode('nope') }}", "unknown encoding"),
        ("{{ 'x' * 10 ** 11 }}", "too much memory"),
        ("{% set n = namespace(x='x' * 1000) %}{% for i in range(50) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
         "the chat template"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "not ended after"),
        ("{{ ", "refuses the prompt"),
        ("{{ messages.nothing.at.all }}", "refuses the prompt"),
        ("", "gives no text"),
        ("{{ '' }}", "gives no text"),
    ],
)  # fmt: skip
def test_a_template_that_fails_is_one_line(monkeypatch, template, words):
    monkeypatch.setattr(encoding, "SECONDS", 0.5)
    with pytest.raises(KvcliError) as raised:
        rendered(template)
    assert words in raised.value.what
    assert "\n" not in raised.value.what
    assert "--raw" in raised.value.hint
    assert raised.value.exit_code == ExitCode.USAGE


def test_the_alarm_of_the_process_is_as_before():
    before = signal.getsignal(signal.SIGALRM)
    rendered("{{ mood }}")
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_other_threads_can_render():
    texts = []
    thread = threading.Thread(target=lambda: texts.append(rendered("{{ mood }}")))
    thread.start()
    thread.join()
    assert texts == ["calm"]
