"""Triton's interpreter without what it does again and again.

Whenever a kernel calls another function it replaces the whole language by its own once more, which takes longer than
all else that it does; once a launch is enough. What it makes of a shape or of a type is the same every time.
"""

from dataclasses import replace
from functools import wraps

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


def _once_for(make, key, own):
    """Stand in for a constructor whose attributes, but for its `own` arguments, follow from the key of these."""
    known = {}

    @wraps(make)
    def made(self, *args):
        of, given = key(*args), own(*args)
        if of in known:
            vars(self).update(known[of], **given)
            return
        make(self, *args)
        if of is not None:
            known[of] = {name: x for name, x in vars(self).items() if name not in given}

    return made


def _shape_of(_, type):
    return type.name if type.is_block() else ""


def _numbers_of(handle, type):
    return {"handle": handle, "type": type, "dtype": type.scalar}


def _block_of(element_ty, shape):
    sizes = *shape, element_ty.name
    return sizes if all(type(size) is int for size in shape) else None


def _found_once(find):
    """Stand in for the function that lists the types of numpy for every number that is made."""
    known = {}

    @wraps(find)
    def found(type):
        name = type.scalar.name
        if name not in known:
            known[name] = find(type)
        return known[name]

    return found


def _unwrapped(unwrap):
    plain = {int, float, bool, str, tl.tensor, type(None)}
    return lambda x: x if type(x) in plain else unwrap(x)


def _broadcast(self, lhs, rhs, broadcast=tl.semantic.TritonSemantic.broadcast_impl_value):
    """Leave tensors of one shape as they are without reasoning about each of their axes."""
    one, other = lhs.type, rhs.type
    if one.is_block() == other.is_block() and (not one.is_block() or [*one.shape] == [*other.shape]):
        return lhs, rhs
    return broadcast(self, lhs, rhs)


tl.tensor.__init__ = _once_for(tl.tensor.__init__, _shape_of, _numbers_of)
tl.block_type.__init__ = _once_for(
    tl.block_type.__init__, _block_of, lambda element_ty, shape: {"element_ty": element_ty}
)
tl.core._unwrap_if_constexpr = _unwrapped(tl.core._unwrap_if_constexpr)
tl.semantic.TritonSemantic.broadcast_impl_value = _broadcast
interpreter._get_np_dtype = _found_once(interpreter._get_np_dtype)


def overflow_is_not_looked_for(monkeypatch):
    """Of every sum and product of integers, in 64 bits: each kernel alone is held to it, at the same sizes."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def few_programs(monkeypatch):
    """Let three programs recall, each of them several pages; of a thousand most would look for one in vain."""
    monkeypatch.setattr(recall, "PROGRAMS", 3)
    monkeypatch.setattr(kernels, "PROGRAM_TOKENS", 1)
