"""Where a model's files are; found out without torch, so that a name that means nothing is refused at once."""

import re
from difflib import get_close_matches
from pathlib import Path

from kvcli.errors import KvcliError, usage_error
from kvcli.models.shapes import shape_names, shape_path

WAY_OUT = "name a directory with config.json, *.safetensors and a tokenizer, or a model on the Hugging Face hub"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def find(name: str, dummy: bool) -> Path | None:
    """The directory (for `dummy` also the config file) that `name` means; None where it is a hub id.

    Raises KvcliError (usage) where it is neither, with the way out.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        if dummy:
            return path
        raise usage_error(f"{name} is a file, not a checkpoint directory", WAY_OUT)
    if name in shape_names():
        if dummy:
            return shape_path(name)
        hint = "add --load-format dummy to run the shape with random weights, or name a checkpoint"
        raise usage_error(f"{name} is a shape without weights", hint)
    if dummy and "/" not in name:
        near = get_close_matches(name, shape_names(), n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        hint += f"Shapes: {', '.join(shape_names())}; or name a config.json"
        raise usage_error(f"no shape, file or directory called {name!r}", hint)
    if not _HUB_ID.fullmatch(name) or ("/" in name and Path(name).parent.is_dir()):
        raise usage_error(f"no such directory: {name}", WAY_OUT)
    return None


def bundled_model() -> Path:
    """The directory of the bundled demo model; raises KvcliError where the installation lacks it."""
    path = Path(__file__).parent / "demo"
    if not (path / "config.json").is_file():
        raise KvcliError("this installation has no bundled demo model", "name a model with -m DIR or -m ORG/NAME")
    return path
