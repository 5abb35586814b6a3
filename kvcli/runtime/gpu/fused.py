"""GPU kernels for the work between the attention of two layers.

Combined projections keep their weights adjacent from then on, each a view of its part: no weight is on the device
twice, except those of one layer while they are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import Parameter, signature
from itertools import pairwise, permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from kvcli.kernels.norm_rope import Rotation, add_rms_norm, rms_norm, rotate, silu_mul
from kvcli.kernels.skinny_linear import MOST_ROWS, InputNorm, skinny_linear, starts_early
from kvcli.models.auto import layers_of
from kvcli.models.weights import is_plain
from kvcli.runtime.fused import Kernels, Norm, fused_by, gated_of, norm_of, replaced

OWN_PRODUCTS = False
"""Whether an MLP of a few rows is two kernels: the norm, both factors and the gate; and the last product with the sum.

They launch two kernels less per layer than a library's products. No GPU has compared the two yet (`products` of
`benchmarks/gpu.py`), so that the library's serve.
"""

# Decoder layers that add the attention output within the kernel that normalises the sum for the MLP.


class Parts(NamedTuple):
    """The modules of a decoder layer, in the order in which they run."""

    before_attention: nn.Module
    attention: nn.Module
    before_mlp: nn.Module
    mlp: nn.Module


@contextmanager
def sums_in_norms(model: PreTrainedModel) -> Iterator[None]:
    """Save a kernel in each suitable layer of a model within this context."""
    with ExitStack() as left:
        for layer in layers_of(model):
            parts = parts_of(layer)
            norm = None if parts is None else norm_of(parts.before_mlp)
            if parts is not None and norm is not None:
                mlp = _own_mlp(parts.mlp, norm) if OWN_PRODUCTS else None
                left.enter_context(replaced(layer, "forward", _forward(layer.forward, parts, norm, mlp)))
        yield


def _own_mlp(mlp: nn.Module, norm: Norm) -> Callable[[Tensor], Tensor] | None:
    """Return the function x + mlp(norm(x)) of at most `MOST_ROWS` rows, or None if a weight is not plain."""
    modules = gated_of(mlp)
    if modules is None or not is_plain(modules[2]):
        return None
    gate, up, down = modules
    side_by_side([gate, up])
    (weight, bias), last = _whole([gate, up]), down.weight.data
    early = starts_early(weight)

    def forward(x: Tensor) -> Tensor:
        factors = skinny_linear(x, weight, bias, norm=InputNorm(*norm), gated=True, dependent=early)
        return skinny_linear(factors, last, down.bias, x, dependent=early)

    return forward


def _forward(
    before: Callable[..., Tensor], parts: Parts, norm: Norm, mlp: Callable[[Tensor], Tensor] | None
) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
        if args:  # only the layer itself knows which arguments these are
            return before(hidden_states, *args, **given)
        found = parts.attention(hidden_states=parts.before_attention(hidden_states), **given)[0]
        if mlp is not None and hidden_states[..., 0].numel() <= MOST_ROWS:
            return mlp(hidden_states + found)
        total, normed = add_rms_norm(hidden_states, found, *norm)
        out: Tensor = total + parts.mlp(normed)
        return out

    return forward


def parts_of(layer: nn.Module) -> Parts | None:
    """Return the parts of a layer that is h = x + attention(norm(x)), then h + mlp(norm(h)), with a gated MLP."""
    children = list(layer.children())
    norms = [child for child in children if norm_of(child) is not None]
    mlps = [child for child in children if gated_of(child) is not None]
    if len(children) != 4 or len(norms) != 2 or len(mlps) != 1 or "forward" in vars(layer):
        return None
    (attention,) = (child for child in children if child not in norms and child not in mlps)
    weight = norms[0].weight
    assert isinstance(weight, Tensor)
    x = torch.linspace(-1.0, 1.0, 3 * len(weight), device=weight.device, dtype=weight.dtype).view(1, 3, -1)
    for first, second in permutations(norms):
        parts = Parts(first, attention, second, mlps[0])
        if _runs(layer, parts, x):
            return parts
    return None


def _runs(layer: nn.Module, parts: Parts, x: Tensor) -> bool:
    """Try a layer out with stand-ins for its modules; attention must receive everything that the layer receives."""
    named = signature(layer.forward).parameters.values()
    given = {each.name: object() for each in named if each.kind == Parameter.POSITIONAL_OR_KEYWORD}
    given = {"something_else": object(), **given}
    given.pop("hidden_states", None)
    seen: dict[str, Any] = {}

    def attention(hidden_states: Tensor, **known: Any) -> tuple[Tensor, None]:
        seen.update(known)
        return 3 * hidden_states - 1, None

    with ExitStack() as stack:
        for part, does in zip(parts, (lambda x: 2 * x, attention, lambda x: x + 5, lambda x: 7 - x), strict=True):
            stack.enter_context(replaced(part, "forward", does))
        try:
            found = layer.forward(x, **given)  # not what hooks do before and after
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False
    total = x + (3 * (2 * x) - 1)
    return isinstance(found, Tensor) and torch.equal(found, total + (7 - (total + 5))) and seen == given


@contextmanager
def fused_layers(model: PreTrainedModel) -> Iterator[None]:
    """Run the layers of a model as few kernels within this context; results are the same within rounding."""
    with sums_in_norms(model), fused_by(GpuKernels(), model):
        yield


class GpuKernels(Kernels):
    """One product for several layers, one kernel for the operation that follows it."""

    @override
    def serve(self, x: Tensor) -> bool:
        return True

    @override
    def alone(self, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        return lambda x: functional.linear(x, linear.weight, linear.bias)

    @override
    def together(self, linears: Sequence[nn.Linear]) -> Callable[[Tensor], Sequence[Tensor]]:
        side_by_side(linears)
        whole, sizes = _whole(linears), [len(linear.weight) for linear in linears]
        return lambda x: torch.split(functional.linear(x, *whole), sizes, -1)

    @override
    def gated(self, gate: nn.Linear, up: nn.Linear) -> Callable[[Tensor], Tensor]:
        side_by_side([gate, up])
        whole = _whole([gate, up])
        return lambda x: silu_mul(functional.linear(x, *whole))

    @override
    def norm(self, x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
        return rms_norm(x, weight, eps, shift)

    @override
    def rotate(self, q: Tensor, k: Tensor, rotation: Rotation) -> None:
        rotate(q, k, rotation)


@torch.no_grad()
def side_by_side(linears: Sequence[nn.Linear]) -> None:
    """Make the weights of linear layers adjacent in memory, if they are not; each becomes a view."""
    for parts in ([x.weight for x in linears], [x.bias for x in linears if x.bias is not None]):
        if not parts or _adjacent(parts):
            continue
        whole = torch.cat([part.data for part in parts])
        for part, own in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
            part.data = own


def _adjacent(parts: Sequence[Tensor]) -> bool:
    return all(
        b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        and b.storage_offset() == a.storage_offset() + a.numel()
        and a.is_contiguous()
        for a, b in pairwise(parts)
    )


def _whole(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of adjacent layers as those of one layer."""
    first, rows = linears[0], sum(x.out_features for x in linears)
    weight = first.weight.data.as_strided((rows, first.in_features), (first.in_features, 1))
    return weight, None if first.bias is None else first.bias.data.as_strided((rows,), (1,))
