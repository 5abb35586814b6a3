"""Steps over slots against the blocking pipeline: the same texts, the same counts, whatever the streams do."""

import statistics
import sys

import pytest
import torch
from engine import SPARE, new_method, run
from families import VOCAB, tiny_model
from interpreted import few_programs
from streams import Late

from kvcli.conformance.crossed import crossed
from kvcli.kernels import _triton
from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import LayerGeometry
from kvcli.runtime.gpu.pipeline import SlotPipeline
from kvcli.runtime.gpu.recorder import SerialStreams
from kvcli.runtime.gpu.stepper import SlotStepper

SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8}
# One has outgrown its budget, one does while it decodes, one never does.
LENGTHS = (91, 41, 7)


def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def outcome(sequences):
    """All that is told of a run, but its times."""
    reports = [sequence.report() for sequence in sequences]
    return [
        (r.token_ids, r.finish_reason, r.correction, r.cache, [(s.step, s.misses, s.bytes_to_host) for s in r.steps])
        for r in reports
    ]


@pytest.mark.parametrize(("method", "family"), crossed(["full", "streaming", "freekv"], ["gemma2", "qwen3", "phi3"]))
def test_every_family_and_method(family, method):
    model = tiny_model(family)
    settings = {"full": {}, "streaming": {"budget": 24}, "freekv": SMALL}[method]
    steps = (model, method, settings, prompts(), 18)
    assert outcome(run(*steps, streams=SerialStreams())) == outcome(run(*steps))


@pytest.mark.parametrize(
    "changed",
    [
        {"tau": 0.0},
        {"tau": 1.0},
        {"tau": 0.5, "correction_pooling": "max"},
        {"host_layout": "nhd"},
        {"recall": "copy"},
        {"recall": "copy", "double_buffer": False, "host_layout": "nhd"},
        {"pooling": "max_qk", "score_scale": False},
        {"window": 24, "dense_layers": 0},
    ],
    ids=str,
)
def test_every_setting(changed):
    steps = (tiny_model("llama"), "freekv", SMALL | changed, prompts(), 18)
    assert outcome(run(*steps, streams=SerialStreams())) == outcome(run(*steps))


@pytest.mark.parametrize(("tau", "seed"), crossed([0.0, 0.5, 1.0], range(4)))
def test_late_lanes_change_nothing(seed, tau):
    steps = (tiny_model("llama"), "freekv", SMALL | {"tau": tau}, prompts(), 20)
    streams = Late(seed, eagerness=(0.0, 0.2, 0.5, 0.8)[seed])
    assert outcome(run(*steps, streams=streams)) == outcome(run(*steps))
    assert streams.late > 0


def test_lanes_that_heed_nothing_are_found_out():
    steps = (tiny_model("llama"), "freekv", SMALL | {"tau": 0.5}, prompts(), 20)
    expected = outcome(run(*steps))
    assert any(outcome(run(*steps, streams=Late(seed, 0.5, heedless=True))) != expected for seed in range(6))


def test_a_sequence_that_ends_takes_part_no_more():
    model = tiny_model("llama")
    free = [sequence.token_ids for sequence in run(model, "freekv", SMALL, prompts(), 20)]
    stop = next(token for token in free[0][2:] if token not in free[1] + free[2])
    steps = (model, "freekv", SMALL, prompts(), 20)
    overlapped = run(*steps, eos=(stop,), streams=SerialStreams())
    assert outcome(overlapped) == outcome(run(*steps, eos=(stop,)))
    assert [sequence.finish_reason for sequence in overlapped] == ["eos", "length", "length"]


def test_steps_tried_out_before_the_start_change_nothing(monkeypatch):
    """As they are where a step is captured."""
    steps = (tiny_model("llama"), "freekv", SMALL, prompts(), 20)
    expected = outcome(run(*steps))
    tried = []
    original = SlotStepper._feed

    def feed(self):  # the last thing that is done before the first step
        if not tried:
            self.pipeline.lengths.seen.zero_()
            self.pipeline.lengths.running.zero_()
            for _ in range(3):
                self._run()
                tried.append(self.pipeline.lengths.seen.tolist())
            self.pipeline.start()
        original(self)

    monkeypatch.setattr(SlotStepper, "_feed", feed)
    assert outcome(run(*steps, streams=SerialStreams())) == expected
    assert tried == [[0, 0, 0]] * 3


def test_more_steps_than_the_log_holds(monkeypatch):
    monkeypatch.setattr("kvcli.runtime.gpu.layers.STEPS", 8)
    monkeypatch.setattr("kvcli.runtime.gpu.pipeline.STEPS", 8)
    steps = (tiny_model("llama"), "freekv", SMALL, prompts(), 27)
    assert outcome(run(*steps, streams=SerialStreams())) == outcome(run(*steps))


@pytest.mark.parametrize("name", ["freekv", "offload"])
def test_counting_makes_no_step_longer_than_the_others(name):
    """By a clock that ticks with every call of a function: of 1,000 steps of a batch of eight nothing but counting."""
    layers = [LayerGeometry(index, 4, 2, 8, None, True) for index in range(6)]
    length, softmax = 60, Softmax(1.0)
    wanted = SMALL if name == "freekv" else {}
    methods = [new_method(name, wanted, layers, length + 1000 + SPARE) for _ in range(8)]
    for method in methods:
        for layer in range(len(layers)):
            k, v = torch.randn(2, 2, length, 8)
            method.prefill(layer, k, v, k[:, :0], softmax)
    pipeline, ticks = SlotPipeline(methods, [length] * 8, SerialStreams()), []
    pipeline.start()
    pipeline.lengths.first = pipeline.lengths.seen = None  # on a device, whose present step would be waited for
    for _ in range(1000):
        for method in methods:
            method.context.counters.next_step()
        ticks.append(0)
        sys.setprofile(lambda *_: ticks.append(ticks.pop() + 1))
        pipeline.stepped()
        sys.setprofile(None)
    median, most = statistics.median(ticks), max(ticks)
    assert most <= 1.2 * median, f"{most} calls in one step, {median} in most"


def test_the_caller_has_its_tensors_back():
    """Queries, keys and values are the caller's again when a layer returns, whatever a stream still has to do."""
    h, hk, d, length, steps = 6, 2, 16, 60, 12
    softmax = Softmax(d**-0.5)
    layers = [LayerGeometry(index, h, hk, d, None, True) for index in range(3)]
    outs = []
    for streams in (SerialStreams(), Late(1, eagerness=0.1)):
        generator = torch.Generator().manual_seed(5)
        method = new_method("freekv", SMALL | {"tau": 0.3, "dense_layers": 0}, layers, length + steps + SPARE)
        for layer in range(3):
            k, v = torch.randn(2, hk, length, d, generator=generator)
            method.prefill(layer, k, v, k[:, :0], softmax)
        pipeline = SlotPipeline([method], [length], streams)
        pipeline.start()
        out = []
        for _ in range(steps):
            pipeline.advance()
            for layer in range(3):
                q, k, v = (torch.randn(1, heads, 1, d, generator=generator) for heads in (h, hk, hk))
                out.append(pipeline(layer, q, k, v, softmax).clone())
                for x in (q, k, v):
                    x.fill_(float("nan"))
            pipeline.settle()
            pipeline.stepped()
        outs.append(torch.stack(out))
    assert torch.equal(*outs)
    assert torch.isfinite(outs[0]).all()


def test_what_has_no_slots_is_refused():
    layers = [LayerGeometry(0, 4, 2, 8, None, True)]
    with pytest.raises(ValueError, match="cannot be served"):
        SlotPipeline([new_method("infllm", {}, layers, 50)], [5], SerialStreams())
    divided_later = new_method("shadowkv", {"plus": True, "budget": 8}, layers, 500, prompt_tokens=400)
    with pytest.raises(ValueError, match="cannot be served"):
        SlotPipeline([divided_later], [400], SerialStreams())


def test_kernels_do_what_their_references_do(monkeypatch):
    """The same steps by the Triton kernels, under their interpreter."""
    few_programs(monkeypatch)
    model = tiny_model("llama")
    steps = (model, "freekv", SMALL | {"tau": 0.5}, [prompts()[0][:58]], 6)
    expected = run(*steps, streams=SerialStreams())
    decoding = []
    original = SlotPipeline.start

    def start(self):
        decoding.append(monkeypatch.setattr(_triton, "on_cpu", True))  # from here on: the prompt was read before
        original(self)

    monkeypatch.setattr(SlotPipeline, "start", start)
    by_kernels = run(*steps, streams=SerialStreams())
    assert decoding
    assert outcome(by_kernels) == outcome(expected)
    assert by_kernels[0].report().correction.heads_corrected > 0
