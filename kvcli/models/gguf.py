"""GGUF checkpoints: llama.cpp's format of weights in blocks, with sizes and tokenizer in the same file.

The header is parsed here, and every length is checked against the file before anything is read by it: the readers of
`gguf` and transformers read past the end of a damaged file. Names, types and the meaning of keys are theirs. The
weights stay as they are in the file (`kvcli.kernels.packed_linear`); only llama.cpp's changes to some of them are
undone: its converter permutes the rows of Llama's queries and keys, and adds 1 to Gemma's norms.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NamedTuple

import huggingface_hub
import numpy as np
import torch
from accelerate import init_empty_weights
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers import models as tokenizer_models
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from kvcli.errors import KvcliError, usage_error
from kvcli.kernels.packed_linear import PACKINGS, PackedWeight, Packing, unpack_rows
from kvcli.models.auto import model_class
from kvcli.models.geometry import build_on_meta
from kvcli.models.place import gguf_parts
from kvcli.models.streamed import FilePart, Layout, Source, WeightStreaming
from kvcli.models.weights import PackedForm, room_for

_AGAIN = "download that file again"
_OTHER_FILES = "use the model's safetensors files"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_DIMENSIONS = 4  # of a tensor, at most
_BLOCK = 1 << 20  # bytes that are asked of the hub at once


class PackedTensor(NamedTuple):
    """A tensor in a file: its shape in torch's order, the name of its type, and the place of its bytes.

    With `then`, which has a place of its own, each matrix has first its rows here and then those there.
    """

    file: Path
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int
    then: PackedTensor | None = None


class Header(NamedTuple):
    """The header of a GGUF checkpoint, merged from its parts; its `files` are in order."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, PackedTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata["general.architecture"])

    def of_model(self, key: str, default: Any = None) -> Any:
        """Look up a number under the architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def of_tokenizer(self, key: str, default: Any = None) -> Any:
        """Look up a value of the tokenizer."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)


def read_header(path: Path) -> Header:
    """Read the header of a GGUF checkpoint, given by its file or the first of several.

    Raises:
        KvcliError: a file is missing, cut off or damaged; its weights are of a type that is not supported (usage).
    """
    files = tuple(gguf_parts(path))
    try:
        stated = tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError as error:
        raise KvcliError(f"cannot read {error.filename}: {error.strerror}", _AGAIN) from error
    return _header(stated)


@lru_cache(maxsize=4)
def _header(files: tuple[tuple[Path, int, int], ...]) -> Header:
    metadata: dict[str, Any] = {}
    tensors: dict[str, PackedTensor] = {}
    for number, (path, size, _) in enumerate(files):
        with path.open("rb") as file:
            reader = _Reader(path, file, size)
            own, found = reader.metadata(), {}
            found = dict(reader.tensors(own))
        if number == 0:
            metadata = own
        if own.get("split.no", number) != number or own.get("split.count", len(files)) != len(files):
            raise KvcliError(f"{path} is not part {number + 1} of {len(files)} of a checkpoint", _AGAIN)
        if twice := tensors.keys() & found.keys():
            raise KvcliError(f"{path} holds {_shown(min(twice))} once more", _AGAIN)
        tensors |= found
    if not isinstance(metadata.get("general.architecture"), str):
        raise KvcliError(f"{files[0][0]} does not say its architecture", _AGAIN)
    return Header(tuple(path for path, *_ in files), metadata, tensors)


class _Reader:
    """Reads a header; no length is accepted that exceeds the rest of the file."""

    def __init__(self, path: Path, file: BinaryIO | _Copied, size: int):
        self.path, self.file, self.left = path, file, size

    def metadata(self) -> dict[str, Any]:
        """Read up to the list of tensors."""
        if self.take(4) != b"GGUF":
            raise KvcliError(f"{self.path} is not a GGUF file: it does not begin like one", _AGAIN)
        version = self.number("I")
        if version & 0xFFFF == 0:
            raise usage_error(f"{self.path} is a big-endian GGUF file", "use a file for little-endian machines")
        if version not in _VERSIONS:
            raise usage_error(f"{self.path} is a GGUF file of version {version}", "use a file of version 2 or 3")
        self.count = self.number("Q")
        return {self.string(): self.value() for _ in range(self.within(self.number("Q"), 12))}

    def tensors(self, metadata: Mapping[str, Any]) -> Iterator[tuple[str, PackedTensor]]:
        """Read the list of tensors, and check it against the bytes of the file."""
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(self.within(self.count, 24)):
            name, dimensions = self.string(), self.number("I")
            if not 0 < dimensions <= _DIMENSIONS:
                raise self.damaged(f"{_shown(name)} has {dimensions} dimensions")
            shape = tuple(reversed([self.number("Q") for _ in range(dimensions)]))
            found.append((name, shape, self.number("I"), self.number("Q")))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"an alignment of {alignment}")
        position = self.file.tell()
        start = -(-position // alignment) * alignment
        held = self.left + position - start
        if len({name for name, *_ in found}) < len(found):
            raise self.damaged("a tensor is listed twice")
        for name, shape, kind, offset in found:
            type_name = _type_name(kind)
            if type_name not in PACKINGS and type_name != "F32":
                known = ", ".join(("F32", *PACKINGS))
                what = f"{self.path}: {_shown(name)} is quantised as {type_name}"
                raise usage_error(what, f"there are products for {known}")
            size, nbytes = (1, 4) if type_name == "F32" else PACKINGS[type_name][1:3]
            if 0 in shape or shape[-1] % size or offset % alignment:
                raise self.damaged(f"{_shown(name)} is {list(shape)} of {type_name} at {offset}")
            total = prod(shape) // size * nbytes
            if offset + total > held:
                ends = f"ends at byte {start + offset + total:,} of {start + held:,}"
                what = f"{self.path} is cut off: {_shown(name)} {ends}"
                raise KvcliError(what, _AGAIN)
            yield name, PackedTensor(self.path, shape, type_name, start + offset, total)

    def damaged(self, what: str) -> KvcliError:
        """Make the error of a damaged file."""
        return KvcliError(f"{self.path} is damaged: {what}", _AGAIN)

    def within(self, count: int, least: int) -> int:
        """Return the number of things of at least `least` bytes each, if the file can hold them."""
        if count * least > self.left:
            raise KvcliError(f"{self.path} is damaged or cut off: it ends within its header", _AGAIN)
        return count

    def take(self, count: int) -> bytes:
        """Read bytes."""
        self.left -= self.within(count, 1)
        taken = self.file.read(count)
        if len(taken) < count:
            raise KvcliError(f"{self.path} is damaged or cut off: it ends within its header", _AGAIN)
        return taken

    def number(self, kind: str) -> Any:
        """Read a number."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def string(self) -> str:
        """Read a text."""
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self) -> Any:
        """Read a value of any type."""
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise self.damaged(f"a value of type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.string() for _ in range(self.within(count, 8))]
        if kind not in _NUMBERS:
            raise self.damaged(f"a list of type {kind}")
        size = struct.calcsize(f"<{_NUMBERS[kind]}")
        return list(struct.unpack(f"<{self.within(count, size)}{_NUMBERS[kind]}", self.take(count * size)))


def _shown(name: str) -> str:
    """Format a name from a file so that it is one word of a line."""
    return name if re.fullmatch(r"[\w.-]{1,80}", name, re.ASCII) else repr(name[:40])


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"type {kind}"


# A model's config, made from llama.cpp's keys by transformers' own table of them.

_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
}
"""llama.cpp's names of architectures, with transformers' model types."""

_WITH_EXPERTS = ("qwen3moe",)
"""Architectures whose layers have experts, which are one tensor for a layer."""

_SCALED_BY_HIDDEN_SIZE = {("gemma2", 46), ("gemma3", 62)}
"""Gemma models of 27 billion weights, by their layers: only their queries are not scaled by the head's size."""

_ENDS = {
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "</s>",
}
"""Control tokens that end an answer or a turn in models of these architectures, whether or not a file says so."""


def config_of(path: Path) -> PreTrainedConfig:
    """Make the config of a GGUF checkpoint; its quantization_config says how the weights are packed.

    Raises:
        KvcliError: as for `read_header`; the architecture is not supported (usage).
    """
    header = read_header(path)
    if header.architecture not in _MODEL_TYPES:
        held = f"{path} holds a model of architecture {header.architecture[:40]!r}"
        what = f"{held}, which kvcli does not read from GGUF files"
        raise usage_error(what, f"known: {', '.join(_MODEL_TYPES)}; use safetensors files for others")
    if header.of_model("expert_count") and header.architecture not in _WITH_EXPERTS:
        number = _shown(str(header.of_model("expert_count")))
        raise usage_error(
            f"{path} holds a model with {number} experts, which kvcli does not read from GGUF files", _OTHER_FILES
        )
    try:
        values = _config_values(header)
        config: PreTrainedConfig = AutoConfig.for_model(_MODEL_TYPES[header.architecture], **values)
    except KvcliError:
        raise
    except Exception as error:  # missing or senseless sizes make it raise anything
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise KvcliError(f"{path}: no config can be made of its header ({said})", _AGAIN) from error
    named = _named(header)
    config.quantization_config = {
        "quant_method": "gguf",
        "tensors": {
            name: tensor.kind
            for name, tensor in named.items()
            if tensor.kind != "F32" and ((len(tensor.shape) == 2 and name.endswith(".weight")) or ".experts." in name)
        },
    }
    return config


def _config_values(header: Header) -> dict[str, Any]:
    """Return the values that a config is made from."""
    architecture = header.architecture
    mapping: Any = GGUF_CONFIG_MAPPING
    names = {"rope.freq_base": "rope_theta"} | (mapping.get(architecture) or mapping[_MODEL_TYPES[architecture]])
    values = {name: header.of_model(key) for key, name in names.items() if name and header.of_model(key) is not None}
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise KvcliError(f"{header.files[0]} lacks token_embd.weight", _AGAIN)
    values |= {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.of_tokenizer("bos_token_id"),
        "pad_token_id": header.of_tokenizer("padding_token_id"),
        "eos_token_id": _ends(header),
    }
    needed = ["block_count", "embedding_length", "attention.head_count"]
    if architecture in _WITH_EXPERTS:
        needed += ["expert_count", "expert_used_count", "expert_feed_forward_length"]
    lacking = [key for key in needed if not header.of_model(key)]
    if lacking:
        raise KvcliError(f"{header.files[0]} does not say {architecture}.{lacking[0]}", _AGAIN)
    if header.of_model("block_count") > len(header.tensors):  # before anything is made of that size
        raise KvcliError(f"{header.files[0]} says {architecture}.block_count {header.of_model('block_count')}", _AGAIN)
    if header.of_model("expert_used_count", 0) > header.of_model("expert_count", 0):
        used, count = header.of_model("expert_used_count"), header.of_model("expert_count", 0)
        raise KvcliError(f"{header.files[0]} says that a token goes to {used} of {count} experts", _AGAIN)
    layers, heads = header.of_model("block_count"), header.of_model("attention.head_count")
    head = header.of_model("attention.key_length", header.of_model("embedding_length") // heads)
    if architecture in ("llama", "qwen3", "qwen3moe", "gemma2", "gemma3"):
        values["head_dim"] = head
    if architecture == "qwen3moe":
        values |= {"moe_intermediate_size": header.of_model("expert_feed_forward_length"), "norm_topk_prob": True}
    if architecture in ("gemma2", "gemma3"):
        wide = (architecture, layers) in _SCALED_BY_HIDDEN_SIZE
        values["query_pre_attn_scalar"] = header.of_model("embedding_length") // heads if wide else head
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if header.of_model(name) is not None:
                values[name] = header.of_model(name)
    if architecture == "gemma3" and header.of_model("rope.freq_base_swa"):
        values["rope_local_base_freq"] = header.of_model("rope.freq_base_swa")
    if architecture == "phi3":
        values["sliding_window"] = header.of_model("attention.sliding_window") or None
        values["partial_rotary_factor"] = header.of_model("rope.dimension_count", head) / head
    if architecture == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        values["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    scaling = _rope_scaling(header, head)
    if scaling is not None:
        values["rope_scaling"] = scaling
    return values


def _ends(header: Header) -> list[int] | None:
    """List the tokens that end a text: those that the file names, and known control tokens."""
    named = [header.of_tokenizer(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    kinds = header.of_tokenizer("token_type", [])
    tokens = header.of_tokenizer("tokens", [])
    pairs = enumerate(zip(tokens, kinds, strict=False))
    known = [at for at, (token, kind) in pairs if kind == _CONTROL and token in _ENDS]  # Gemma has one that is a tag
    found = [at for at in dict.fromkeys([*named, *known]) if isinstance(at, int) and 0 <= at < len(tokens)]
    return found or None


def _rope_scaling(header: Header, head_dim: int) -> dict[str, Any] | None:
    """Return the scaling of rotary angles in transformers' terms; Llama 3's file has only the outcome of its rule."""
    kind, factor = header.of_model("rope.scaling.type", "none"), header.of_model("rope.scaling.factor")
    original = header.of_model("rope.scaling.original_context_length")
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, head_dim)
    if "rope_factors_long.weight" in header.tensors:
        long, short = (_plain(header.tensors[f"rope_factors_{length}.weight"]).tolist() for length in ("long", "short"))
        found = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        attention = header.of_model("rope.scaling.attn_factor")
        found |= {"attention_factor": attention} if attention else {}
        return found | {"original_max_position_embeddings": original or header.of_model("context_length")}
    if kind in ("none", "") or not factor:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise usage_error(f"{header.files[0]}: rotary scaling {str(kind)[:40]!r} is not read of GGUF files", _OTHER_FILES)


def _llama3_scaling(header: Header, head_dim: int) -> dict[str, Any]:
    """Find the rule from the divisors of the frequencies: all files so far have the same bounds of wavelengths."""
    divided = _plain(header.tensors["rope_freqs.weight"]).double()
    base, factor = header.of_model("rope.freq_base", 10000.0), float(divided.max())
    low, high, original = 1.0, 4.0, 8192
    waves = 2 * torch.pi * base ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((original / waves - low) / (high - low)).clamp(0, 1)
    wanted = 1 / ((1 - smooth) / factor + smooth)
    if divided.shape != wanted.shape or not torch.allclose(divided, wanted, rtol=1e-3):
        raise usage_error(f"{header.files[0]}: its rotary frequencies follow no known rule", _OTHER_FILES)
    rule = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": factor} | rule


# The tokenizer: llama.cpp has two kinds for these models, byte-level BPE and SentencePiece's.

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, Sequence[str]] = {
    "gpt-2": (_WORDS,),
    "phi-2": (_WORDS,),
    "olmo": (_WORDS,),
    "smollm": (r"\p{N}", _WORDS),
    "starcoder": (r"\p{N}", _WORDS),
    "refact": (r"\p{N}", _WORDS),
    "command-r": (r"\p{N}", _WORDS),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "falcon3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "stablelm2": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
"""How text is split before its bytes are merged, by llama.cpp's names; one expression after another."""

_WHOLE_FIRST = {"llama-bpe", "llama3", "llama-v3", "falcon3"}
"""With these, a word that is a token is one, whatever its merges would make of it."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"


def tokenizer_of(path: Path) -> PreTrainedTokenizerBase:
    """Make the tokenizer that a GGUF file holds, with its chat template.

    Raises:
        KvcliError: the file holds none, or one of an unknown kind (usage).
    """
    header = read_header(path)
    kind, tokens = header.of_tokenizer("model"), header.of_tokenizer("tokens")
    hint = "name the directory of the model's own tokenizer with --tokenizer DIR"
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise usage_error(f"{path} holds no tokenizer", hint)
    kinds = header.of_tokenizer("token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise KvcliError(f"{path} is damaged: {len(tokens):,} tokens do not have as many types", _AGAIN)
    if kind == "gpt2":
        split = header.of_tokenizer("pre", "gpt-2")
        if split not in _SPLITS:
            raise usage_error(f"{path} splits text as {str(split)[:40]!r}, which is not known", hint)
        made, begins = _byte_level(header, tokens, split), split in _WHOLE_FIRST
    elif kind == "llama":
        made, begins = _sentencepiece(header, tokens, kinds), True
    else:
        raise usage_error(f"{path} holds a tokenizer of kind {str(kind)[:40]!r}, which is not known", hint)
    for special in (True, False):
        wanted = _CONTROL if special else _USER_DEFINED
        each = (token for token, of in zip(tokens, kinds, strict=True) if of == wanted)
        spelled = [_spelled(token) if kind == "llama" else token for token in each]
        added = [AddedToken(token, normalized=token.startswith(_SPACE), special=special) for token in spelled]
        (made.add_special_tokens if special else made.add_tokens)(added)
    named = {name: header.of_tokenizer(f"{key}_token_id") for name, key in _NAMED.items()}
    names = {name: tokens[at] for name, at in named.items() if isinstance(at, int) and 0 <= at < len(tokens)}
    if header.of_tokenizer("add_bos_token", begins) and "bos_token" in names:
        begin = names["bos_token"]
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, named["bos_token"])]
        )
    template = header.metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, chat_template=template, clean_up_tokenization_spaces=False, **names
    )


_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _byte_level(header: Header, tokens: list[str], split: str) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in header.of_tokenizer("merges", [])]
    vocab = {token: at for at, token in enumerate(tokens)}
    try:
        model = tokenizer_models.BPE(vocab=vocab, merges=merges, ignore_merges=split in _WHOLE_FIRST)
    except Exception as error:
        raise KvcliError(f"{header.files[0]}: no tokenizer can be made of it ({error})", _AGAIN) from error
    tokenizer = Tokenizer(model)
    if split in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    parts = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in _SPLITS[split]]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _spelled(token: str) -> str:
    """Write spaces as SentencePiece does; in files some tokens that consist only of spaces have real ones."""
    return _SPACE * len(token) if token and not token.strip(" ") else token


def _sentencepiece(header: Header, tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores = header.of_tokenizer("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise KvcliError(f"{header.files[0]} is damaged: {len(tokens):,} tokens do not have as many scores", _AGAIN)
    vocab: dict[str, int] = {}
    for at, token in enumerate(tokens):
        vocab.setdefault(_spelled(token), at)
    merges = _merges(vocab, tokens, scores, kinds)
    unknown = header.of_tokenizer("unknown_token_id")
    name = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    has_bytes = any(kind == _BYTE for kind in kinds)
    model = tokenizer_models.BPE(vocab=vocab, merges=merges, unk_token=name, fuse_unk=True, byte_fallback=has_bytes)
    tokenizer = Tokenizer(model)
    before = header.of_tokenizer("add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if before else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if before else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(
    vocab: Mapping[str, int], tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """List the pairs that SentencePiece merges, the best first, by the score of the merged token."""
    # Hundreds of thousands: as numbers they take a tenth of the memory.
    found, lefts, rights = array("d"), array("l"), array("l")
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        for at in range(1, len(token) if kind == _NORMAL else 0):
            left = vocab.get(token[:at])
            if left is not None and (right := vocab.get(token[at:])) is not None:
                found.append(-score)
                lefts.append(left)
                rights.append(right)
    spelled = list(map(_spelled, tokens))
    order = np.lexsort((rights, lefts, found))
    return [(spelled[lefts[each]], spelled[rights[each]]) for each in order]


# The weights.

_LEAVES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
"""The parts of a layer, by llama.cpp's names, with transformers'."""

_OF_EXPERTS = {"ffn_gate_exps": "gate_up_proj", "ffn_up_exps": "gate_up_proj", "ffn_down_exps": "down_proj"}
"""The tensors of a layer's experts, each [experts, out, in]; transformers has the rows of gate and up in one."""

_OF_GEMMA: dict[str, str] = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHERWISE: dict[str, dict[str, str]] = {
    "gemma2": _OF_GEMMA,
    "gemma3": _OF_GEMMA,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
_BESIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NO_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def _name(header: Header, name: str) -> str:
    """Return transformers' name of a tensor; one without keeps its own."""
    stem, _, suffix = name.rpartition(".")
    if stem in _BESIDE_LAYERS:
        return f"{_BESIDE_LAYERS[stem]}.{suffix}"
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        if found[2] in _OF_EXPERTS and header.architecture in _WITH_EXPERTS:
            return f"model.layers.{found[1]}.mlp.experts.{_OF_EXPERTS[found[2]]}"
        leaf = (_LEAVES | _OTHERWISE.get(header.architecture, {})).get(found[2])
        return name if leaf is None else f"model.layers.{found[1]}.{leaf}.{suffix}"
    return name


def _named(header: Header) -> dict[str, PackedTensor]:
    """Return the tensors of a model by transformers' names.

    Raises:
        KvcliError: gate and up of experts differ in shape or, as one packed weight cannot, in how they are packed.
    """
    found: dict[str, PackedTensor] = {}
    for name, tensor in sorted(header.tensors.items()):  # gate comes before up
        if name in _NO_WEIGHTS:
            continue
        own = _name(header, name)
        gate = found.get(own)
        if gate is not None:
            if (gate.shape, gate.kind) != (tensor.shape, tensor.kind) or len(gate.shape) != 3 or gate.then is not None:
                what = f"{tensor.file}: {_shown(name)} is {list(tensor.shape)} of {tensor.kind}"
                raise KvcliError(f"{what}, and its gate {list(gate.shape)} of {gate.kind}", _OTHER_FILES)
            count, rows, columns = gate.shape
            tensor = gate._replace(shape=(count, 2 * rows, columns), nbytes=2 * gate.nbytes, then=tensor)
        found[own] = tensor
    return found


def tensor_kinds(path: Path) -> dict[str, str]:
    """Return the types of a checkpoint's tensors by transformers' names; raises what `read_header` raises."""
    return {name: tensor.kind for name, tensor in _named(read_header(path)).items()}


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model whose weights are on the meta device, while the buffers that modules compute themselves exist."""
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = model_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    return model


def tie_head(model: PreTrainedModel) -> None:
    """Tie the head to the embedding's weight, if the config says so."""
    if model.config.get_text_config(decoder=True).tie_word_embeddings:
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        head.weight = model.get_input_embeddings().weight


def load_gguf(
    path: Path,
    config: PreTrainedConfig,
    form: PackedForm,
    dtype: torch.dtype,
    device: torch.device,
    streaming: WeightStreaming | None = None,
) -> PreTrainedModel:
    """Make the model of a GGUF checkpoint with its weights, packed where `form` keeps them so.

    With `streaming`, some of them are read later, for each use.

    Raises:
        KvcliError: as for `read_header`; a tensor is missing, is not of the model, or has another shape.
    """
    header = read_header(path)
    named = _named(header)
    wanted = {name: tuple(weight.shape) for name, weight in build_on_meta(config, dtype).named_parameters()}
    if absent := wanted.keys() - named.keys():
        raise KvcliError(f"{path} lacks {min(absent)}", _AGAIN)
    if strange := named.keys() - wanted.keys():
        raise KvcliError(f"{path} holds {_shown(min(strange))}, which is not part of such a model", _AGAIN)
    for name, shape in wanted.items():
        if named[name].shape != shape:
            what = f"{path}: {name} is {list(named[name].shape)}, not {list(shape)} as the header says"
            raise KvcliError(what, _AGAIN)
    model = empty_model(config, dtype)
    if header.architecture in _WITH_EXPERTS:
        model.set_experts_implementation("eager")  # one expert after another, so that only those chosen are unpacked
    packings = {name: form.packing(name, dtype) for name in wanted}
    sources = {name: _source(header, name, named[name]) for name in wanted}
    if streaming is None:
        packed = [name for name, packing in packings.items() if packing is not None]
        rooms = dict(zip(packed, room_for([sources[name].nbytes for name in packed], device), strict=True))
    else:
        layout = Layout(streaming, sources, device)
        rooms = {**layout.rooms}
    for name, packing in packings.items():
        owner, _, own = name.rpartition(".")
        raw = rooms.get(name)
        if streaming is None or raw is None:
            raw = sources[name].read(raw, keep=streaming is None)
        weight = _weight(header, name, named[name], packing, dtype, raw).to(device)
        setattr(model.get_submodule(owner), own, nn.Parameter(weight, requires_grad=False))
    tie_head(model)
    if streaming is not None:
        layout.attach(model)
    for module in model.modules():
        for own, buffer in module.named_buffers(recurse=False):
            module._buffers[own] = buffer.to(device)
    return model


def _weight(
    header: Header, name: str, tensor: PackedTensor, packing: Packing | None, dtype: torch.dtype, raw: Tensor
) -> Tensor:
    """Make a weight of its bytes in the file [n], packed or in a dtype; without llama.cpp's change of norms."""
    if packing is not None:
        return PackedWeight(raw.view(*tensor.shape[:-1], -1), packing, dtype)
    held = dtype.itemsize == 2 and tensor.kind == {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    weight = raw.view(dtype).view(tensor.shape) if held else _plain(tensor, raw)  # a view, where weights are streamed
    if header.architecture.startswith("gemma") and name.endswith("norm.weight"):
        weight = weight - 1
    return weight.to(dtype)


def _source(header: Header, name: str, tensor: PackedTensor) -> Source:
    """Find the bytes of a weight, and undo what llama.cpp's converter did to the order of its rows."""
    pieces = [FilePart(tensor.file, tensor.offset, tensor.nbytes)]
    if tensor.then is not None:
        each = tensor.nbytes // 2 // tensor.shape[0]
        places = (tensor, tensor.then)
        pieces = [
            FilePart(part.file, part.offset + matrix * each, each)
            for matrix in range(tensor.shape[0])
            for part in places
        ]
    if header.architecture != "llama" or not re.search(r"\.self_attn\.[qk]_proj\.", name):
        return Source(pieces)
    heads = header.of_model("attention.head_count")
    if ".k_proj." in name:
        heads = header.of_model("attention.head_count_kv", heads)

    def settle(raw: Tensor) -> None:
        rows = raw.view(tensor.shape[0], -1)
        rows.copy_(_halves_apart(rows, heads))

    return Source(pieces, settle)


def _halves_apart(rows: Tensor, heads: int) -> Tensor:
    """Reorder the channels of each head, of which neighbours are rotated together, into transformers' order."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _plain(tensor: PackedTensor, raw: Tensor | None = None) -> Tensor:
    """Make a tensor of its bytes [n], which are read if they are not given, as fp32."""
    if raw is None:
        raw = Source([FilePart(tensor.file, tensor.offset, tensor.nbytes)]).read()
    if tensor.kind == "F32":
        return raw.view(torch.float32).view(tensor.shape)
    packing = PACKINGS[tensor.kind]
    return unpack_rows(raw.view(-1, packing.row_bytes(tensor.shape[-1])), packing).view(tensor.shape)


# Files in a repository on the hub.


def from_hub(name: str, offline: bool, header_only: bool = False) -> Path:
    """Find or download REPO:QUANTISATION or REPO:FILE, with all its parts; return the first.

    With `header_only`, files that are not in the local cache are of their size but hold nothing beyond the header.

    Raises:
        KvcliError: the repository has no such file, or several (usage); errors of the hub are passed on.
    """
    repository, _, wanted = name.partition(":")
    if wanted.endswith(".gguf"):
        chosen = [wanted]
    else:
        names = _listed(repository, offline)
        chosen = [each for each in names if wanted.lower() in re.split(r"[-./]", each.lower().removesuffix(".gguf"))]
        chosen = [each for each in chosen if "mmproj" not in each]
        if not chosen:
            others = ", ".join(sorted(names)[:8]) or "none at all"
            raise usage_error(f"{repository} has no GGUF file of {wanted}", f"there are: {others}")
        first = gguf_parts(Path(chosen[0]))[0]
        if any(gguf_parts(Path(each))[0] != first for each in chosen):
            raise usage_error(f"{repository} has several files of {wanted}", f"name one: {repository}:{min(chosen)}")
    parts = [str(part) for part in gguf_parts(Path(chosen[0]))]
    if header_only and not offline and not huggingface_hub.constants.HF_HUB_OFFLINE:
        there = [_header_from_hub(repository, part) for part in parts]
    else:
        there = [Path(huggingface_hub.hf_hub_download(repository, part, local_files_only=offline)) for part in parts]
    return there[0]


@lru_cache(maxsize=64)
def _header_from_hub(repository: str, name: str) -> Path:
    """Copy the header of a file, some megabytes for the tokenizer, into a sparse file of the same size."""
    if isinstance(cached := huggingface_hub.try_to_load_from_cache(repository, name), str):
        return Path(cached)
    copy = Path(_headers().name) / repository / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    hub = huggingface_hub.HfFileSystem(skip_instance_cache=True)
    try:
        there = hub.open(f"{repository}/{name}", block_size=_BLOCK)
    except FileNotFoundError as error:  # also what stands for a repository that does not exist
        hint = "the hub's page of a model lists its files; private models need `hf auth login`"
        raise usage_error(f"the hub has no {repository}:{name}", hint) from error
    with there as original, copy.open("wb") as file:
        file.truncate(original.size)
        reader = _Reader(copy, _Copied(original, file), original.size)
        deque(reader.tensors(reader.metadata()), maxlen=0)
    return copy


class _Copied(NamedTuple):
    """A file that is read, and a copy of what was read."""

    original: BinaryIO
    copy: BinaryIO

    def read(self, count: int) -> bytes:
        """Read from one, write to the other."""
        taken = self.original.read(count)
        self.copy.write(taken)
        return taken

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self.copy.tell()


@cache
def _headers() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="kvcli-headers-")


def _listed(repository: str, offline: bool) -> list[str]:
    """List the GGUF files of a repository, or those in the local cache."""
    if not offline and not huggingface_hub.constants.HF_HUB_OFFLINE:
        return [each for each in huggingface_hub.HfApi().list_repo_files(repository) if each.endswith(".gguf")]
    folder = Path(huggingface_hub.snapshot_download(repository, local_files_only=True))
    return [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
