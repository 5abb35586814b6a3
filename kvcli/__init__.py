"""Offline long-context generation with the KV cache in host memory.

    import kvcli
    model = kvcli.load("path-or-id")
    print(model.generate(text, prompt="Who signed?", method="freekv", budget=2048).text)

Neither torch nor transformers is imported until a model is loaded.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.errors import KvcliError

if TYPE_CHECKING:
    from kvcli.api import Answer, LanguageModel, load, resume
    from kvcli.methods import register

__all__ = ["Answer", "KvcliError", "LanguageModel", "__version__", "load", "register", "resume"]
__version__ = "0.1.0"


_LOADED = 0.6
"""Threads that wanted a core in the last minute, on average, from which on one is taken for good."""


def _spins() -> str:
    """Return how often a waiting thread of OpenMP looks before it sleeps.

    By default threads look for milliseconds. Where another program wants a core, threads with work then wait for
    threads without, and a step was ten times slower beside a single one. Where all cores are free, sleeping soon makes
    short steps slower, by a sixth with the larger number; a program may still come later.
    """
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1  # besides this thread
        taken = running > 0 and os.getloadavg()[0] > _LOADED  # not by something that passes
    except (OSError, ValueError, IndexError):
        taken = False
    return "1000" if taken else "10000"


# The library reads it as it is loaded, with torch. With OMP_WAIT_POLICY the user has decided.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", _spins())

_LAZY = {
    "Answer": "kvcli.api",
    "LanguageModel": "kvcli.api",
    "load": "kvcli.api",
    "register": "kvcli.methods",
    "resume": "kvcli.api",
}


def __getattr__(name: str) -> Any:
    """Import `name` on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
