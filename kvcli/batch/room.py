"""Memory for rows in flight, by the arithmetic of `kvcli plan`: each row's own length, no padding."""

from __future__ import annotations

from collections.abc import Sequence

from kvcli.capacity import memory
from kvcli.capacity.memory import Need, PromptSize
from kvcli.capacity.workspace import Workspace
from kvcli.inputs.encoding import EncodedPrompt, in_common
from kvcli.inputs.profiles import Profile
from kvcli.memory.disk_tier import DiskTier
from kvcli.memory.tiers import Footprint
from kvcli.models.loading import Model


class Room:
    """What is free beside a loaded model, and what rows in flight take of it.

    `layers_beside` and `disk` are as in `memory.need`.
    """

    def __init__(self, profile: Profile, model: Model, layers_beside: int = 0, disk: DiskTier | None = None):
        self.profile, self.model, self.layers_beside, self.disk = profile, model, layers_beside, disk
        self.free = memory.available(model.place)
        self.taken = Footprint()
        self._needs: dict[tuple[PromptSize, int, int, int], Need] = {}

    def needed(self, prompts: Sequence[EncodedPrompt]) -> tuple[Footprint, Workspace]:
        """KV of prompts that are read together, each with its own sampling, and the workspace of reading them."""
        lengths, samplings = [len(prompt.ids) for prompt in prompts], [prompt.sampling for prompt in prompts]
        common = in_common(prompts) if len(prompts) > 1 else 0
        together = sum(lengths) - common * (len(prompts) - 1)
        tokens = [sampling.max_tokens if sampling else 0 for sampling in samplings]
        capacity = max(map(sum, zip(lengths, tokens, strict=True)))  # all get the room that the longest needs
        needs = [
            self._need(PromptSize(length, common if place else 0), capacity, sampling.num_samples, together)
            for place, (length, sampling) in enumerate(zip(lengths, samplings, strict=True))
            if sampling is not None
        ]
        most = max((need.prefill for need in needs), key=lambda prefill: prefill.on_device)
        return sum((need.kv for need in needs), Footprint()), most

    def holds(self, kv: Footprint, workspace: Workspace) -> bool:
        """Tell whether there is room for so much more."""
        return self._fits(self.taken + kv, workspace)

    def held_alone(self, kv: Footprint, workspace: Workspace) -> bool:
        """Tell whether there would be room with nothing else in flight."""
        return self._fits(kv, workspace)

    def take(self, kv: Footprint) -> None:
        """Note what rows take from now on."""
        self.taken += kv

    def give_back(self, kv: Footprint) -> None:
        """Note what they took no more."""
        self.taken += kv.times(-1)

    def _fits(self, kv: Footprint, workspace: Workspace) -> bool:
        return memory.fits(Need(0, kv, workspace).on(self.model.place), self.free)

    def _need(self, size: PromptSize, capacity: int, samples: int, together: int) -> Need:
        key = (size, capacity, samples, together)
        if key not in self._needs:
            model = self.model
            self._needs[key] = memory.need(
                *(self.profile, model.geometry, model.dtype, [size], capacity - size.tokens, samples),
                device=model.place,
                together=together,
                layers_beside=self.layers_beside,
                disk=self.disk,
            )
        return self._needs[key]
