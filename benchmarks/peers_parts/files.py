"""GGUF files for programs that are compared: copies for long contexts, and models of made-up weights.

llama.cpp reads no further than a model was trained, so every file says that this was `CONTEXT` tokens. Files are kept
in the cache directory and written once.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from kvcli.models.place import find
from peers_parts.blocks import Array, blocks

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvcli" / "peers"
CONTEXT = 1 << 17
DEVIATION = 0.02  # of made-up weights


class Shape(NamedTuple):
    """The sizes of a model, with llama.cpp's name of its architecture."""

    architecture: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    rope_base: float


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 1e6),
    "llama-3.2-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 5e5),
}
FORMATS = ("Q8_0", "Q4_K")
MODELS = ("smollm2", *(f"{shape}-{kind.lower()}" for shape in SHAPES for kind in FORMATS))


def file_of(model: str) -> Path:
    """Return the file of a model of `MODELS`, or the copy of a GGUF file; it is written if it is not there yet."""
    shape, _, kind = model.rpartition("-")
    if shape in SHAPES and kind.upper() in FORMATS:
        return _kept(model, lambda path: write_made_up(path, SHAPES[shape], kind.upper()))
    source = find(model, dummy=False)
    if source is None or source.suffix != ".gguf":
        sys.exit(f"{model} is neither a GGUF file nor one of {', '.join(MODELS)}")
    state = source.stat()
    return _kept(f"{source.stem}-{state.st_size:x}-{state.st_mtime_ns:x}", lambda path: write_copy(path, source))


def _kept(name: str, write: Callable[[Path], None]) -> Path:
    """Return the file of this name in the cache, once `write` has written all of it."""
    path, partial = CACHE / f"{name}.gguf", CACHE / f"{name}.partial"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        write(partial)
        partial.rename(path)
    return path


def write_copy(path: Path, source: Path) -> None:
    """Copy a file, its tensors as they are, with `CONTEXT` as the length of its context."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(path, architecture)
    _copy_fields(reader, writer, "", {f"{architecture}.context_length": CONTEXT})
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _finish(writer)


def write_made_up(path: Path, shape: Shape, kind: str) -> None:
    """Write a model of a shape with SmolLM2's vocabulary; its matrices are of a `kind`, the embedding of Q8_0.

    The layers have the same weights, and the head is the embedding.
    """
    source = find("smollm2", dummy=False)
    assert source is not None
    reader, writer = GGUFReader(source), GGUFWriter(path, shape.architecture)
    _copy_fields(reader, writer, "tokenizer.", {})
    writer.add_context_length(CONTEXT)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    queries, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    matrices = {
        "attn_q": (queries, shape.width),
        "attn_k": (kv, shape.width),
        "attn_v": (kv, shape.width),
        "attn_output": (shape.width, queries),
        "ffn_gate": (shape.inner, shape.width),
        "ffn_up": (shape.inner, shape.width),
        "ffn_down": (shape.width, shape.inner),
    }
    norms = {"attn_norm": shape.width, "ffn_norm": shape.width}
    if shape.architecture == "qwen3":
        norms |= {"attn_q_norm": shape.head, "attn_k_norm": shape.head}
    drawn = np.random.default_rng(0)
    layer = {name: blocks(kind, size, DEVIATION, drawn) for name, size in matrices.items()}
    layer |= {name: np.ones(size, np.float32) for name, size in norms.items()}
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)
    _add(writer, "token_embd", blocks("Q8_0", (vocabulary, shape.width), DEVIATION, drawn), "Q8_0")
    _add(writer, "output_norm", np.ones(shape.width, np.float32), kind)
    for number in range(shape.layers):
        for name, weight in layer.items():
            _add(writer, f"blk.{number}.{name}", weight, kind)
    _finish(writer)


def _add(writer: GGUFWriter, name: str, weight: Array, kind: str) -> None:
    writer.add_tensor(f"{name}.weight", weight, raw_dtype=GGMLQuantizationType[kind if weight.ndim > 1 else "F32"])


def _copy_fields(reader: GGUFReader, writer: GGUFWriter, prefix: str, changed: Mapping[str, int]) -> None:
    """Copy the metadata whose names begin with `prefix`, but for the values that are `changed`."""
    for name, field in reader.fields.items():
        if name.startswith(prefix) and not name.startswith("GGUF.") and name != "general.architecture":
            value = changed.get(name, field.contents())
            writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for name, value in changed.items():
        if name not in reader.fields:
            writer.add_key_value(name, value, GGUFValueType.UINT32)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
