"""Describe a checkpoint's layers from its config alone, and refuse models that kvcli cannot run.

Nothing is allocated: the model is built on the meta device, where `kvcli.models.layers` finds what its layers are.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.models.auto import layers_of, model_class
from kvcli.models.checkpoint import StoredTensor, quiet
from kvcli.models.layers import DecoderLayer, LayerFinder, refusal
from kvcli.models.layers import LayerGeometry as LayerGeometry
from kvcli.models.layers import OwnSelection as OwnSelection
from kvcli.models.layers import StateGeometry as StateGeometry
from kvcli.models.streamed import WeightStreaming
from kvcli.models.weights import WeightForm


class WeightCounts(NamedTuple):
    """The numbers of weights in the parts of `WeightParts`."""

    projections: int
    mlp: int
    experts: int
    head: int


@dataclass(frozen=True)
class WeightParts:
    """Bytes of weights by their use in a step: all `projections` of attention, the `mlp`s with everything else in the
    layers except experts, all `experts`, and the `head` that makes logits. A token goes through the fraction `active`
    of the experts. `counts` has the same parts in weights, each of which is multiplied and added once per token.
    """

    projections: int
    mlp: int
    experts: int
    head: int
    active: float
    counts: WeightCounts

    @property
    def passed(self) -> int:
        """Weights in the layers' MLPs that a token goes through."""
        return self.counts.mlp + round(self.counts.experts * self.active)

    def used(self, tokens: int) -> int:
        """Return the bytes in the MLPs that a step of `tokens` reads, if their experts are drawn independently."""
        return self.mlp + round(self.experts * (1 - (1 - self.active) ** tokens))


@dataclass(frozen=True)
class ModelGeometry:
    """The sizes that memory and time depend on; `weight_bytes` counts tied weights once."""

    layers: tuple[LayerGeometry, ...]
    """Those that attend, in order."""
    states: tuple[StateGeometry, ...]
    """Those that keep a state, in order."""
    decoder: tuple[DecoderLayer, ...]
    """All of them, with their modules."""
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None
    weight_bytes: int
    parts: WeightParts
    ends: bool = False
    """Whether the model has a table of its positions, so that none lies beyond `max_positions`."""
    reshapes: bool = False
    """Whether all tokens have to leave the layers, as the decoder gives its output the shape of its input (GPT-2)."""
    beside_hidden: int = 0
    """Numbers that layers get of a token beside one hidden state: further ones (Gemma 3n), an input of every layer
    (Gemma 3n, Gemma 4), the token itself (DeepSeek-V4)."""
    form: WeightForm | None = None
    """The form of weights that are not in the dtype."""
    spared: tuple[str, ...] = ()
    """Linear layers whose weights are in the dtype all the same."""
    streams: int = 1
    """Hidden states of a token between layers: several with hyper-connections (arXiv 2409.19606)."""
    streaming: WeightStreaming | None = None
    """Which layers' weights are streamed to the device."""

    @property
    def held_bytes(self) -> int:
        """Bytes of weights on the device at a time."""
        return self.weight_bytes if self.streaming is None else self.streaming.held

    @property
    def weights(self) -> str:
        """The name of the weights' form in a report."""
        return "auto" if self.form is None else self.form.label

    @property
    def shares(self) -> bool:
        """Whether layers read the KV of others."""
        return any(layer.readers for layer in self.layers)

    @property
    def depth(self) -> int:
        """Number of decoder layers, of any kind."""
        return len(self.decoder)

    @property
    def by_itself(self) -> bool:
        """Whether modules attend by themselves."""
        return any(layer.by_itself for layer in self.layers)

    @property
    def selects(self) -> OwnSelection | None:
        """What the first of the layers that select by themselves selects; None if there are none."""
        return next((layer.selects for layer in self.layers if layer.selects is not None), None)

    @property
    def scratch(self) -> int:
        """Bytes for each query and token while a layer scores tokens to select by itself; the most of any layer."""
        return max((layer.selects.scratch for layer in self.layers if layer.selects is not None), default=0)

    @property
    def strides(self) -> list[int]:
        """Decoder layers that each attending layer stands for: those since the one before; for the last, the rest."""
        places = [place for place, layer in enumerate(self.decoder) for _ in layer.attention]
        return [after - before for before, after in pairwise([0, *(place + 1 for place in places[:-1]), self.depth])]

    def beyond_positions(self, tokens: int, name: str) -> str | None:
        """Return a sentence if `tokens` exceed the positions that the model, called `name`, was made for; else None.

        Raises:
            KvcliError: the model has no further positions (usage).
        """
        limit = self.max_positions
        if limit is None or tokens <= limit:
            return None
        what = f"{tokens:,} tokens (prompt and output) are more than the {limit:,} positions {name} was made for"
        if self.ends:
            raise usage_error(what, "use a shorter prompt or a smaller --max-tokens: the model has no others")
        return what


_KNOWN: WeakKeyDictionary[nn.Module, ModelGeometry] = WeakKeyDictionary()


def geometry_of(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    form: WeightForm | None = None,
    stored: Mapping[str, StoredTensor] | None = None,
) -> ModelGeometry:
    """Describe the model of `config` with weights in `dtype`, or of a `form`, without allocating it.

    `stored` has the tensors of files that are read as they are.

    Raises KvcliError (usage) for a model that kvcli cannot run, naming the model type and the reason.
    """
    _refuse(config)
    model = build_on_meta(config, dtype)
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        raise refusal(config, "transformers names no output layer of it")
    text = config.get_text_config(decoder=True)
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    with quiet():  # modules say on stderr which packages would make them faster
        found = LayerFinder(model, text)
        held = {} if form is None else form.held(model)
    dense = {name: weight.nbytes for name, weight in model.named_parameters()}
    quantised = {id(model.get_parameter(name)) for name in held}
    return ModelGeometry(
        layers=tuple(found.layers),
        states=tuple(found.states),
        decoder=tuple(found.decoder),
        hidden_size=text.hidden_size,
        intermediate_size=max(wide) if isinstance(wide, list) else wide,  # a list has one for each layer
        vocab_size=text.vocab_size,
        max_positions=found.bias_positions or positions_of(text),
        weight_bytes=_as_stored(model, held, form, stored) or sum((dense | held).values()),
        parts=_parts(model, text, found.decoder, held),
        ends=found.ends,
        reshapes=found.reshapes,
        beside_hidden=(getattr(text, "altup_num_inputs", 1) - 1) * text.hidden_size
        + len(found.decoder) * (getattr(text, "hidden_size_per_layer_input", None) or 0)
        + _reads_tokens(layers_of(model)),
        form=form,
        spared=tuple(
            name
            for name, module in model.named_modules()
            if form and isinstance(module, nn.Linear) and id(module.weight) not in quantised
        ),
        streams=getattr(text, "hc_mult", None) or getattr(text, "hc_count", None) or 1,
    )


def geometry_of_model(model: PreTrainedModel, known: ModelGeometry | None = None) -> ModelGeometry:
    """Describe a loaded model; computed once, unless it is `known`."""
    if model not in _KNOWN:
        _KNOWN[model] = known or geometry_of(model.config, model.dtype)
    return _KNOWN[model]


def positions_of(config: PreTrainedConfig) -> int | None:
    """Return how many positions a model serves, None where its config sets no limit.

    Where RoPE is stretched that is `factor` times the original length. Many configs state it next to a
    `max_position_embeddings` that is still the original one, as model cards tell users to switch YaRN on. Llama 3's
    form states the stretched length itself.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    found = getattr(config, "rope_parameters", None) or {}
    forms = [each for each in found.values() if isinstance(each, dict)] or [found]
    for form in forms if limit is not None else ():
        kind, factor = form.get("rope_type"), form.get("factor")
        original = form.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", limit if kind == "dynamic" else None
        )
        if kind in ("yarn", "linear", "dynamic", "longrope") and factor and original:
            limit = max(limit or 0, int(factor * original))
    return limit


def rotates_by_length(config: PreTrainedConfig, shorter: int, longer: int) -> bool:
    """Tell whether a model chooses other rotary frequencies for the longer sequence (dynamic and longrope scaling)."""
    text = config.get_text_config(decoder=True)
    found = getattr(text, "rope_parameters", None) or {}
    for form in [each for each in found.values() if isinstance(each, dict)] or [found]:
        original = form.get("original_max_position_embeddings") or text.max_position_embeddings
        kind = form.get("rope_type")
        if (kind == "dynamic" and longer > original) or (kind == "longrope" and shorter <= original < longer):
            return True
    return False


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """List the attention modules of a loaded model, in the order of `ModelGeometry.layers`."""
    return [model.get_submodule(name) for layer in geometry_of_model(model).decoder for name in layer.attention]


def reader_modules(model: PreTrainedModel) -> dict[nn.Module, int]:
    """Find the attention modules that read another layer's KV, each with the number of that layer."""
    readers = (layer.reader for layer in geometry_of_model(model).decoder if layer.reader)
    return {model.get_submodule(reader.name): reader.layer for reader in readers}


def state_modules(model: PreTrainedModel) -> list[nn.Module]:
    """List the modules of a model that keep a state, in the order of `ModelGeometry.states`."""
    return [model.get_submodule(layer.state) for layer in geometry_of_model(model).decoder if layer.state]


def _reads_tokens(layers: nn.Module) -> bool:
    """Tell whether a module within the layers needs the tokens themselves."""
    given = (signature(kind.forward).parameters.get("input_ids") for kind in {type(each) for each in layers.modules()})
    return any(name is not None and name.default is Parameter.empty for name in given)


def _as_stored(
    model: PreTrainedModel,
    held: Mapping[str, int],
    form: WeightForm | None,
    stored: Mapping[str, StoredTensor] | None,
) -> int | None:
    """Count the bytes of a model whose files are read as they are, except for numbers converted to its dtype.

    Returns None if they are not read so, or if the files use other names for the weights.
    """
    own = {name: weight.nbytes for name, weight in model.named_parameters() if name not in held}
    if form is None or form.widened or not stored or (form.bits is not None and not own.keys() <= stored.keys()):
        return None
    whole = {name for name in own.keys() & stored.keys() if stored[name].floating}
    return sum(own[name] if name in whole else tensor.nbytes for name, tensor in stored.items())


def _parts(
    model: PreTrainedModel, text: PreTrainedConfig, decoder: Sequence[DecoderLayer], held: Mapping[str, int]
) -> WeightParts:
    quantised = {model.get_parameter(name): size for name, size in held.items()}

    def weights(*modules: nn.Module, named: str = "") -> list[nn.Parameter]:
        return [weight for module in modules for name, weight in module.named_parameters() if named in name]

    def size(found: list[nn.Parameter]) -> int:
        return sum(quantised.get(weight, weight.nbytes) for weight in found)

    def count(found: list[nn.Parameter]) -> int:
        return sum(weight.numel() for weight in found)

    layers = list(layers_of(model))
    readers = [(layer.reader.name,) if layer.reader else () for layer in decoder]
    attending = [name for layer, read in zip(decoder, readers, strict=True) for name in (*layer.attention, *read)]
    attention = weights(*map(model.get_submodule, attending))
    experts, whole = weights(*layers, named=".experts."), weights(*layers)
    head = weights(model.get_output_embeddings())  # type: ignore[no-untyped-call]
    number = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    return WeightParts(
        projections=size(attention),
        mlp=size(whole) - size(attention) - size(experts),
        experts=size(experts),
        head=size(head),
        active=(getattr(text, "num_experts_per_tok", None) or number) / number,
        counts=WeightCounts(
            count(attention), count(whole) - count(attention) - count(experts), count(experts), count(head)
        ),
    )


def _refuse(config: PreTrainedConfig) -> None:
    """Refuse models that the config alone shows to be unsupported."""
    if config.is_encoder_decoder:
        raise refusal(config, "it is an encoder-decoder model")


def build_on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model of shapes alone; raises KvcliError (usage) if the config makes none."""
    config = copy.deepcopy(config)  # the attention implementation is stored in it
    try:
        with torch.device("meta"):
            model: PreTrainedModel = model_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # a senseless config makes modelling code raise anything
        if "Unrecognized configuration class" in str(error):
            raise refusal(config, "it is not a causal language model") from error
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
    return model


def _unknown_rope_type(config: PreTrainedConfig) -> str | None:
    """Return the first kind of rotary scaling unknown to transformers; layers of several types have one each."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    rules = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    kinds = (str(rule["rope_type"]) for rule in rules if "rope_type" in rule)
    return next((kind for kind in kinds if kind != "default" and kind not in ROPE_INIT_FUNCTIONS), None)
