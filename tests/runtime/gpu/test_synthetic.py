import pytest
import torch
from engine import SPARE, new_method
from fake_cuda import NOTHING
from kernel_modules import kernel_modules
from torch.utils._python_dispatch import TorchDispatchMode

from kvcli.kernels import _triton
from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import LayerGeometry
from kvcli.runtime.gpu.pipeline import DecisionRates, SlotPipeline
from kvcli.runtime.gpu.recorder import SerialStreams
from kvcli.telemetry.counters import Count

H, HK, D, LENGTH, STEPS = 8, 4, 8, 400, 70
SETTINGS = {"budget": 128, "sink": 16, "window": 32, "page_size": 8, "dense_layers": 0}


def prefilled(rates):
    """A pipeline over a prompt beyond its budget, and its method."""
    layers = [LayerGeometry(index, H, HK, D, None, True) for index in range(3)]
    method = new_method("freekv", SETTINGS, layers, LENGTH + STEPS + SPARE)
    for layer in range(3):
        k, v = torch.randn(2, HK, LENGTH, D)
        method.prefill(layer, k, v, k[:, :0], Softmax(1.0))
    return SlotPipeline([method], [LENGTH], SerialStreams(), rates), method


def step(pipeline):
    pipeline.advance()
    for layer in range(3):
        pipeline(layer, *(torch.randn(1, heads, 1, D) for heads in (H, HK, HK)), Softmax(1.0))
    pipeline.settle()


@pytest.mark.parametrize(("corrected", "turnover"), [(0.0, 0.2), (0.3, 0.2), (1.0, 0.5), (0.5, 0.0)])
def test_rates_are_what_happens(corrected, turnover):
    pipeline, method = prefilled(DecisionRates(corrected, turnover))
    for _ in range(3):
        step(pipeline)  # as before a capture: nothing is brought
    pipeline.start()
    for _ in range(STEPS):
        method.context.counters.next_step()
        step(pipeline)
        pipeline.stepped()
    pipeline.count()
    counts = torch.tensor(method.context.counters.counts)[1:]  # in the first step nothing is there yet
    selected = pipeline.layers[0].rows.layout.selected
    misses = counts[..., Count.MISSES]
    assert (misses == HK * round(turnover * selected)).all()
    exposed = counts[..., Count.BYTES_EXPOSED].sum() / max(1, int(counts[..., Count.BYTES_TO_DEVICE].sum()))
    first = torch.tensor(method.context.counters.counts)[0, :, Count.MISSES]
    assert (first == HK * selected).all()
    if turnover:
        assert abs(float(exposed) - corrected) < 0.12


class Operations(TorchDispatchMode):
    """Counts operations of torch that launch a kernel on a device."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.names += [] if func.is_view or name in NOTHING else [name]
        return func(*args, **(kwargs or {}))


def test_a_step_launches_what_a_real_one_does_and_few_operations_more(monkeypatch):
    """What is forced is to cost next to nothing: its steps are held against those of others."""
    launched = []
    for module in kernel_modules():
        for name, stand_in in (("launch", lambda kernel, *_, **__: launched.append(kernel.__name__)),
                               ("multiprocessors", lambda _: 132)):  # fmt: skip
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    found = {}
    for rates in (None, DecisionRates(0.3, 0.2)):
        pipeline, _ = prefilled(rates)
        pipeline.start()
        monkeypatch.setattr(_triton, "on_cpu", True)
        launched.clear()
        with Operations() as operations:
            step(pipeline)
        monkeypatch.setattr(_triton, "on_cpu", False)
        found[rates is None] = list(launched), operations.names
    (forced, more), (real, fewer) = found[False], found[True]
    assert forced == real
    assert len(real) > 3 * 5
    assert len(more) - len(fewer) <= 8
    assert not {"sort", "argsort"} & {*more}
