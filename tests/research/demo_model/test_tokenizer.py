"""The demo model's tokenizer, built afresh and as it ships."""

import re
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.phrases import NAMES, VOCABULARY

sys.path.append(str(Path(__file__).parents[3] / "research" / "demo_model"))

from measure_recall import MODEL
from tokenizer import BOS, EOS, build_tokenizer


@pytest.fixture(scope="module", params=["built", "shipped"])
def tokenizer(request):
    return build_tokenizer(4096) if request.param == "built" else AutoTokenizer.from_pretrained(MODEL)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "text",
    [
        "The access code of Amber is 482913057.",
        "naïve café — “quotes” … 中文 العربية हिन्दी",
        "🙂👩‍👩‍👧‍👦 \U0010ffff \u200b\u00a0",
        "tabs\tand\n\nnew\r\nlines \n \n\n\n",
        "  leading, trailing and   doubled spaces  ",
        "def f(x: int) -> int:\n\treturn x ** 2  # {}[]<>|\\~`^@$%&",
        "<0x41> <0xAB> <0x412> ▁ Ġ ##ing",
        "1 12 123 1234 12345 00 3.14 -7,000,000",
        "is is  is 7 are 8, 9 and 10 value 11",
        "",
    ],
)
def test_every_text_decodes_to_itself(tokenizer, text):
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_every_group_of_three_digits_is_one_token(tokenizer):
    ids = [encode(tokenizer, f"{group:03d}") for group in range(1000)]
    assert all(len(pieces) == 1 for pieces in ids)
    assert len({pieces[0] for pieces in ids}) == 1000


@pytest.mark.parametrize("words", [NAMES, VOCABULARY, phrases.PHRASE_WORDS], ids=["names", "filler", "phrases"])
def test_every_word_of_the_grammar_is_one_token(tokenizer, words):
    assert [word for word in words if len(encode(tokenizer, " " + word)) != 1] == []


def test_a_fact_is_a_handful_of_tokens(tokenizer):
    ids = encode(tokenizer, "The access code of Amber is 482913057.")
    pieces = ["The", " access", " code", " of", " Amber", " is ", "482", "913", "057", "."]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces


def test_vocabulary_size(tokenizer):
    assert 2000 <= len(tokenizer) <= 3000


def test_bos_is_added_to_raw_text_once(tokenizer):
    assert tokenizer("The").input_ids == [tokenizer.bos_token_id, *encode(tokenizer, "The")]


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_chat_template_puts_the_answer_mark_behind_the_question(tokenizer):
    messages = [{"role": "user", "content": "Document.\n\nQuestion?"}]
    expected = f"{BOS}Document.\n\nQuestion?\nAnswer:"
    assert render(tokenizer, messages, add_generation_prompt=True) == expected
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == encode(tokenizer, expected)
    assert ids[0] == tokenizer.bos_token_id


def test_chat_template_holds_a_conversation_in_the_format_of_training(tokenizer):
    messages = [
        {"role": "user", "content": "Document.\n\nFirst?"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "Second?"},
    ]
    rendered = render(tokenizer, messages, add_generation_prompt=True)
    assert rendered == f"{BOS}Document.\n\nFirst?\nAnswer: One.{EOS}\n\nSecond?\nAnswer:"


def test_chat_template_trims_the_newline_at_the_end_of_a_file(tokenizer):
    one, other = ({"role": "user", "content": "Document.\n\nQuestion?" + end} for end in ("", "\n"))
    assert render(tokenizer, [one], add_generation_prompt=True) == render(
        tokenizer, [other], add_generation_prompt=True
    )


def test_special_tokens_are_known_by_id(tokenizer):
    assert encode(tokenizer, f"{BOS}x{EOS}")[0] == tokenizer.bos_token_id == 1
    assert encode(tokenizer, f"{BOS}x{EOS}")[-1] == tokenizer.eos_token_id == 2
    assert not re.search(r"[<>|]", tokenizer.decode([1, 2], skip_special_tokens=True))
