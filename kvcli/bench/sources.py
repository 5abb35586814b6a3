"""What the caches hold when a run begins: KV that is made up, or a prompt that is really read.

How long a step takes depends on how many tokens are held, not on their values, with one exception: what is selected,
corrected and recalled follows the queries. Made-up KV spares a prefill that takes minutes on a CPU; tokens that are
read (a document, or seeded ones) make selections that are the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.inputs.profiles import Profile
from kvcli.kernels.softmax import Softmax
from kvcli.methods.base import AnyMethod
from kvcli.models.geometry import LayerGeometry
from kvcli.runtime.engine import Engine
from kvcli.telemetry.counters import Counters
from kvcli.telemetry.timeline import Timeline

# Queries of the prompt shown to methods that look at them; the last ones of a prompt are what they want.
_QUERIES = 64


@dataclass(frozen=True)
class Load:
    """What a run decodes: `batch` sequences after `context` tokens each, `steps` timed ones after `warmup` others."""

    context: int
    batch: int
    warmup: int
    steps: int

    @property
    def max_tokens(self) -> int:
        """Tokens of each sequence beside its context, the first one among them."""
        return 1 + self.warmup + self.steps

    @property
    def capacity(self) -> int:
        """Tokens of each sequence at the end."""
        return self.context + self.max_tokens


class ContextSource(Protocol):
    """Gives the methods of a run their context."""

    def methods(self, engine: Engine, profile: Profile, load: Load, timeline: Timeline) -> list[AnyMethod]:
        """Make one method object a sequence, its context read; their spans go to `timeline`."""


class RandomKV:
    """Seeded normal keys and values, the same ones in every layer and sequence; made when asked for."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype):
        self.seed, self.device, self.dtype = seed, device, dtype
        self._kept: tuple[tuple[int, ...], Tensor] | None = None

    def kv(self, layer: LayerGeometry, context: int) -> Tensor:
        """Keys and values [2, Hk, context, d] of a layer, not to be changed."""
        shape = (2, layer.num_kv_heads, context, layer.head_dim)
        if self._kept is None or self._kept[0] != shape:
            self._kept = None  # the old one is freed before the new one is made
            self._kept = (shape, self._normal(*shape))
        return self._kept[1]

    def queries(self, layer: LayerGeometry, rows: int) -> Tensor:
        """The last queries [H, rows, d] of the prompt."""
        return self._normal(layer.num_heads, rows, layer.head_dim)

    def _normal(self, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)


class RandomContext(ContextSource):
    """Hands noise to the methods, layer by layer, as a prefill would."""

    def __init__(self, noise: RandomKV):
        self.noise = noise

    @override
    def methods(self, engine: Engine, profile: Profile, load: Load, timeline: Timeline) -> list[AnyMethod]:
        made = []
        for row in range(load.batch):
            context = engine.context(load.context, load.max_tokens, timeline=timeline, track=f"sequence {row}")
            made.append(engine.method(profile, context))
        with torch.inference_mode():
            for layer in engine.layers:
                k, v = self.noise.kv(layer, load.context)
                for method in made:
                    q = self.noise.queries(layer, min(load.context, max(_QUERIES, method.query_rows)))
                    softmax = Softmax(layer.head_dim**-0.5)
                    method.observe(layer.index, q, k, softmax)
                    method.prefill(layer.index, k, v, q[:, q.shape[1] - method.query_rows :], softmax)
        return made


class ReadContext(ContextSource):
    """Reads a prompt once for all profiles and keeps the result; every run continues copies of it."""

    def __init__(self, ids: Sequence[int], profiles: Sequence[Profile]):
        self.ids, self.profiles = ids, profiles
        self._kept: dict[str, AnyMethod] = {}

    @override
    def methods(self, engine: Engine, profile: Profile, load: Load, timeline: Timeline) -> list[AnyMethod]:
        if not self._kept:
            contexts = [engine.context(len(self.ids), load.max_tokens) for _ in self.profiles]
            made = [engine.method(each, context) for each, context in zip(self.profiles, contexts, strict=True)]
            engine.prefill(self.ids, made)
            self._kept = {each.hash: method for each, method in zip(self.profiles, made, strict=True)}
        master = self._kept[profile.hash]
        copies = [master.fork(Counters(len(engine.layers)), f"sequence {row}") for row in range(load.batch)]
        for copy in copies:
            copy.context.timeline = timeline
        return copies


def seeded_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids that stand for a text."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()
