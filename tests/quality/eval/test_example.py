"""Examples in tokens: template, prefix, middle truncation, and texts that are fed."""

from dataclasses import replace

import pytest
import torch
from families import CHAT_TEMPLATE, tiny_tokenizer

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.options import Template
from kvcli.quality.eval.example import Example, encode_example
from kvcli.runtime.sampling import TeacherForcing

TEXT = " ".join(f"word{number}" for number in range(80))
EXAMPLE = Example(f"{TEXT}\n\nWho?", "Who?", ("x",), "recall", 9)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def spelled(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_the_chat_template_comes_around_the_prompt_unless_the_benchmark_leaves_it_out(tokenizer):
    assert "<user>" in CHAT_TEMPLATE.replace("{{ message['role'] }}", "user")
    chat = encode_example(EXAMPLE, Template(), tokenizer, None, None)
    assert spelled(tokenizer, chat.ids) == f"<user>{EXAMPLE.prompt}\n<assistant>"
    assert (chat.cut, chat.fed, chat.max_tokens) == (0, [], 9)
    assert spelled(tokenizer, chat.question) == "Who?"
    raw = encode_example(replace(EXAMPLE, raw=True), Template(), tokenizer, 5, None)
    assert spelled(tokenizer, raw.ids) == EXAMPLE.prompt
    assert raw.max_tokens == 5


@pytest.mark.parametrize("raw", [False, True])
def test_turns_go_on_where_the_prompt_ends(tokenizer, raw):
    turns = (("Ann.", "And when?"), ("Never.", "Why?"))
    encoded = encode_example(replace(EXAMPLE, turns=turns), Template(raw=raw), tokenizer, None, None)
    chat = "Ann.\n<user>And when?\n<assistant>Never.\n<user>Why?\n<assistant>"
    assert spelled(tokenizer, encoded.turns) == (" Ann.\n\nAnd when? Never.\n\nWhy?" if raw else chat)
    assert encoded.room == len(encoded.turns) + 9


@pytest.mark.parametrize("raw", [False, True])
def test_turns_that_are_read_stand_in_the_prompt(tokenizer, raw):
    example = replace(EXAMPLE, prompt="Who?", turns=(("Ann.", "And when?"),), turns_read=True)
    encoded = encode_example(example, Template(raw=raw), tokenizer, None, None)
    chat = "<user>Who?\n<assistant>Ann.\n<user>And when?\n<assistant>"
    assert spelled(tokenizer, encoded.ids) == ("Who? Ann.\n\nAnd when?" if raw else chat)
    assert (encoded.turns, encoded.room) == ([], 9)


def test_a_prompt_that_is_never_cut_and_too_long_is_named(tokenizer):
    with pytest.raises(KvcliError, match="leaves no room") as raised:
        encode_example(replace(EXAMPLE, whole=True), Template(), tokenizer, None, 20)
    assert "leave that row out" in raised.value.hint


def test_a_template_that_rewrites_what_was_said_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    with pytest.raises(KvcliError, match="changes the beginning of a conversation") as raised:
        encode_example(replace(EXAMPLE, turns=(("Ann.", "When?"),)), Template(), tokenizer, None, None)
    assert raised.value.exit_code == ExitCode.USAGE


def test_an_answer_prefix_stands_behind_the_template(tokenizer):
    encoded = encode_example(replace(EXAMPLE, answer_prefix=" It is"), Template(), tokenizer, None, None)
    assert spelled(tokenizer, encoded.ids).endswith("<assistant> It is")


@pytest.mark.parametrize("max_length", [60, 101, 256])
def test_a_long_prompt_loses_its_middle_and_keeps_both_ends(tokenizer, max_length):
    encoded = encode_example(EXAMPLE, Template(), tokenizer, None, max_length)
    text = spelled(tokenizer, encoded.ids)
    assert max_length - 4 <= len(encoded.ids) + 9 <= max_length
    assert text.startswith("<user>word0 word1")
    assert text.endswith("\n\nWho?\n<assistant>")
    assert "word40" not in text
    whole = encode_example(EXAMPLE, Template(), tokenizer, None, None)
    assert encoded.cut == pytest.approx(len(whole.ids) - len(encoded.ids), abs=3)


def test_what_fits_is_left_alone(tokenizer):
    whole = encode_example(EXAMPLE, Template(), tokenizer, None, None)
    assert encode_example(EXAMPLE, Template(), tokenizer, None, len(whole.ids) + 9) == whole


def test_an_answer_that_leaves_no_room_is_a_usage_error(tokenizer):
    with pytest.raises(KvcliError, match="an answer of 500 tokens leaves no room") as raised:
        encode_example(EXAMPLE, Template(), tokenizer, 500, 400)
    assert raised.value.exit_code == ExitCode.USAGE


def test_a_continuation_is_fed_whole(tokenizer):
    encoded = encode_example(replace(EXAMPLE, continuation=" It was Amber."), Template(), tokenizer, 3, None)
    assert spelled(tokenizer, encoded.fed) == " It was Amber."
    assert encoded.max_tokens == len(encoded.fed)


def test_the_teacher_says_its_tokens_and_adds_their_likelihoods():
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, -1.0]])
    teacher = TeacherForcing([2, 1])
    assert [teacher(row) for row in logits] == [2, 1]
    wanted = -logits.double().log_softmax(-1)
    assert teacher.nll == pytest.approx(float(wanted[0, 2] + wanted[1, 1]), rel=1e-6)
