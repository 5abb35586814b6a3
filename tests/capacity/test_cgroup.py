"""Limits of a container, read from files as the system writes them."""

import psutil
import pytest
import torch

from kvcli.capacity import cgroup as control_group
from kvcli.capacity import memory

GIB = 1 << 30


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(control_group, "ROOT", tmp_path)

    def write(**files):
        for name, text in files.items():
            (tmp_path / name.replace("_", ".", 1)).write_text(f"{text}\n")

    return write


def test_without_a_group_there_is_no_limit(group):
    assert control_group.memory_limit() is control_group.memory_free() is control_group.cpu_quota() is None
    group(memory_max="max", cpu_max="max 100000")
    assert control_group.memory_limit() is control_group.memory_free() is control_group.cpu_quota() is None


def test_what_is_left_does_not_count_cached_files(group):
    group(memory_max=4 * GIB, cpu_max="50000 100000")
    assert control_group.cpu_quota() == 0.5
    assert control_group.memory_free() == 4 * GIB
    group(memory_current=3 * GIB, memory_stat=f"anon {GIB}\ninactive_file {GIB}\nactive_file 7")
    assert control_group.memory_free() == 2 * GIB
    group(memory_current=6 * GIB)
    assert control_group.memory_free() == 0


def test_a_run_is_held_against_the_containers_limit(group):
    here = memory.available(torch.device("cpu"))["host"]
    assert here == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    group(memory_max=1 << 20)
    assert memory.available(torch.device("cpu")) == {"host": 1 << 20}
