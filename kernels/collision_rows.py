"""Votes and four-bit products of keys on a CPU: what `kvcli.kernels.collisions` adds up, in loops over the bytes.

    population    signs [Hk, n, B] uint8 -> [Hk, B, 256] int64
    worth         products of the centroids [Hk, B, 256] fp32, their population, tiers' ends [t] -> [Hk, B, 256] int32
    votes         signs, worth -> [Hk, n] int32
    most          votes, none negative -> [Hk, k] int64, the most votes, ties to the lower key, ascending
    products      codes [Hk, n, C] uint8, weights [Hk, n, B] fp32, tokens [Hk, c] -> [Hk, c]

A byte of codes is two channels, whose part of a product is looked up in a table [Hk, C, 256] made for the query.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, prange, run, serves

PIECE = 1024  # keys that a thread takes at once
CHOSEN = 256  # chosen keys that it takes at once
BYTES = 4  # of codes in a block
WORD = 8  # blocks of signs in a word


@compiled
def _population(signs: Any, head: int, n: int, out: Any) -> None:
    heads, blocks, _ = out.shape
    for h in prange(heads):
        for j in range(n):
            own = signs[h * head + j * blocks :][:blocks]
            for b in range(blocks):
                out[h, b, own[b]] += 1


@compiled
def _worth(products: Any, counts: Any, ends: Any, out: Any) -> None:
    heads, blocks = out.shape[:2]
    for row in prange(heads * blocks):
        h, b = row // blocks, row % blocks
        before, tiers = 0, len(ends)
        for pattern in np.argsort(-products[h, b], kind="mergesort"):  # which leaves equal ones in order
            while tiers and before >= ends[len(ends) - tiers]:
                tiers -= 1
            out[h, b, pattern] = tiers
            before += counts[h, b, pattern]


@compiled
def _votes(signs: Any, head: int, worth: Any, out: Any) -> None:
    heads, n = out.shape
    blocks = worth.shape[1]
    pieces = (n + PIECE - 1) // PIECE
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * PIECE
        for j in range(first, min(first + PIECE, n)):
            own, total = signs[h * head + j * blocks :][:blocks], 0
            for b in range(blocks):
                total += worth[h, b, own[b]]
            out[h, j] = total


@compiled
def _word_votes(words: Any, head: int, worth: Any, out: Any) -> None:
    # Of blocks that come by eights: a word has the patterns of eight, which are then read at once.
    heads, n = out.shape
    size = worth.shape[1] // WORD
    pieces = (n + PIECE - 1) // PIECE
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * PIECE
        for j in range(first, min(first + PIECE, n)):
            total = np.int32(0)
            for w in range(size):
                x, of = words[h * head + j * size + w], worth[h, w * WORD :]
                total += of[0, x & 255] + of[1, (x >> 8) & 255] + of[2, (x >> 16) & 255] + of[3, (x >> 24) & 255]
                total += of[4, (x >> 32) & 255] + of[5, (x >> 40) & 255] + of[6, (x >> 48) & 255] + of[7, x >> 56]
            out[h, j] = total


@compiled
def _most(votes: Any, bins: int, out: Any) -> None:
    count = out.shape[1]
    for h in prange(len(votes)):
        own, counts, taken = votes[h], np.zeros(bins, np.int64), np.empty(count + 1, np.int64)
        for j in range(len(own)):
            counts[own[j]] += 1
        least, wanted, at = bins - 1, count, 0
        while counts[least] < wanted:
            wanted -= counts[least]
            least -= 1
        # `wanted` are still to be taken of those that have the `least` votes. No branch could be foretold here.
        for j in range(len(own)):
            equal = own[j] == least
            taken[at] = j
            at += (own[j] > least) | (equal & (wanted > 0))
            wanted -= equal
        out[h] = taken[:count]


@compiled
def _products(table: Any, codes: Any, head: int, weights: Any, weight_head: int, tokens: Any, out: Any) -> None:
    heads, n = tokens.shape
    size = table.shape[1]
    blocks = size // BYTES
    pieces = (n + CHOSEN - 1) // CHOSEN
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * CHOSEN
        last = min(first + CHOSEN, n)
        own, code_of, weight_of = tokens[h], codes[h * head :], weights[h * weight_head :]
        touched = np.float32(0)  # has all that is wanted on its way from memory at once
        for i in range(first, last):
            touched += code_of[own[i] * size] + weight_of[own[i] * blocks]
        out[h, first] = touched
        for i in range(first, last):
            code, weight, total = code_of[own[i] * size :][:size], weight_of[own[i] * blocks :][:blocks], np.float32(0)
            for b in range(blocks):
                block = np.float32(0)
                for c in range(b * BYTES, b * BYTES + BYTES):
                    block += table[h, c, code[c]]
                total += weight[b] * block
            out[h, i] = total


def suits(signs: Tensor, *beside: Tensor) -> bool:
    """Tell whether this can count these, and read weights beside them: tokens one behind the other."""
    in_order = all(each.stride()[1:] == (each.shape[2], 1) for each in (signs, *beside))
    return in_order and serves(signs, dtype=torch.uint8) and all(map(serves, beside))


def population(signs: Tensor) -> Tensor:
    """Count how often each pattern occurs in a block."""
    (heads, n, blocks), out = signs.shape, torch.zeros(len(signs), signs.shape[2], 256, dtype=torch.int64)
    run(_population, heads * n * blocks, flat(signs), signs.stride(0), n, out)
    return out


def worth(products: Tensor, counts: Tensor, ends: list[int]) -> Tensor:
    """Rank the centroids of each block: how many of the tiers' `ends`, ascending, keys ranked before do not reach."""
    out = torch.empty(products.shape, dtype=torch.int32)
    run(_worth, 8 * products.numel(), products.contiguous(), counts, np.array(ends), out)
    return out


def votes(signs: Tensor, worth: Tensor) -> Tensor:
    """Add up over the blocks of a key what its patterns are worth."""
    out, own = torch.empty(signs.shape[:2], dtype=torch.int32), flat(signs)
    if signs.shape[2] % WORD == 0 and own.storage_offset() % WORD == 0 and sys.byteorder == "little":
        run(_word_votes, signs.numel(), own.view(torch.uint64), signs.stride(0) // WORD, worth.to(torch.uint8), out)
    else:
        run(_votes, signs.numel(), own, signs.stride(0), worth, out)
    return out


def most(votes: Tensor, count: int) -> Tensor:
    """Choose the keys with the most votes: whole numbers, of which there are few."""
    out = torch.empty(len(votes), count, dtype=torch.int64)
    run(_most, votes.numel(), votes, 1 + int(votes.max()), out)
    return out


def products(table: Tensor, codes: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
    """Add up what the codes of the tokens stand for, block by block by its weight."""
    out = torch.empty(tokens.shape)
    by_head = flat(codes), codes.stride(0), flat(weights), weights.stride(0)
    run(_products, tokens.numel() * table.shape[1], table, *by_head, tokens, out)
    return out
