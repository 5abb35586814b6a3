"""Shipped model shapes: the config.json of well-known checkpoints, for `--load-format dummy`."""

from importlib.resources import files
from pathlib import Path


def shape_names() -> list[str]:
    """Names that `--load-format dummy` knows without a checkpoint, sorted."""
    return sorted(Path(entry.name).stem for entry in files(__name__).iterdir() if entry.name.endswith(".json"))


def shape_path(name: str) -> Path:
    """The config file of a shape in `shape_names()`."""
    return Path(str(files(__name__))) / f"{name}.json"
