"""KV-cache methods of this package, one file or folder each, named like the method; and methods of other packages.

A folder holds what only this method uses: the method in `method.py`, its cache, its kernels.

Another package offers a method by an entry point of the group `kvcli.methods`, named like the method and pointing to
its class, or by `register` in a running program.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, TypeVar

from kvcli.errors import ExitCode, KvcliError

if TYPE_CHECKING:
    from kvcli.methods.contract import AnyMethod

    MethodT = TypeVar("MethodT", bound=type[AnyMethod])

ENTRY_POINTS = "kvcli.methods"
_SHARED = {"card", "config", "contract", "step"}
_registered: dict[str, type[AnyMethod]] = {}


def register(method_class: MethodT, name: str | None = None) -> MethodT:
    """Make a method available as `name`, by default its class name in lower case; also usable as a decorator.

    A class with the same module and name replaces the one registered before, as when a notebook cell is run again.

    Raises:
        KvcliError: another method has this name, or the class is not a `Method`.
    """
    name = name or method_class.__name__.lower()
    before = _registered.get(name)
    again = before and (before.__module__, before.__qualname__) == (method_class.__module__, method_class.__qualname__)
    if not again and name in method_names():
        raise KvcliError(f"method {name!r} already exists", "register it with another name=", ExitCode.USAGE)
    _registered[name] = _checked(name, method_class)
    return method_class


def method_names() -> list[str]:
    """List all methods without importing them.

    Raises:
        KvcliError: two packages offer methods of the same name.
    """
    return sorted({*own_method_names(), *_registered, *_offered()})


@cache
def own_method_names() -> tuple[str, ...]:
    """List the methods of this package by their files and folders; names with a leading underscore are not methods."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in names if name not in _SHARED and not name.startswith("_")))


@cache
def home_of(name: str) -> str:
    """Return the module that holds the class of one of this package's methods, relative to this package."""
    folders = {module.name for module in pkgutil.iter_modules(__path__) if module.ispkg}
    return f"{name}.method" if name in folders else name


def get_method(name: str) -> type[AnyMethod]:
    """Import the method called `name`.

    Raises:
        KvcliError: there is no such method, or it cannot be imported from the package that offers it.
    """
    if name in own_method_names():
        from kvcli.methods.contract import Method

        module = importlib.import_module(f"{__name__}.{home_of(name)}")
        return next(
            cls
            for _, cls in inspect.getmembers(module, inspect.isclass)
            if issubclass(cls, Method) and cls.__module__ == module.__name__
        )
    if name in _registered:
        return _registered[name]
    if name in (offered := _offered()):
        return _load(offered[name])
    near = get_close_matches(name, method_names(), n=1)
    hint = f"did you mean {near[0]!r}? kvcli methods lists all" if near else f"methods: {', '.join(method_names())}"
    raise KvcliError(f"unknown method {name!r}", hint, ExitCode.USAGE)


def _offered() -> dict[str, EntryPoint]:
    """Return the entry points of other packages, by method name."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        if point.name in own_method_names() or found.setdefault(point.name, point).value != point.value:
            what = f"method {point.name!r} already exists: {_source(point)} has another of this name"
            raise KvcliError(what, "rename its entry point, or uninstall the package", ExitCode.USAGE)
    return found


def _load(point: EntryPoint) -> type[AnyMethod]:
    try:
        loaded = point.load()
    except Exception as error:  # whatever another package's import may raise
        what = f"method {point.name!r} of {_source(point)} cannot be imported: {type(error).__name__}: {error}"
        raise KvcliError(what, "fix or uninstall the package", ExitCode.USAGE) from error
    return _checked(point.name, loaded)


def _checked(name: str, method_class: type[AnyMethod]) -> type[AnyMethod]:
    """Return the class if it is a method and states everything that a listing shows.

    Raises:
        KvcliError: it is not a method, or a statement is missing.
    """
    from kvcli.methods.card import STATED
    from kvcli.methods.contract import Method

    if not (isinstance(method_class, type) and issubclass(method_class, Method)):
        raise KvcliError(f"method {name!r} is not a subclass of Method", "see CONTRIBUTING.md", ExitCode.USAGE)
    missing = [each for each in ("Config", *STATED) if not hasattr(method_class, each)]
    if missing:
        raise KvcliError(f"method {name!r} does not state {', '.join(missing)}", "see CONTRIBUTING.md", ExitCode.USAGE)
    return method_class


def _source(point: EntryPoint) -> str:
    return f"package {point.dist.name}" if point.dist else point.value
