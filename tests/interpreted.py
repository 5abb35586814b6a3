"""Triton's interpreter without what it does again and again.

Whenever a kernel calls another function it replaces the whole language by its own once more, which takes longer than
all else that it does; once a launch is enough.
"""

from dataclasses import replace

import triton.language as tl
import triton.runtime.interpreter as interpreter

from kvcli.kernels import recall as kernels
from kvcli.runtime.gpu import recall

_replaced = set()  # modules of the language, by the launch that is under way


def replace_once(fn, patch=interpreter._patch_lang):
    """Stand in for the interpreter's own function of this purpose; a launch undoes at its end what it has replaced."""
    modules = {module.__name__ for module in fn.__globals__.values() if module is tl or module is tl.core}
    if _replaced and modules <= _replaced:
        return None  # a function that a kernel calls does not ask for it
    scope = patch(fn)
    if not _replaced:
        restore = scope.restore

        def restored():
            restore()
            _replaced.clear()

        scope.restore = restored
    _replaced.update(modules)
    return scope


interpreter._patch_lang = replace_once


def overflow_is_not_looked_for(monkeypatch):
    """Of every sum and product of integers, in 64 bits: each kernel alone is held to it, at the same sizes."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def few_programs(monkeypatch):
    """Let three programs recall, each of them several pages; of a thousand most would look for one in vain."""
    monkeypatch.setattr(recall, "PROGRAMS", 3)
    monkeypatch.setattr(kernels, "PROGRAM_TOKENS", 1)
