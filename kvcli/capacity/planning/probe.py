"""Run a few layers of a model as `generate` runs them, without weights: to time them, or to compile their loops.

The layers are random, and so is the KV that a method is given: times depend on shapes, and on how far queries turn from
one step to the next. With random weights they turn completely, so that methods that recall what a query wants recall
most of it: their worst case.

Which loops a step uses, and for which kinds of numbers, depends on the method, the model and the context. Compiling
takes ten seconds or so, once on a machine. Without a rehearsal the answer would stop for them after its first word.
"""

from __future__ import annotations

import copy
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvcli.capacity.memory import available
from kvcli.capacity.roofline import synchronize, timed
from kvcli.inputs.profiles import Profile, verifying_profile
from kvcli.kernels._numba import LEAST, kept_in
from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import both
from kvcli.memory.tiers import nbytes
from kvcli.methods import get_method
from kvcli.methods.contract import AnyMethod
from kvcli.models.auto import layers_of
from kvcli.models.dummy import random_model
from kvcli.models.geometry import LayerGeometry, ModelGeometry, geometry_of
from kvcli.models.loading import Checkpoint, Model
from kvcli.models.weights import WeightForm, settle
from kvcli.runtime.engine import Engine, engine
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.report import environment

TRIED_BYTES = 512 << 20
"""Weights and KV of the layers that are run: more than any processor cache holds, and drawn in a second or two."""

WARMUP, STEPS = 2, 32
SECONDS = 2.0  # after which no further step is begun once there are a few
_FEW = 6
_QUERIES = 64  # at the end of a prompt, for methods that look at its last queries
PROMPT = 256  # tokens of the prefill that is timed
_FREED_BYTES = 24 << 20  # less than the 32 MiB from which glibc always asks the system
_HEAD_BYTES = 128 << 20  # of the model's head; a larger vocabulary is cut


@dataclass(frozen=True)
class Probe:
    """Medians over the steps: seconds of each layer and of the rest, and of a layer in a prefill of `PROMPT` tokens.

    `geometry` is that of the model tried, `length` the tokens of each sequence. `missed` is the part of the selected
    pages that had to be recalled, None if none were selected. `read` is the rate at which attention read all of a
    layer, in bytes a second.
    """

    geometry: ModelGeometry
    length: int
    layers: list[float]
    rest: float
    prompt_layer: float
    missed: float | None
    read: float


def shortened(config: PreTrainedConfig, layers: int, itemsize: int) -> PreTrainedConfig:
    """Copy a config for a model of its first `layers`, with a small head."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    before = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:  # one entry per layer
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    text.vocab_size = min(text.vocab_size, max(1024, _HEAD_BYTES // (text.hidden_size * itemsize)))
    if text.pad_token_id is not None and text.pad_token_id >= text.vocab_size:
        text.pad_token_id = None
    return config


def few_layers(
    config: PreTrainedConfig,
    geometry: ModelGeometry,
    dtype: torch.dtype,
    profile: Profile,
    context: int,
    batch: int,
    free: Mapping[str, int],
    most: int | None = None,
) -> tuple[PreTrainedConfig, int] | None:
    """Return the config of as many layers, and as long a context up to `context`, as `most` bytes hold.

    By default that is `TRIED_BYTES`. In any case there are layers of every kind that the model has, and more tokens
    than the budget. None if they exceed the `free` bytes of a pool of memory.
    """
    most = TRIED_BYTES if most is None else most
    parts, kinds = geometry.parts, kinds_of(geometry, profile.settings.leading_dense_layers)
    layer_bytes = (parts.projections + parts.mlp + parts.experts) // geometry.depth
    widest = max(layer.token_size for layer in geometry.layers)
    token_bytes = widest * dtype.itemsize * batch
    # At least one of each kind, and all layers before it; all, if a config counts those that read the KV of others.
    counted: int = config.get_text_config(decoder=True).num_hidden_layers  # longcat_flash counts attentions
    whole = geometry.shares or counted != geometry.depth
    fewest = len(kinds) if whole else 1 + max(kinds.index(kind) for kind in set(kinds))
    ample = (
        2 * getattr(profile.settings, "budget", 0) + 1024
    )  # tokens, more than the budget, so that there is something to select
    length = min(context, max(ample, (most // fewest - layer_bytes) // token_bytes))
    layers = min(len(kinds), max(fewest, most // (layer_bytes + length * token_bytes)))
    if 2 * layers * (layer_bytes + length * token_bytes) > min(free.values()):
        return None
    return shortened(config, counted if layers == geometry.depth else layers, dtype.itemsize), length


def kinds_of(geometry: ModelGeometry, dense: int) -> list[str]:
    """Name the kind of each decoder layer: the way in which it attends, and whether it keeps a state."""
    layers = iter(geometry.layers)
    ways = [" ".join(_kind(next(layers), dense) for _ in each.attention) for each in geometry.decoder]
    return [f"{way} {each.state is None}" for way, each in zip(ways, geometry.decoder, strict=True)]


def _kind(layer: LayerGeometry, dense: int) -> str:
    """Name the way in which a layer attends."""
    return "sliding" if layer.window is not None else "dense" if layer.index < dense else f"retrieval {layer.rate}"


@contextmanager
def on_noise(
    profile: Profile,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    length: int,
    sampling: Sampling,
    batch: int = 1,
    form: WeightForm | None = None,
    notice: Callable[[str], None] = lambda _: None,
    checked: bool = False,
) -> Iterator[tuple[Engine, list[RunningSequence], RandomKV]]:
    """Yield an engine of the model of `config` and `batch` sequences of `length` tokens of random KV, to be decoded.

    Its random weights are in `dtype`, or made in a `form` or in one like it. Sequences that are `checked` bring full
    attention with the same KV, for lossless decoding.
    """
    form = None if form is None or form.widened else form.made
    geometry = geometry_of(config, dtype, form)
    module = random_model(config, dtype, device, form).requires_grad_(False).train(False)
    settle(module, dtype)
    model = Model(module, WordlessTokenizer(), geometry, device, dtype, "made up", "dummy")  # type: ignore[arg-type]
    with engine(model, [length + sampling.max_tokens, PROMPT], notice) as ready:

        def made(profile: Profile) -> list[AnyMethod]:
            make = partial(get_method(profile.method), profile.settings, geometry.layers)  # the model is not known
            return [make(ready.context(length, sampling.max_tokens)) for _ in range(batch)]

        methods = made(profile)
        references = made(verifying_profile(device.type)) if checked else []
        noise = RandomKV(0, device, dtype)
        noise.fill([*methods, *references], geometry.layers, length)
        sequences = [
            ready.sequence(method, sampling, first_token=1, reference=reference)
            for method, reference in zip_longest(methods, references)
        ]
        yield ready, sequences, noise


def probe(
    profile: Profile,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    length: int,
    batch: int,
    form: WeightForm | None = None,
) -> Probe:
    """Run decode steps of `batch` sequences of `length` tokens through the model of `config`, and one prefill."""
    sampling = Sampling(max_tokens=WARMUP + STEPS + 1, ignore_eos=True)
    with on_noise(profile, config, dtype, device, length, sampling, batch, form) as (ready, sequences, noise):
        begun = _now(device)
        ready.prefill_into([1] * PROMPT, _NoConsumer())
        taken = (_now(device) - begun) / ready.depth
        _settle_allocator(device)
        with _clocked(ready.model.module, device) as moments:
            layers, rest = _decode(ready, sequences, moments)
    caches = [sequence.counters.cache() for sequence in sequences]
    requested = sum(cache.pages_requested for cache in caches)
    missed = sum(cache.misses for cache in caches) / requested if requested else None
    geometry = ready.model.geometry
    rate = _attention_rate(noise, geometry.layers[-1], length, device)
    return Probe(geometry, length, layers, rest, taken, missed, rate)


# What a rehearsal decodes, and the weights and KV that it takes unless a layer of every kind takes more.
_REHEARSED_BYTES = 32 << 20
_REHEARSED_TOKENS = 4


def rehearse(
    profile: Profile,
    checkpoint: Checkpoint,
    context: int,
    notice: Callable[[str], None],
    lossless: int | None = None,
) -> None:
    """Compile the loops of a prompt and of its steps, unless a run like it was rehearsed on this machine before.

    The prompt has `context` tokens; with `lossless`, full attention checks that many drafts in a pass. The note of a
    rehearsal lies beside the loops. The run itself compiles what was not rehearsed: layers that do not fit into the
    free memory, or that cannot be made without the rest of their model.
    """
    geometry, directory, form = checkpoint.geometry, kept_in(), checkpoint.geometry.form
    if checkpoint.device.type != "cpu" or checkpoint.placement is not None or directory is None:
        return
    profile = profile.for_prompt(context)
    widest = max((layer.token_size for layer in geometry.layers), default=0)
    if max(context * widest, geometry.parts.counts.head) < LEAST or not (form is None or form.widened or form.made):
        return
    free = available(checkpoint.place)
    found = few_layers(checkpoint.config, geometry, checkpoint.dtype, profile, context, 1, free, _REHEARSED_BYTES)
    if found is None:
        return
    config, length = found
    sampling = Sampling(max_tokens=_REHEARSED_TOKENS + (lossless or 0), ignore_eos=True)
    made = config, checkpoint.dtype, checkpoint.device, length, sampling
    run = environment(), config.to_json_string(), str(checkpoint.dtype), form and form.name, profile.hash, lossless
    like = json.dumps([*run, length.bit_length()])  # a loop serves from some number of tokens on
    note = directory / f"rehearsed-{hashlib.sha256(like.encode()).hexdigest()[:12]}"
    if note.exists():
        return
    with suppress(Exception):  # the run does not need this, and says itself what is wrong
        drafts = [lossless] if lossless is None else _drafts_of(lossless)
        checked = lossless is not None
        with on_noise(profile, *made, len(drafts), form, notice, checked) as (ready, sequences, _):
            ready.prefill_into([1] * PROMPT, _NoConsumer())
            for sequence, count in zip(sequences, drafts, strict=True):
                for _ in ready.decode([sequence], lossless=count):
                    pass
        note.touch()


def _drafts_of(most: int) -> list[int]:
    """List numbers of drafts for whose passes there are loops: the last passes of a text check fewer than `most`.

    A pass has a row for every draft and one for the token before them; loops serve powers of two rows.
    """
    return [most, *(rows - 1 for rows in (2**power for power in range(1, most.bit_length() + 1)) if rows - 1 < most)]


def _settle_allocator(device: torch.device) -> None:
    """Free a block as large as a prompt's intermediates, as a run has done when it decodes.

    The C library returns blocks to the system until one of their size was freed once; before that, every step would pay
    for faulting them in anew.
    """
    torch.empty(_FREED_BYTES, dtype=torch.uint8, device=device).fill_(0)


def _decode(ready: Engine, sequences: list[RunningSequence], moments: list[float]) -> tuple[list[float], float]:
    """Run steps, of which at most `STEPS` count; return median seconds of each layer, and of the rest."""
    totals: list[float] = []
    for _ in ready.decode(sequences):
        totals.append(sequences[0].decode_ms[-1] / 1000)
        if len(totals) >= WARMUP + _FEW and sum(totals) > SECONDS:
            break
    taken = [end - begin for begin, end in zip(moments[::2], moments[1::2], strict=True)]
    layers = ready.depth
    steps = [taken[step * layers : (step + 1) * layers] for step in range(WARMUP, len(totals))]
    rest = [total - sum(step) for total, step in zip(totals[WARMUP:], steps, strict=True)]
    return [statistics.median(times) for times in zip(*steps, strict=True)], statistics.median(rest)


@contextmanager
def _clocked(model: PreTrainedModel, device: torch.device) -> Iterator[list[float]]:
    """Yield a list of the moments at which each decoder layer begins and ends, one layer after another."""
    moments: list[float] = []

    def note(*_: Any) -> None:
        moments.append(_now(device))

    layers: Any = layers_of(model)
    hooks = [hook(note) for layer in layers for hook in (layer.register_forward_pre_hook, layer.register_forward_hook)]
    try:
        yield moments
    finally:
        for hook in hooks:
            hook.remove()


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


class RandomKV:
    """Seeded normal keys and values, the same in every layer and sequence; made on demand."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype):
        self.seed, self.device, self.dtype = seed, device, dtype
        self._kept = torch.empty(0)

    def kv(self, layer: LayerGeometry, context: int) -> Tensor:
        """Return keys and values [t, Hk, context, d] of a layer; do not change them."""
        shape = (layer.parts, layer.num_kv_heads, context, layer.head_dim)
        if self._kept.shape != shape:
            self._kept = torch.empty(0)  # the old one is freed before the new one is made
            self._kept = self.normal(*shape)
        return self._kept

    @torch.inference_mode()
    def fill(self, methods: Sequence[AnyMethod], layers: Sequence[LayerGeometry], context: int) -> None:
        """Pass noise to methods, layer by layer, as the prefill of `context` tokens would."""
        for layer in layers:
            k, v = both(self.kv(layer, context).to(methods[0].context.device(layer.index)))
            softmax = Softmax(layer.head_dim**-0.5)
            for method in methods:
                method.states.started = True  # on zeros
                rows = min(context, max(_QUERIES, method.query_rows))
                q = self.normal(layer.num_heads, rows, layer.head_dim).to(k.device)
                method.observe(layer.index, q, k, softmax)
                for part in method.repeated:
                    some = min(rows, part.stop - part.start)
                    method.observe_repeated(layer.index, part, q[:, rows - some :], k, softmax)
                method.prefill(layer.index, k, v, q[:, rows - min(rows, method.query_rows) :], softmax)

    def normal(self, *shape: int) -> Tensor:
        """Return the same noise for the same shape."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)


def _attention_rate(noise: RandomKV, layer: LayerGeometry, context: int, device: torch.device) -> float:
    """Measure the rate at which attention reads all of a layer, in bytes a second."""
    k, v = both(kv := noise.kv(layer, context))
    q = noise.normal(layer.num_heads, layer.head_dim)
    softmax = Softmax(layer.head_dim**-0.5)
    return nbytes(kv) / statistics.median(timed(lambda: decode_attention(q, k, v, softmax), device))


class WordlessTokenizer:
    """A tokenizer that spells nothing."""

    eos_token_id = None

    def decode(self, *_: Any, **__: Any) -> str:
        """Return no text."""
        return ""

    def get_added_vocab(self) -> dict[str, int]:
        """Return no special tokens."""
        return {}

    def __call__(self, *_: Any, **__: Any) -> dict[str, list[int]]:
        """Return no tokens."""
        return {"input_ids": []}


class _NoConsumer:
    """Takes a prompt's KV and keeps nothing."""

    query_rows = 0

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """See nothing."""

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Keep nothing."""
