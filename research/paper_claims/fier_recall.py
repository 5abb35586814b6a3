"""FIER's tokens against Quest's pages where both read the same part of the keys (arXiv 2508.08256, figure 6).

Every decode step of full attention shows its query and keys. The `top` tokens that it attends to most are looked for
among those that a method selects within a budget; all full groups of tokens are candidates, none is given. Weights are
pooled over the query heads of a KV head by their maximum, for the truth as for both methods.

Beside the methods: pages ranked by their best token, which no bound can better; and tokens by exact scores,
which say how much attention there is to find. `attention` is the share of the weights of all candidates that was
selected. (The demo model was trained so that the bounds of pages of 32 agree with its attention: pages have the
advantage here.)
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from subject import Subject, percent, table
from torch import Tensor

from kvcli.kernels.group_pooling import pool_scores
from kvcli.kernels.page_scores import page_scores, page_summary
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import DenseCache
from kvcli.kv.pages import paged
from kvcli.methods.fier.kernels import one_bit_scores, quantise_keys
from kvcli.methods.full import Full

FIRST_LAYER = 1  # the layers before it are dense in both methods
POOLING = "max_s"

See = Callable[[int, Tensor, Tensor, Softmax], None]


class WatchedFull(Full):
    """Full attention that shows the query [H, d] and the keys [Hk, n, d] of every decode step."""

    see: See

    def retrieve(self, layer: int, cache: DenseCache, q: Tensor, softmax: Softmax) -> Tensor:
        """See `Method.retrieve`."""
        self.see(layer, q, cache.k[:, : cache.length], softmax)
        return super().retrieve(layer, cache, q, softmax)


@dataclass
class Recalls:
    """What each way to select found, step after step and layer by layer."""

    group: int
    pages: list[int]
    top: int
    budgets: list[int]
    found: dict[tuple[str, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    attention: dict[tuple[str, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    candidates: list[int] = field(default_factory=list)

    def see(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Measure one layer of one decode step."""
        if layer < FIRST_LAYER:
            return
        block = max(self.group, *self.pages)
        k = k[:, : k.shape[1] // block * block]
        heads = q.view(k.shape[0], -1, q.shape[-1])  # [Hk, G, d]
        logits = softmax.scale * heads @ k.transpose(1, 2)  # [Hk, G, n]
        exact, weights = pool_scores(logits, POOLING), logits.softmax(-1)
        truth = exact.topk(self.top).indices  # [Hk, top]
        for name, rank in self._ranks(q, heads, k, exact, softmax.scale).items():
            of_truth = rank.gather(1, truth)
            for budget in self.budgets:
                key = (name, layer, budget)
                self.found[key].append(float((of_truth < budget).float().mean()))
                self.attention[key].append(float((weights * (rank < budget)[:, None]).sum(-1).mean()))
        self.candidates.append(k.shape[1])

    def _ranks(self, q: Tensor, heads: Tensor, k: Tensor, exact: Tensor, scale: float) -> dict[str, Tensor]:
        """Place of each token [Hk, n] in the order of selection; all tokens of a page stand together."""
        one_bit = scale * one_bit_scores(heads, *quantise_keys(paged(k, self.group)))
        ranks = {"exact tokens": _rank(exact), f"fier g={self.group}": _rank(pool_scores(one_bit, POOLING))}
        for size in self.pages:
            for name, scores in (
                (f"quest L={size}", page_scores(q, page_summary(paged(k, size)), scale, POOLING)),
                (f"best pages L={size}", exact.unflatten(1, (-1, size)).amax(-1)),
            ):
                ranks[name] = (_rank(scores)[..., None] * size + torch.arange(size)).flatten(1)
        return ranks


def _rank(scores: Tensor) -> Tensor:
    """Place of each entry of a row in descending order, of equals the lower first: [Hk, n] -> [Hk, n]."""
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what is compared."""
    parser.add_argument("--top", type=int, default=64, help="most attended tokens that are looked for")
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512, 1024], help="tokens selected")
    parser.add_argument("--group", type=int, default=32, help="tokens quantised together by FIER")
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 32], help="page sizes of Quest")


def run(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    recalls = Recalls(args.group, args.pages, args.top, args.budgets)
    answered = []
    for document in subject.documents(args.tasks, args.rows):
        method = WatchedFull(Full.Config(), subject.model.geometry.layers, subject.context(document))
        method.see = recalls.see
        answered.append(subject.answer(document, method, subject.read(document, [method])))
    loads = {f"fier g={args.group}": (1 + 32 / args.group) / 16} | {f"quest L={page}": 2 / page for page in args.pages}
    names = list(dict.fromkeys(name for name, _, _ in recalls.found))
    layers = sorted({layer for _, layer, _ in recalls.found})
    candidates = statistics.mean(recalls.candidates)
    rows = [
        {
            "method": name,
            "key load": loads.get(name),
            "budget": budget,
            "recall %": percent([x for layer in layers for x in recalls.found[name, layer, budget]]),
            **{f"layer {layer}": percent(recalls.found[name, layer, budget]) for layer in layers},
            "attention %": percent([x for layer in layers for x in recalls.attention[name, layer, budget]]),
        }
        for budget in args.budgets
        for name in names
    ]
    table(
        f"fier-recall: recall of the {args.top} most attended of {candidates:.0f} tokens, {len(recalls.candidates)} "
        f"steps x layers, full attention answers {percent(answered):.0f} %",
        rows,
    )
    return {
        "candidates": candidates,
        "observations": len(recalls.candidates),
        "accuracy": percent(answered),
        "rows": rows,
    }
