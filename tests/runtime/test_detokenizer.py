import random

import pytest
from families import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvcli.quality.eval.final_answer import final_letter
from kvcli.runtime.detokenizer import StreamingDetokenizer

TEXTS = [
    "the quick brown fox",
    "  two spaces, a tab\tand\nlines\n\n  indented",
    "Grüße, 你好, 🙂👩‍👩‍👧 and e\u0301",
    "ends with a broken emoji 🙂",
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def stream(tokenizer, text, stop=()):
    out = StreamingDetokenizer(tokenizer, stop)
    pieces = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        pieces.append(out.push(token))
        if out.stopped:
            break
    pieces.append(out.finish())
    assert "".join(pieces) == out.text
    return out, pieces


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_break_no_character(tokenizer, text):
    out, pieces = stream(tokenizer, text)
    assert out.text == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_an_incomplete_character_at_the_end_is_shown_as_such(tokenizer):
    out = StreamingDetokenizer(tokenizer)
    for token in tokenizer("🙂", add_special_tokens=False)["input_ids"][:-1]:
        assert out.push(token) == ""
    assert out.finish().startswith("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize(
    ("stop", "left"), [(("fox",), "the quick brown "), (("row", "quick"), "the "), (("zebra",), TEXTS[0])]
)
def test_text_ends_before_a_stop_string(tokenizer, stop, left):
    out, _ = stream(tokenizer, TEXTS[0], stop)
    assert out.text == left
    assert out.stopped == (left != TEXTS[0])


def test_the_beginning_of_a_stop_string_is_held_back(tokenizer):
    out = StreamingDetokenizer(tokenizer, ("dog ate",))
    shown = ""
    for token in tokenizer("the dog and", add_special_tokens=False)["input_ids"]:
        shown += out.push(token)
        assert not any(shown.endswith("dog ate"[:n]) for n in range(1, 8)), shown
    assert shown + out.finish() == "the dog and"


def _byte_level():
    return tiny_tokenizer()


def _sentencepiece():
    """Make a tokenizer as Llama 2, Mistral and Phi 3 have it: pieces with a mark for spaces, bytes as a fallback."""
    words = ["▁the", "▁", "of", "▁of", "▁and", "to", "in", "▁in", "s", ".", ",", "▁.", "\n", "▁▁"]
    specials = ["<unk>", "<s>", "</s>", "<|end|>", "<|user|>"]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in specials])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _metaspace():
    """Make a tokenizer as T5 and XLNet have it: the first piece loses its space."""
    pieces = ["<unk>", "</s>", "▁the", "▁of", "and", "▁to", "▁", "s", "."]
    backend = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in pieces[:2]])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("make", [_byte_level, _sentencepiece, _metaspace])
def test_a_stream_of_any_tokens_is_their_text(make):
    """Bytes come as whole characters: a byte that is none turns those before it into marks."""
    tokenizer, generator = make(), random.Random(1)
    special = [[token] for token in tokenizer.all_special_ids]
    words = [[id] for token, id in tokenizer.get_vocab().items() if not token.startswith("<0x")]
    characters = [tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in each.encode()]) for each in "aé你🙂"]
    kinds = [special, words, words, characters if make is _sentencepiece else words]
    for _ in range(300):
        units = [generator.choice(generator.choice(kinds)) for _ in range(generator.randrange(1, 24))]
        ids = [token for unit in units for token in unit]
        out = StreamingDetokenizer(tokenizer)
        text = "".join(out.push(token) for token in ids) + out.finish()
        assert text == out.text == tokenizer.decode(ids, skip_special_tokens=True), ids


def test_a_space_after_a_special_token_is_kept():
    tokenizer = _sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["▁the", "of", "<|end|>", "▁and", "<|end|>", "<|user|>", "▁in"])
    out = StreamingDetokenizer(tokenizer)
    assert [out.push(token) for token in ids] == ["the", "of", "", " and", "", "", " in"]


def test_messages_of_an_answer_in_channels_are_told_apart():
    tokenizer = tiny_tokenizer()
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    thought = "<|channel|>analysis<|message|>the quick fox<|end|><|start|>assistant"
    out, pieces = stream(tokenizer, f"{thought}<|channel|>final<|message|>the dog ate<|return|>", stop=("ate it",))
    assert out.text == "[analysis]\nthe quick fox\n\n[final]\nthe dog ate"
    assert "[final]" in "".join(pieces)
    assert out.thoughts == ("the quick fox", "the dog ate")
    assert final_letter(out.text + ". The answer is B", "B") == 1
    without_marks, _ = stream(tiny_tokenizer(), "the quick fox")
    assert without_marks.text == "the quick fox"


@pytest.mark.parametrize(
    ("begin", "end"), [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<s:think>", "</s:think>")]
)
@pytest.mark.parametrize("special", [False, True])  # special tokens have no text
@pytest.mark.parametrize("opened", [False, True])  # by the template, at the end of the prompt
def test_thoughts_and_answer_are_told_apart_by_the_tokenizers_own_marks(begin, end, special, opened):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(begin, special=special), AddedToken(end, special=special)], special_tokens=special)
    out, _ = stream(tokenizer, f"{'' if opened else begin}the quick fox\n{end}\n\nthe dog", stop=("cat",))
    assert out.thoughts == ("the quick fox", "the dog")
    assert (end in out.text) != special
    unfinished, _ = stream(tokenizer, f"{begin}the quick fox")
    assert unfinished.thoughts is None


def test_words_that_look_like_marks_divide_nothing(tokenizer):
    out, _ = stream(tokenizer, "the </think> dog")
    assert out.thoughts is None
