"""The demo model's tokenizer: whole words of the synthetic tasks, three-digit groups, and bytes for everything else.

A Unigram model in which every piece has about the same score, so that the segmentation with the fewest pieces wins:
a sentence of the grammar costs one token a word, and a fact such as "The access code of Amber is 482913057." costs
ten. Text from outside the grammar falls back to single ASCII characters and then to bytes, and always decodes to
itself. Digits are split off before the model sees them, in groups of three from the left.
"""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvcli.quality.tasks.phrases import NAMES, PHRASE_WORDS, VOCABULARY

UNK, BOS, EOS = "<|unk|>", "<|bos|>", "<|eos|>"

GENERATION_PROMPT = "\nAnswer:"

# A conversation is bos, then question and answer in turn; each answer ends with eos and a blank line follows it.
# Contents are trimmed: a file that ends in a newline asks the same as one that does not.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '\\nAnswer: ' + message['content'] | trim + eos_token }}"
    "{% else %}{{ ('' if loop.first else '\\n\\n') + message['content'] | trim }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\\nAnswer:' }}{% endif %}"
)

# Pieces that end in a space stand before a number, whose digits are split off without theirs. They cost a little more
# than a word, so that they never tie with the word and a following letter.
_BEFORE_NUMBER = (" is ", " are ", " and ", ", ", " value ", " Record ", ": code ", ", price ", " occurs ")

# What stands between the numbers of a JSON list of records.
_JSON = (' [{"record": "', '", "code": "', '", "price": "', '"}, {"record": "', '"}]')


def pieces() -> list[tuple[str, float]]:
    """Return the vocabulary in the order of its ids: (piece, score)."""
    known = sorted(set(VOCABULARY) | set(PHRASE_WORDS) | set(NAMES))
    capitalised = [word for word in known if word[0].isupper() and word not in set(NAMES)]
    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n", "\t"]
    ordered = [
        *(f"{group:03d}" for group in range(1000)),
        *(f" {word}" for word in known),
        *(word for word in capitalised if len(word) > 1),
        *characters,
        "\n\n",
    ]
    assert len(set(ordered)) == len(ordered)
    return [
        (UNK, 0.0),
        (BOS, 0.0),
        (EOS, 0.0),
        *((f"<0x{byte:02X}>", -10.0) for byte in range(256)),
        *((piece, -1.0) for piece in ordered),
        *((piece, -1.5) for piece in (*_BEFORE_NUMBER, *_JSON)),
    ]


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a demo model that was trained on sequences of `max_length` tokens."""
    tokenizer = Tokenizer(models.Unigram(pieces(), unk_id=0, byte_fallback=True))
    # The byte pieces hold a "0", which stands alone here: the literal text "<0x41>" can never become a byte.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[0-9]{3}|[0-9]"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    backend = fast.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, fast.convert_tokens_to_ids(BOS))]
    )
    return fast


def token_classes(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the ids of names, and those of numbers and of the pieces that announce them."""
    ids = tokenizer.convert_tokens_to_ids
    telling = [*(f"{group:03d}" for group in range(1000)), *_BEFORE_NUMBER, *_JSON]
    return ids([f" {name}" for name in NAMES]), ids(telling)
