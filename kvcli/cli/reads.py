"""Which files a command reads, so that none of its outputs takes the place of one."""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from kvcli.cli.output import check_outputs


def files_read(
    *,
    documents: Iterable[str] = (),
    profiles: Iterable[str | None] = (),
    settings: Iterable[str] = (),
    model: str | None = None,
) -> Iterator[str | Path]:
    """Name what a run may read: `documents` as they are, and the files of profiles, of KEY=VALUE settings, of a model.

    Files that do not exist are among them; "-" is standard input.
    """
    yield from documents
    for name in profiles:
        if name is not None:
            yield from _profile_files(name)
    for setting in settings:
        yield setting.partition("=")[2]
    yield from _model_files(model)


def check_files(
    outputs: Mapping[str, Path | None],
    *,
    model: str | None,
    load_format: str = "dummy",
    documents: Iterable[str] | None = None,
    profiles: Iterable[str | None] = (),
    settings: Iterable[str] | None = None,
) -> None:
    """Refuse outputs as `check_outputs` does, and a model that cannot be there, before anything is imported for it.

    Raises:
        KvcliError: an output is refused, or there is no such directory, file or shape (usage).
    """
    reads = files_read(documents=documents or (), profiles=profiles, settings=settings or (), model=model)
    check_outputs(outputs, reads)
    if model is not None:
        from kvcli.models.place import find

        find(model, load_format == "dummy")


def _profile_files(name: str) -> Iterator[str]:
    """The profile, and files that its settings name: what `kvcli calibrate` found."""
    path = name if name.endswith(".toml") or "/" in name else str(files("kvcli.profiles") / f"{name}.toml")
    yield path
    with suppress(OSError, ValueError, RecursionError):  # what is wrong with a profile is said where it is used
        settings = tomllib.loads(Path(path).read_text()).get("settings")
        if isinstance(settings, dict):
            yield from (value for value in settings.values() if isinstance(value, str))


def _model_files(name: str | None) -> Iterator[Path]:
    """Every file in a checkpoint's directory that a checkpoint may consist of; a config or shape file itself."""
    if name is None:
        directory = Path(str(files("kvcli.models"))) / "demo"
    elif "/" in name and not Path(name).expanduser().exists():
        cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")) / "hub"
        directory = Path(os.environ.get("HF_HUB_CACHE", cache)) / f"models--{name.partition(':')[0].replace('/', '--')}"
    else:
        directory = Path(name).expanduser()
        yield directory
    patterns = ("*.json", "*.safetensors", "*.bin", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.gguf")
    with suppress(OSError, ValueError):
        yield from (path for pattern in patterns for path in directory.rglob(pattern))
