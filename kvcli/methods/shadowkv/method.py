"""ShadowKV: low-rank keys on the device, values in host memory (arXiv 2410.21465, sections 3 and 4).

Keys without their rotation have low rank within a sequence; values do not. So the prompt's keys are factorised, K ~ A B
with the heads concatenated, and only values leave the device. A step scores the mean key of every chunk (its landmark),
fetches the values of the best chunks, rebuilds their keys and rotates them to their original positions, and attends to

    [ outliers | selected | local | generated ]

Outliers are the chunks whose keys fit their landmark worst. Outliers, the last chunks of the prompt and generated
tokens stay exact on the device. Chunks that the previous step selected are hits: neither fetched nor rebuilt. With
`plus` (ShadowKV+, appendix A.1) generated tokens are treated like the prompt's: the local window moves on, and a chunk
that leaves it is projected by the same factor, gets a landmark and goes to the host.

Decided where the paper is silent:
- `budget` counts selected tokens, as in the paper; outliers, local and generated tokens are attended in addition.
- As long as the prompt fits into budget, outliers and local tokens together, everything stays exact and is attended to,
  so that an ample budget is full attention. Nothing is factorised then, and without `plus` nothing ever has to be:
  generated tokens stay. With `plus` the context is divided as soon as it outgrows that room.
- The local window is the last `local` full chunks and the tokens after them (the reference code keeps as much).
- `svd_refresh` is the variant that FreeKV compared with (arXiv 2505.13109, appendix A): every so many generated tokens
  a new factor is made of all exact keys seen, and the stored tokens are converted to it (`LowRankKeys.refresh`).
- The factorisation is by the Gram matrix, as good as an SVD in fp32 and faster; `kvcli.kernels.key_bases` has numbers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import model_validator
from typing_extensions import override

from kvcli.methods.config import CountOrShare, HostKVConfig, setting
from kvcli.methods.contract import Method
from kvcli.methods.shadowkv.cache import ShadowCache, ShadowLayout, summarise
from kvcli.methods.shadowkv.step import LandmarkScores, RebuiltKeys
from kvcli.methods.step import FromHost, StepPlan
from kvcli.models.geometry import LayerGeometry


class ShadowKVConfig(HostKVConfig):
    """Settings of ShadowKV; defaults: section 5.1, RULER at 128K included, and appendix B.1."""

    budget: CountOrShare = setting(
        2048, "tokens selected per layer and KV head, outliers and local ones aside", "tokens", ge=1
    )
    chunk: int = setting(8, "consecutive tokens selected together", "tokens", ge=1)
    rank: int = setting(160, "rank of the keys of a layer, all heads together", "", ge=1)
    outliers: int = setting(48, "chunks per KV head that are kept exact on the device", "chunks", ge=0)
    local: int = setting(4, "last chunks that are kept exact on the device", "chunks", ge=1)
    dense_layers: int = setting(0, "leading layers that attend to everything", "layers", ge=0)
    plus: bool = setting(False, "store generated tokens like the prompt's (ShadowKV+)")
    fp8: bool = setting(False, "round keys and values to float8_e5m2 as they come (tables 12 and 13)")
    svd_refresh: int = setting(0, "factorise again after so many generated tokens, with plus; 0: never", "tokens", ge=0)

    @property
    @override
    def leading_dense_layers(self) -> int:
        return self.dense_layers

    @property
    @override
    def stays_in_place(self) -> bool:
        return not self.svd_refresh  # a refresh factorises anew; the cache knows whether the context gets divided

    @override
    def beside_budget(self, prompt: int, generated: int) -> int:
        """Count the tokens of outliers, local chunks and the partly filled one, and without `plus` generated ones."""
        return (self.outliers + self.local + 1) * self.chunk - 1 + (0 if self.plus else generated)

    @property
    def layout(self) -> ShadowLayout:
        """The sizes in chunks."""
        refresh = self.svd_refresh or None
        selected = self.budget // self.chunk
        return ShadowLayout(self.chunk, self.outliers, selected, self.local, self.rank, self.plus, refresh, self.fp8)

    @model_validator(mode="after")
    def _makes_sense(self) -> ShadowKVConfig:
        if self.budget < self.chunk:
            raise ValueError(f"budget {self.budget} holds no chunk of {self.chunk}: it must be at least {self.chunk}")
        if self.svd_refresh and not self.plus:
            raise ValueError(f"svd_refresh {self.svd_refresh} needs plus = true: else generated keys stay exact")
        return self


class ShadowKV(Method[ShadowKVConfig, ShadowCache]):
    """Selects chunks by their mean key; only values cross the bus."""

    Config = ShadowKVConfig
    title = "chunks scored by their mean key; low-rank keys rebuilt, values fetched"
    paper = "arXiv 2410.21465"
    long_generation = False
    offloads = True
    group_consistent = True
    device_memory = "O(B + L·r/w + L/p + g)"
    no_latents = "it keeps low-rank keys apart from values, and a latent is both"
    ablation: ClassVar[dict[str, dict[str, Any]]] = {
        "without outliers": {"outliers": 0},
        "half the rank": {"rank": 80},
        "twice the rank": {"rank": 320},  # figure 9
        "fp8": {"fp8": True},
    }
    true_kv: ClassVar[dict[str, Any] | None] = {"rank": 1 << 20, "fp8": False}

    def new_cache(self, layer: LayerGeometry) -> ShadowCache:
        """Make a cache with values in host memory and low-rank keys, landmarks and exact chunks on the device."""
        context, config = self.context, self.config
        rotary, tiers = context.rotary[layer.index], config.tiers(context.tiers)
        return ShadowCache(layer, context.capacity, context.prompt_tokens, config.layout, rotary, tiers)

    @property
    @override
    def step_plan(self) -> StepPlan:
        fetch = FromHost(rebuild=RebuiltKeys, writes=self.config.plus)
        return StepPlan(LandmarkScores(), fetch=fetch, rounds=self.config.layout.rounded if self.config.fp8 else None)

    def statistics(self) -> dict[str, Any]:
        """Return the accuracy of the stored keys and the memory saved; empty where nothing was factorised."""
        return summarise(self.retrieval, self.context.counters.cache())
