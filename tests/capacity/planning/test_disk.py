"""Plans of runs with a disk below host memory."""

import pytest
import torch
from families import tiny_config

from kvcli.capacity.planning import tables
from kvcli.capacity.planning.estimate import Machine, PlannedRun
from kvcli.capacity.planning.plan import plan
from kvcli.capacity.roofline import MachineRates, Rate
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.options import DiskOptions
from kvcli.inputs.profiles import resolve_profile

SUBJECT = PlannedRun.of(tiny_config("llama"), torch.float32)
FREE = {"host": 1 << 40}
RATES = MachineRates(*(Rate.given(1e12) for _ in range(4)), Rate.given(1e15))


def planned(folder, size, names=("freekv", "offload"), batch=1):
    machine = Machine(torch.device("cpu"), FREE, None, here=False)
    profiles = [(name, resolve_profile(name)) for name in names]
    disk = None if folder is None else DiskOptions(folder, size)
    return list(plan(SUBJECT, machine, profiles, (20_000,), (batch,), 16, None, disk))


@pytest.mark.parametrize("batch", [1, 3])
def test_host_memory_is_what_is_given_and_the_disk_has_all(tmp_path, batch):
    size = batch << 20
    for with_disk, without in zip(planned(tmp_path, size, batch=batch), planned(None, 0, batch=batch), strict=True):
        brought = with_disk.need.kv.device - without.need.kv.device  # offload reads memory, but no disk, in its place
        assert brought > 0 if with_disk.label == "offload" else brought == 0
        assert 0.8 * size < with_disk.need.kv.host < 1.3 * size
        assert with_disk.need.kv.disk >= without.need.kv.host
        assert without.need.kv.disk == 0
        assert with_disk.as_dict()["memory"]["kv_disk"] == with_disk.need.kv.disk
        assert with_disk.needed["host"] < without.needed["host"]
        assert with_disk.fits
        assert "disk tier" in dict(tables.notes([with_disk], None, measured=False))


def test_a_step_reads_what_the_cache_does_not_hold(tmp_path):
    """Offloading asks for everything at every step: what lies on the disk alone is read."""
    machine = Machine(torch.device("cpu"), FREE, RATES, here=False)
    profiles, rate = [("offload", resolve_profile("offload"))], 1e6
    with_disk, without = (
        next(plan(SUBJECT, machine, profiles, (20_000,), (1,), 16, given, DiskOptions(tmp_path, 1 << 20)))
        for given in (rate, None)
    )
    kv = with_disk.need.kv
    assert with_disk.times.from_disk == pytest.approx(kv.disk - kv.host, rel=0.01)
    assert with_disk.times.step == with_disk.times.roofline == with_disk.times.from_disk / rate > without.times.step
    assert with_disk.as_dict()["times"]["bytes_from_disk"] == with_disk.times.from_disk
    assert "requests all KV evenly" in dict(tables.notes([with_disk], RATES, measured=False))["disk tier"]
    assert without.times.from_disk == 0
    assert "give --disk-rate" in dict(tables.notes([without], RATES, measured=False))["disk tier"]


def test_what_fits_into_host_memory_needs_no_disk(tmp_path):
    for found, without in zip(planned(tmp_path, 1 << 35), planned(None, 0), strict=True):
        assert found.need == without.need


def test_methods_without_kv_in_host_memory_are_planned_beside_others_and_refused_alone(tmp_path):
    full, freekv = planned(tmp_path, 1 << 20, ("full", "freekv"))
    assert (full.tier, full.need.kv.disk) == (None, 0)
    assert freekv.need.kv.disk > 0
    with pytest.raises(KvcliError, match="full") as caught:
        planned(tmp_path, 1 << 20, ("full",))
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_disk_without_room_does_not_fit(tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    for found in planned(tmp_path, 1 << 20):
        assert not found.fits
        assert 0 < found.longest < 20_000
