"""Shipped model shapes: the config.json of well-known checkpoints, for `--load-format dummy`.

Each is what its makers published under its name (deepseek-v2-lite: arXiv 2405.04434, appendix B, and
huggingface.co/deepseek-ai/DeepSeek-V2-Lite); tests compare them with the published numbers of parameters.
"""

from importlib.resources import files
from pathlib import Path


def shape_names() -> list[str]:
    """List the names that `--load-format dummy` knows without a checkpoint, sorted."""
    return sorted(Path(entry.name).stem for entry in files(__name__).iterdir() if entry.name.endswith(".json"))


def shape_path(name: str) -> Path:
    """Return the config file of a shape in `shape_names()`."""
    return Path(str(files(__name__))) / f"{name}.json"
