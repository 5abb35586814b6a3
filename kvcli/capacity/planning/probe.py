"""A few layers of a model, run as `generate` runs them: what a decode step and a prefill take here, without weights.

The layers are made up of random numbers, and so is the KV that a method is given: times depend on shapes, and on how
far queries turn from one step to the next. With random weights they turn completely, so that methods that recall what
a query wants recall most of it: their worst case.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvcli.capacity.roofline import synchronize, timed
from kvcli.inputs.profiles import Profile
from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.softmax import Softmax
from kvcli.methods import get_method
from kvcli.methods.base import Method, SequenceContext
from kvcli.models.dummy import random_model
from kvcli.models.geometry import ModelGeometry, decoder_of, geometry_of
from kvcli.models.rope import Rope, Rotary, installed
from kvcli.runtime.attention_hook import Hook, attached
from kvcli.runtime.decode import forward_step
from kvcli.runtime.detokenizer import StreamingDetokenizer
from kvcli.runtime.linear import onednn_linears
from kvcli.runtime.prefill import prefill
from kvcli.runtime.sampling import Sampler, Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.store.cache import Tiers, nbytes
from kvcli.telemetry.counters import Counters
from kvcli.telemetry.timeline import Timeline

WARMUP, STEPS = 2, 32
SECONDS = 2.0  # after which no further step is begun once there are a few
_FEW = 6
PROMPT = 256  # tokens of the prefill that is timed
_FREED_BYTES = 24 << 20  # less than the 32 MiB from which glibc always asks the system
_HEAD_BYTES = 128 << 20  # of the model's head; a larger vocabulary is cut


@dataclass(frozen=True)
class Probe:
    """Medians over the steps: seconds of each layer and of all else, and of a layer in a prefill of `PROMPT` tokens.

    `geometry` is that of the model tried, `length` the tokens of each sequence. `missed` is the part of what was
    selected that had to be recalled, None where nothing was. `read` is what attention to all of a layer read, in bytes
    a second.
    """

    geometry: ModelGeometry
    length: int
    layers: list[float]
    rest: float
    prompt_layer: float
    missed: float | None
    read: float


def shortened(config: PreTrainedConfig, layers: int, itemsize: int) -> PreTrainedConfig:
    """Copy a config for a model of its first `layers`, with a head that is quickly made."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    before = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:  # one entry a layer
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    text.vocab_size = min(text.vocab_size, max(1024, _HEAD_BYTES // (text.hidden_size * itemsize)))
    if text.pad_token_id is not None and text.pad_token_id >= text.vocab_size:
        text.pad_token_id = None
    return config


def probe(
    profile: Profile,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    length: int,
    batch: int,
) -> Probe:
    """Run decode steps of `batch` sequences of `length` tokens through the model of `config`, and one prefill."""
    geometry = geometry_of(config, dtype)
    capacity = length + WARMUP + STEPS + 1
    model = random_model(config, dtype, device).requires_grad_(False).train(False)
    with attached(model) as hook, onednn_linears(model), installed(model, [capacity, PROMPT]) as rope:
        clock = _Clock(device)
        rope.use([PROMPT])
        clock.begin()
        prefill(model, hook, [1] * PROMPT, _Nobody(), geometry.layers, lambda _: None)
        taken = clock.stop() / len(geometry.layers)
        sequences = [
            _sequence(index, profile, geometry, rope.rotary(capacity), dtype, device, length) for index in range(batch)
        ]
        k, v = _fill([sequence.method for sequence in sequences], geometry, length, dtype, device)
        _settle_allocator(device)
        with _clocked(model, clock):
            layers, rest = _decode(model, hook, rope, sequences, clock)
    caches = [sequence.counters.cache() for sequence in sequences]
    requested = sum(cache.pages_requested for cache in caches)
    missed = sum(cache.misses for cache in caches) / requested if requested else None
    return Probe(geometry, length, layers, rest, taken, missed, _attention_rate(k, v, geometry, device))


def _settle_allocator(device: torch.device) -> None:
    """Free what a prompt's intermediates take, as a run has done when it decodes.

    The C library gives blocks back to the system until one of their size was freed once; before that, every step would
    pay for faulting them in anew.
    """
    torch.empty(_FREED_BYTES, dtype=torch.uint8, device=device).fill_(0)


def _decode(
    model: PreTrainedModel, hook: Hook, rope: Rope, sequences: list[RunningSequence], clock: _Clock
) -> tuple[list[float], float]:
    """Run steps, at most `STEPS` that count: median seconds of each layer, and of all else."""
    totals: list[float] = []
    while len(totals) < WARMUP + STEPS and (len(totals) < WARMUP + _FEW or sum(totals) < SECONDS):
        clock.start()
        for sequence in sequences:
            sequence.counters.next_step()
        logits = forward_step(model, hook, sequences, rope)
        for sequence, row in zip(sequences, logits, strict=True):
            sequence.accept(row)
        totals.append(clock.stop())
    steps = clock.steps[WARMUP:]
    rest = [total - sum(step) for total, step in zip(totals[WARMUP:], steps, strict=True)]
    return [statistics.median(times) for times in zip(*steps, strict=True)], statistics.median(rest)


def _sequence(
    index: int,
    profile: Profile,
    geometry: ModelGeometry,
    rotary: Sequence[Rotary | None],
    dtype: torch.dtype,
    device: torch.device,
    length: int,
) -> RunningSequence:
    context = SequenceContext(
        capacity=length + WARMUP + STEPS + 1,
        tiers=Tiers.for_device(device, dtype),
        counters=Counters(len(geometry.layers)),
        timeline=Timeline(),
        rotary=rotary,
        prompt_tokens=length,
    )
    return RunningSequence(
        index=index,
        source="made up",
        sample=0,
        prompt_tokens=length,
        method=get_method(profile.method)(profile.settings, geometry.layers, context),
        counters=context.counters,
        sampler=Sampler(Sampling(), 0, device),
        stream=StreamingDetokenizer(_NoText()),  # type: ignore[arg-type]
        eos=(),
        max_tokens=WARMUP + STEPS + 2,
        prefill_ms=0.0,
        token_ids=[1],
    )


@torch.inference_mode()
def _fill(
    methods: list[Method[Any, Any]], geometry: ModelGeometry, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Give every layer of every method made-up KV of `length` tokens; returns one layer's."""
    generator = torch.Generator(device).manual_seed(0)

    def noise(heads: int, tokens: int, d: int) -> Tensor:
        return torch.randn(heads, tokens, d, generator=generator, dtype=dtype, device=device)

    made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for layer in geometry.layers:
        shape = layer.num_kv_heads, layer.head_dim
        if shape not in made:
            made[shape] = noise(shape[0], length, shape[1]), noise(shape[0], length, shape[1])
        k, v = made[shape]
        softmax = Softmax(layer.head_dim**-0.5)
        for method in methods:
            q = noise(layer.num_heads, min(length, max(1, method.query_rows)), layer.head_dim)
            method.observe(layer.index, q, k, softmax)
            method.prefill(layer.index, k, v, q[:, q.shape[1] - min(length, method.query_rows) :], softmax)
    return k, v


def _attention_rate(k: Tensor, v: Tensor, geometry: ModelGeometry, device: torch.device) -> float:
    """Bytes a second that attention reads all of a layer with, k and v [Hk, n, d]."""
    layer = geometry.layers[-1]
    q = torch.randn(layer.num_heads, layer.head_dim, device=device).to(k.dtype)
    softmax = Softmax(layer.head_dim**-0.5)
    return nbytes(k, v) / statistics.median(timed(lambda: decode_attention(q, k, v, softmax), device))


class _Clock:
    """Times the layers of a step, the device waited for at every reading."""

    def __init__(self, device: torch.device):
        self.device = device
        self.steps: list[list[float]] = []
        self._layer = self._step = 0.0

    def start(self) -> None:
        """A step begins."""
        self.steps.append([])
        self.begin()

    def begin(self) -> None:
        """Something begins."""
        self._step = self._now()

    def stop(self) -> float:
        """It has ended: its seconds."""
        return self._now() - self._step

    def enter(self, *_: Any) -> None:
        """A layer begins."""
        self._layer = self._now()

    def leave(self, *_: Any) -> None:
        """A layer has ended."""
        self.steps[-1].append(self._now() - self._layer)

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


@contextmanager
def _clocked(model: PreTrainedModel, clock: _Clock) -> Iterator[None]:
    hooks = []
    for layer in decoder_of(model).layers:  # type: ignore[union-attr]
        hooks += [layer.register_forward_pre_hook(clock.enter), layer.register_forward_hook(clock.leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _NoText:
    """A tokenizer that spells nothing."""

    def decode(self, *_: Any, **__: Any) -> str:
        """Nothing."""
        return ""


class _Nobody:
    """Whoever wants no prompt."""

    query_rows = 0

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """See nothing."""

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Keep nothing."""
