"""What a checkpoint's attention looks like, read from its config alone, and the models that are refused for it.

Nothing is allocated: the model is built on the meta device, and each attention module runs once on shapes. So the
numbers are those that the model itself passes to its attention function, whatever its config calls them.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvcli.compat import can_set_attention
from kvcli.errors import ExitCode, KvcliError

_PROBE = "kvcli_probe"
# What kvcli's attention honours, or may ignore: position_ids and the cache say nothing that it does not know.
_UNDERSTOOD = {"scaling", "softcap", "s_aux", "sliding_window"}
_UNDERSTOOD |= {"dropout", "is_causal", "position_ids", "past_key_values"}
_SUPPORTED_HINT = (
    "kvcli needs a decoder whose layers keep keys and values, with full or sliding-window attention "
    "(llama, qwen2, qwen3, mistral, gemma2, gemma3, phi3, glm4, granite, gpt_oss and their like)"
)


@dataclass(frozen=True)
class LayerGeometry:
    """One attention layer: H query heads over Hk KV heads of `head_dim`; `window` in tokens, None for full attention.

    `rope` is False where the layer uses no rotary positions (NoPE).
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    rope: bool


@dataclass(frozen=True)
class WeightParts:
    """Bytes of weights by what a step does with them: all `projections` of attention, the `mlp`s with all else in the
    layers but experts, all `experts`, and the `head` that makes logits. A token goes through `active` of the experts.
    """

    projections: int
    mlp: int
    experts: int
    head: int
    active: float

    def used(self, tokens: int) -> int:
        """Bytes in the MLPs that a step of so many tokens reads, if their experts are drawn independently."""
        return self.mlp + round(self.experts * (1 - (1 - self.active) ** tokens))


@dataclass(frozen=True)
class ModelGeometry:
    """The sizes that memory and time depend on; `weight_bytes` counts tied weights once."""

    layers: tuple[LayerGeometry, ...]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None
    weight_bytes: int
    parts: WeightParts

    def beyond_positions(self, tokens: int, name: str) -> str | None:
        """Say that so many tokens are more than the model, called `name`, was made for; None where they are not."""
        limit = self.max_positions
        if limit is None or tokens <= limit:
            return None
        return f"{tokens:,} tokens (prompt and output) are more than the {limit:,} positions {name} was made for"


def geometry_of(config: PreTrainedConfig, dtype: torch.dtype) -> ModelGeometry:
    """Describe the model of `config` with weights in `dtype`, without allocating it.

    Raises KvcliError (usage) for a model that kvcli cannot run, naming the model type and the reason.
    """
    windows = _windows(config)
    model = _build_on_meta(config, dtype)
    text = config.get_text_config(decoder=True)
    return ModelGeometry(
        layers=tuple(_layers(model, text, windows)),
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in model.parameters()),
        parts=_parts(model, text),
    )


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The stack of decoder layers inside a causal language model, with its `layers` and `rotary_emb`."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    return decoder


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention module of every decoder layer, in order.

    Raises KvcliError (usage) where the decoder is not a stack of layers with one attention module each.
    """
    modules = []
    for layer in getattr(decoder_of(model), "layers", ()):
        found = [module for module in layer.modules() if module is not layer and _is_attention(module)]
        if len(found) > 1:
            raise refusal(model.config, f"a decoder layer holds {len(found)} attention modules, not one")
        modules += found
    if not modules:
        raise refusal(model.config, "its decoder is not a stack of layers with rotary positions")
    return modules


def layer_type_of(rotary: nn.Module, config: PreTrainedConfig, index: int) -> str | None:
    """The argument that selects layer `index`'s frequencies, None where all layers share them.

    Some models keep one set of frequencies for each layer type (gemma3: sliding and full).
    """
    return config.layer_types[index] if isinstance(getattr(rotary, "rope_type", None), dict) else None


def refusal(config: PreTrainedConfig, reason: str) -> KvcliError:
    """Name the model type and why kvcli cannot run it."""
    return KvcliError(f"model type {config.model_type!r} is not supported: {reason}", _SUPPORTED_HINT, ExitCode.USAGE)


def _parts(model: PreTrainedModel, text: PreTrainedConfig) -> WeightParts:
    def size(*modules: nn.Module, named: str = "") -> int:
        return sum(
            weight.numel() * weight.element_size()
            for module in modules
            for name, weight in module.named_parameters()
            if named in name
        )

    layers = list(decoder_of(model).layers)  # type: ignore[arg-type]
    projections, experts = size(*attention_modules(model)), size(*layers, named=".experts.")
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    count = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    return WeightParts(
        projections=projections,
        mlp=size(*layers) - projections - experts,
        experts=experts,
        head=size(head),
        active=(getattr(text, "num_experts_per_tok", None) or count) / count,
    )


def _windows(config: PreTrainedConfig) -> list[int | None]:
    """Each layer's window, None for full attention; refuses every layer that is neither full nor sliding."""
    if config.is_encoder_decoder:
        raise refusal(config, "it is an encoder-decoder model")
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    if "chunked_attention" in kinds or _sets(text, "attention_chunk_size"):
        raise refusal(config, "it uses chunked attention")
    if _sets(text, "kv_lora_rank"):
        raise refusal(config, "multi-head latent attention keeps a compressed latent instead of keys and values")
    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:
        raise refusal(config, f"transformers knows no key and value cache for it ({error})") from error
    # The exact classes: what derives from them (state-space mixed with attention, indexed caches) stores more.
    unknown = [type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)]
    if unknown:
        named = ", ".join(sorted(kinds - {"full_attention", "sliding_attention"})) or unknown[0]
        raise refusal(
            config, f"layers of type {named} (state-space, linear attention, convolution or shared) keep no KV cache"
        )
    return [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]


def _sets(config: PreTrainedConfig, name: str) -> bool:
    try:
        return bool(getattr(config, name, None))
    except Exception:  # transformers' way to say that the layers have values of their own
        return True


def _build_on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    config = copy.deepcopy(config)  # the attention implementation is stored in it
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:  # a senseless config makes modelling code raise anything
        if "Unrecognized configuration class" in str(error):
            raise refusal(config, "it is no causal language model") from error
        if unknown := _unknown_rope_type(config):
            what = f"rope_type {unknown!r} in config.json is none that transformers {transformers.__version__} knows"
            hint = f"check it, or install a newer transformers; known: {', '.join(['default', *ROPE_INIT_FUNCTIONS])}"
            raise KvcliError(what, hint, ExitCode.USAGE) from error
        reason = str(error).partition("\n")[0]
        raise KvcliError(
            f"no model of type {config.model_type!r} can be made from this config: {reason}",
            "check the sizes in config.json",
            ExitCode.USAGE,
        ) from error
    if not can_set_attention(model):
        raise refusal(config, "its attention cannot be replaced (it does not use transformers' attention interface)")
    return model


def _unknown_rope_type(config: PreTrainedConfig) -> str | None:
    """The first kind of rotary scaling that transformers has no rule for; layers of several types have one each."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    rules = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    kinds = (str(rule["rope_type"]) for rule in rules if "rope_type" in rule)
    return next((kind for kind in kinds if kind != "default" and kind not in ROPE_INIT_FUNCTIONS), None)


def _layers(model: PreTrainedModel, text: PreTrainedConfig, windows: list[int | None]) -> list[LayerGeometry]:
    """Run every attention module of `model` (on meta) for one token and note the shapes it hands to attention."""
    modules = attention_modules(model)
    rotary = getattr(decoder_of(model), "rotary_emb", None)
    if rotary is None or len(modules) != len(windows):
        raise refusal(model.config, "its decoder is not a stack of layers with rotary positions")
    seen: list[tuple[torch.Size, torch.Size, torch.Size]] = []

    def attention(
        _: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        unknown = [name for name, given in kwargs.items() if given is not None and name not in _UNDERSTOOD]
        if attention_mask is not None or unknown:
            raise ValueError(f"it hands {', '.join(unknown) or 'a mask of its own'} to attention")
        seen.append((query.shape, key.shape, value.shape))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_PROBE, attention)
    model.set_attn_implementation(_PROBE)
    real_rotary = type(rotary)(config=text)  # on the CPU: some choose their frequencies by the values of positions
    layers = []
    for index, (module, window) in enumerate(zip(modules, windows, strict=True)):
        if not getattr(module, "is_causal", True):
            raise refusal(model.config, "its attention is bidirectional")
        try:
            layer_type = layer_type_of(real_rotary, text, index)
            arguments = () if layer_type is None else (layer_type,)
            cos, sin = real_rotary(torch.empty(1, 1, 1), torch.zeros(1, 1, dtype=torch.long), *arguments)
            cos, sin = cos.to("meta", model.dtype), sin.to("meta", model.dtype)
            with _UseOf(cos) as use:
                module(
                    hidden_states=torch.empty(1, 1, text.hidden_size, dtype=model.dtype, device="meta"),
                    position_embeddings=(cos, sin),
                    attention_mask=None,
                    position_ids=torch.zeros(1, 1, dtype=torch.long, device="meta"),
                )
        except Exception as error:
            raise refusal(model.config, f"{type(module).__name__} has an unknown form ({error})") from error
        if len(seen) != index + 1:
            raise refusal(model.config, f"{type(module).__name__} does not use transformers' attention interface")
        query, key, value = seen[index]  # [1, H, 1, d], [1, Hk, 1, d], [1, Hk, 1, d]
        if key[-1] != value[-1]:
            raise refusal(model.config, f"keys of {key[-1]} dimensions and values of {value[-1]} (latent attention)")
        layers.append(LayerGeometry(index, query[1], key[1], key[-1], window, use.found))
    return layers


class _UseOf(TorchFunctionMode):
    """Watches whether a tensor is an argument of any torch function called inside."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self.tensor = tensor
        self.found = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found = self.found or any(argument is self.tensor for argument in args)
        return function(*args, **(kwargs or {}))


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "layer_idx") and {"attention_mask", "position_embeddings"} <= set(
        signature(module.forward).parameters
    )
