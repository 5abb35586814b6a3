"""Where in a prompt's tokens its document ends."""

import signal
import threading

import pytest
from families import tiny_tokenizer

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs import encoding
from kvcli.inputs.encoding import document_tokens, render_chat_template

DOCUMENT = list(range(100, 140))


@pytest.mark.parametrize(
    ("behind", "question", "found"),
    [
        ([1, 2, 3, 4, 9, 9], [1, 2, 3, 4], 40),
        ([1, 2, 3, 4], [1, 2, 3, 4], 40),
        ([77, 2, 3, 4, 9], [1, 2, 3, 4], 40),  # what came before it has changed its first token
        ([77, 2, 3, 88, 9], [1, 2, 3, 4], 40),  # what came behind it its last one, too
        ([1, 2, 1, 2, 9], [1, 2], 42),  # the last of several
        ([5, 6, 7], [1, 2], 43),  # not there
        ([5, 6, 7], [], 43),
        ([1, 2], [1], 40),
    ],
)
def test_the_document_ends_where_its_question_begins(behind, question, found):
    assert document_tokens(DOCUMENT + behind, question) == found


def test_a_question_before_the_document_ends_none():
    assert document_tokens([1, 2, 3, *DOCUMENT], [1, 2, 3]) == 43
    assert document_tokens([1, 2, 3, *DOCUMENT, 1, 2, 3], [1, 2, 3]) == 43


CONVERSATION = [{"role": "user", "content": "the fox"}]


def rendered(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return render_chat_template(tokenizer, CONVERSATION, {"mood": "calm"})


def test_the_conversation_and_the_variables_reach_the_template():
    assert rendered("{{ mood }}: {{ messages[0]['content'] }}") == "calm: the fox"


PARTS = "{% for m in messages %}<{{ m.role }}>{% for part in m.content if part.type == 'text' %}{{ part.text }}"
PARTS += "{% endfor %}{% endfor %}<assistant>"


@pytest.mark.parametrize("content", ["the fox", "  the fox\n", 'a "quoted" text', "狐狸 fox", "?!"])
def test_a_template_that_wants_parts_gets_the_text_as_one(content):
    tokenizer = tiny_tokenizer()
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": content}]
    tokenizer.chat_template = PARTS
    assert render_chat_template(tokenizer, said, {}) == f"<system>be brief<user>{content}<assistant>"
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim | tojson }}{% endfor %}"
    assert "<user>" in render_chat_template(tokenizer, said, {})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("<user><assistant>", "leaves the prompt's text out"),
        ("{{ messages[0].content[:2] }}", "leaves the prompt's text out"),
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
    rendered("{{ messages[0].content }}")
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_other_threads_can_render():
    texts = []
    thread = threading.Thread(target=lambda: texts.append(rendered("{{ mood }} {{ messages[0].content }}")))
    thread.start()
    thread.join()
    assert texts == ["calm the fox"]
