"""Why ActQKV and InfLLM miss needles on the demo model: which part of their choice of blocks loses the needle's block.

Every document, with the answer up to its value, is read exactly, so that no earlier mistake spoils a query. For the
query of the last token, the one that fetches the value, the blocks of the document are ranked in each layer, by the
published rule and by rules that repair one part of it each:

    tokens   which tokens make the block's key: the `representatives` that got most attention while they were local
             (published), all of them (their mean), or each for itself (the block scores as its best token)
    heads    all heads concatenated (published), or the one KV head that ranks the needle's block best

A rule finds the needle where its block is among the `best_blocks` best. Beside it, by layer: the attention that
the last token really pays to the needle's block, and how often the needle's token is one of the block's
representatives.
"""

import argparse
import statistics
from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from subject import Document, Subject, percent, table
from torch import Tensor
from torch.nn.functional import normalize

from kvcli.kernels.prefill_attention import last_rows
from kvcli.kernels.softmax import Softmax

TOKENS, HEADS = ("representatives", "mean of all", "best token"), ("together", "best head")


class Watch:
    """Takes a prompt's KV and ranks its blocks, layer by layer."""

    def __init__(self, rotary: Any, needle: int, args: argparse.Namespace):
        self.rotary, self.needle, self.args = rotary, needle, args
        self.found: dict[tuple[int, str, str], bool] = {}
        self.mass: dict[int, float] = {}
        self.represented: dict[int, bool] = {}

    @property
    def query_rows(self) -> int:
        """All of the prompt's queries: representatives are chosen by the attention of later ones."""
        return 1 << 30

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Take no part in the chunks: all queries come at the end."""

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:  # noqa: ARG002
        """Rank the blocks of a layer: k [Hk, s, d], q [H, s, d]."""
        size, length = self.args.choice_block, k.shape[1]
        blocks, wanted, positions = length // size, self.needle // size, torch.arange(length)
        weights = last_rows(q, k, softmax)  # [H, s, s]
        start = wanted * size
        self.mass[layer] = float(weights[:, -1, start : start + size].sum(-1).max())
        near = positions[:, None] - positions < self.args.choice_local  # [s, s]
        attention = (weights * near).sum((0, 1)) - weights.diagonal(dim1=1, dim2=2).sum(0)  # [s], of later tokens
        chosen = attention[: blocks * size].view(blocks, size).topk(self.args.representatives).indices  # [n, r]
        self.represented[layer] = bool((chosen[wanted] == self.needle - start).any())

        plain = k if self.rotary[layer] is None else self.rotary[layer].unrotate(k, positions)
        query = q[:, -1:] if self.rotary[layer] is None else self.rotary[layer].unrotate(q[:, -1:], positions[-1:])
        by_block = plain[:, : blocks * size].unflatten(1, (blocks, size)).transpose(0, 1)  # [n, Hk, p, d]
        rows = torch.arange(blocks)[:, None]
        keys = {
            "representatives": by_block.transpose(1, 2)[rows, chosen].mean(1, keepdim=True).transpose(1, 2),
            "mean of all": by_block.mean(2, keepdim=True),
            "best token": by_block,
        }
        grouped = query[:, 0].view(k.shape[0], -1, k.shape[2]).sum(1)  # [Hk, d], summed over the group
        for tokens, heads in product(TOKENS, HEADS):
            self.found[layer, tokens, heads] = self._finds(grouped, keys[tokens], heads, wanted)

    def _finds(self, query: Tensor, keys: Tensor, heads: str, wanted: int) -> bool:
        """Rank by cosine of query [Hk, d] and keys [n, Hk, r, d]; a block scores as its best of r."""
        if heads == "together":
            query, keys = query.reshape(1, -1), keys.transpose(1, 2).flatten(2)[:, None]  # [1, Hk * d], [n, 1, r, ..]
        cosines = torch.einsum("hc,nhrc->hnr", normalize(query, dim=-1), normalize(keys, dim=-1)).amax(-1)
        better = (cosines > cosines[:, wanted : wanted + 1]).sum(-1)  # [Hk or 1] blocks before the needle's
        return int(better.min()) < self.args.best_blocks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what is ranked."""
    parser.add_argument("--choice-block", type=int, default=32, help="tokens of a block")
    parser.add_argument("--choice-local", type=int, default=64, help="tokens of the local window")
    parser.add_argument("--representatives", type=int, default=4, help="tokens that represent a block")
    parser.add_argument("--best-blocks", type=int, default=12, help="blocks that are retrieved")


def run(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    found, mass, represented = defaultdict(list), defaultdict(list), defaultdict(list)
    for document in subject.documents(["niah_single"], args.rows):
        asked = up_to_the_value(subject, document)
        needle = value_tokens(subject, document).start
        if len(asked.ids) - needle < args.choice_local:  # it lies in the local window: nothing has to be found
            continue
        watch = Watch(subject.context(asked).rotary, needle, args)
        subject.read(asked, [watch])
        for key, hit in watch.found.items():
            found[key].append(hit)
        for layer in watch.mass:
            mass[layer].append(watch.mass[layer])
            represented[layer].append(watch.represented[layer])
    rows = [
        {
            "layer": layer,
            "documents": len(mass[layer]),
            "attention to the needle's block %": round(100 * statistics.median(mass[layer]), 1),
            "needle's token represents %": percent(represented[layer]),
            **{
                f"{tokens}, {heads} %": percent(found[layer, tokens, heads]) for tokens, heads in product(TOKENS, HEADS)
            },
        }
        for layer in sorted(mass)
    ]
    table("block-choice: documents whose needle's block is among the best, by layer and rule", rows)
    return {"rows": rows}


def up_to_the_value(subject: Subject, document: Document) -> Document:
    """Append the answer's words before its value: the query of the last token then fetches the value."""
    row, tokenizer = document.row, subject.model.tokenizer
    fact = row.document[: row.document.find(row.outputs[0])].rpartition(" the ")[2]  # "access code of <name> is "
    return replace(document, ids=document.ids + tokenizer.encode(f" The {fact}", add_special_tokens=False))


def value_tokens(subject: Subject, document: Document) -> range:
    """Positions of the value that is asked for, in the prompt."""
    value = subject.model.tokenizer.encode(document.row.outputs[0], add_special_tokens=False)
    start = next(i for i in range(len(document.ids)) if document.ids[i : i + len(value)] == value)
    return range(start, start + len(value))
