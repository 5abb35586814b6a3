"""Run the work between the attention of two layers in fewer kernels: a model's own code launches some 37 per layer.

Queries, keys and values are one product, and so are gate and up; norms, rotation and the gate are a kernel each.
Modules are recognised by what they compute, not by their names: each is tried out and left alone if the outcome
differs. The kernels are those of a GPU (`kvcli.runtime.gpu.fused`), or loops of a CPU (`kvcli.runtime.cpu_layers`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import Parameter, signature
from itertools import permutations
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from kvcli.kernels.norm_rope import Rotation, rms_norm_ref
from kvcli.models.weights import is_plain

Turn = Callable[..., tuple[Tensor, Tensor]]


class Kernels(Protocol):
    """The kernels that run the layers of a model."""

    def serve(self, x: Tensor) -> bool:
        """Tell whether these kernels are for such rows; other rows go through the model's own code."""

    def knows(self, linear: object) -> bool:
        """Tell whether a module is a linear layer that these kernels multiply by."""
        return is_plain(linear)

    def alone(self, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        """Make the function that multiplies by a single linear layer."""

    def together(self, linears: Sequence[nn.Linear]) -> Callable[[Tensor], Sequence[Tensor]]:
        """Make the function that multiplies the same rows by all of these layers."""

    def gated(self, gate: nn.Linear, up: nn.Linear) -> Callable[[Tensor], Tensor]:
        """Make the function silu(gate(x)) * up(x)."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
        """Normalise rows, see `kvcli.kernels.norm_rope`."""

    def rotate(self, q: Tensor, k: Tensor, rotation: Rotation) -> None:
        """Rotate queries and keys in place, see `kvcli.kernels.norm_rope`."""


@contextmanager
def fused_by(kernels: Kernels, model: PreTrainedModel) -> Iterator[None]:
    """Run the layers of a model by these kernels within this context; results are the same within rounding."""
    with ExitStack() as left:
        for module in model.modules():
            _fuse(module, kernels, left)
        for name in {type(module).__module__ for module in model.modules()}:
            turn = getattr(sys.modules[name], "apply_rotary_pos_emb", None)
            if turn is not None and "k" in signature(turn).parameters:  # not where it rotates one tensor at a time
                left.enter_context(replaced(sys.modules[name], "apply_rotary_pos_emb", Turning(turn, kernels)))
        yield


def _fuse(module: nn.Module, kernels: Kernels, left: ExitStack) -> None:
    norm = norm_of(module)
    if norm is not None:
        left.enter_context(replaced(module, "forward", _normalised(kernels, norm, module.forward)))
    if projections := projections_of(module, kernels.knows):
        first, *others = projections
        product = OneProduct(projections, kernels)
        left.enter_context(replaced(first, "forward", product))
        for index, other in enumerate(others, 1):
            left.enter_context(replaced(other, "forward", product.part(index, other)))
    parts = gated_of(module, kernels.knows)
    if parts is not None:
        gate, up, down = parts
        gated, before = kernels.gated(gate, up), module.forward

        def forward(x: Tensor) -> Tensor:
            out: Tensor = down(gated(x)) if kernels.serve(x) else before(x)
            return out

        left.enter_context(replaced(module, "forward", forward))


def projections_of(module: nn.Module, knows: Callable[[object], bool] = is_plain) -> list[nn.Linear]:
    """Find the linear layers for queries, keys and values of a module that can be one product; empty if they cannot."""
    together: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    return together if _alike(together, knows) else []


class OneProduct:
    """The forward of the first of several linear layers with the same input: computes the products of all."""

    def __init__(self, linears: Sequence[Any], kernels: Kernels):
        self.kernels, self.products, self.first = kernels, kernels.together(linears), kernels.alone(linears[0])
        self.x: Tensor | None = None
        self.parts: Sequence[Tensor] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply, and keep the products for the other layers."""
        if not self.kernels.serve(x):
            return self.first(x)
        self.x, self.parts = x, self.products(x)
        return self.parts[0]

    def part(self, index: int, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        """Make the forward of another of the layers; for any other input it multiplies itself."""

        alone = self.kernels.alone(linear)

        def forward(x: Tensor) -> Tensor:
            if x is not self.x:
                return alone(x)
            found = self.parts[index]
            if index == len(self.parts) - 1:
                self.x, self.parts = None, ()
            return found

        return forward


class Turning:
    """A model's function that rotates queries and keys, run as one kernel if it rotates pairs of channels."""

    def __init__(self, turn: Turn, kernels: Kernels):
        self.turn, self.kernels = turn, kernels
        self.channels: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor, Tensor] | None] = {}

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Rotate q [b, H, n, d] and k [b, Hk, n, d] by cos and sin [b, n, w]."""
        key = q.shape[-1], cos.shape[-1], q.device
        # Callers that rotate a single tensor expect their input unchanged.
        plain = not args and not kwargs and cos.dim() == 3 and cos.shape[:2] == (len(q), q.shape[2]) and k.shape[1] > 0
        if not plain or not self.kernels.serve(q):
            return self.turn(q, k, cos, sin, *args, **kwargs)
        channels = self.tables(*key)
        if channels is None:
            return self.turn(q, k, cos, sin)
        self.kernels.rotate(q, k, Rotation(cos, sin, *channels))
        return q, k

    def tables(self, d: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return partner, column and sign of each channel, see `Rotation`; None if it does not rotate pairs."""
        if (key := (d, width, device)) not in self.channels:
            self.channels[key] = self._channels(*key)
        return self.channels[key]

    def _channels(self, d: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
        tables = torch.ones(1, width, device=device), torch.zeros(1, width, device=device)
        try:
            found = Rotation.of(*tables, lambda x, cos, sin: self.turn(x, x[:, :0], cos, sin)[0], d, d)
        except (ValueError, RuntimeError):
            return None
        return found.partner, found.column, found.sign


class Norm(NamedTuple):
    """A module that normalises rows by their root mean square, see `kvcli.kernels.norm_rope`."""

    weight: Tensor
    eps: float
    shift: float


def norm_of(module: nn.Module) -> Norm | None:
    """Return the norm that a module computes, or None."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float) or list(module.children()):
        return None
    x = torch.linspace(-2.0, 3.0, 2 * len(weight), device=weight.device, dtype=weight.dtype).view(2, -1)
    try:
        wanted = module(x).float()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    tolerance = 1e-4 if x.dtype == torch.float32 else 3e-2
    for shift in (0.0, 1.0):
        found = rms_norm_ref(x, weight, eps, shift).float()
        if found.shape == wanted.shape and bool(((found - wanted).norm() <= tolerance * wanted.norm()).item()):
            return Norm(weight, eps, shift)
    return None


def _normalised(kernels: Kernels, norm: Norm, before: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(x: Tensor, *gate: Any, **named: Any) -> Tensor:  # some norms take a gate, too
        plain = not gate and not named and kernels.serve(x)
        return kernels.norm(x, *norm) if plain else before(x, *gate, **named)

    return forward


def gated_of(
    module: nn.Module, knows: Callable[[object], bool] = is_plain
) -> tuple[nn.Linear, nn.Linear, nn.Linear] | None:
    """Return gate, up and down of an MLP that is down(silu(gate) * up), or None."""
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    both = _alike([gate, up], knows)
    if both and isinstance(down, nn.Linear) and _gates(module, gate, up, down):  # type: ignore[arg-type]
        return gate, up, down  # type: ignore[return-value]
    return None


def _gates(mlp: nn.Module, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> bool:
    """Tell whether an MLP is down(silu(gate) * up), by trying it on numbers without multiplying by a weight."""
    x = torch.linspace(-1.0, 1.0, 64, device=gate.weight.device, dtype=gate.weight.dtype)[None]
    with ExitStack() as stack:
        for linear, product in ((gate, lambda x: 3 * x - 1), (up, lambda x: 2 - x), (down, lambda x: -x)):
            stack.enter_context(replaced(linear, "forward", product))
        try:
            wanted = mlp(x)
        except (RuntimeError, TypeError, ValueError):
            return False
    return isinstance(wanted, Tensor) and torch.equal(-(functional.silu(3 * x - 1) * (2 - x)), wanted)


class Parts(NamedTuple):
    """The modules of a decoder layer, in the order in which they run."""

    before_attention: nn.Module
    attention: nn.Module
    before_mlp: nn.Module
    mlp: nn.Module


def parts_of(layer: nn.Module, knows: Callable[[object], bool] = is_plain) -> Parts | None:
    """Return the parts of a layer that is h = x + attention(norm(x)), then h + mlp(norm(h)), with a gated MLP."""
    children = list(layer.children())
    norms = [child for child in children if norm_of(child) is not None]
    mlps = [child for child in children if gated_of(child, knows) is not None]
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


def _alike(linears: Sequence[Any], knows: Callable[[object], bool]) -> bool:
    """Tell whether these are linear layers that can be combined."""
    if any(not knows(linear) or "forward" in vars(linear) for linear in linears):
        return False
    first = linears[0]
    return all(
        (x.weight.dtype, x.in_features, x.bias is None) == (first.weight.dtype, first.in_features, first.bias is None)
        for x in linears
    )


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace the value of an attribute within this context."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
