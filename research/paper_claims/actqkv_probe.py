"""ActQKV's probe against mean pooling: which ranks blocks more like the single tokens do (arXiv 2502.13542, app. D.1).

    oracle_j = max_i cos(q_i, c_j)      probe_j = cos(sum_i w_i q_i, c_j)      w_i = |phi_i|_1 / sum |phi|_1, or 1 / n

for the tokens i of a query (equations 15 to 17). The method itself reads each document and shows its un-rotated queries
and block keys, heads concatenated: of every window of the prompt that finds blocks, and of the question, whose probe is
compared with the blocks of the whole document. (The paper takes both from a text embedding model.) The paper calls its
figure Spearman's, but equation 18 is Pearson's correlation of the scores; both are reported, median and quartiles.

What the two probes can differ by is measured beside: how uneven the weights are (standard deviation by mean), the
cosine between probe and mean, and that of the single queries with their mean.
"""

import argparse
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from subject import Subject, percent, table
from torch import Tensor
from torch.nn.functional import normalize

from kvcli.inputs.profiles import resolve_profile
from kvcli.kernels.softmax import Softmax
from kvcli.kv.blocks import BlockCache
from kvcli.methods.actqkv import EPS, ActQKV, Moments, activation_probe, moments_of
from kvcli.methods.contract import SequenceContext

PROBES = ("activation", "mean")


@dataclass(frozen=True)
class Seen:
    """One query of several tokens: correlation of each probe with the oracle, and how much the probes differ."""

    spearman: dict[str, float]
    pearson: dict[str, float]
    weight_spread: float
    probe_to_mean: float
    tokens_to_mean: float


class WatchedActQKV(ActQKV):
    """ActQKV that correlates both probes with the oracle, window after window."""

    def __init__(self, config: Any, layers: Any, context: SequenceContext, least: int):
        super().__init__(config, layers, context)
        self.least = least
        self.asked: dict[int, Tensor] = {}  # layer -> un-rotated queries of the question [H, n, d]
        self.seen: list[tuple[str, int, Seen]] = []

    def take_preview(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> None:
        """Keep the question's queries, too."""
        super().take_preview(layer, q, k, v, softmax)
        self.asked[layer] = self.retrieval[layer].unrotate(q, 1)

    def window_scores(self, layer: int, cache: BlockCache, queries: Tensor) -> Tensor:
        """Compare the probes of a window before its scores are used."""
        scores = super().window_scores(layer, cache, queries)
        self._compare("window", layer, queries, self.moments[layer], cache.block_keys)
        return scores

    def compare_questions(self) -> None:
        """Do for the question, once the document is read, what was done for its windows."""
        for layer, queries in self.asked.items():
            moments = moments_of(queries.transpose(0, 1).flatten(1))
            self._compare("question", layer, queries, moments, self.retrieval[layer].block_keys)

    def _compare(self, what: str, layer: int, queries: Tensor, moments: Moments, block_keys: Tensor) -> None:
        if len(block_keys) < self.least:
            return
        tokens = queries.transpose(0, 1).flatten(1)  # [n, H * d]
        groups = queries.shape[0] // block_keys.shape[1]
        keys = normalize(block_keys.float().repeat_interleave(groups, 1).flatten(1), dim=1)  # [blocks, H * d]
        oracle = (normalize(tokens, dim=1) @ keys.T).amax(0)  # [blocks]
        mean = normalize(tokens.mean(0), dim=0)
        probe = normalize(activation_probe(tokens, moments), dim=0)
        scores = {"activation": keys @ probe, "mean": keys @ mean}
        bias = ((tokens - moments.mean).square() / (moments.variance + EPS)).sum(1)  # [n]
        seen = Seen(
            {name: correlation(ranks(some), ranks(oracle)) for name, some in scores.items()},
            {name: correlation(some, oracle) for name, some in scores.items()},
            float(bias.std() / bias.mean()),
            float(probe @ mean),
            float((normalize(tokens, dim=1) @ mean).mean()),
        )
        self.seen.append((what, layer, seen))


def ranks(scores: Tensor) -> Tensor:
    """Ranks of scores [n] without ties."""
    return scores.argsort().argsort().double()


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation of a and b [n]; of ranks it is Spearman's."""
    return float(torch.corrcoef(torch.stack((a, b)).double())[0, 1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what is compared."""
    parser.add_argument("--block", type=int, default=32, help="tokens of a block")
    parser.add_argument("--local", type=int, default=512, help="tokens of the local window")
    parser.add_argument("--least-blocks", type=int, default=16, help="fewest blocks whose ranking counts")


def run(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    profile = resolve_profile(method="actqkv", overrides={"page_size": args.block, "window": args.local})
    layers, found = subject.model.geometry.layers, defaultdict(list)
    for document in subject.documents(args.tasks, args.rows):
        method = WatchedActQKV(profile.settings, layers, subject.context(document), args.least_blocks)
        subject.engine.prefill(document.ids, [method])
        method.compare_questions()
        for what, layer, one in method.seen:
            for where in (str(layer), "all"):
                found[what, where].append(one)
    rows, differences = [], []
    for what, where in sorted(found, key=lambda key: (key[0], key[1] != "all", key[1])):
        seen = found[what, where]
        for probe in PROBES:
            low, median, high = statistics.quantiles([one.spearman[probe] for one in seen], n=4)
            rows.append(
                {
                    "query": what,
                    "layer": where,
                    "probe": probe,
                    "queries": len(seen),
                    "spearman": round(median, 3),
                    "lower quartile": round(low, 3),
                    "upper quartile": round(high, 3),
                    "pearson": round(statistics.median(one.pearson[probe] for one in seen), 3),
                    "better %": percent([one.spearman[probe] == max(one.spearman.values()) for one in seen]),
                }
            )
        differences.append(
            {"query": what, "layer": where}
            | {
                name.replace("_", " "): round(statistics.median(getattr(one, name) for one in seen), 4)
                for name in ("weight_spread", "probe_to_mean", "tokens_to_mean")
            }
        )
    table("actqkv-probe: correlation with the ranking of blocks by their best token (paper: 0.73 against 0.54)", rows)
    table("actqkv-probe: how much the two probes differ, medians", differences)
    whole = next(row for row in differences if row["query"] == "window" and row["layer"] == "all")
    note = (
        f"The two probes are nearly the same vector: over all windows and layers their median cosine is "
        f"{whole['probe to mean']}, that of a single query with the mean {whole['tokens to mean']}."
    )
    print(f"  note: {note}")
    settings, paper = profile.as_dict()["settings"], {"activation": 0.73, "mean": 0.54}
    return {"profile": settings, "paper": paper, "note": note, "rows": rows, "differences": differences}
