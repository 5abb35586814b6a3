"""Tiny checkpoints on disk, and what kvcli refuses; the models themselves are those of the conformance suite."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from kvcli.conformance.models import (  # noqa: F401 - what tests take from here
    BOS,
    EAGER,
    EOS,
    EXPERTS,
    FAMILIES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    HYBRIDS,
    KV_HEADS,
    LATENT,
    LAYERS,
    MAX_POSITIONS,
    PAD,
    SELECTING,
    SIZES,
    VOCAB,
    WINDOW,
    config_of,
    randomize,
    tiny_config,
    tiny_model,
)

_WAYS = ("deepseek_v32", "glm_moe_dsa", "minimax_m3", "glm5_next", "deepseek_v4")
WAYS_OF_SELECTING = [name if name in _WAYS else pytest.param(name, marks=pytest.mark.exhaustive) for name in SELECTING]
"""Models that select by themselves: five of them in every run, the others with `pytest -m ''`."""

LATER = {"dots3_note", "glm5_next", "mistral_large4", "qwen4_exp"}
"""Of these, what transformers has since 5.24, or reads otherwise since then."""


def of_this_version(name: str) -> str:
    """Skip the test of a model that the installed transformers does not have."""
    if name in LATER and Version(transformers.__version__) < Version("5.24"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return name


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_TEXT = (
    "the quick brown fox jumps over the lazy dog and then the dog runs there, while the other fox sleeps under the old "
    "tree; the number of the third key is 4711 and the value of the first one is 1234."
)


# What kvcli refuses, and a word its message has to contain.
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, state_size=4, num_hidden_layers=2),
        "state-space",
    ),
    "t5": (
        lambda: transformers.T5Config(vocab_size=VOCAB, d_model=HIDDEN, d_kv=16, d_ff=96, num_layers=2, num_heads=4),
        "encoder-decoder",
    ),
    "bart": (
        lambda: transformers.BartConfig(
            vocab_size=VOCAB,
            d_model=HIDDEN,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
        ),
        "encoder-decoder",
    ),
}


@cache
def _byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 4,  # some families' tokenizers add a special token of their own
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    assert tokenizer.get_vocab_size() <= VOCAB - 4
    return tokenizer.to_str()


def tiny_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most VOCAB entries; any text survives encoding and decoding."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level_json()),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE if chat else None,
    )


def tiny_checkpoint(
    family: str, path: Path, seed: int = 0, layers: int = LAYERS, chat: bool = True, max_shard_size: str = "1GB"
) -> Path:
    """Write config, safetensors, generation config and tokenizer into the directory `path` and return it."""
    model = tiny_model(family, seed, layers)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    tiny_tokenizer(chat).save_pretrained(path)
    return Path(path)
