"""What is wrong with a model's files, and what transformers' errors mean for the user.

Directories are checked before transformers sees them: it reads a missing directory as a repository name, and finds
a damaged file only after minutes of loading.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import torch
import transformers
from huggingface_hub import errors as hub
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError

from kvcli.errors import ExitCode, KvcliError
from kvcli.models.checkpoint_files import (
    GenerationFile,
    JsonFile,
    ModelConfig,
    ShardIndex,
    check_pointer,
    check_safetensors,
    read_json,
)
from kvcli.models.place import WAY_OUT


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
    """Raise KvcliError where the directory lacks weights, or a weight or tokenizer file is missing or damaged."""
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
            raise KvcliError(f"{file} is missing (the index names {len(weights)} shards)", "get that file again")
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
    """What a user should know of a checkpoint's directory although it can be used."""
    config = None if path is None else path / "config.json" if path.is_dir() else path
    named = read_json(config, ModelConfig).attn_implementation if config is not None else None
    if named is None or named == "eager":
        return []
    return [f"config.json asks for the attention implementation {named!r}; kvcli attends by its own"]


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust failed: its panics are no `Exception`, and their class cannot be imported."""
    return type(error).__name__ == "PanicException"


def _shards(index: Path) -> list[Path]:
    return [index.parent / name for name in sorted(set(read_json(index, ShardIndex).weight_map.values()))]


def explain(error: Exception, name: str, offline: bool) -> KvcliError:
    """Turn what transformers, the hub or torch raised while loading `name` into one line and a way out."""
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
    if caused_by(hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled):
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
        return KvcliError(f"the weights of {name} are damaged ({text})", "get them again")
    # The second: transformers would draw what is missing, and there is no such number of 8 bits.
    if "automatic conversion of the weights" in text or "normal_kernel" in text:
        what = f"{name} lacks parts of its quantised weights, or they are not what config.json says"
        return KvcliError(what, "the files are incomplete or belong to another config.json: get them again")
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
    """Silence the progress bars, logs and warnings of transformers and the hub; what was set before comes back."""
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
        # After transformers' own switch, which throws the hub's as well.
        if hub_bars:
            enable_progress_bars()
        else:
            disable_progress_bars()
