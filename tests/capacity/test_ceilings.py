import pytest
import torch

from kvcli.capacity import ceilings
from kvcli.capacity.ceilings import Rate, measure_ceilings, timed

CPU = torch.device("cpu")


def test_a_rate_is_the_median_with_its_spread():
    rate = Rate.of(12.0, [1.0, 4.0, 2.0])
    assert (rate.median, rate.least, rate.most) == (6.0, 3.0, 12.0)


def test_work_is_timed_after_one_run_that_is_not():
    calls = []
    seconds = timed(lambda: calls.append("work"), CPU, 3, before=lambda: calls.append("before"))
    assert len(seconds) == 3
    assert calls == ["before", "work"] * 4


def test_all_ceilings_are_measured(monkeypatch):
    monkeypatch.setattr(ceilings, "_BUFFER", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "_SQUARE", {"cpu": 64})
    found = measure_ceilings(CPU, torch.bfloat16)
    for name, rate in found.as_dict().items():
        assert 0 < rate["least"] <= rate["median"] <= rate["most"], name
    assert found.to_device == found.to_host == found.copy
    assert found.read.median > 1e6  # bytes a second: no unit was lost


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_a_bus():
    found = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    assert found.to_device.median < found.copy.median
    assert found.to_host.median < found.copy.median
