"""A step of every method on a fake CUDA device: nothing that cannot be captured, and a budget of kernels a layer."""

import pytest
import torch
from fake_cuda import CUDA, Watch, fake_cuda, method_on_fake_cuda
from stated import HK, D, H, prefilled, settings, variants
from torch._subclasses.fake_tensor import DataDependentOutputException

from kvcli.kernels.norm_rope import Rotation
from kvcli.kernels.softmax import Softmax
from kvcli.runtime.gpu.pipeline import SlotPipeline
from kvcli.runtime.gpu.recorder import SerialStreams

LAYERS, LENGTH = 3, 131
BEYOND = LENGTH, 40  # one prompt of a batch is beyond the budget
# Kernels of a layer beside the model's own: Triton kernels, operations of torch.
BUDGET = {
    "arkvale": (3, 0),
    "cake": (1, 0),
    "duoattention": (2, 4),
    "expected_attention": (1, 0),
    "expected_attention-covariance": (1, 0),
    "expected_attention-value_norm": (1, 0),
    "fier": (6, 0),
    "fier-offload": (7, 0),
    "freekv": (7, 0),
    "freekv-score_scale": (7, 0),
    "freekv-double_buffer": (7, 0),
    "freekv_layer": (4, 1),
    "full": (1, 0),
    "h2o": (4, 2),
    "infinigen": (10, 1),
    "kvzip": (1, 0),
    "loki": (6, 0),
    "loki-offload": (8, 0),
    "offload": (3, 0),
    "pyramidkv": (1, 0),
    "quest": (3, 0),
    "quest-offload": (3, 0),
    "raas": (2, 0),
    "raas-contested": (4, 2),
    "refreekv": (1, 0),
    "shadowkv": (6, 0),
    "shadowkv-plus": (8, 0),
    "shadowkv-fp8": (6, 0),
    "snapkv": (1, 0),
    "streaming": (1, 0),
    "streaming-positions": (2, 0),
    "tokenselect": (5, 1),
    "tova": (4, 2),
    "twilight": (6, 0),
    "twilight-offload": (6, 0),
}


def cases():
    """Every method and switch after prompts beyond its budget; RaaS also where pages compete, none of the prompt's."""
    for case in variants(dense_layers=0):
        yield pytest.param(*case.values, BEYOND, id=case.id)
    yield pytest.param("raas", settings("raas"), (24, 17), id="raas-contested")


class FakeRotary:
    """A rotation of the right shapes."""

    def rotate(self, x, positions):
        return x.float() * positions.cos()[..., None]

    unrotate = rotate

    def rotation(self, d):
        tables = (torch.empty(LENGTH + 9, d, device=CUDA) for _ in range(2))
        names = (torch.empty(d, dtype=dtype, device=CUDA) for dtype in (torch.int32, torch.int32, torch.float32))
        return Rotation(*tables, *names)


ROTARY = FakeRotary()  # all sequences have the same frequencies


def moved(method):
    """Let a method be on the fake device, with a rotation that is there."""
    method.context.rotary = [ROTARY] * LAYERS
    return method_on_fake_cuda(method)


def traced(methods, lengths, monkeypatch, streams=None, heads=H, kv_heads=HK, d=D):
    """Run two steps of a batch: what its last layer launched in the second, by kind, and what it should not have done.

    A layer that chooses ahead is told its queries right before; what that launches counts as its own. Where a layer
    chooses for the next one, the last that does so counts.
    """
    softmax, b, dtype = Softmax(d**-0.5), len(lengths), methods[0].context.tiers.dtype
    with fake_cuda(monkeypatch) as (launched, mode):
        streams = streams or SerialStreams()
        pipeline = SlotPipeline([moved(method) for method in methods], lengths, streams)
        pipeline.start()
        q, k, v = (torch.empty(b, own, 1, d, dtype=dtype, device=CUDA) for own in (heads, kv_heads, kv_heads))
        for _ in range(2):
            launched.clear()
            mode.from_host.clear()
            with Watch() as watch:
                pipeline.advance()
                for layer in range(LAYERS - bool(pipeline.borrowing)):
                    before = sum(watch.kernels.values()), len(launched)
                    if hasattr(streams, "beside"):  # which counts kernels by stream
                        streams.beside.clear()
                        streams.count = lambda watch=watch: sum(watch.kernels.values()) + len(launched)
                    if layer in pipeline.predicted:
                        pipeline.predict(layer, q[:, :, 0], softmax.scale)
                    out = pipeline(layer, q, k, v, softmax)
                after = sum(watch.kernels.values()), len(launched)
                pipeline.settle()
        assert out.shape == (b, 1, heads, d)
        assert out.is_cuda
    torch_, triton = (end - begin for begin, end in zip(before, after, strict=True))
    return triton, torch_, [*watch.faults, *(f"{each} of the host's numbers" for each in mode.from_host)]


@pytest.mark.parametrize(("name", "switch", "lengths"), list(cases()))
def test_a_step_can_be_captured_and_keeps_to_its_budget(name, switch, lengths, monkeypatch, request):
    methods = [prefilled(name, switch, length, LAYERS) for length in lengths]
    kernels, operations, faults = traced(methods, lengths, monkeypatch)
    assert faults == []
    allowed = BUDGET[request.node.callspec.id]
    assert kernels <= allowed[0]
    assert operations <= allowed[1]


def test_what_cannot_be_captured_is_found(monkeypatch):
    with fake_cuda(monkeypatch) as (_, mode):
        x = torch.empty(4, device=CUDA)
        torch.tensor([1])  # which has to be copied to be of use
        with Watch() as watch:
            with pytest.raises(DataDependentOutputException):
                x.sum().item()
            with pytest.raises(RuntimeError, match=r"(?i)device"):  # torch 2.11 has no name for it
                x + torch.empty(4)
    assert watch.faults in (["_local_scalar_dense waits for the device"], ["item waits for the device"])
    assert mode.from_host == ["tensor"]
