"""A step of whole models on a fake CUDA device: what transformers' modules do in it can be captured, too."""

from contextlib import nullcontext

import pytest
import torch
from fake_cuda import Watch, fake_cuda, method_on_fake_cuda, on_fake_cuda, parts_on_fake_cuda
from families import of_this_version

from kvcli.conformance.crossed import crossed
from kvcli.conformance.models import tiny_model
from kvcli.conformance.runs import in_memory
from kvcli.conformance.test_method import SMALL, prompt, settings
from kvcli.methods import get_method
from kvcli.models.latent import Latent
from kvcli.models.rope import RopeTable
from kvcli.runtime.engine import engine
from kvcli.runtime.gpu import piecewise, stepper
from kvcli.runtime.gpu.piecewise import PiecewiseStepper
from kvcli.runtime.gpu.recorder import SerialStreams
from kvcli.runtime.gpu.stepper import SlotStepper
from kvcli.runtime.sampling import Sampling

LENGTHS, STEPS = (75, 40), 9
KINDS = ("llama", "gemma2", "gpt_oss", "llama4", "deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_5", "minimax")
KINDS += ("falcon_h1", "jamba", "nemotron_h", "granitemoehybrid", "lfm2")


class NoGraph:
    """Records nothing: the step is run by the test, under watch."""

    def record(self, *_):
        """Do nothing."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_model_can_be_captured(kind, monkeypatch):
    model = tiny_model(kind).to(torch.bfloat16)  # experts' products are grouped on a GPU in this dtype alone
    sequences, method = [], get_method("freekv")
    with engine(in_memory(model), [length + STEPS for length in LENGTHS]) as ready:
        for index, length in enumerate(LENGTHS):
            made = method(method.Config(**settings("freekv", SMALL)), ready.layers, ready.context(length, STEPS))
            (logits,) = ready.prefill(prompt(index, length), [made])
            sequences.append(ready.sequence(made, Sampling(max_tokens=STEPS), index=index))
            sequences[-1].accept(logits)
        with fake_cuda(monkeypatch) as (launched, mode):
            ready.rope.use([length + STEPS for length in LENGTHS])
            tables = [row for row in ready.rope._rows if isinstance(row, RopeTable)]
            parts_on_fake_cuda([*model.modules(), *tables])
            ready.hook.latents = [Latent.of(module) for module in ready.hook.modules]
            for sequence in sequences:
                method_on_fake_cuda(sequence.method)
            monkeypatch.setattr(stepper, "fused_layers", lambda _: nullcontext())  # tries modules out on numbers
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
            step = SlotStepper(ready.hook, sequences, ready.rope, streams=SerialStreams(), recorder=NoGraph())
            places = [tensor for cache in step.states.caches for tensor in cache.tensors().values()]
            mode.from_host.clear()
            launched.clear()
            with Watch() as watch:
                step._run()
            after = [tensor for cache in step.states.caches for tensor in cache.tensors().values()]
    assert watch.faults == []
    assert mode.from_host == []
    assert launched
    assert step.tokens.is_cuda
    assert len(places) == len(after)
    assert all(one is other for one, other in zip(places, after, strict=True)), "states stay where they are"


SELECTING = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4", "dots3_note", "minimax_m3")


class Watched:
    """Runs pieces at once, under watch; nothing is recorded."""

    def __init__(self, mode):
        self.mode, self.watch, self.pieces = mode, Watch(), 1

    def record(self, rehearse, work):
        rehearse()
        self.mode.from_host.clear()
        with self.watch:
            work()
        self.watch.faults += self.mode.from_host

    def cut(self):
        self.pieces += 1


@pytest.mark.parametrize(("kind", "name"), crossed(SELECTING, ["full", "native"]))
def test_what_a_model_selects_by_can_be_captured_in_pieces(kind, name, monkeypatch):
    """Index keys are written, tokens scored and chosen without a number that the host knows."""
    model = tiny_model(of_this_version(kind)).to(torch.bfloat16)
    sequences, method = [], get_method(name)
    with engine(in_memory(model), [length + STEPS for length in LENGTHS]) as ready:
        for index, length in enumerate(LENGTHS):
            made = method(method.Config(), ready.layers, ready.context(length, STEPS))
            (logits,) = ready.prefill(prompt(index, length), [made])
            sequences.append(ready.sequence(made, Sampling(max_tokens=STEPS), index=index))
            sequences[-1].accept(logits)
        with fake_cuda(monkeypatch) as (_, mode):
            ready.rope.use([length + STEPS for length in LENGTHS])
            tables = [row for row in ready.rope._rows if isinstance(row, RopeTable)]
            parts_on_fake_cuda([*model.modules(), *tables])
            ready.hook.latents = [Latent.of(module) for module in ready.hook.modules]
            for cache in [cache for sequence in sequences for cache in sequence.method.caches]:
                held = "keys" if hasattr(cache, "keys") else "kv"
                setattr(cache, held, on_fake_cuda(getattr(cache, held)))
            monkeypatch.setattr(piecewise, "fused_layers", lambda _: nullcontext())  # tries modules out on numbers
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
            recorder = Watched(mode)
            step = PiecewiseStepper(ready.hook, sequences, ready.rope, recorder=recorder)
    assert recorder.watch.faults == []
    assert recorder.watch.kernels["topk"] > 0
    assert recorder.pieces == len(sequences[0].method.caches) + 1
    assert all(call.softmax.selected is None or call.softmax.selected.is_cuda for call in step.calls)
