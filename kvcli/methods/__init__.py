"""KV-cache methods: one file each, and the file's name is the method's name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from difflib import get_close_matches
from typing import TYPE_CHECKING

from kvcli.errors import ExitCode, KvcliError

if TYPE_CHECKING:
    from kvcli.methods.base import AnyMethod

_SHARED = {"base", "card", "config"}


def method_names() -> list[str]:
    """List the methods by their files, importing none of them."""
    return sorted(
        module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED and module.name[0] != "_"
    )


def get_method(name: str) -> type[AnyMethod]:
    """Import the method called `name`.

    Raises:
        KvcliError: there is no such method; names the nearest one.
    """
    from kvcli.methods.base import Method

    if name not in method_names():
        near = get_close_matches(name, method_names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise KvcliError(f"unknown method {name!r}", f"{hint}methods: {', '.join(method_names())}", ExitCode.USAGE)
    module = importlib.import_module(f"{__name__}.{name}")
    return next(
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, Method) and cls.__module__ == module.__name__
    )
