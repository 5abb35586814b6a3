"""Statistics of retrieval by blocks, kept as sums."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class BlockStats:
    """The retrievals of one layer in one phase that had to leave something out; blocks are the same for all heads.

    Summed over retrievals: `blocks` retrieved, of which `misses` were not on the device; `bytes_to_device`; `scores`,
    the mean score of the retrieved blocks; `entropies` of all scores in nats, where the method looks at them. `fewest`
    and `most` are blocks of a single retrieval.
    """

    retrievals: int = 0
    blocks: int = 0
    fewest: int | None = None
    most: int = 0
    misses: int = 0
    bytes_to_device: int = 0
    scores: float = 0.0
    entropies: float | None = None

    def add(self, blocks: int, misses: int, moved: int, score: float) -> None:
        """Add one retrieval."""
        self.retrievals += 1
        self.blocks += blocks
        self.fewest = blocks if self.fewest is None else min(self.fewest, blocks)
        self.most = max(self.most, blocks)
        self.misses += misses
        self.bytes_to_device += moved
        self.scores += score

    def add_entropy(self, entropy: float) -> None:
        """Add the entropy of one retrieval's scores."""
        self.entropies = entropy + (self.entropies or 0.0)

    def summary(self) -> dict[str, Any]:
        """Return plain data for the report, with means per retrieval; empty where nothing was retrieved."""
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
    """The statistics of one layer, of prefill and decode apart."""

    prefill: BlockStats = field(default_factory=BlockStats)
    decode: BlockStats = field(default_factory=BlockStats)


def total(layers: Iterable[BlockStats]) -> BlockStats:
    """Add up the statistics of layers."""
    used = [layer for layer in layers if layer.retrievals]
    entropies = [layer.entropies for layer in used if layer.entropies is not None]
    return BlockStats(
        retrievals=sum(layer.retrievals for layer in used),
        blocks=sum(layer.blocks for layer in used),
        fewest=min((layer.fewest for layer in used if layer.fewest is not None), default=None),
        most=max((layer.most for layer in used), default=0),
        misses=sum(layer.misses for layer in used),
        bytes_to_device=sum(layer.bytes_to_device for layer in used),
        scores=sum(layer.scores for layer in used),
        entropies=sum(entropies) if entropies else None,
    )


def summarise(layers: Mapping[int, PhaseStats]) -> dict[str, Any]:
    """Return plain data for the report: what was retrieved in prefill and in decode, in all and by layer.

    Means of decode come first: blocks a layer and step, the score of these blocks, the entropy of all scores.
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
