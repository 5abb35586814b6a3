import pytest
from families import tiny_tokenizer

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
