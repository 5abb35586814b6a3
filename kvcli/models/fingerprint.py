"""Telling models apart by their files, without reading gigabytes."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from kvcli.models.loading import Checkpoint

_SAMPLE = 1 << 20  # bytes read at the start, in the middle and at the end of every file of weights
_SUFFIXES = (".safetensors", ".bin")
_IGNORED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def fingerprint(checkpoint: Checkpoint) -> str:
    """Twelve hexadecimal digits over the config, how weights are quantised on loading, and of each of their files the
    name, the size and three samples.

    Whatever retrains a model changes all of its weights, so samples tell; dummy weights are told by their shape alone.
    """
    digest = hashlib.sha256(_config(checkpoint.config.to_dict()).encode())
    if checkpoint.spec.weights != "auto":
        digest.update(checkpoint.spec.weights.encode())
    folder = None if checkpoint.spec.dummy else _folder(checkpoint)
    files = [] if folder is None else sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in (0, max(0, size // 2 - _SAMPLE // 2), max(0, size - _SAMPLE)):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:12]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Twelve hexadecimal digits over what a tokenizer does, its chat template included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(json.dumps([rules, tokenizer.chat_template]).encode()).hexdigest()[:12]


def _folder(checkpoint: Checkpoint) -> Path | None:
    if checkpoint.path is not None:
        return checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    config = cached_file(str(checkpoint.spec.name), "config.json", local_files_only=True)
    return None if config is None else Path(config).parent


def _config(config: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in config.items() if key not in _IGNORED}, sort_keys=True, default=str)
