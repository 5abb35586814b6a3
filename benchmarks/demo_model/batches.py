"""Batches of training sequences: repeats of names and numbers, and documents with questions behind them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from documents import KINDS
from torch import Tensor
from writer import IGNORED, VALUE, Writer


@dataclass(frozen=True)
class Batch:
    """Token ids, what each of them is to the loss, and their positions, all [batch, length].

    `tags` names what each VALUE belongs to, row by row.
    """

    ids: Tensor
    kinds: Tensor
    positions: Tensor
    tags: list[str]


def skipping_positions(rng: random.Random, length: int, size: int, reach: int) -> Tensor:
    """Return positions that grow by one, apart from a few gaps: distances of up to `reach` in short sequences.

    After Zhu et al., "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training", arXiv
    2309.10400. Half of the sequences have no gaps. [size, length]
    """
    positions = torch.arange(length).repeat(size, 1)
    for row in range(size):
        if rng.random() < 0.5 or length >= reach:
            continue
        cuts = sorted(rng.sample(range(1, length), rng.randint(1, 6)))
        extra = rng.randint(0, reach - length)
        ends = sorted(rng.randint(0, extra) for _ in cuts)
        for cut, gap in zip(cuts, ends, strict=True):
            positions[row, cut:] = torch.arange(cut, length) + gap
    return positions


def dense_batch(rng: random.Random, length: int, size: int, vocabulary: Sequence[int], reach: int) -> Batch:
    """Return sequences of the tokens `vocabulary` of which every later token is a VALUE.

    Half of the batches repeat one random segment; the others repeat records of four tokens, each time in another order,
    with the first token of each left to chance. Nothing but a match with the earlier copy predicts the others. These
    batches make the matching heads form.
    """
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    period = rng.randint(max(length // 8, 8), length // 2) // 4 * 4
    drawn = torch.randint(len(vocabulary), (size, period), generator=generator)
    segment = torch.tensor(vocabulary)[drawn]
    times = -(-length // period)
    if rng.random() < 0.5:
        ids, kinds = segment.repeat(1, times), torch.full((size, period * times), VALUE)
        kinds[:, period] = IGNORED
    else:
        entries = segment.view(size, -1, 4)  # [size, entries, 4]
        orders = torch.rand(size, times - 1, entries.shape[1], generator=generator).argsort(-1).flatten(1)
        again = entries.gather(1, orders[..., None].expand(-1, -1, 4))
        ids = torch.cat([entries, again], 1).flatten(1)
        kinds = torch.full_like(ids, VALUE)
        kinds[:, ::4] = IGNORED
    kinds[:, :period] = IGNORED
    positions = skipping_positions(rng, length, size, reach)
    return Batch(ids[:, :length], kinds[:, :length], positions, ["dense"] * int((kinds[:, :length] == VALUE).sum()))


def question_batch(kind: str, rng: random.Random, writer: Writer, *, length: int, size: int, reach: int) -> Batch:
    """Return `size` documents of one kind with questions behind them, cut or padded (IGNORED) to `length`."""
    ids = torch.zeros((size, length), dtype=torch.long)
    kinds = torch.zeros((size, length), dtype=torch.long)
    tags: list[str] = []
    for row in range(size):
        KINDS[kind](rng, writer, length)
        n = min(len(writer.ids), length)
        ids[row, :n] = torch.tensor(writer.ids[:n])
        kinds[row, :n] = torch.tensor(writer.kinds[:n])
        tags += writer.tags[: int((kinds[row] == VALUE).sum())]
    return Batch(ids, kinds, skipping_positions(rng, length, size, reach), tags)
