"""What the method object of a sequence is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import Tiers
from kvcli.kv.parking import Parking
from kvcli.memory.tiers import Footprint
from kvcli.models.devices import Placement
from kvcli.models.geometry import StateGeometry
from kvcli.telemetry.counters import Counters
from kvcli.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from kvcli.methods.base import AnyMethod
    from kvcli.models.rope import Rotary


class AttentionObserver(Protocol):
    """What watches a method attend."""

    def __call__(self, method: AnyMethod, layer: int, q: Tensor, out: Tensor, softmax: Softmax) -> None:
        """See what a layer's query q [H, d] got from attention, out [H, d]; not to be changed, nor kept."""


@dataclass
class SequenceContext:
    """What a method object is given: room for `capacity` tokens, memory tiers, counters, spans, and RoPE.

    Where layers lie on several devices, `tiers` are those of the layer whose cache is being made, else the first one's.
    """

    stateless: ClassVar[bool] = True
    capacity: int
    tiers: Tiers
    counters: Counters
    timeline: Timeline
    rotary: Sequence[Rotary | None]
    track: str = "sequence 0"
    question: Sequence[int] = ()  # token ids of the one after the document, where the prompt has one
    prompt_tokens: int | None = None  # of `capacity`, where that is known: the others are generated
    document_tokens: int | None = None  # of these, those before the question, once the prompt is there; None: all
    prepared: Mapping[str, Any] | None = None
    """What `Method.needs` asked for, by name; None while memory is planned and nothing is known of the model."""
    states: Sequence[StateGeometry] = ()  # the layers that keep one
    placement: Placement | None = None  # of the layers, where they lie on several devices
    parking: Parking | None = None  # where what layers hold on the device waits while a long prompt is read
    attention_observer: AttentionObserver | None = None  # called after every `Method.attend`
    prefill_statistics: Mapping[str, Any] | None = None  # what a prefill that was not exact left out

    @classmethod
    def of(
        cls,
        num_layers: int,
        device: torch.device,
        dtype: torch.dtype,
        capacity: int,
        rotary: Sequence[Rotary | None] | None = None,
        timeline: Timeline | None = None,
        **known: Any,
    ) -> SequenceContext:
        """Make the context of a sequence of `capacity` tokens; `known` are further fields.

        On the meta device nothing is allocated: that is how memory is planned.
        """
        return cls(
            capacity=capacity,
            tiers=Tiers.for_device(device, dtype),
            counters=Counters(num_layers),
            timeline=timeline or Timeline(),
            rotary=rotary or [None] * num_layers,
            **known,
        )

    def device(self, layer: int) -> torch.device:
        """Say where a layer lies, by its number among those that attend."""
        return self.tiers.device if self.placement is None else self.placement.attending[layer]

    @property
    def keeping(self) -> Sequence[torch.device]:
        """Where the layers lie that keep a state."""
        return [self.tiers.device] * len(self.states) if self.placement is None else self.placement.keeping

    def placed(self, held: Footprint, device: torch.device) -> Footprint:
        """Say on which device that is what is held, where there are several."""
        if self.placement is None:
            return held
        devices = self.placement.devices
        return held.on(devices.index(device), len(devices))
