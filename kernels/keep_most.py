"""The fewest rows that hold a part of the attention of a query head, inside a kernel: one program finds them.

Weights are read as integers of the same order; the largest threshold from which on all hold the part is found by digits
of three bits, then everything above it is kept, and of what equals it the lowest rows. Wider digits are fewer passes,
but every value of a digit needs a sum of its own: a histogram of weights would be made of atomic additions, whose order
differs from run to run.
"""

from __future__ import annotations

from kvcli.kernels._triton import jit, tl


@jit
def _weights(scores: tl.tensor, row: tl.tensor, num_rows: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """Read scores and make weights of them that the largest one measures."""
    return tl.exp(tl.load(scores + row, mask=row < num_rows, other=float("-inf")) - highest)


@jit
def keep_most(
    scores: tl.tensor,
    kept: tl.tensor,
    num_rows: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    part: tl.tensor,
    BLOCK_W: tl.constexpr,
) -> None:
    """Flag for one query head what is kept of the rows begin .. end, and all others that hold a token."""
    highest = tl.full([BLOCK_W], float("-inf"), tl.float32)
    for start in range(0, num_rows, BLOCK_W):
        i = start + tl.arange(0, BLOCK_W)
        highest = tl.maximum(highest, tl.load(scores + i, mask=i < num_rows, other=float("-inf")))
    top = tl.max(highest, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    norm = tl.zeros([BLOCK_W], tl.float32)
    fixed = tl.zeros([BLOCK_W], tl.float32)
    for start in range(0, num_rows, BLOCK_W):
        i = start + tl.arange(0, BLOCK_W)
        weight = _weights(scores, i, num_rows, top)
        norm += weight
        fixed += tl.where((i < begin) | (i >= end), weight, 0.0)
    wanted = part * tl.sum(norm, axis=0) - tl.sum(fixed, axis=0)  # of the others, in weights that the largest measures
    trials = tl.arange(0, 8)
    threshold = 0  # in bits, of which no weight has more than thirty, since none is greater than one
    for digit in range(10):
        shift = 27 - 3 * digit
        trial = threshold | (trials << shift)
        mass = tl.zeros([8, BLOCK_W // 4], tl.float32)  # of those that reach a trial
        for start in range(begin, end, BLOCK_W // 4):
            i = start + tl.arange(0, BLOCK_W // 4)
            weight = tl.where(i < end, _weights(scores, i, num_rows, top), 0.0)
            reaches = weight.to(tl.int32, bitcast=True)[None, :] >= trial[:, None]
            mass += tl.where(reaches, weight[None, :], 0.0)
        enough = (trials > 0) & (tl.sum(mass, axis=1) >= wanted)  # of all up to the digit, as less reach a higher one
        threshold |= tl.sum(enough.to(tl.int32), axis=0) << shift
    above = tl.zeros([BLOCK_W], tl.float32)
    for start in range(begin, end, BLOCK_W):
        i = start + tl.arange(0, BLOCK_W)
        weight = _weights(scores, i, num_rows, top)
        above += tl.where((i < end) & (weight.to(tl.int32, bitcast=True) > threshold), weight, 0.0)
    left, equal = wanted - tl.sum(above, axis=0), 0
    for start in range(0, num_rows, BLOCK_W):
        i = start + tl.arange(0, BLOCK_W)
        weight = _weights(scores, i, num_rows, top)
        bits = weight.to(tl.int32, bitcast=True)
        always = (i < begin) | (i >= end)
        tie = ((always == 0) & (bits == threshold) & (i < num_rows)).to(tl.int32)
        before = (equal + tl.cumsum(tie, axis=0) - tie).to(tl.float32) * weight
        keeps = always | (bits > threshold) | ((tie == 1) & (before < left)) | (part >= 1.0)
        keeps = keeps & (tl.load(scores + i, mask=i < num_rows, other=float("-inf")) > float("-inf"))
        tl.store(kept + i, keeps, mask=i < num_rows)
        equal += tl.sum(tie, axis=0)
