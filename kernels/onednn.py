"""Matrix products with a thin left factor on the CPU, through oneDNN.

A decode step reads every weight, and every cached value of a dense layer, once for a row or a few: it is bound by
memory. For such shapes oneDNN reads at up to twice the rate of the BLAS that torch calls by default, and is no slower
for the many rows of a prefill (`benchmarks/cpu_linear.py` measures it).

Shapes: x [..., in], weight [out, in] (a transposed view will do), bias [out] -> [..., out].
"""

from functools import cache

import torch
from torch import Tensor


@cache
def _dtypes() -> frozenset[torch.dtype]:
    """What oneDNN multiplies here; bfloat16 takes a processor with AVX-512 or its like."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset()
    wide = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return frozenset([torch.float32, torch.bfloat16] if wide else [torch.float32])


def suits(weight: Tensor) -> bool:
    """Tell whether oneDNN can multiply by this tensor here."""
    return weight.device.type == "cpu" and weight.dtype in _dtypes()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, without gradients; agrees with torch's within rounding."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
