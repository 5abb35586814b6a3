"""The cache that a module of transformers is given for its state alone: of a convolution, of a recurrence.

transformers' own layer of a cache does the work, on tensors that are ours: it writes in place, so that their addresses
stay. Keys and values pass through, because attention is kvcli's.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""What modules of transformers call their cache: `cache` from 5.24 on."""


def cache_argument(module: nn.Module) -> str:
    """Name the argument for its cache that a module which takes one has."""
    taken = signature(module.forward).parameters
    return next(name for name in CACHE_ARGUMENTS if name in taken)


class StateCache(Cache):
    """The state of module `number`, as it counts itself: `tensors` as `tensors()` gives them, [b, ...] each.

    Where none are given, the module makes them. They hold something where the sequence has `started`.
    """

    def __init__(
        self, number: int, tensors: Mapping[str, Tensor] | None = None, started: bool = False, states: int = 1
    ):
        self.state = LinearAttentionLayer(number_of_states=sum("conv" in name for name in tensors or ()) or states)
        super().__init__(layers=[self.state] * (number + 1))  # the module asks for its own
        for name, tensor in (tensors or {}).items():
            kind, at = name.split(".")
            getattr(self.state, f"{kind}_states")[int(at)] = tensor
            getattr(self.state, f"is_{kind}_states_initialized")[int(at)] = True
            self.state.device, self.state.dtype = tensor.device, tensor.dtype  # type: ignore[assignment]
            if kind == "conv":
                self.state.conv_kernel_size[int(at)] = tensor.shape[-1]
        self.started = started

    def tensors(self) -> dict[str, Tensor]:
        """What the module keeps: "conv.0" and "recurrent.0", as far as it has them, and the same of further states."""
        kinds = {"conv": self.state.conv_states, "recurrent": self.state.recurrent_states}
        return {
            f"{kind}.{number}": tensor
            for kind, held in kinds.items()
            for number, tensor in held.items()
            if tensor is not None
        }

    @property
    def started(self) -> bool:
        """Whether the tensors are those of a sequence's first tokens; zeros go before those."""
        return all(self.state.has_previous_state.values())

    @started.setter
    def started(self, started: bool) -> None:
        self.state.has_previous_state = dict.fromkeys(self.state.has_previous_state, started)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep no keys and values."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Count no tokens, as none are kept."""
        return 0

    # What MiniMax asks for, whose layers have a cache class of their own.

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:  # noqa: ARG002
        """Give the state of a layer, if it has one."""
        return self.state.recurrent_states[0] if self.started else None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Take the state of a layer."""
        self.update_recurrent_state(linear_cache, layer_idx)
