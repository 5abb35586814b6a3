"""Bytes of quantised matrices that are drawn, not quantised."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SIZES = {"Q8_0": (32, 34), "Q4_K": (256, 144)}  # numbers of a block, and its bytes


def blocks(kind: str, size: tuple[int, int], deviation: float, drawn: np.random.Generator) -> Array:
    """Draw a matrix of a kind of `SIZES` -> bytes [rows, n]; its numbers have about this deviation, and mean zero."""
    (of, nbytes), (rows, columns) = SIZES[kind], size
    held = drawn.integers(0, 256, (rows, columns // of, nbytes), np.uint8)
    if kind == "Q8_0":  # a scale, and 32 numbers of 8 bits
        held[..., :2] = _half(deviation / 74)
    else:  # two scales, of which one takes off the mean, eight factors of 6 bits for each, and 256 numbers of 4 bits
        held[..., :2], held[..., 2:4] = _half(deviation / 257), _half(deviation / 257 * 7.5)
    return held.reshape(rows, -1)


def _half(number: float) -> Array:
    return np.array([number], np.float16).view(np.uint8)
