"""Which class of transformers makes a model of a config, how its rotary module is asked, and what it says."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

Angles = tuple[Tensor, Tensor] | Tensor
"""What a rotary module gives: cosines and sines, or complex numbers (llama4, deepseek_v2)."""


def model_class(config: PreTrainedConfig) -> Any:
    """Choose the class for a config: one for text alone or, where there is none, one that also sees images."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def angles_at(rotary: nn.Module, like: Tensor, positions: Tensor, layer_type: str | None) -> Angles:
    """Call a rotary module for positions [n] of text -> its angles, [1, n, r] each; `like` tells dtype and device."""
    # One row for each axis of models that also see images.
    positions = positions.expand(3, 1, -1) if hasattr(rotary, "mrope_section") else positions[None]
    angles: Angles = rotary(like, positions, *(() if layer_type is None else (layer_type,)))
    return angles


def rotate_neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [b, H, n, d] and k [b, Hk, n, d] by complex numbers, cos + i sin [b, n, d / 2]."""
    turn = torch.complex(cos, sin)[:, None]
    pairs = (torch.view_as_complex(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)) for x in (q, k))
    q, k = (torch.view_as_real(x * turn).flatten(-2) for x in pairs)
    return q, k


def rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [b, H, n, d] and k [b, Hk, n, d], whose pairs are a channel of the first half and one of the second."""
    cos, sin = cos[:, None], sin[:, None]  # [b, 1, n, d]
    q, k = (x * cos + torch.cat((-second, first), -1) * sin for x in (q, k) for first, second in [x.chunk(2, -1)])
    return q, k
