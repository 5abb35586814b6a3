import pytest
import torch
from engine import run
from families import VOCAB, tiny_config, tiny_model

from kvcli.capacity import memory, roofline
from kvcli.capacity.roofline import (
    PHASES,
    MachineRates,
    Rate,
    RatesOverTime,
    Work,
    equivalent_bandwidth,
    least_seconds,
    measure_rates,
    rate_rows,
    step_work,
    timed,
)
from kvcli.inputs.profiles import resolve_profile
from kvcli.memory.tiers import Traffic
from kvcli.methods import get_method, method_names
from kvcli.models.geometry import geometry_of

SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8, "dense_layers": 1, "chunk": 4, "rank": 12}
SMALL |= {"outliers": 2, "local": 1, "prefill_window": 20, "group": 8}
CPU = torch.device("cpu")
LENGTH, HK, D, ITEM = 77, 2, 16, 4
TOKEN = 2 * HK * D * ITEM  # bytes of KV of a token in a layer


def profile(name, **settings):
    fields = get_method(name).Config.model_fields
    wanted = {key: value for key, value in {**SMALL, **settings}.items() if key in fields}
    return resolve_profile(method=name, overrides=wanted)


def traffic(name, length=LENGTH, layer=2, **settings):
    geometry = geometry_of(tiny_config("llama"), torch.float32)
    return memory.planned_method(profile(name, **settings), geometry, 200, torch.float32, 60).traffic(layer, length)


def test_a_dense_layer_reads_what_there_is():
    assert traffic("full") == Traffic(attended=LENGTH * TOKEN)
    assert traffic("freekv", layer=0) == Traffic(attended=LENGTH * TOKEN)


def test_streaming_reads_its_budget():
    assert traffic("streaming") == Traffic(attended=48 * TOKEN)
    assert traffic("streaming", length=31) == Traffic(attended=31 * TOKEN)


def test_pages_are_scored_by_their_bounds_and_recalled_where_they_are_away():
    pages = 10 - 1 - 1  # of 77 tokens, without sink and window
    attended = (48 - 3) * TOKEN  # the last page has 5 of its 8 tokens
    bounds, scores = pages * TOKEN, 4 * HK * pages
    assert traffic("quest") == Traffic(attended, bounds, scores)
    assert traffic("freekv") == Traffic(attended, bounds, scores, recalled=4 * 8 * TOKEN)


def test_the_equivalent_bandwidth_of_shadowkv_is_its_papers():
    """arXiv 2410.21465, section 4.2: an A100, 128K tokens, chunks of 8, 256 of them, 48 outliers, 60 % hits."""
    bus, memory_rate = Rate.given(31.5e9), Rate.given(2e12)
    rates = MachineRates(memory_rate, memory_rate, bus, bus, Rate.given(1.0))
    vector, length, chunk, chosen, outliers = 256, 128 << 10, 8, 256, 48
    work = dict.fromkeys(PHASES, Work(read=12345)) | {
        "score": Work(read=vector * length // chunk),
        "attention": Work(read=2 * vector * (chosen + outliers) * chunk, operations=1 << 60),
        "recall": Work(read=1 << 60, to_device=round(0.4 * vector * chosen * chunk), operations=1 << 60),
    }
    assert equivalent_bandwidth(work, 2 * vector * length, rates) == pytest.approx(7.2e12, rel=0.01)
    assert equivalent_bandwidth(dict.fromkeys(PHASES, Work()), 1, rates) is None


def test_only_the_bus_goes_on_beside_the_phases():
    rate = Rate.given(1.0)
    rates = MachineRates(read=rate, copy=rate, to_device=Rate.given(0.5), to_host=rate, matmul=rate)
    work = {
        "attention": Work(read=3),
        "mlp": Work(operations=4),
        "recall": Work(to_device=2),
        "offload": Work(to_host=9),
    }
    assert least_seconds(work, rates, overlapped=False) == 3 + 4 + 4 + 9
    assert least_seconds(work, rates, overlapped=True) == 9  # both ways at once
    assert least_seconds({**work, "offload": Work()}, rates, overlapped=True) == 3 + 4


@pytest.mark.parametrize("name", ["quest", "freekv", "fier", "shadowkv", "infllm"])
def test_within_the_budget_nothing_is_scored(name):
    assert traffic(name, length=40) == Traffic(attended=40 * TOKEN)


def test_single_tokens_are_scored_by_their_bits():
    groups, candidates = 8, LENGTH - 8 - 8  # the groups that hold a candidate
    codes, ranges = HK * groups * 8 * D // 8, groups * TOKEN
    assert traffic("fier") == Traffic(48 * TOKEN, codes + ranges, 4 * HK * candidates)
    assert traffic("fier", offload=True).recalled == (48 - 8 - 8) * TOKEN


def test_shadowkv_recalls_values_alone():
    chunks = 60 // 4 - 1  # of the prompt, without the local one
    found = traffic("shadowkv", budget=32)
    assert found.scored == chunks * TOKEN // 2
    assert found.recalled == 32 * TOKEN // 2
    assert found.attended == (2 * 4 + 32 + LENGTH - chunks * 4) * TOKEN


@pytest.mark.parametrize("name", method_names())
def test_traffic_is_that_of_a_run(name):
    """What a run counts is not more than what its method says on the meta device, and nothing is left unsaid."""
    model, chosen = tiny_model("llama"), profile(name)
    ids = torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    (sequence,) = run(model, name, chosen.settings.model_dump(), [ids], 9)
    geometry = geometry_of(model.config, model.dtype)
    capacity = sequence.method.context.capacity
    meta = memory.planned_method(chosen, geometry, capacity, model.dtype, len(ids), place=torch.device("cpu"))
    for layer in geometry.layers:
        stated = [meta.traffic(layer.index, 60 + step) for step in range(1, 9)]
        if not sequence.method.planned_is_bound:
            assert stated == [sequence.method.traffic(layer.index, 60 + step) for step in range(1, 9)]
        moved = sequence.counters.cache().layers[layer.index]
        if not (sequence.method.reads_by_chance or name == "offload"):  # which is read in its place on a CPU
            assert moved.bytes_to_device <= sum(step.recalled for step in stated)
        if moved.pages_requested:
            assert all(step.scored and step.scores for step in stated)
        held = meta.footprint().device + meta.footprint().host
        assert all(0 < step.attended <= held and step.scored <= held for step in stated)


def test_a_step_reads_every_weight_once_and_its_kv_for_each_sequence():
    geometry = geometry_of(tiny_config("llama"), torch.float32)
    method = memory.planned_method(profile("freekv"), geometry, 200, torch.float32)
    one, two = (step_work(geometry, ITEM, [(method, LENGTH)] * batch) for batch in (1, 2))
    assert tuple(one) == PHASES
    linear = sum(one[phase].read for phase in ("projections", "mlp"))
    embedding = VOCAB * geometry.hidden_size * ITEM
    assert linear + embedding + geometry.hidden_size * ITEM == geometry.weight_bytes  # the last norm's
    assert [two[phase].read for phase in ("projections", "mlp")] == [
        one[phase].read for phase in ("projections", "mlp")
    ]
    for phase in ("attention", "score", "select", "recall", "offload"):
        assert two[phase] == one[phase] + one[phase]
    assert one["offload"].to_host == 3 * TOKEN  # the first layer is dense
    assert one["recall"].to_device == 3 * 4 * 8 * TOKEN
    assert step_work(geometry, ITEM, [(method, LENGTH)], 0.5)["recall"].to_device == 3 * 2 * 8 * TOKEN
    assert one["attention"].operations == 2 * 2 * one["attention"].read // ITEM  # two query heads a KV head


def test_experts_that_no_token_goes_through_are_not_read():
    geometry = geometry_of(tiny_config("qwen3_moe"), torch.float32)
    parts = geometry.parts
    assert parts.experts == 4 * 4 * 3 * 64 * 32 * ITEM  # layers, experts, matrices
    assert parts.used(1) == parts.mlp + parts.experts // 2
    assert parts.used(2) == parts.mlp + parts.experts * 3 // 4
    assert parts.used(1000) == parts.mlp + parts.experts


def test_the_slowest_part_of_the_work_decides():
    rates = MachineRates(*(Rate.given(rate) for rate in (100.0, 50.0, 10.0, 20.0, 1000.0)))
    assert Work(read=500, to_device=20, to_host=20, operations=100).seconds(rates) == 5
    assert Work(read=500, to_device=90).seconds(rates) == 9
    assert Work(read=500, to_host=200).seconds(rates) == 10
    assert Work(operations=7000).seconds(rates) == 7
    assert Work().seconds(rates) == 0


def test_a_rate_is_the_median_with_its_spread():
    rate = Rate.of(12.0, [1.0, 4.0, 2.0])
    assert (rate.median, rate.least, rate.most) == (6.0, 3.0, 12.0)


def test_work_is_timed_after_one_run_that_is_not():
    calls = []
    seconds = timed(lambda: calls.append("work"), CPU, 3, before=lambda: calls.append("before"))
    assert len(seconds) == 3
    assert calls == ["before", "work"] * 4


def test_all_rates_are_measured(monkeypatch):
    monkeypatch.setattr(roofline, "_BUFFER_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(roofline, "_MATMUL_SIZE", {"cpu": 64})
    found = measure_rates(CPU, torch.bfloat16)
    for name, rate in found.as_dict().items():
        assert 0 < rate["least"] <= rate["median"] <= rate["most"], name
    assert found.to_device == found.to_host == found.copy
    assert found.read.median > 1e6  # bytes a second: no unit was lost


def test_rates_of_a_cpu_are_measured_again_when_they_are_old(monkeypatch):
    measured = [MachineRates(*[Rate(speed, speed / 2, 2 * speed)] * 5) for speed in (4.0, 1.0, 2.0)]
    clock = [0.0]
    monkeypatch.setattr(roofline, "measure_rates", lambda *_: measured[round(clock[0] / 10)])
    monkeypatch.setattr(roofline.time, "monotonic", lambda: clock[0])
    rates = RatesOverTime(CPU, torch.float32)
    seen = []
    for clock[0] in (0.5, 10.0, 10.5, 20.0):
        seen.append(rates.now())
    assert seen == [measured[0], measured[1], measured[1], measured[2]]
    assert rates.all == measured
    assert MachineRates.over(rates.all).read == Rate(2.0, 0.5, 8.0)


def test_rates_of_a_gpu_are_those_before_its_memory_was_taken(monkeypatch):
    monkeypatch.setattr(roofline, "measure_rates", lambda *_: object())
    monkeypatch.setattr(roofline, "OLD", -1.0)
    rates = RatesOverTime(torch.device("cuda"), torch.float32)
    assert rates.now() is rates.now() is rates.all[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_a_bus():
    found = measure_rates(torch.device("cuda"), torch.bfloat16)
    assert found.to_device.median < found.copy.median
    assert found.to_host.median < found.copy.median


def test_rates_are_shown_one_by_one():
    rates = MachineRates(*(Rate.given(rate) for rate in (12.34e9, 6e9, 1e9, 2e9, 0.125e12)))
    assert rate_rows(rates.as_dict()) == [
        ("memory read", "12.3 GB/s"),
        ("memory copy", "6.0 GB/s"),
        ("host to device", "1.0 GB/s"),
        ("device to host", "2.0 GB/s"),
        ("matrix products", "0.125 TFLOP/s"),
    ]


def floor(family):
    geometry = geometry_of(tiny_config(family), torch.float32)
    method = memory.planned_method(profile("full"), geometry, 200, torch.float32, 60)
    return geometry, step_work(geometry, ITEM, [(method, LENGTH)])


def test_the_floor_of_a_hybrid_counts_kv_of_the_layers_that_attend_and_the_states_of_the_others():
    geometry, work = floor("qwen3_5")
    convolution = (2 * 2 * 16 + 4 * 16) * 4  # channels of q and k (2 heads of 16) and v (4 of 16), the last 4 tokens'
    recurrence = 4 * 16 * 16  # a matrix for each value head
    assert work["mlp"].read == geometry.parts.used(1) + 2 * 2 * ITEM * (convolution + recurrence)  # read and written
    assert work["attention"].read == 2 * LENGTH * TOKEN
    assert work["attention"].operations == 2 * 2 * LENGTH * 4 * 2 * D  # 4 query heads, a key and a value of D each


def test_the_floor_of_latent_attention_reads_a_latent_once_for_all_heads():
    _, work = floor("deepseek_v3")
    heads, rank, rotary, content, value, hidden, layers = 4, 16, 8, 8, 12, 64, 4
    assert work["attention"].read == layers * LENGTH * ITEM * (rank + rotary)
    assert work["attention"].operations == layers * LENGTH * heads * 2 * 2 * (rank + rotary)
    queries = 24 * (hidden + 1 + heads * (content + rotary))  # down, norm, up
    latents = (rank + rotary) * hidden + rank + heads * (content + value) * rank
    out = heads * value * hidden
    assert work["projections"].read == ITEM * (layers * (queries + latents + out) + VOCAB * hidden)
