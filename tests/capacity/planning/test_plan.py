import pytest
import torch
from families import tiny_config

from kvcli.capacity import memory
from kvcli.capacity.planning.estimate import Machine, PlannedRun
from kvcli.capacity.planning.plan import plan
from kvcli.inputs.profiles import resolve_profile

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SUBJECT = PlannedRun.of(tiny_config("llama"), torch.float32)


def planned(free, contexts=(2000,), batches=(1,), names=("freekv",), device=CPU):
    machine = Machine(device, free, None, here=False)
    profiles = [(name, resolve_profile(name)) for name in names]
    return list(plan(SUBJECT, machine, profiles, contexts, batches, 16))


def test_every_combination_is_planned_in_order():
    found = planned({"host": 1 << 40}, (100, 200), (1, 3), ("full", "quest"))
    assert [(each.label, each.context, each.batch) for each in found] == [
        (name, context, batch) for name in ("full", "quest") for context in (100, 200) for batch in (1, 3)
    ]


def test_a_share_is_planned_in_tokens_of_each_context():
    machine = Machine(torch.device("cpu"), {"host": 1 << 40}, None, here=False)
    profile = resolve_profile("snapkv", overrides={"budget": "25%"})
    found = list(plan(SUBJECT, machine, [("snapkv 25%", profile)], (400, 800), (1,), 16))
    assert [each.as_dict()["profile"]["settings"]["budget"] for each in found] == [100, 200]
    assert [each.label for each in found] == ["snapkv 25% = 100", "snapkv 25% = 200"]
    assert found[0].need.kv.device < found[1].need.kv.device


@pytest.mark.parametrize("batch", [1, 2])
def test_the_longest_context_is_where_generate_begins_to_refuse(batch):
    free = {"host": 600 << 20}
    (found,) = planned(free, batches=[batch])

    def needed(length):
        lengths = [length] * batch
        need = memory.need(resolve_profile("freekv"), SUBJECT.geometry, SUBJECT.dtype, lengths, 16, 1)
        return need.on(CPU)

    assert memory.fits(needed(found.longest), free)
    assert not memory.fits(needed(found.longest + 1), free)
    assert found.fits == (found.longest >= 2000)
    assert found.needed == needed(2000)


def test_a_gpu_has_two_pools():
    (found,) = planned({"device": 1 << 30, "host": 1 << 30}, device=CUDA)
    assert set(found.needed) == {"device", "host"}
    assert found.needed["host"] == found.need.kv.host + memory.RUNTIME_BYTES
    (crowded,) = planned({"device": 1 << 30, "host": memory.RUNTIME_BYTES + (1 << 20)}, device=CUDA)
    assert not crowded.fits
    assert 1300 < crowded.longest < (1 << 20) / (3 * 2 * 2 * 16 * 4)  # bytes of a token in three layers


def test_nothing_fits_or_everything():
    (nothing,) = planned({"host": 1000})
    assert (nothing.longest, nothing.fits) == (0, False)
    (everything,) = planned({"host": 1 << 60})
    assert (everything.longest, everything.fits) == (None, True)
    assert everything.as_dict()["longest_context"] is None


def test_without_rates_there_are_no_times():
    (found,) = planned({"host": 1 << 40})
    assert found.times is None
    assert found.as_dict()["times"] is None
    assert found.as_dict()["basis"]["times"].startswith("not known")
