"""Private interfaces of torch and transformers, all in one place; `tests/test_compat.py` fails when one changes.

Nothing here has a public counterpart in the supported versions; public interfaces are used directly.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention import SDPBackend


@cache
def _onednn_dtypes() -> frozenset[torch.dtype]:
    """List the dtypes that oneDNN multiplies here; bfloat16 takes a processor with AVX-512 or the like."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset()
    wide = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return frozenset([torch.float32, torch.bfloat16] if wide else [torch.float32])


def onednn_suits(weight: Tensor) -> bool:
    """Tell whether oneDNN can multiply by this tensor here."""
    return weight.device.type == "cpu" and weight.dtype in _onednn_dtypes()


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [..., in] @ weight.T + bias -> [..., out], without gradients; agrees with torch's within rounding.

    A decode step reads every weight once for one row or a few, so it is bound by memory. For such shapes oneDNN reads
    at up to twice the rate of the BLAS that torch calls by default, and it is no slower for the many rows of a prefill
    (`benchmarks/cpu_linear.py`).
    """
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def preferred_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, grouped: bool) -> SDPBackend:
    """Name the backend of torch's scaled_dot_product_attention for q [b, H, m, d] and k, v [b, Hk, n, d]."""
    return SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped))


def end_broken_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: tuple[int, int]) -> None:
    """End a capture into `pool` that failed midway, on the stream that it began on.

    After a failure of the captured work, torch's own end fails before it takes the allocator out of capture. The
    allocator would then hold the pool for good, and no longer free cached memory to make room.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):  # it had come that far, or not even begun
            torch._C._cuda_endAllocateToPool(device.index or 0, pool)
            torch._C._cuda_releasePool(device.index or 0, pool)


@contextmanager
def exporting() -> Iterator[None]:
    """Let modules take the paths that torch.export can follow: those written in torch, whatever else is installed."""
    before = torch.compiler._is_exporting_flag
    torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_exporting_flag = before


def attention_implementation(model: Any) -> str:
    """Name the attention that a model is set to, for `set_attn_implementation` to restore."""
    return str(model.config._attn_implementation)


def can_set_attention(model: Any) -> bool:
    """Tell whether a model calls attention through transformers' interface, so that it can be replaced."""
    return bool(model._can_set_attn_implementation())


def set_attention(model: Any, name: str) -> None:
    """Set a model's attention; where the model does not ask for one, this only decides how it makes masks."""
    if can_set_attention(model):
        model.set_attn_implementation(name)
    else:
        model.config._attn_implementation = name


def auto_class(auto: Any, config: type, model: type) -> Any:
    """Derive one of transformers' auto classes that makes a model of class `model` from such a config."""
    return type(auto.__name__, (auto,), {"_model_mapping": {config: model}})


def is_routed(module: Any) -> bool:
    """Tell whether a module is of experts that it calls with tokens, and the numbers of the experts for each token."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed")
