"""The manifest of a directory of saved KV: `manifest.json`, written last, which makes the directory complete.

Pages of tokens are hashed in a chain: the hash of a page covers the hash of the page before and its own tokens, and
that of the first page covers the `Identity` under which the KV was computed. Equal hashes mean an equal prompt up to
there.
"""

from __future__ import annotations

import array
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvcli.errors import KvcliError, first_problem, usage_error
from kvcli.models.geometry import ModelGeometry

FORMAT = 2
"""Version of the directory's format; a reader refuses newer ones. The first one has no `states`."""

PAGE = 32
"""Tokens in a page of saved KV, the default page size of methods."""

MANIFEST = "manifest.json"
_LAST_FIELD = ',"checksum":'
_HASH_BYTES = 16


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Identity(_Part):
    """Fingerprints of what KV depends on besides the tokens: weights, dtype, rotary positions; and of the tokenizer."""

    model: str
    weights: str
    tokenizer: str
    rope: str
    dtype: str

    @property
    def root(self) -> str:
        """The start of the chain of page hashes for a prompt that was read exactly."""
        return self.root_of("exact")

    def root_of(self, reading: str) -> str:
        """Return the start of the chain for a prompt that was read as `reading` says (`MethodConfig.prefill`)."""
        how = [] if reading == "exact" else [reading]
        body = json.dumps([self.weights, self.tokenizer, self.rope, self.dtype, PAGE, *how])
        return hashlib.blake2b(body.encode(), digest_size=_HASH_BYTES).hexdigest()


class LayerEntry(_Part):
    """The file of a layer, the shape of its pages, and a checksum for every `CHECKED_PAGES` of them."""

    file: str = Field(pattern=r"^[a-z0-9-]+\.safetensors$")
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    parts: int = Field(default=2, ge=1, le=2)
    checksums: list[str]


class StateEntry(_Part):
    """The file of a layer's states: checksums of its tensors, named by the number of tokens as in "8192.conv.0"."""

    file: str = Field(pattern=r"^[a-z0-9-]+\.safetensors$")
    checksums: dict[str, str]

    @property
    def marks(self) -> list[int]:
        """Numbers of the prompt's tokens after which states were saved."""
        return sorted({int(name.partition(".")[0]) for name in self.checksums})


class PromptRead(_Part):
    """The document's text and name, and how the prompt was made from them."""

    source: str
    text: str
    question: str = ""
    question_first: str = "no"
    system: str | None = None
    raw: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class Manifest(_Part):
    """A run of pages: `pages` are the hashes of those from page `first_page` of the prompt on, `tokens` their tokens.

    `parent` is the hash of the page before, or the identity's root. `reading` says how the prompt was read, as
    `MethodConfig.prefill` does: sparse reading gives other KV.
    """

    format: int = 1
    kvcli: str
    model: Identity
    reading: str = "exact"
    first_page: int = Field(default=0, ge=0)
    parent: str
    tokens: list[int]
    pages: list[str] = Field(min_length=1)
    layers: list[LayerEntry] = Field(min_length=1)
    states: list[StateEntry] = Field(default_factory=list)
    asked: PromptRead
    checksum: str = ""

    def sealed(self) -> str:
        """Return the manifest as JSON, with its own checksum."""
        without = {"checksum"} if self.states else {"checksum", "states"}  # as in the first format
        body = json.dumps(self.model_dump(mode="json", exclude=without), ensure_ascii=False, separators=(",", ":"))
        return f'{body[:-1]}{_LAST_FIELD}"{xxhash.xxh3_64_hexdigest(body.encode())}"}}'

    def shape(self, layer: int) -> tuple[int, int, int, int, int]:
        """Return the shape of a layer's pages: [n, Hk, t, p, d]."""
        entry = self.layers[layer]
        return len(self.pages), entry.num_kv_heads, entry.parts, PAGE, entry.head_dim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.model.dtype]

    @property
    def name(self) -> str:
        """The directory's name in a cache: the page before, the first and the last page."""
        return f"{self.parent}-{self.pages[0]}-{self.pages[-1]}"

    def same_pages(self, hashes: Sequence[str]) -> int:
        """Count its leading pages that have these hashes."""
        pairs = enumerate(zip(self.pages, hashes, strict=False))
        return next((at for at, (mine, other) in pairs if mine != other), min(len(self.pages), len(hashes)))

    def fits(self, geometry: ModelGeometry) -> bool:
        """Tell whether these are layers of that model."""
        shapes = [(entry.parts, entry.num_kv_heads, entry.head_dim) for entry in self.layers]
        return shapes == [(layer.parts, layer.num_kv_heads, layer.head_dim) for layer in geometry.layers]

    def problem(self) -> str | None:
        """Describe an inconsistency, if there is one."""
        if self.first_page == 0 and self.parent != self.model.root_of(self.reading):
            return "its first page does not begin with the model"
        if len(self.tokens) != PAGE * len(self.pages) or self.pages != page_hashes(self.parent, self.tokens):
            return "a page hash is wrong"
        return None


def page_hashes(before: str, tokens: Sequence[int]) -> list[str]:
    """Hash every whole page of tokens, each after the page before it."""
    data, size = array.array("q", tokens).tobytes(), 8 * PAGE
    hashes, last = [], bytes.fromhex(before)
    for start in range(0, len(data) - size + 1, size):
        last = hashlib.blake2b(last + data[start : start + size], digest_size=_HASH_BYTES).digest()
        hashes.append(last.hex())
    return hashes


def read_manifest(folder: Path) -> Manifest:
    """Read and check a directory's manifest.

    Raises:
        KvcliError: the directory holds no saved KV, or KV of a newer format (usage); its manifest is damaged (runtime).
    """
    hint = "name a directory written by --save-kv"
    try:
        data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        what = "holds no saved KV" if folder.is_dir() else "no such directory"
        raise usage_error(f"{folder}: {what}", hint) from None
    except OSError as error:
        raise usage_error(f"{folder}: cannot be read: {error.strerror}", hint) from None
    try:
        found = json.loads(data)
        if isinstance(found, dict) and isinstance(version := found.get("format"), int) and version > FORMAT:
            what = f"{folder}: saved in format {version}, which is newer than this kvcli's {FORMAT}"
            raise usage_error(what, "update kvcli, or save the document again")
        manifest = Manifest.model_validate(found)
    except ValidationError as error:
        raise damaged(folder, f"{MANIFEST}: {first_problem(error)}") from None
    except (ValueError, RecursionError) as error:
        raise damaged(folder, f"{MANIFEST}: {error}") from None
    problem = "its checksum is wrong" if manifest.checksum != _checksum(data) else manifest.problem()
    if problem is not None:
        raise damaged(folder, f"{MANIFEST}: {problem}")
    return manifest


def damaged(folder: Path, problem: str) -> KvcliError:
    """Make the error of a directory that differs from what was written."""
    return KvcliError(
        f"{folder} is damaged: {problem}; nothing of it was used", "remove it and save the document again"
    )


def _checksum(data: bytes) -> str:
    """Compute the checksum of a manifest from its bytes in the file, without its last field, the checksum itself.

    The manifest is not serialised again for it: that of a document of 256K tokens has 1.5 MB.
    """
    return xxhash.xxh3_64_hexdigest(data.rpartition(_LAST_FIELD.encode())[0] + b"}")
