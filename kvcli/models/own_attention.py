"""Attention that a module computes itself, noted from the operations that it runs.

Old families of transformers multiply queries, keys and values in their own code. Such a module is given a cache that
returns markers for its keys and values. A marker has a shape and no numbers. Each operation on markers is noted: the
product with queries, a factor, a bias, a mask, the softmax. At the product with values everything is known, and the
attention so noted runs instead. Whatever is not understood is an error.

A bias that depends on the key alone (ALiBi, arXiv 2108.12409) becomes two more channels of the keys, which queries
multiply by a constant: a softmax is the same whether a bias counts from the query or from the start. So methods score,
bound and move keys as they do any others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionMaskInterface
from typing_extensions import override

NAME = "kvcli_own"
"""The attention implementation that models are set to whose modules attend themselves: it makes markers of masks."""

BIASES = ("alibi", "position_bias")
"""Arguments by which a decoder gives its layers a bias of every key: [H, 1, n], or [b * H, 1, n]."""

BIAS_CHANNELS = 2  # the bias rounded to bfloat16, and the rest

_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm"}
_FACTORS = {"mul", "__mul__", "__rmul__", "mul_", "__imul__"}
_DIVISIONS = {"div", "__truediv__", "__div__", "div_", "__itruediv__", "__idiv__"}
_SUMS = {"add", "__add__", "__radd__", "add_", "__iadd__"}
_MASKINGS = {"masked_fill", "masked_fill_"}
_ALIKE = {"to", "float", "type", "contiguous", "dropout"}  # nothing but numbers changes
_VIEWS = {"view", "reshape", "transpose", "permute", "__getitem__", "flatten"}


class Attend(Protocol):
    """Attention: q [b, H, n, d], k and v [b, Hk, n, d] of the new tokens -> [b, n, H, d]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend."""


@dataclass(frozen=True)
class _Note:
    """What a marker stands for: a `part` of the attention with keys k and values v, with the queries and factors.

    `bias` has the numbers of a bias, which was added to scores that were multiplied by `scale_then` so far.
    """

    part: str
    k: Tensor | None = None
    v: Tensor | None = None
    q: Tensor | None = None
    scale: float = 1.0
    bias: Tensor | None = None
    scale_then: float = 1.0
    masked: bool = False


class _Marker(Tensor):
    """A tensor without numbers that knows what it stands for."""

    note: _Note
    finish: Callable[[_Note], Tensor] | None  # of values: attend, [b, H, n, d]

    @classmethod
    def like(cls, x: Tensor, note: _Note, finish: Callable[[_Note], Tensor] | None = None) -> _Marker:
        """Mark the shape of x."""
        marker = torch.empty(x.shape, dtype=x.dtype, device="meta").as_subclass(cls)
        marker.note, marker.finish = note, finish
        return marker

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        markers = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Marker)]
        by_part = {each.note.part: each for each in markers}
        plain = [each for each in tree_leaves((args, kwargs)) if not isinstance(each, _Marker)]
        if name in _PRODUCTS:
            return _product(by_part, args, kwargs)
        scores = by_part.get("scores")
        if scores is not None and (found := _of_scores(name, scores.note, by_part, plain)) is not None:
            return cls.like(scores, found)
        if len(by_part) == 1 and name in (*_ALIKE, *_VIEWS, "__get__", "size", "dim"):
            (marker,) = by_part.values()
            if name in _ALIKE:
                return marker
            out = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            return cls.like(out.as_subclass(Tensor), marker.note, marker.finish) if isinstance(out, Tensor) else out
        raise ValueError(f"it runs {name} on its {' and '.join(by_part)}")


def _of_scores(name: str, note: _Note, beside: Mapping[str, _Marker], plain: list[Any]) -> _Note | None:
    """Return what scores become by an operation; None if it is none of those that belong to attention."""
    numbers = [each for each in plain if isinstance(each, (int, float)) and not isinstance(each, bool)]
    tensors = [each for each in plain if isinstance(each, Tensor)]
    if name in _FACTORS | _DIVISIONS and len(numbers) == 1 and not tensors and len(beside) == 1:
        return replace(note, scale=note.scale * numbers[0] if name in _FACTORS else note.scale / numbers[0])
    if name in _SUMS and "bias" in beside and note.bias is None:
        return replace(note, bias=beside["bias"].note.bias, scale_then=note.scale)
    if name in (*_SUMS, *_MASKINGS) and "mask" in beside:
        return replace(note, masked=True)
    if name == "max" and [each.dim() for each in tensors] == [0]:  # the least number of a dtype
        return note
    return replace(note, part="weights") if name == "softmax" and -1 in numbers else None


def _product(by_part: Mapping[str, _Marker], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Multiply queries with keys, or weights with values."""
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    *added, left, right = given
    result = torch.empty(left.shape, device="meta") @ torch.empty(right.shape, device="meta")
    if by_part.keys() == {"weights", "values"} and right is by_part["values"] and not added:
        finish = by_part["values"].finish
        assert finish is not None
        return finish(by_part["weights"].note).reshape(result.shape)
    if right is not by_part.get("keys") or isinstance(left, _Marker):
        raise ValueError(f"it multiplies {' and '.join(by_part)}")
    note = replace(by_part["keys"].note, part="scores", q=left, scale=kwargs.get("alpha", 1.0))
    if added and "bias" in by_part and kwargs.get("beta", 1.0) == 1:
        note = replace(note, bias=by_part["bias"].note.bias, scale_then=note.scale)
    elif added and (added[0].device.type != "meta" and bool(added[0].any())):
        raise ValueError("it adds something of its own to its scores")
    return _Marker.like(result, note)


class _MarkingCache:
    """Returns markers for keys and values [b, Hk, n, d]; `finish` attends."""

    def __init__(self, finish: Callable[[_Note, Tensor, Tensor], Tensor]):
        self.finish = finish

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return 0: the module sees the new tokens alone."""
        return 0

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Mark them."""
        keys = _Marker.like(k, _Note("keys"))
        return keys, _Marker.like(v, _Note("values"), lambda note: self.finish(note, k, v))


def run_noted(
    forward: Callable[..., Any], cache: str, given: Mapping[str, Any], positions: Tensor, attend: Attend
) -> Any:
    """Run the forward of a module that attends itself, with these arguments, for tokens at positions [b, n].

    `cache` is the name of its cache argument. In the output nothing stands for weights.

    Raises:
        ValueError: it does something else than softmax attention.
    """

    def finish(note: _Note, k: Tensor, v: Tensor) -> Tensor:
        if not note.masked:
            raise ValueError("it puts no causal mask on its scores")
        b, _, n, d = k.shape
        q = cast(Tensor, note.q).reshape(b, -1, n, d).to(k.dtype)
        if note.bias is not None:
            q, k = _with_bias(q, k, note, positions)
        return attend(q, k, v, note.scale).transpose(1, 2)

    marked = {
        name: _Marker.like(value, _Note("bias", bias=value))
        for name, value in given.items()
        if name in BIASES and value is not None
    }
    mask, (b, n) = given.get("attention_mask"), positions.shape
    if isinstance(mask, _Marker) and mask.dim() == 4:  # cut to the queries alone, if the module runs on a part
        marked["attention_mask"] = _Marker.like(torch.empty(b, 1, n, n, device="meta"), mask.note)
    out = forward(**{**given, **marked, cache: _MarkingCache(finish)})
    return tree_map(lambda each: None if isinstance(each, _Marker) else each, out)


def _with_bias(q: Tensor, k: Tensor, note: _Note, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Append the bias of keys at positions [b, n] to k [b, H, n, d], and constants to q [b, H, n, d]."""
    b, heads, n, _ = q.shape
    if k.shape[1] != heads:
        raise ValueError("its bias differs between query heads of one KV head")
    bias = cast(Tensor, note.bias)
    every = bias.reshape(-1, heads, bias.shape[-1]).expand(b, -1, -1)
    numbers = every.gather(2, positions[:, None].expand(-1, heads, -1)).float()  # [b, H, n]
    rounded = numbers.bfloat16()
    channels = torch.stack((rounded.to(k.dtype), (numbers - rounded).to(k.dtype)), -1)
    constants = q.new_full((b, heads, n, BIAS_CHANNELS), 1 / note.scale_then)
    return torch.cat((q, constants), -1), torch.cat((k, channels), -1)


def mask_marker(batch_size: int, q_length: int, kv_length: int, **given: Any) -> Tensor:
    """Return what stands for a causal mask; where a decoder must have one, it has no dimensions to add ALiBi to."""
    shape = (batch_size, 1, q_length, kv_length) if given.get("allow_is_causal_skip", True) else ()
    others = {"allow_is_bidirectional_skip": "mask of both directions", "local_size": "mask of a window"}
    part = next((others[name] for name in others if given.get(name) is not None), "mask")
    return _Marker.like(torch.empty(shape, device="meta"), _Note(part))


AttentionMaskInterface.register(NAME, mask_marker)
