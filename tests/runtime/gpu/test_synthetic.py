import pytest
import torch
from engine import SPARE, new_method

from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import LayerGeometry
from kvcli.runtime.gpu.pipeline import DecisionRates, SlotPipeline
from kvcli.runtime.gpu.recorder import SerialStreams
from kvcli.telemetry.counters import Count

H, HK, D, LENGTH, STEPS = 8, 4, 8, 400, 40
SETTINGS = {"budget": 128, "sink": 16, "window": 32, "page_size": 8, "dense_layers": 0}


@pytest.mark.parametrize(("corrected", "turnover"), [(0.0, 0.2), (0.3, 0.2), (1.0, 0.5), (0.5, 0.0)])
def test_rates_are_what_happens(corrected, turnover):
    layers = [LayerGeometry(index, H, HK, D, None, True) for index in range(3)]
    method = new_method("freekv", SETTINGS, layers, LENGTH + STEPS + SPARE)
    for layer in range(3):
        k, v = torch.randn(2, HK, LENGTH, D)
        method.prefill(layer, k, v, k[:, :0], Softmax(1.0))
    pipeline = SlotPipeline([method], [LENGTH], SerialStreams(), DecisionRates(corrected, turnover))
    pipeline.start()
    for _ in range(STEPS):
        method.context.counters.next_step()
        pipeline.advance()
        for layer in range(3):
            pipeline(layer, *(torch.randn(1, heads, 1, D) for heads in (H, HK, HK)), Softmax(1.0))
        pipeline.settle()
        pipeline.stepped()
    pipeline.count()
    counts = torch.tensor(method.context.counters.counts)[1:]  # in the first step nothing is there yet
    selected = pipeline.layers[0].rows.layout.selected
    misses = counts[..., Count.MISSES]
    assert (misses == HK * round(turnover * selected)).all()
    exposed = counts[..., Count.BYTES_EXPOSED].sum() / max(1, int(counts[..., Count.BYTES_TO_DEVICE].sum()))
    if turnover:
        assert abs(float(exposed) - corrected) < 0.12
