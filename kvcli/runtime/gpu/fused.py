"""What lies between the attention of two layers, in fewer kernels: a model's own code launches some 37 a layer for it.

Queries, keys and values are one product, and so are gate and up; norms, rotation and the gate are a kernel each. It is
found by what modules do, not by their names: each is tried out and stays as it is where the outcome differs.
Projections that were made one keep their weights side by side from then on, each a view of its part: nothing is on the
device twice, but for one layer's while it is put together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from kvcli.kernels.rebuild_keys import Rotation
from kvcli.kernels.rms_norm import rms_norm, rms_norm_ref
from kvcli.kernels.rotate import rotate
from kvcli.kernels.silu_mul import silu_mul
from kvcli.models.quantising import is_plain

Turn = Callable[..., tuple[Tensor, Tensor]]


@contextmanager
def fused_layers(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the layers of a model run as few kernels; what they compute is the same within rounding."""
    with ExitStack() as left:
        for module in model.modules():
            _fuse(module, left)
        for name in {type(module).__module__ for module in model.modules()}:
            turn = getattr(sys.modules[name], "apply_rotary_pos_emb", None)
            if turn is not None:
                left.enter_context(_replaced(sys.modules[name], "apply_rotary_pos_emb", Turning(turn)))
        yield


def _fuse(module: nn.Module, left: ExitStack) -> None:
    norm = _norm_of(module)
    if norm is not None:
        left.enter_context(_replaced(module, "forward", norm))
    together: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    if _alike(together):
        first, *others = together
        product = OneProduct(together)
        left.enter_context(_replaced(first, "forward", product))
        for index, other in enumerate(others, 1):
            left.enter_context(_replaced(other, "forward", product.part(index, other)))
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if _alike([gate, up]) and isinstance(down, nn.Linear) and _gates(module, gate, up, down):  # type: ignore[arg-type]
        side_by_side([gate, up])  # type: ignore[list-item]
        whole = _whole([gate, up])  # type: ignore[list-item]

        def forward(x: Tensor) -> Tensor:
            out: Tensor = down(silu_mul(functional.linear(x, *whole)))
            return out

        left.enter_context(_replaced(module, "forward", forward))


class OneProduct:
    """The forward of the first of several linear layers with the same input: it makes the products of all of them."""

    def __init__(self, linears: Sequence[Any]):
        side_by_side(linears)
        self.whole, self.sizes = _whole(linears), [len(linear.weight) for linear in linears]
        self.x: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply, and keep what the other layers will be asked for."""
        self.x, self.parts = x, torch.split(functional.linear(x, *self.whole), self.sizes, -1)
        return self.parts[0]

    def part(self, index: int, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        """Make the forward of another of them; asked for a product of something else, it multiplies itself."""

        def forward(x: Tensor) -> Tensor:
            if x is not self.x:
                return functional.linear(x, linear.weight, linear.bias)
            found = self.parts[index]
            if index == len(self.parts) - 1:
                self.x, self.parts = None, ()
            return found

        return forward


class Turning:
    """A model's function that rotates queries and keys, by one kernel where its rule is one of pairs of channels."""

    def __init__(self, turn: Turn):
        self.turn = turn
        self.channels: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor, Tensor] | None] = {}

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Rotate q [b, H, n, d] and k [b, Hk, n, d] by cos and sin [b, n, w]."""
        key = q.shape[-1], cos.shape[-1], q.device
        # Who turns single tensors wants them to stay as they are.
        if args or kwargs or cos.dim() != 3 or cos.shape[:2] != (len(q), q.shape[2]) or k.shape[1] == 0:
            return self.turn(q, k, cos, sin, *args, **kwargs)
        if key not in self.channels:
            self.channels[key] = self._channels(*key)
        channels = self.channels[key]
        if channels is None:
            return self.turn(q, k, cos, sin)
        rotate(q, k, Rotation(cos, sin, *channels))
        return q, k

    def _channels(self, d: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
        tables = torch.ones(1, width, device=device), torch.zeros(1, width, device=device)
        try:
            found = Rotation.of(*tables, lambda x, cos, sin: self.turn(x, x[:, :0], cos, sin)[0], d, d)
        except (ValueError, RuntimeError):
            return None
        return found.partner, found.column, found.sign


def _norm_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Find the kernel that does what a module does, if it normalises rows by their root mean square."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float) or list(module.children()):
        return None
    x = torch.linspace(-2.0, 3.0, 2 * len(weight), device=weight.device, dtype=weight.dtype).view(2, -1)
    try:
        wanted = module(x).float()
    except (RuntimeError, TypeError, ValueError):
        return None
    tolerance = 1e-4 if x.dtype == torch.float32 else 3e-2
    for shift in (0.0, 1.0):
        found = rms_norm_ref(x, weight, eps, shift).float()
        if found.shape == wanted.shape and bool(((found - wanted).norm() <= tolerance * wanted.norm()).item()):
            return lambda x, shift=shift: rms_norm(x, weight, eps, shift)  # type: ignore[misc]
    return None


def _gates(mlp: nn.Module, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> bool:
    """Tell whether an MLP is down(silu(gate) * up)."""
    x = torch.linspace(-1.0, 1.0, gate.in_features, device=gate.weight.device, dtype=gate.weight.dtype)[None]
    try:
        wanted = mlp(x)
    except (RuntimeError, TypeError, ValueError):
        return False
    found = down(functional.silu(gate(x)) * up(x))
    return isinstance(wanted, Tensor) and torch.equal(found, wanted)


def _alike(linears: Sequence[Any]) -> bool:
    """Tell whether these are plain linear layers that can be one."""
    if any(not is_plain(linear) or "forward" in vars(linear) for linear in linears):
        return False
    first = linears[0]
    return all(
        (x.weight.dtype, x.in_features, x.bias is None) == (first.weight.dtype, first.in_features, first.bias is None)
        for x in linears
    )


@torch.no_grad()
def side_by_side(linears: Sequence[nn.Linear]) -> None:
    """Put the weights of linear layers one behind the other in memory, where they are not; each becomes a view."""
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
    """Give weight and bias of layers that lie side by side as those of one."""
    first, rows = linears[0], sum(x.out_features for x in linears)
    weight = first.weight.data.as_strided((rows, first.in_features), (first.in_features, 1))
    return weight, None if first.bias is None else first.bias.data.as_strided((rows,), (1,))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put a value in the place of an attribute; what was there before comes back."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
