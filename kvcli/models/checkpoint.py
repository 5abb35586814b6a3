"""Check a model's files, and explain transformers' errors to the user.

Directories are checked before transformers sees them: it reads a missing directory as a repository name, and finds a
damaged file only after minutes of loading.
"""

from __future__ import annotations

import json
import logging
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import huggingface_hub
import torch
import transformers
from huggingface_hub import errors as hub
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from safetensors import SafetensorError, safe_open
from transformers.activations import ACT2FN

from kvcli.errors import ExitCode, KvcliError
from kvcli.models.place import WAY_OUT

# The files of a checkpoint, validated before transformers sees them: config, index, generation settings, weights.

_LFS = b"version https://git-lfs"
_FLOATING = ("F64", "F32", "F16", "BF16")  # of safetensors; 8 bits are a quantised form
_LONGEST_NAME = 255  # characters of a file name

Size = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


def _file_name(name: str) -> str:
    if not 0 < len(name) <= _LONGEST_NAME or "/" in name or "\0" in name or name.startswith("."):
        raise ValueError("is not the name of a file next to the index")
    return name


def _dtype(name: str) -> str:
    if name != "auto" and not isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype):
        raise ValueError("is not a torch dtype")
    return name


def _activation(name: str) -> str:
    if name not in ACT2FN:
        raise ValueError("is not an activation that transformers knows")
    return name


DType = Annotated[str, AfterValidator(_dtype)]
Activation = Annotated[str, AfterValidator(_activation)]


class JsonFile(BaseModel):
    """Any of the JSON files: an object; fields that are not declared are left to transformers."""

    model_config = ConfigDict(extra="allow")


class ModelConfig(JsonFile):
    """The sizes in config.json that models are built from, if it has them, including those of an inner text model."""

    num_hidden_layers: Size | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | list[Size] | None = None
    qk_nope_head_dim: int | None = None
    head_dim: Annotated[int, Field(ge=0, lt=2**31)] | None = None
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

    @field_validator("head_dim")
    @classmethod
    def _is_a_size(cls, channels: int | None, config: ValidationInfo) -> int | None:
        # Of latent attention transformers gives the rotary channels here, and GLM 5 Next has none.
        if channels == 0 and not config.data.get("qk_nope_head_dim"):
            raise ValueError("should be greater than or equal to 1")
        return channels


class GenerationFile(JsonFile):
    """The end-of-text tokens and the numbers in generation_config.json; kvcli samples by its own options."""

    eos_token_id: TokenId | list[TokenId] | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None


class ShardIndex(JsonFile):
    """The file of each weight; transformers also requires the metadata."""

    metadata: dict[str, Any]
    weight_map: Annotated[dict[str, Annotated[str, AfterValidator(_file_name)]], Field(min_length=1)]


File = TypeVar("File", bound=JsonFile)


def read_json(path: Path, kind: type[File]) -> File:
    """Read a JSON file of this kind.

    Raises:
        KvcliError: the file cannot be read, is a Git LFS pointer or not a JSON object, or holds a forbidden value.
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
            raise KvcliError(f"{path} is not valid JSON: {said}", "download that file again") from error
        if not problem["loc"]:
            raise KvcliError(f"{path} holds no JSON object", "download that file again") from error
        # For a union pydantic also names the branch: "constrained-int", "str".
        names = (str(part) for part in problem["loc"] if part not in ("int", "str"))
        place = ".".join(name for name in names if name.isidentifier())
        said = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        given = "" if problem["type"] == "missing" else f" {repr(problem['input'])[:60]}"
        raise KvcliError(f"{path}: {place}{given}: {said[:1].lower()}{said[1:]}", "download that file again") from error


def check_pointer(path: Path) -> None:
    """Raise KvcliError if a file cannot be read or is a Git LFS pointer."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_LFS))
    except OSError as error:
        raise KvcliError(f"cannot read {path}: {error.strerror}") from error
    if head == _LFS:
        raise KvcliError(f"{path} is a Git LFS pointer, not the file itself", f"run `git lfs pull` in {path.parent}")


def check_safetensors(path: Path) -> None:
    """Raise KvcliError if a file's header is damaged, or announces other data than the file holds."""
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise KvcliError(f"{path} is damaged or cut off ({error})", "download that file again") from error


class StoredTensor(NamedTuple):
    """A tensor in a file of weights: its shape, its bytes from `offset` on, and safetensors' name of its type."""

    shape: tuple[int, ...]
    nbytes: int
    kind: str
    file: Path
    offset: int

    @property
    def floating(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.kind in _FLOATING


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Describe the tensors of all safetensors files of a directory, by name, without reading them."""
    found: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            data = file.tell()
        for name, told in header.items():
            if name != "__metadata__":
                start, end = told["data_offsets"]
                found[name] = StoredTensor(tuple(told["shape"]), end - start, told["dtype"], path, data + start)
    return found


_OF_EXPERTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""The tensors of one expert in files, each a matrix; a model has one tensor of all experts, by the name here."""


def stored_parts(name: str, stored: Mapping[str, StoredTensor]) -> list[StoredTensor]:
    """Find the tensors that a weight of a model consists of, one after another; empty if there are none."""
    for own in (name, name.replace(".mlp.", ".block_sparse_moe.")):  # Mixtral's name
        if own in stored:
            return [stored[own]]
        module, _, leaf = own.rpartition(".")
        for parts in _OF_EXPERTS.get(leaf, ()):
            found: list[StoredTensor] = []
            for expert in count():
                each = [stored.get(f"{module}.{expert}.{part}.weight") for part in parts]
                if None in each:
                    break
                found += filter(None, each)
            if found:
                return found
    return []


def check_config(path: Path) -> None:
    """Raise KvcliError unless the directory's config.json (or the file `path` itself) holds a JSON object."""
    if path.is_dir():
        if not any(path.iterdir()):
            raise KvcliError(f"{path} is empty", WAY_OUT, ExitCode.USAGE)
        if (path / "adapter_config.json").is_file():
            what = f"{path} holds a LoRA adapter (adapter_config.json), which would be left out"
            hint = "merge it with peft (merge_and_unload, save_pretrained) and name the directory of the merged model"
            raise KvcliError(what, hint, ExitCode.USAGE)
        if not (path / "config.json").is_file():
            raise KvcliError(f"{path} is not a checkpoint: it has no config.json", WAY_OUT, ExitCode.USAGE)
        path /= "config.json"
    read_json(path, ModelConfig)


def check_files(path: Path) -> None:
    """Raise KvcliError if the directory lacks weights, or a weight or tokenizer file is missing or damaged."""
    if (path / "model.safetensors").is_file():
        weights = [path / "model.safetensors"]
    elif (index := path / "model.safetensors.index.json").is_file():
        weights = _shards(index)
    elif (path / "pytorch_model.bin").is_file():
        weights = [path / "pytorch_model.bin"]
    elif (index := path / "pytorch_model.bin.index.json").is_file():
        weights = _shards(index)
    else:
        raise KvcliError(f"{path} has no weights: no model*.safetensors in it", WAY_OUT, ExitCode.USAGE)
    for file in weights:
        if not file.is_file():
            raise KvcliError(f"{file} is missing (the index names {len(weights)} shards)", "download that file again")
        check_pointer(file)
        if file.suffix == ".safetensors":
            check_safetensors(file)
    for file in path.glob("*token*"):
        if file.suffix == ".json":
            read_json(file, JsonFile)
        elif file.is_file():
            check_pointer(file)
    if (file := path / "generation_config.json").is_file():
        read_json(file, GenerationFile)


def notices(path: Path | None) -> list[str]:
    """List what a user should know about a checkpoint's directory that can be used."""
    config = None if path is None else path / "config.json" if path.is_dir() else path
    named = read_json(config, ModelConfig).attn_implementation if config is not None else None
    if named is None or named == "eager":
        return []
    return [f"config.json asks for the attention implementation {named!r}; kvcli attends by its own"]


def is_panic(error: BaseException) -> bool:
    """Tell whether a Rust library panicked: panics are not `Exception`s, and their class cannot be imported."""
    return type(error).__name__ == "PanicException"


def _shards(index: Path) -> list[Path]:
    return [index.parent / name for name in sorted(set(read_json(index, ShardIndex).weight_map.values()))]


def explain(error: Exception, name: str, offline: bool) -> KvcliError:
    """Turn an error of transformers, the hub or torch from loading `name` into one line and a way out."""
    chain = list(_chain(error))
    text = " ".join(str(error).split())

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in chain)

    if isinstance(error, KvcliError):
        return error
    if caused_by(torch.OutOfMemoryError) or "not enough memory" in text or "can't allocate memory" in text:
        hint = "`kvcli plan` shows what would fit; a smaller dtype or model takes less"
        return KvcliError(f"{name} does not fit into memory", hint, ExitCode.WILL_NOT_FIT)
    if caused_by(hub.GatedRepoError) or "gated repo" in text:
        hint = f"accept its terms at https://huggingface.co/{name}, then run `hf auth login`"
        return KvcliError(f"{name} is gated: the hub refuses access to it", hint)
    if caused_by(hub.RepositoryNotFoundError):
        what = f"no directory and no model on the hub called {name}"
        return KvcliError(what, f"{WAY_OUT}; private models need `hf auth login`", ExitCode.USAGE)
    if caused_by(hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, socket.gaierror, ConnectionError):
        if offline or huggingface_hub.constants.HF_HUB_OFFLINE or caused_by(hub.OfflineModeIsEnabled):
            said = "--offline" if offline else "HF_HUB_OFFLINE=1 (an environment variable)"
            hint = f"leave {said} out once to download it, or name a directory"
            return KvcliError(f"{name} is not a directory and not in the local hub cache", hint)
        return KvcliError(
            f"{name} is not a directory, and the hub cannot be reached", "check the network, or " + WAY_OUT
        )
    if caused_by(hub.EntryNotFoundError):
        return KvcliError(f"{name} is not a checkpoint: a file is missing on the hub ({text})", WAY_OUT, ExitCode.USAGE)
    if caused_by(SafetensorError):
        return KvcliError(f"the weights of {name} are damaged ({text})", "download them again")
    # The second: transformers would draw what is missing at random, which 8-bit types do not support.
    if "automatic conversion of the weights" in text or "normal_kernel" in text:
        what = f"{name} lacks parts of its quantised weights, or they are not what config.json says"
        return KvcliError(what, "the files are incomplete or belong to another config.json: download them again")
    if "custom code" in text or "trust_remote_code" in text:
        hint = "choose a model whose architecture is part of transformers"
        return KvcliError(f"{name} needs custom code, which kvcli never runs", hint, ExitCode.USAGE)
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        hint = "check model_type in its config.json, or install a newer transformers"
        what = f"{name} has an architecture that transformers {transformers.__version__} does not know"
        return KvcliError(what, hint, ExitCode.USAGE)
    if caused_by(ImportError):
        return KvcliError(f"{name} needs a package that is not installed ({text})", "install it and try again")
    return KvcliError(f"cannot load {name}: {text}", "run again with --debug for the traceback")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars, logs and warnings of transformers and the hub within this context."""
    log, hub_log = transformers.logging, huggingface_hub.logging
    verbosity, hub_verbosity = log.get_verbosity(), hub_log.get_verbosity()
    bars, hub_bars = log.is_progress_bar_enabled(), not are_progress_bars_disabled()
    log.set_verbosity(logging.CRITICAL)
    hub_log.set_verbosity(logging.CRITICAL)
    log.disable_progress_bar()  # type: ignore[no-untyped-call]
    disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        hub_log.set_verbosity(hub_verbosity)
        if bars:
            log.enable_progress_bar()  # type: ignore[no-untyped-call]
        # After transformers' own switch, which also throws the hub's.
        if hub_bars:
            enable_progress_bars()
        else:
            disable_progress_bars()
