"""The Python interface: the same texts, the same report and the same refusals as the command line."""

import json
import os
import subprocess
import sys

import pytest
from families import tiny_checkpoint

import kvcli
from kvcli.errors import ExitCode
from kvcli.generate import generate
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.prompts import Prompt
from kvcli.models.loading import ModelSpec
from kvcli.request import GenerationRequest
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.observer import Observer

TEXT = "the quick brown fox jumps over the lazy dog and the number of the third key is 4711 " * 3
SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8}
OPTIONS = {"method": "freekv", "max_tokens": 12, "ignore_eos": True, **SMALL}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint("llama", path)
    return str(path)


@pytest.fixture(scope="module")
def model(path):
    return kvcli.load(path, device="cpu")


def by_command(path, *prompts, **sampling):
    sampling = Sampling(**{"max_tokens": 12, "ignore_eos": True, **sampling})
    request = GenerationRequest(resolve_profile("freekv", overrides=SMALL), prompts, sampling)
    return generate(ModelSpec(path), request, Observer())


def test_one_text_is_one_answer_as_the_command_line_has_it(path, model):
    answer = model.generate(TEXT, prompt="what is the number?", **OPTIONS)
    expected = by_command(path, Prompt("x", TEXT, "what is the number?"))
    assert answer.token_ids == expected.sequences[0].token_ids
    assert (answer.text, answer.finish_reason) == (expected.sequences[0].text, "length")
    body = answer.to_dict()
    assert list(body) == list(json.loads(expected.to_json()))
    assert body["profile"] == json.loads(expected.to_json())["profile"]
    assert answer.statistics["correction"] == body["sequences"][0]["correction"]
    assert answer.statistics["drafts"] == body["sequences"][0]["drafts"]
    assert answer.statistics["cache"]["pages_requested"] > 0


def test_several_texts_are_a_list_and_a_text_does_not_depend_on_its_company(model):
    answers = model.generate([TEXT, "a short one"], **OPTIONS)
    assert [answer.token_ids for answer in answers] == [
        model.generate(text, **OPTIONS).token_ids for text in (TEXT, "a short one")
    ]
    assert [len(answer.report.sequences) for answer in answers] == [1, 1]


def test_samples_stay_with_their_text(model):
    one, two = model.generate([TEXT, TEXT], num_samples=2, temperature=2.0, seed=3, **OPTIONS)
    assert len(one.report.sequences) == 2
    assert one.report.sequences[0].token_ids != one.report.sequences[1].token_ids
    assert one.token_ids == two.token_ids, "a sample is drawn by its seed and number"


def test_a_stream_adds_up_to_the_answer_and_can_be_left(model):
    answer = model.generate(TEXT, **OPTIONS)
    assert "".join(model.stream(TEXT, **OPTIONS)) == answer.text
    pieces = model.stream(TEXT, **OPTIONS)
    first = next(pieces)
    pieces.close()
    assert answer.text.startswith(first)
    assert model.generate(TEXT, **OPTIONS).text == answer.text, "the model is as it was"


def test_a_plan_needs_no_weights(path):
    model = kvcli.load(path, device="cpu")
    planned = model.plan(131072, method="freekv", budget="2K", max_tokens=16)
    assert "loaded" not in vars(model)
    assert planned.profile.settings.budget == 2048
    assert planned.need.kv.host > model.plan(1024, method="freekv").need.kv.host
    assert planned.times is None
    assert (model.plan(1024).profile.method, model.plan(1024).profile.chosen is None) == ("full", False)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "freekw"}, "unknown method 'freekw'"),
        ({"method": "freekv", "budgett": 5}, "no setting 'budgett'"),
        ({"temperature": -1}, "temperature"),
        ({"method": "full", "pipeline": "overlapped", "audit": 2}, "audit"),
        ({"audit": 0}, "audit is 0"),
        ({"lossless": -1}, "lossless is -1"),
        ({"checkpoint": "run", "every": 0}, "every is 0"),
    ],
)
def test_what_is_wrong_is_a_kvcli_error(model, options, match):
    with pytest.raises(kvcli.KvcliError, match=match) as caught:
        model.generate(TEXT, **options)
    assert caught.value.exit_code == ExitCode.USAGE


def test_no_text_is_refused(model):
    for nothing in ("", " \n", []):
        with pytest.raises(kvcli.KvcliError, match=r"no document|is empty"):
            model.generate(nothing)


def test_importing_it_imports_neither_torch_nor_transformers():
    program = "import kvcli, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_a_method_made_here_can_be_used_by_its_name(model):
    from kvcli.methods.quest import Quest

    class QuestAgain(Quest):
        """The same, by another name."""

    assert kvcli.register(QuestAgain, "quest-again") is QuestAgain
    answers = [model.generate(TEXT, **{**OPTIONS, "method": name}) for name in ("quest", "quest-again")]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].report.profile["method"] == "quest-again"


def test_a_chat_goes_on_where_it_was(model):
    """Each turn has its answer; another method answers from the same KV."""
    chat = model.chat("the quick brown fox jumps over the lazy dog " * 20, method="quest", max_tokens=6)
    first = chat.ask("which fox?")
    assert first.statistics["timing"]["prefill_ms"] > 0
    chat.use("freekv", budget="2K")
    assert "".join(chat.stream("which dog?")) == chat.to_dict()["sequences"][1]["text"]
    turns = chat.to_dict()["sequences"]
    assert [turn["question"] for turn in turns] == ["which fox?", "which dog?"]
    assert turns[1]["kv"]["shared_tokens"] > 100
    assert chat.retry().text == turns[1]["text"]
    with pytest.raises(kvcli.KvcliError, match="chat does not take"):
        model.chat("text", num_samples=2)


def test_a_run_that_was_kept_is_resumed(model, tmp_path):
    texts = ["a quick brown fox", "a lazy dog"]
    answers = model.generate(texts, checkpoint=tmp_path, every=2, max_tokens=6, ignore_eos=True)
    assert [answer.token_ids for answer in kvcli.resume(tmp_path)] == [answer.token_ids for answer in answers]


@pytest.mark.parametrize(
    ("loadavg", "load", "spins"),
    [
        ("8.00 8.00 8.00 9/200 1", 8.0, "1000"),
        ("1.00 1.00 1.00 2/200 1", 1.0, "1000"),  # one program is enough: threads wait for the one beside it
        ("0.10 0.10 0.10 2/200 1", 0.1, "10000"),
        ("8.00 8.00 8.00 1/200 1", 8.0, "10000"),
        ("", 0.0, "10000"),
    ],
)
def test_threads_spin_less_where_cores_are_taken(monkeypatch, loadavg, load, spins):
    monkeypatch.setattr(kvcli.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(kvcli.Path, "read_text", lambda _: loadavg)
    assert kvcli._spins() == spins


def test_the_user_decides_how_threads_wait():
    asked = "import os, kvcli; print(os.environ.get('GOMP_SPINCOUNT'))"
    own = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}

    def spins(**variables):
        return subprocess.check_output([sys.executable, "-c", asked], env=own | variables, text=True).strip()

    assert spins() in ("1000", "10000")
    assert spins(GOMP_SPINCOUNT="7") == "7"
    assert spins(OMP_WAIT_POLICY="passive") == "None"
