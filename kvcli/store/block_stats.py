"""What retrieval by blocks did, as sums that are cheap to keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class BlockStats:
    """Retrievals of one phase; only those where something had to be left out.

    A block is one for all heads. `scores` sums, over retrievals, the mean score of the retrieved blocks; `entropies`
    the entropy of all scores in nats, where the method looks at it.
    """

    retrievals: int = 0
    blocks: int = 0
    fewest: int | None = None
    most: int = 0
    misses: int = 0
    bytes_to_device: int = 0
    scores: float = 0.0
    entropies: float | None = None

    def note(self, blocks: int, misses: int, moved: int, score: float) -> None:
        """Add one retrieval."""
        self.retrievals += 1
        self.blocks += blocks
        self.fewest = blocks if self.fewest is None else min(self.fewest, blocks)
        self.most = max(self.most, blocks)
        self.misses += misses
        self.bytes_to_device += moved
        self.scores += score

    def note_entropy(self, entropy: float) -> None:
        """Add the entropy of one retrieval's scores."""
        self.entropies = entropy + (self.entropies or 0.0)

    def summary(self) -> dict[str, Any]:
        """Plain data for the report; means are per retrieval. Nothing where nothing was retrieved."""
        if not self.retrievals:
            return {}
        summary = {
            "retrievals": self.retrievals,
            "blocks_requested": self.blocks,
            "blocks_missed": self.misses,
            "bytes_to_device": self.bytes_to_device,
            "blocks_mean": self.blocks / self.retrievals,
            "blocks_min": self.fewest,
            "blocks_max": self.most,
            "score_mean": self.scores / self.retrievals,
        }
        return summary if self.entropies is None else summary | {"entropy_mean": self.entropies / self.retrievals}


@dataclass
class PhaseStats:
    """Prefill and decode of one layer, counted apart."""

    prefill: BlockStats = field(default_factory=BlockStats)
    decode: BlockStats = field(default_factory=BlockStats)


def total(usages: Iterable[BlockStats]) -> BlockStats:
    """Add up the layers."""
    used = [usage for usage in usages if usage.retrievals]
    entropies = [usage.entropies for usage in used if usage.entropies is not None]
    return BlockStats(
        retrievals=sum(usage.retrievals for usage in used),
        blocks=sum(usage.blocks for usage in used),
        fewest=min((usage.fewest for usage in used if usage.fewest is not None), default=None),
        most=max((usage.most for usage in used), default=0),
        misses=sum(usage.misses for usage in used),
        bytes_to_device=sum(usage.bytes_to_device for usage in used),
        scores=sum(usage.scores for usage in used),
        entropies=sum(entropies) if entropies else None,
    )


def summarise(layers: Mapping[int, PhaseStats]) -> dict[str, Any]:
    """Plain data for the report: what was retrieved in prefill and in decode, in all and by layer.

    Means of decode stand in front: blocks a layer and step, score of these blocks, entropy of all scores.
    """
    prefill, decode = (
        total(getattr(phases, phase) for phases in layers.values()).summary() for phase in ("prefill", "decode")
    )
    shown = {"blocks_mean": "blocks_per_layer", "score_mean": "block_score", "entropy_mean": "score_entropy"}
    by_layer = [
        {"layer": layer, "prefill": phases.prefill.summary(), "decode": phases.decode.summary()}
        for layer, phases in layers.items()
    ]
    return {
        **{name: decode[key] for key, name in shown.items() if key in decode},
        "prefill": prefill,
        "decode": decode,
        "layers": by_layer,
    }
