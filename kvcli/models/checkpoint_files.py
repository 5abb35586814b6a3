"""The files of a checkpoint, validated before transformers sees them: config, index, generation settings, weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from transformers.activations import ACT2FN

from kvcli.errors import KvcliError

_LFS = b"version https://git-lfs"
_FLOATING = ("F64", "F32", "F16", "BF16")  # of safetensors; 8 bits are a quantised form
_LONGEST_NAME = 255  # characters of a file name

Size = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


def _file_name(name: str) -> str:
    if not 0 < len(name) <= _LONGEST_NAME or "/" in name or "\0" in name or name.startswith("."):
        raise ValueError("is no name of a file beside the index")
    return name


def _dtype(name: str) -> str:
    if name != "auto" and not isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype):
        raise ValueError("is no dtype of torch")
    return name


def _activation(name: str) -> str:
    if name not in ACT2FN:
        raise ValueError("is no activation that transformers knows")
    return name


DType = Annotated[str, AfterValidator(_dtype)]
Activation = Annotated[str, AfterValidator(_activation)]


class JsonFile(BaseModel):
    """Any of them: a JSON object; what is not declared is left to transformers."""

    model_config = ConfigDict(extra="allow")


class ModelConfig(JsonFile):
    """The sizes in config.json that models are built by, where it has them; also those of a text model within."""

    num_hidden_layers: Size | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | list[Size] | None = None
    head_dim: Size | None = None
    vocab_size: Size | None = None
    max_position_embeddings: Size | None = None
    hidden_act: Activation | None = None
    dtype: DType | dict[str, Any] | None = None
    torch_dtype: DType | dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    text_config: ModelConfig | None = None
    quantization_config: dict[str, Any] | None = None
    attn_implementation: str | None = Field(
        None, validation_alias=AliasChoices("_attn_implementation", "attn_implementation")
    )


class GenerationFile(JsonFile):
    """The end-of-text tokens and the numbers in generation_config.json; kvcli samples by its own options."""

    eos_token_id: TokenId | list[TokenId] | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: int | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None


class ShardIndex(JsonFile):
    """Which file holds which weight; transformers wants the metadata, too."""

    metadata: dict[str, Any]
    weight_map: Annotated[dict[str, Annotated[str, AfterValidator(_file_name)]], Field(min_length=1)]


File = TypeVar("File", bound=JsonFile)


def read_json(path: Path, kind: type[File]) -> File:
    """Read a JSON file of this kind.

    Raises:
        KvcliError: the file cannot be read, is a Git LFS pointer or no JSON object, or holds a value that it must not.
    """
    check_pointer(path)
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise KvcliError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        if problem["type"] == "json_invalid":
            said = problem["msg"].removeprefix("Invalid JSON: ")
            raise KvcliError(f"{path} is not valid JSON: {said}", "get that file again") from error
        if not problem["loc"]:
            raise KvcliError(f"{path} holds no JSON object", "get that file again") from error
        # Of a union pydantic names the branch as well: "constrained-int", "str".
        names = (str(part) for part in problem["loc"] if part not in ("int", "str"))
        place = ".".join(name for name in names if name.isidentifier())
        said = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        given = "" if problem["type"] == "missing" else f" {repr(problem['input'])[:60]}"
        raise KvcliError(f"{path}: {place}{given}: {said[:1].lower()}{said[1:]}", "get that file again") from error


def check_pointer(path: Path) -> None:
    """Raise KvcliError where a file cannot be read or is what Git LFS puts in its place."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_LFS))
    except OSError as error:
        raise KvcliError(f"cannot read {path}: {error.strerror}") from error
    if head == _LFS:
        raise KvcliError(f"{path} is a Git LFS pointer, not the file itself", f"run `git lfs pull` in {path.parent}")


def check_safetensors(path: Path) -> None:
    """Raise KvcliError where a file's header is damaged, or announces other data than the file holds."""
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise KvcliError(f"{path} is damaged or cut off ({error})", "get that file again") from error


class StoredTensor(NamedTuple):
    """A tensor in a file of weights: its shape, its bytes there, and whether it holds floating-point numbers."""

    shape: tuple[int, ...]
    nbytes: int
    floating: bool


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Describe the tensors of all safetensors files of a directory, by name, without reading them."""
    found: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, told in header.items():
            if name != "__metadata__":
                start, end = told["data_offsets"]
                found[name] = StoredTensor(tuple(told["shape"]), end - start, told["dtype"] in _FLOATING)
    return found
