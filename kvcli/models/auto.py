"""Find the transformers class for a config, its decoder, and the output of its rotary module."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvcli.compat import auto_class

Angles = tuple[Tensor, Tensor] | Tensor
"""The output of a rotary module: cosines and sines, or complex numbers (llama4, deepseek_v2)."""


def model_class(config: PreTrainedConfig) -> Any:
    """Choose the class for a config: one for text alone or, if there is none, the text side of another.

    The modules of a multimodal model that text never passes are neither made nor loaded.
    """
    auto: Any = AutoModelForCausalLM
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        auto, known = AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) not in known or config.get_text_config(decoder=True) is config:
        return auto
    whole = known[type(config)]
    return auto if whole.config_class is not type(config) else auto_class(auto, type(config), _text_side(whole))


@cache
def _text_side(whole: type[PreTrainedModel]) -> Any:
    """Derive a class whose models hold only the decoder, the modules around it, and the head that makes logits."""

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        with _without_packages():
            whole.__init__(self, *args, **kwargs)
        _keep_only({decoder_of(self), self.get_output_embeddings()}, self)

    return type(whole.__name__, (whole,), {"__module__": whole.__module__, "__init__": make})


@contextmanager
def _without_packages() -> Iterator[None]:
    """Let a part of a model be empty if it needs a package that is not installed (Gemma 3n sees by timm).

    Text never passes such a part, which is removed right away.
    """
    auto: Any = AutoModel
    before = auto.from_config

    def from_config(*args: Any, **kwargs: Any) -> nn.Module:
        try:
            made: nn.Module = before(*args, **kwargs)
        except ImportError:
            return nn.Module()
        return made

    auto.from_config = from_config
    try:
        yield
    finally:
        auto.from_config = before


def _keep_only(kept: Collection[nn.Module | None], module: nn.Module) -> None:
    """Remove all submodules that neither are nor hold one of those kept."""
    for name, child in list(module.named_children()):
        if child in kept or hasattr(child, "vocab_offset"):  # embeds some tokens of a text (Gemma 3n)
            continue
        if any(each in kept for each in child.modules()):
            _keep_only(kept, child)
        else:
            delattr(module, name)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the decoder of a causal language model, which has its layers, and its `rotary_emb` if there is one."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    if next(decoder.children(), None) is None:  # a head of that name (ModernBERT)
        decoder = model.base_model
    inner: nn.Module | None = getattr(decoder, "model", None)  # in llama4 it finds the whole model
    return decoder if inner is None or hasattr(decoder, "layers") else inner


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a model's decoder: its `layers`, or its first list of modules that know their numbers."""
    decoder = decoder_of(model)
    found = (getattr(decoder, "layers", None), *decoder.modules())
    lists = (module for module in found if isinstance(module, nn.ModuleList))
    numbered = (each for each in lists if any(hasattr(module, "layer_idx") for module in each.modules()))
    return next(numbered, nn.ModuleList())


def rotary_name(decoder: nn.Module) -> str | None:
    """Return the attribute of a decoder that holds its rotary module; None if it has none."""
    return next((name for name in ("rotary_emb", "pos_emb") if getattr(decoder, name, None) is not None), None)


def rotary_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the rotary module of a model's decoder, if it has one."""
    name = rotary_name(decoder := decoder_of(model))
    return None if name is None else decoder.get_submodule(name)


def angles_at(rotary: nn.Module, like: Tensor, positions: Tensor, layer_type: str | None) -> Angles:
    """Call a rotary module for positions [n] of text -> its angles, [1, n, r] each; `like` gives dtype and device."""
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
