"""Messages become tokens as the template says, and only what is new of them is read."""

from dataclasses import replace

import pytest
import torch

from kvcli.capacity import memory
from kvcli.chat import Dialogue
from kvcli.errors import ExitCode, KvcliError
from kvcli.generate import generate
from kvcli.inputs.options import Template
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.prompts import Prompt
from kvcli.models.loading import ModelSpec, open_checkpoint
from kvcli.request import GenerationRequest
from kvcli.runtime.detokenizer import StreamingDetokenizer
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.saved.library import KVOptions
from kvcli.runtime.saved.manifest import read_manifest
from kvcli.telemetry.observer import Observer

DOCUMENT = "The access code of Nelson is Edna. It was a quiet morning, and the doctors were white. " * 8
QUESTION = "What is the access code of Nelson?"
CHATTY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As models do that think: what an earlier answer said goes.
FORGETFUL = CHATTY.replace("{{ m.content }}", "{{ '...' if m.role == 'assistant' else m.content }}")


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(ModelSpec(dtype="float32"))


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint.load()


@pytest.fixture
def dialogue(model, checkpoint, monkeypatch):
    def make(template=CHATTY, document=DOCUMENT, method="freekv", **how):
        monkeypatch.setattr(checkpoint.tokenizer, "chat_template", template)
        sampling = Sampling(max_tokens=8, ignore_eos=True)
        return Dialogue(model, checkpoint, resolve_profile(method), sampling, Template(**how), document)

    return make


class Counting(Observer):
    """Adds up what is read, in tokens of a layer."""

    total = 0

    def stage(self, name, total=None):
        self.total += total or 0


class Notes(Observer):
    """Keeps what is said."""

    def __init__(self):
        self.notices = []

    def notice(self, message):
        self.notices.append(message)


def say(dialogue, question):
    return "".join(dialogue.ask(question))


def prompt(dialogue, turn=-1):
    return dialogue.checkpoint.tokenizer.decode(dialogue.exchanges[turn].ids)


def test_the_document_is_read_once_and_a_turn_reads_what_is_new(dialogue):
    talk = dialogue(system="Be brief.")
    talk.read()
    first, second = say(talk, QUESTION), say(talk, "And who?")
    assert prompt(talk) == (
        f"<system>Be brief.</system><user>{DOCUMENT.rstrip()}\n\n{QUESTION}</user><assistant>{first}</assistant>"
        "<user>And who?</user><assistant>"
    )
    for exchange in talk.exchanges:
        assert exchange.answer.kv.shared_tokens % 32 == 0
        assert exchange.answer.kv.read_tokens < 32 + len(exchange.answer.token_ids) + 40 < len(exchange.ids) / 2
    report = talk.report()
    assert [each.text for each in report.sequences] == [first, second]
    assert [each.question for each in report.sequences] == [QUESTION, "And who?"]
    assert [each.text for each in talk.report(last=1).sequences] == [second]


def test_a_template_that_forgets_costs_what_it_changes(dialogue):
    talk = dialogue(FORGETFUL)
    say(talk, QUESTION), say(talk, "And who?")
    assert "<assistant>...</assistant><user>And who?</user>" in prompt(talk)
    known = talk.exchanges[0].ids
    assert talk.exchanges[1].answer.kv.shared_tokens > len(known) - 64


def test_what_was_thought_is_no_part_of_the_conversation(dialogue, monkeypatch):
    monkeypatch.setattr(StreamingDetokenizer, "thoughts", property(lambda _: ("hm", "yes")))
    talk = dialogue()
    say(talk, QUESTION)
    say(talk, "And who?")
    assert "<assistant>yes</assistant>" in prompt(talk).replace(" ", "")
    assert [each.answer.thoughts for each in talk.exchanges] == ["hm", "hm"]


def test_without_a_template_the_tokens_go_on_as_they_are(dialogue):
    talk = dialogue(None)
    say(talk, QUESTION), say(talk, "And who?")
    first, second = talk.exchanges
    assert second.ids[: len(first.ids) + 8] == [*first.ids, *first.answer.token_ids]
    assert prompt(talk).endswith("\n\nAnd who?")


@pytest.mark.parametrize("method", ["freekv", None])
def test_a_system_message_is_for_the_next_answers(dialogue, method):
    talk = dialogue(document=DOCUMENT, method=method)
    talk.observer = notes = Notes()
    talk.read()
    say(talk, QUESTION)
    talk.instruct("Be brief.")
    say(talk, "And who?")
    assert prompt(talk).startswith("<system>Be brief.</system><user>The access code")
    assert any("tokens again" in notice and "prefills" in notice for notice in notes.notices)
    assert not any("all queries" in notice for notice in notes.notices)
    talk.instruct(None)
    say(talk, "And who?")
    assert "<system>" not in prompt(talk)


def test_a_system_message_behind_the_document_reads_nothing_again(dialogue):
    """As the templates of some models have it: the message stands in the last question."""
    last = "{% set m = messages[-1] %}"
    late = (
        "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}"
        "{{ s if loop.last }}</{{ m.role }}>{% endfor %}<assistant>"
    )
    talk = dialogue(last + late)
    talk.observer = notes = Notes()
    say(talk, QUESTION)
    talk.instruct("Be brief.")
    say(talk, "And who?")
    assert "And who?Be brief.</user>" in prompt(talk)
    assert not any("read again" in notice for notice in notes.notices)
    assert talk.exchanges[1].answer.kv.shared_tokens > len(talk.exchanges[0].ids) - 64


def test_a_template_without_a_place_for_a_system_message_keeps_it_out(dialogue):
    for template in (None, "{{ raise_exception('no system') if messages[0].role == 'system' }}" + CHATTY):
        talk = dialogue(template)
        say(talk, QUESTION)
        with pytest.raises(KvcliError):
            talk.instruct("Be brief.")
        assert say(talk, "And who?")


def test_what_was_read_under_an_earlier_system_message_is_saved_as_that(dialogue, tmp_path):
    talk = dialogue(system="Be brief.")
    say(talk, QUESTION)
    talk.instruct("Be long.")
    talk.save(tmp_path / "first")
    say(talk, "And who?")
    talk.save(tmp_path / "second")
    read = [read_manifest(tmp_path / name).asked.system for name in ("first", "second")]
    assert read == ["Be brief.", "Be long."]


def test_what_will_answer_is_known_once_it_was_chosen(dialogue):
    talk = dialogue(document="", method=None)
    assert talk.answering is None
    say(talk, QUESTION)
    assert talk.answering.method == "full"
    talk.profile = resolve_profile("quest")
    assert talk.answering.method == "quest"


def test_there_need_be_no_document(dialogue):
    talk = dialogue(document="")
    talk.read()
    assert say(talk, QUESTION)
    assert prompt(talk) == f"<user>{QUESTION}</user><assistant>"


def test_a_retry_takes_the_place_of_the_answer(dialogue):
    talk = dialogue()
    before = say(talk, QUESTION)
    assert "".join(talk.retry()) == before
    assert len(talk.exchanges) == 1
    talk.sampling = Sampling(max_tokens=8, temperature=2.0, ignore_eos=True)
    assert len({"".join(talk.retry()) for _ in range(3)}) > 1


def test_an_answer_that_is_broken_off_stays_as_far_as_it_came(dialogue):
    talk = dialogue()
    pieces = talk.ask(QUESTION)
    text = next(pieces) + next(pieces)
    pieces.close()
    assert talk.exchanges[0].answer.finish_reason == "interrupted"
    assert talk.exchanges[0].text.startswith(text)
    say(talk, "And who?")
    assert f"<assistant>{talk.exchanges[0].text}</assistant>" in prompt(talk)


def test_ctrl_c_while_reading_leaves_the_conversation_as_it_was(dialogue):
    class Interrupting(Observer):
        def advance(self, amount=1):
            raise KeyboardInterrupt

    talk = dialogue()
    say(talk, QUESTION)
    quiet, talk.conversation.observer = talk.conversation.observer, Interrupting()
    with pytest.raises(KeyboardInterrupt):
        say(talk, "And who?")
    talk.conversation.observer = quiet
    assert len(talk.exchanges) == 1
    assert say(talk, "And who?")


def test_nothing_to_retry_and_no_room_are_said(dialogue, monkeypatch):
    talk = dialogue()
    with pytest.raises(KvcliError, match="nothing was asked yet"):
        next(talk.retry())
    talk, notes = dialogue(method=None), Notes()
    talk.observer = notes
    monkeypatch.setattr("kvcli.chat.memory.available", lambda device: {"host": 1})
    with pytest.raises(KvcliError, match=r"a conversation of .* tokens needs") as raised:
        say(talk, QUESTION)
    assert raised.value.exit_code is ExitCode.WILL_NOT_FIT
    assert not talk.exchanges
    assert [note[:12] for note in notes.notices] == ["no --method:"]


def test_a_turn_that_fits_no_more_is_answered_by_what_does(dialogue, checkpoint, monkeypatch):
    """Planned for a GPU of so much memory: the KV of earlier turns stays, and one line says what changed."""
    talk, notes, cuda = dialogue(document=DOCUMENT * 20, method=None), Notes(), torch.device("cuda")
    talk.observer = talk.conversation.observer = notes
    talk.checkpoint, free = replace(checkpoint, device=cuda), {"device": 1 << 40, "host": 1 << 40}
    monkeypatch.setattr("kvcli.chat.memory.available", lambda _: free)
    monkeypatch.setattr("kvcli.chat.pipelines.choose", lambda *_: "blocking")
    say(talk, QUESTION)
    tokens = [len(talk._tokens(talk.document, "And who?", talk.exchanges))]
    known = resolve_profile("full"), checkpoint.geometry, checkpoint.dtype, tokens, talk.sampling.max_tokens, 1
    free["device"] = replace(memory.need(*known, device=cuda), weights=0).on(cuda)["device"] - 1
    say(talk, "And who?")
    first, second = talk.exchanges
    assert (first.profile.method, second.profile.method) == ("full", "offload")
    said = [note for note in notes.notices if note.startswith("no --method")]
    assert len(said) == 2
    assert "because with full attention a conversation of" in said[1]
    assert second.answer.kv.read_tokens < 64
    free["device"] = 1
    with pytest.raises(KvcliError) as refused:
        say(talk, "And then?")
    assert refused.value.exit_code is ExitCode.WILL_NOT_FIT
    assert talk.exchanges == [first, second]
    free["device"] = 1 << 40
    assert say(talk, "And then?")


def test_what_is_kept_of_earlier_turns_is_counted_once(dialogue, checkpoint, monkeypatch):
    talk = dialogue(document=DOCUMENT * 20, method="full")
    say(talk, QUESTION)
    kept, tokens = talk.conversation.footprint().host, len(talk._tokens(talk.document, "And who?", talk.exchanges))
    known = checkpoint.geometry, checkpoint.dtype
    need = memory.need(talk.profile, *known, [tokens], talk.sampling.max_tokens, 1, device=checkpoint.device)
    beside = replace(need, weights=0).on(checkpoint.device)["host"]
    monkeypatch.setattr("kvcli.chat.memory.available", lambda _: {"host": beside + kept // 4})
    assert say(talk, "And who?")


def test_what_was_read_is_saved_for_other_runs(dialogue, checkpoint, tmp_path):
    """As `generate --kv` finds it: the document's pages, whatever is asked of them next."""
    talk = dialogue(checkpoint.tokenizer.chat_template)
    with pytest.raises(KvcliError, match="there is no KV yet"):
        talk.save(tmp_path / "kv")
    say(talk, QUESTION)
    saved = talk.save(tmp_path / "kv")
    assert saved == len(talk.exchanges[0].ids) // 32 * 32
    request = GenerationRequest(
        resolve_profile("quest"),
        (Prompt("text", DOCUMENT, "Who else?"),),
        Sampling(max_tokens=4),
        kv=KVOptions(use=tmp_path / "kv"),
    )
    again = dialogue(checkpoint.tokenizer.chat_template)
    again.conversation.observer = counting = Counting()
    again.read(tmp_path / "kv")
    assert 0 < counting.total <= 32 * len(checkpoint.geometry.layers) < saved * len(checkpoint.geometry.layers) / 3
    assert say(again, QUESTION) == talk.exchanges[0].text
    with pytest.raises(KvcliError, match="does not begin like the saved"):
        dialogue(checkpoint.tokenizer.chat_template, "Another text altogether. " * 20).read(tmp_path / "kv")
    with pytest.raises(KvcliError, match="'infllm' cannot use saved KV"):
        dialogue(checkpoint.tokenizer.chat_template, method="infllm").read(tmp_path / "kv")
    (sequence,) = generate(ModelSpec(dtype="float32"), replace(request, template=talk.template), Observer()).sequences
    assert sequence.kv.disk_tokens > saved - 96
