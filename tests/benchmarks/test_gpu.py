"""`benchmarks/gpu.py` where there is no GPU: its frame, its arithmetic, and a part of its smoke run."""

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from registrar import FakeRegistrar
from triton_cases import CASES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import common  # noqa: E402
import gpu  # noqa: E402
from gpu_parts import (  # noqa: E402
    agreement,
    clock,
    device,
    made_up,
    methods,
    peers,
    products,
    steps,
    targets,
)
from gpu_parts.frame import Ended, Found, NotHere, in_processes  # noqa: E402
from gpu_parts.made_up import SharedHost  # noqa: E402
from gpu_parts.setting import smoke  # noqa: E402

from kvcli.bench.phases import Kernel  # noqa: E402
from kvcli.inputs.profiles import resolve_profile  # noqa: E402
from kvcli.memory.pinned import PinnedAllocator  # noqa: E402
from kvcli.methods import get_method, method_names  # noqa: E402
from kvcli.methods.card import GRAPH, PIECEWISE, gpu_step_of  # noqa: E402
from kvcli.runtime import engine as engine_module  # noqa: E402
from kvcli.runtime.gpu.fused import GpuKernels  # noqa: E402
from kvcli.telemetry.counters import Count, Counters  # noqa: E402


def rows(*found, then=lambda: None):
    yield from ({"found": each} for each in found)
    then()


def fail():
    raise ValueError("two\nlines")


def not_here():
    raise NotHere("no such thing")


def outcomes(limit=30.0, at_once=1, **works):
    found = {}
    for name, message in in_processes(works, limit, at_once):
        found.setdefault(name, []).append(message if isinstance(message, Ended) else message["found"])
    return found


def test_rows_and_ends_of_processes():
    found = outcomes(
        good=partial(rows, 1, 2),
        bad=partial(rows, 3, then=fail),
        dead=partial(rows, 4, then=partial(os._exit, 7)),
        elsewhere=partial(rows, then=not_here),
        last=partial(rows, 5),
    )
    assert found["good"] == [1, 2, Ended()]
    assert found["bad"][0] == 3
    assert found["bad"][1].error.startswith("ValueError: two (tests/benchmarks/test_gpu.py:")
    assert found["dead"] == [4, Ended("the process died with exit code 7")]
    assert found["elsewhere"] == [Ended("no such thing", not_here=True)]
    assert found["last"] == [5, Ended()]


def test_what_hangs_is_stopped_and_leaves_the_others_alone():
    hang = partial(rows, 1, then=partial(time.sleep, 60))
    started = time.monotonic()
    found = outcomes(limit=2.0, at_once=2, first=hang, second=hang, third=partial(rows, 2))
    assert time.monotonic() - started < 30
    assert found == {"first": [1, Ended("stopped after 2 s")], "second": [1, Ended("stopped after 2 s")],
                     "third": [2, Ended()]}  # fmt: skip


def test_what_it_has_started_is_stopped_too(tmp_path):
    mark = tmp_path / "mark"

    def inner():
        time.sleep(2.5)
        mark.touch()
        yield {}

    def outer():
        for _ in in_processes({"inner": inner}, 60.0):
            yield {}

    assert outcomes(limit=1.0, outer=outer)["outer"] == [Ended("stopped after 1 s")]
    time.sleep(2.5)
    assert not mark.exists()


def results(**parts):
    return {name: {"state": "done", "error": None, "rows": found} for name, found in parts.items()}


def step(case, *rounds, **more):
    return {"case": case, "rounds_ms": list(rounds), "step_ms": {"median": sorted(rounds)[len(rounds) // 2]}, **more}


def judged(found, what):
    return next(row for row in targets.judged(found) if row["what"].startswith(what))


def test_ratios_are_taken_round_by_round():
    speed = [
        step("streaming", 4.0, 8.0, 4.0),
        step("freekv 0%", 4.0, 8.0, 4.0),
        step("freekv 10%", 4.1, 8.2, 4.1),
        step("freekv 30%", 4.4, 8.0, 4.2, floor_ms=4.0),
        step("freekv 100%", 6.0, 8.8, 4.4),
    ]
    found = results(speed=speed)
    assert judged(found, "freekv, no head")["measured"] == 1
    some = judged(found, "freekv, 10 and 30 %")
    assert (some["measured"], some["least"], some["most"]) == pytest.approx((1.05, 1.0, 1.1))
    assert some["met"]
    assert judged(found, "freekv, all")["measured"] == pytest.approx(1.1)
    floor = judged(found, "freekv against the floor, short")
    assert floor["measured"] == pytest.approx(1.1)
    assert targets.target_line(floor).endswith("1.10 x (1.05 to 2.00)      wanted <= 1.3: met")


def test_bounds_have_sides():
    looped = {"median": 5.0, "min": 4.0, "max": 8.0}
    own = step("freekv 30%", 3.0, 3.0, 3.0, floor_ms=None, looped_ms=looped)
    peers = [own, step("transformers", 19.0), step("transformers offloaded", 400.0)]
    found = results(peers=peers, batch=[step("batch 1", 4.0, 4.0), step("batch many", 6.0, 6.4, batch=8)])
    resident = judged(found, "transformers, resident")
    assert (resident["measured"], resident["least"], resident["most"]) == pytest.approx((3.8, 19 / 8, 19 / 4))
    assert not resident["met"]
    assert judged(found, "transformers, offloaded")["met"]
    assert judged(found, "tokens a second")["measured"] == pytest.approx((8 * 4 / 6 + 8 * 4 / 6.4) / 2)
    assert judged(found, "freekv against the floor, middle")["missing"].startswith("rates")


def test_reading_and_recall():
    above = {"above_bytes": 3 << 29}
    reading = [
        {"case": "kvcli", "seconds": 10.0, **above},
        {"case": "transformers", "seconds": 10.0},
        {"case": "kvcli", "seconds": 11.0, **above},
        {"case": "transformers", "seconds": 10.0},
        {"case": "kvcli", "seconds": 12.0, **above},
    ]
    of_plain = {"median": 0.84, "min": 0.8, "max": 0.9}
    gathered = {"layout": "hnd", "missing": 1.0, "default": True, "of_plain": of_plain}
    found = results(reading=reading, rates=[{**gathered, "default": False}, gathered])
    last = judged(found, "prefill against")
    assert (last["measured"], last["least"], last["most"]) == (1.1, 1.0, 1.1)
    assert judged(found, "prefill, device memory") | {"met": True} == judged(found, "prefill, device memory")
    recall = judged(found, "recall")
    assert (recall["measured"], recall["met"]) == (pytest.approx(84), False)


def test_what_was_not_measured_is_not_judged():
    parts = {"speed": {"state": "not finished", "error": "stopped after 60 s", "rows": [step("streaming", 1.0)]}}
    table = targets.judged(parts)
    assert all(row["met"] is None and row["measured"] is None for row in table)
    assert "speed: stopped after 60 s" in targets.target_line(table[0])
    assert "peers: not asked for" in targets.target_line(judged(parts, "transformers, resident"))


def test_nothing_measured_on_a_cpu_is_judged():
    found = results(speed=[step("streaming", 1.0), step("freekv 100%", 1.0)])
    assert judged(found, "freekv, all")["met"]
    assert all(row["met"] is None for row in targets.judged(found, judge=False))


def test_the_ablation_says_what_is_without_speculation():
    cases = steps.ablated(100)
    assert len({case.name for case in cases}) == len(cases) == 7
    assert all((case.corrected == 1.0) == ("no speculation" in case.name) for case in cases)


def test_turns_are_taken_in_every_round():
    calls = []
    works = {"a": (lambda: calls.append("a"), 2), "b": (lambda: calls.append("b"), 1)}
    times = clock.in_turn(works, 3, torch.device("cpu"))
    assert "".join(calls) == 4 * "aab"
    assert [len(times[name]) for name in "ab"] == [3, 3]
    late = clock.in_turn(works, 7, torch.device("cpu"), deadline=time.monotonic())
    assert [len(late[name]) for name in "ab"] == [2, 2]


def test_what_was_let_go_is_unpinned_before_the_next_clock_starts(monkeypatch):
    notes = FakeRegistrar()
    memory = PinnedAllocator(notes)
    plain = notes.unregister
    monkeypatch.setattr(notes, "unregister", lambda address: (time.sleep(0.02), plain(address)))
    monkeypatch.setattr(clock, "pinned_allocator", lambda _: memory)
    monkeypatch.setattr(peers, "freed", lambda _: clock.freed(torch.device("cuda")))
    held = []

    def reader(model, ids):
        held.append(len(notes.held))
        return [memory.allocate((8,), torch.uint8).result() for _ in range(10)]

    model = made_up.dummy_model(smoke(), smoke().shape)
    try:
        for _ in range(2):
            peers._measured(model, [1], reader)
    finally:
        memory.close()
    assert max(held) <= 1  # the one that was waited for


def test_shared_host_memory_begins_elsewhere_every_time():
    pool = torch.arange(5 * 4096.0)
    cpu = torch.device("cpu")
    tiers = SharedHost(cpu, cpu, torch.float32, pool=pool)
    starts = [int(tiers.on_host(3, 1000).flatten()[0]) for _ in range(4)]
    assert starts == [0, 4096, 8192, 12288]
    assert tiers.on_host(2, 5 * 4096).shape == (2, 5 * 4096)  # more than there is: its own


def test_made_up_pages_are_pinned_as_kv_is(monkeypatch):
    """In pages of another size the device would look their addresses up at another rate."""
    notes = FakeRegistrar()
    memory = PinnedAllocator(notes)
    monkeypatch.setattr(device, "pinned_allocator", lambda _: memory)
    monkeypatch.setattr(torch, "randn", lambda count, device, dtype: torch.ones(count, dtype=dtype))
    host = device.pinned(replace(smoke(), device=torch.device("cuda", 0)), 1000)
    assert notes.held == {host.data_ptr(): 4000}
    assert (host == 1).all()
    memory.close()


def test_smoke(warm, tmp_path):
    output = tmp_path / "gpu.json"
    smoke_of = partial(warm, "--smoke", "-o", output, program=BENCHMARKS / "gpu.py")
    run = smoke_of("--parts", "machine,rates,agreement,length,phases")
    assert run.returncode == 0, run.stderr
    found = json.loads(output.read_text())
    states = {name: part["state"] for name, part in found["parts"].items()}
    assert {name for name, state in states.items() if state == "done"} == {"machine", "rates", "agreement", "length"}
    assert len({row["case"] for row in found["parts"]["agreement"]["rows"]}) == 6
    assert "agreement: 6 of 6 agree" in run.stdout
    assert found["parts"]["phases"]["error"] == "there are no kernels to trace on a CPU"
    assert found["parts"]["speed"]["error"] == "not asked for"
    gathers = [row for row in found["parts"]["rates"]["rows"] if "arrives" in row]
    assert gathers
    assert all(row["arrives"] for row in gathers)
    assert all(row["missed_pages"] > 0 for row in found["parts"]["length"]["rows"])
    measured = {row["what"] for row in found["targets"] if row["measured"] is not None}
    assert measured == {"long context against short, first layer dense", "long context against short, no dense layer",
                        "recall against plain copies"}  # fmt: skip
    assert "long context against short" in run.stdout
    assert smoke_of("--parts", "machine").returncode == 0
    assert json.loads(output.read_text())["parts"]["rates"] == found["parts"]["rates"]


ABSENT = """
import runpy, sys

class Absent:
    def find_spec(name, path=None, target=None):
        if (package := name.partition(".")[0]) in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{package!r}}", name=name)

sys.meta_path.insert(0, Absent)
sys.argv, sys.path[0] = {arguments!r}, {folder!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "packages",
    [
        ("xxhash", "pydantic", "psutil", "transformers", "numba", "rich"),
        ("pydantic",),
    ],
)
@pytest.mark.exhaustive
def test_parts_do_without_packages_that_they_have_no_use_for(tmp_path, packages):
    output = tmp_path / "gpu.json"
    arguments = [
        str(BENCHMARKS / "gpu.py"),
        "--smoke",
        "--parts",
        "machine,rates,packed,kernels,speed",
        "-o",
        str(output),
    ]
    program = ABSENT.format(packages=packages, arguments=arguments, folder=str(BENCHMARKS))
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    parts = json.loads(output.read_text())["parts"]
    assert all(parts[name]["state"] == "done" for name in ("machine", "rates", "packed", "kernels"))
    assert all(row["agrees"] for row in parts["packed"]["rows"])
    speed = parts["speed"]
    assert (speed["state"], speed["rows"]) == ("not run", [])
    assert speed["error"] in {f"the package {each} is not here" for each in packages}
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("only machine, kernels, rates and packed can run") == 1


def test_a_package_that_another_one_lacks_is_named():
    def imports():
        try:
            raise ModuleNotFoundError("No module named 'regex'", name="regex._regex")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("Could not import module 'Cache'") from error

    assert outcomes(lacking=partial(rows, then=imports)) == {
        "lacking": [Ended("the package regex is not here", not_here=True)]
    }


def test_an_import_of_its_own_that_fails_is_an_error():
    (found,) = outcomes(broken=partial(rows, then=partial(importlib.import_module, "gpu_parts.nowhere"))).values()
    assert found[-1].error.startswith("ModuleNotFoundError: No module named 'gpu_parts.nowhere'")
    assert not found[-1].not_here


@pytest.mark.exhaustive
def test_what_a_file_has_is_gone_on_from_into_another_one(warm, tmp_path):
    first, second, third = (tmp_path / f"{name}.json" for name in "abc")
    smoke_of = partial(warm, "--smoke", program=BENCHMARKS / "gpu.py")
    assert smoke_of("--parts", "machine,rates", "-o", first).returncode == 0
    before = json.loads(first.read_text())
    run = smoke_of("--parts", "rates,phases", "--resume", first, "-o", second)
    assert run.returncode == 0, run.stderr
    assert "rates: " not in run.stdout
    found = json.loads(second.read_text())["parts"]
    assert found["rates"] == before["parts"]["rates"]
    assert found["phases"]["error"] == "there are no kernels to trace on a CPU"
    assert json.loads(first.read_text()) == before
    before["parts"]["machine"]["rows"][0]["device"] = "another one"
    first.write_text(json.dumps(before))
    run = smoke_of("--parts", "phases", "--resume", first, "-o", third)
    assert "was measured on another one: nothing of it is taken" in run.stdout
    assert json.loads(third.read_text())["parts"]["rates"]["state"] == "not run"
    run = smoke_of("--resume", tmp_path / "absent.json", "-o", third)
    assert run.returncode == 2
    assert "there is no file" in run.stderr


def test_methods_stand_beside_freekv_and_what_is_known_is_left_out(monkeypatch):
    named = {each.name: each for each in targets.BY_GRAPH}
    monkeypatch.setattr(methods, "BY_GRAPH", [named[name] for name in ("infinigen", "shadowkv", "h2o")])
    setting = replace(smoke(), calls=1, repeats=1)
    before = [{"case": "h2o"}, {"case": "infinigen", "failed": "it did not end in the time of its part"}]
    begun = list(chain(*methods.methods_batch(setting, Found(own=before))))
    assert [("failed" in row, row["case"]) for row in begun] == [
        (True, "shadowkv"), (False, "shadowkv"), (True, "infinigen"), (False, "infinigen")
    ]  # fmt: skip
    beside = [row for row in begun if "failed" not in row]
    assert all(row["batch"] == 3 for row in beside)
    largest = list(chain(*methods.throughput(setting, Found())))
    assert [(row["case"], row["batch"]) for row in largest] == [("full", 2), ("shadowkv", 2)]
    found = {"methods_middle": {"error": None, "rows": beside}, "throughput": {"error": None, "rows": largest}}
    assert judged(found, "shadowkv against freekv")["measured"] > 0
    assert judged(found, "tokens a second, shadowkv against full")["measured"] > 0


def test_contenders_are_all_methods_as_they_are_served_and_some_otherwise_too():
    everyone = targets.BY_GRAPH + targets.IN_PIECES
    others = {"freekv", "native"}  # freekv is beside all of them; native serves models that select by themselves
    assert {each.method for each in everyone} == {*method_names()} - others
    for each in everyone:
        settings = resolve_profile(each.method, None, each.settings).settings
        served = GRAPH if each in targets.BY_GRAPH else PIECEWISE
        assert gpu_step_of(get_method(each.method), settings) == served
        assert each.offloads == settings.on_host or served == PIECEWISE
    counted = json.loads((BENCHMARKS / "results/kernel_counts.json").read_text())["methods"]
    assert {each.name for each in targets.BY_GRAPH} <= {*counted}
    (plus,) = (each for each in targets.OFFLOADING if each.name == "shadowkv-plus")
    assert resolve_profile(None, "shadowkv-plus").settings == resolve_profile(plus.method, None, plus.settings).settings


def test_packed_weights_are_compared_with_unpacked_ones(monkeypatch):
    packing = products.PACKINGS["Q4_K"]
    rows = list(chain(*products.against_unpacked(packing, [1, 9], smoke())))
    assert [(row["case"], row["agrees"]) for row in rows] == [("Q4_K, 1 rows", True), ("Q4_K, 9 rows", True)]
    assert all(row["packed_of_library"]["median"] > 0 for row in rows)
    monkeypatch.setattr(products, "packed_linear", lambda x, weight: 1 + products.packed_linear_ref(x, weight))
    (row,) = next(products.against_unpacked(packing, [2], smoke()))
    assert not row["agrees"]


def test_a_method_in_pieces_goes_on_from_the_tokens_that_it_chose(monkeypatch):
    setting, served = replace(smoke(), calls=2, repeats=1), []

    class Watched(steps.PiecewiseStepper):
        def step(self, batch):
            served.append([len(sequence.token_ids) for sequence in batch])
            return super().step(batch)

    monkeypatch.setattr(steps, "PiecewiseStepper", Watched)
    monkeypatch.setattr(methods, "IN_PIECES", [each for each in targets.IN_PIECES if each.name == "infllm"])
    begun, row = chain(*methods.methods_pieces(setting, Found()))
    assert (begun["case"], begun["failed"]) == ("infllm", "it did not end in the time of its part")
    assert (row["case"], row["captured"], len(row["freekv_ms"])) == ("infllm", False, 1)
    assert served == [[count] for count in range(1, len(served) + 1)]
    assert len(served) > 3


def test_sequences_of_a_batch_differ_by_their_token_where_they_are_copies():
    with made_up.workshop(smoke(), smoke().shape, [smoke().short]) as place:
        made = place.sequences(place.profile("shadowkv"), smoke().short, 3, copied=True)
        assert [sequence.token_ids for sequence in made] == [[1], [2], [3]]


def test_what_began_and_what_failed_leaves_no_row_beside_its_figures(monkeypatch):
    sent = [{"case": name, **more} for name in "ab" for more in ({"failed": "begun"}, {"rounds_ms": [1.0]})]
    monkeypatch.setattr(gpu, "rows_of", lambda *_: ([row] for row in [*sent, {"case": "c", "failed": "begun"}]))
    before = [{"case": "b", "failed": "before"}, {"case": "d", "rounds_ms": [2.0]}]
    *_, (_, found) = gpu.run({gpu.BenchmarkPart("methods", "methods_large", 60, ""): before}, smoke(), {}, 60.0)
    assert [(row["case"], "failed" in row) for row in found["rows"]] == [
        ("d", False), ("a", False), ("b", False), ("c", True)
    ]  # fmt: skip


def test_what_has_no_room_on_the_device_is_said_and_not_tried(monkeypatch):
    on_gpu = replace(smoke(), device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 20))
    with made_up.workshop(smoke(), smoke().shape, [smoke().short]) as place:
        place.setting = on_gpu
        methods.fit(place, [steps.StepCase("shadowkv", "shadowkv", smoke().short)])
        with pytest.raises(ValueError, match="GiB on the device"):
            methods.fit(place, [steps.StepCase("shadowkv", "shadowkv", smoke().short, batch=1000)])


@pytest.mark.parametrize(
    ("free", "batch", "pool"), [((40, 1000), 34, "device"), ((40, 10), 8, "host"), ((0, 0), 1, "device")]
)
def test_the_largest_batch_fits_into_the_hosts_memory_too(free, batch, pool, monkeypatch):
    with made_up.workshop(smoke(), smoke().shape, [smoke().middle]) as place:
        (one,) = place.sequences(place.profile("shadowkv"), smoke().middle)
        held = one.method.footprint()
        assert held.host > 0
        monkeypatch.setattr(methods, "freed", lambda _: None)
        sizes = {"device": free[0] * held.device, "host": free[1] * held.host}
        monkeypatch.setattr(methods, "available", lambda _: sizes)
        place.setting = replace(smoke(), device=SimpleNamespace(type="cuda"))
        assert methods.largest(place, "shadowkv", smoke().middle) == (batch, pool)
        sizes["host"] = 0
        assert methods.largest(place, "full", smoke().middle)[1] == "device"  # needs nothing of the host


def test_a_selection_may_differ_where_scores_are_equal_but_for_rounding():
    bench = agreement.Bench(smoke(), torch.float32, {"tau": 1.0})
    bench.lengths = [400]
    method, layer = bench.methods()[0], 1
    cache = method.retrieval[layer]
    q = next(bench.tokens())[layer][0][0, :, 0]
    start, selected = cache.candidates.start, cache.budget.selected
    scale = bench.softmax.scale if method.config.score_scale else 1.0
    scores = agreement.page_scores_ref(q, cache.summaries.of(cache.candidates), scale, method.config.pooling)[0]
    order = scores.argsort(descending=True).tolist()
    last, next_one = (order[selected - 1] + start, order[selected] + start)
    head = agreement.Head(0, layer, 0)
    assert not agreement.near_tie(method, head, q, {last, next_one}, bench.softmax)
    bounds = cache.summaries.bounds
    bounds[0, next_one] = bounds[0, last] * (1 + 1e-7)
    assert agreement.near_tie(method, head, q, {last, next_one}, bench.softmax)
    assert not agreement.near_tie(method, head, q, {last, order[0] + start}, bench.softmax)


def test_every_method_has_a_reference_text():
    """Without the text that a CPU writes for it, a method ended the whole part on a GPU."""
    assert json.loads((BENCHMARKS / "results" / "texts.json").read_text())["methods"].keys() == {*method_names()}


def test_texts_of_both_pipelines_come_of_layers_that_the_gpu_fuses(monkeypatch):
    decoded, together, seen = agreement._decoded, GpuKernels.together, []
    monkeypatch.setattr(GpuKernels, "together", lambda *given: seen.append("fused") or together(*given))
    monkeypatch.setattr(agreement, "_decoded", lambda *given: seen.append(given[-1]) or decoded(*given))
    monkeypatch.setattr(engine_module, "cpu_layers", lambda _: nullcontext())  # there is none on a GPU
    assert agreement.same_texts(smoke())["agrees"]
    layers = ["fused"] * (seen.index("overlapped") - 1)
    assert layers
    assert seen == ["blocking", *layers, "overlapped", *layers]


def test_after_near_ties_only_transfers_may_differ():
    def counters(misses, corrected):
        made = Counters(1)
        made.next_step()
        made.add(0, Count.MISSES, misses)
        made.add(0, Count.HEADS_CORRECTED, corrected)
        return made

    assert agreement.same_counts(counters(3, 1), counters(3, 1), 0)
    assert not agreement.same_counts(counters(3, 1), counters(4, 1), 0)
    assert agreement.same_counts(counters(3, 1), counters(5, 1), 1)
    assert not agreement.same_counts(counters(3, 1), counters(6, 1), 1)
    assert not agreement.same_counts(counters(3, 1), counters(3, 2), 1)


def compared_rows(wrong=()):
    """Rows as parts give them that compare: a figure called error, and whether they agree."""
    kernels = [{"case": f"kernel {n}", "error": n / 1e9, "agrees": n not in wrong, "problem": ""} for n in range(129)]
    agreement = [{"case": f"tau {n}", "error": 0.0, "agrees": True} for n in range(6)]
    return {"kernels": kernels, "agreement": agreement}


@pytest.mark.parametrize("wrong", [(), (3, 77)])
def test_every_comparison_is_kept_and_one_that_disagrees_is_an_exit_code(wrong, monkeypatch, tmp_path, capfd):
    output, found = tmp_path / "gpu.json", compared_rows(wrong)
    machine = [{"case": "machine", "device": "made up"}]
    monkeypatch.setattr(gpu, "rows_of", lambda part, *_: ([row] for row in found.get(part.name, machine)))
    monkeypatch.setattr(gpu, "prepare", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--smoke", "--parts", "machine,kernels,agreement", "-o", str(output)])
    with pytest.raises(SystemExit) if wrong else nullcontext() as ended:
        gpu.main()
    parts = json.loads(output.read_text())["parts"]
    assert {name: len(parts[name]["rows"]) for name in found} == {"kernels": 129, "agreement": 6}
    out, _ = capfd.readouterr()
    assert f"kernels: {129 - len(wrong)} of 129 agree" in out
    assert "agreement: 6 of 6 agree" in out
    if wrong:
        # A text goes to stderr, and the exit code is 1.
        assert ended.value.code == "kernels: kernel 3, kernel 77 differ from the reference"


def test_no_two_kernels_share_a_name():
    assert len({case.name for case in CASES}) == len(CASES) > 100


class Rehearsal:
    """Stands in for parts of three rows each; `cut` is where the whole call is killed, after so many rows."""

    def __init__(self, output, cut=None):
        self.output, self.cut, self.asked = output, cut, output.with_name("asked")

    def rows(self, part, setting, found):
        for number in range(3):
            case = {"case": f"{part.name} {number}", "device": "made up", "agrees": True}
            if found.has(case["case"]):
                continue
            if (part.name, number) == self.cut:
                while len(kept(self.output).get(part.name, {"rows": []})["rows"]) < number:
                    time.sleep(0.01)
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            with self.asked.open("a") as file:
                file.write(f"{case['case']}\n")
            yield [case]


def kept(output):
    return json.loads(output.read_text())["parts"] if output.exists() else {}


def test_a_call_that_is_killed_loses_nothing_and_the_next_one_does_the_rest(monkeypatch, tmp_path):
    """The first hour, rehearsed: two calls are killed, a third has no time left, and the fourth ends it."""
    monkeypatch.setattr(gpu, "prepare", lambda: None)
    output, fork = tmp_path / "gpu.json", multiprocessing.get_context("fork")

    def call(*words, cut=None):
        monkeypatch.setattr(gpu, "rows_of", Rehearsal(output, cut).rows)
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--smoke", "-o", str(output), *words])
        run = fork.Process(target=gpu.main)
        run.start()
        run.join()
        return run.exitcode, {name: [row["case"] for row in part["rows"]] for name, part in kept(output).items()}

    code, rows = call(cut=("rates", 2))
    before = ["machine", "kernels", "agreement", "texts", "rates"]
    assert (code, [name for name in before if name in rows], rows["rates"]) == (-9, before, ["rates 0", "rates 1"])
    assert kept(output)["rates"] | {"state": "not finished", "error": "it was cut off"} == kept(output)["rates"]
    code, rows = call("--resume", cut=("phases", 1))
    assert (code, rows["rates"], rows["phases"]) == (-9, ["rates 0", "rates 1", "rates 2"], ["phases 0"])
    code, before = call("--resume", "--seconds", "0")
    assert (code, before["rates"], before["phases"]) == (1, rows["rates"], rows["phases"])
    code, rows = call("--resume")
    assert code == 0
    assert rows == {part.name: [f"{part.name} {number}" for number in range(3)] for part in gpu.PARTS}
    assert {part["state"] for part in kept(output).values()} == {"done"}
    asked = [line for line in Rehearsal(output).asked.read_text().splitlines() if not line.startswith("machine")]
    expected = [f"{part.name} {number}" for part in gpu.PARTS[1:] for number in range(3)]
    assert sorted(asked) == sorted(expected)  # each once
    timed = [line for line in expected if line.split()[0] not in ("kernels", "agreement", "texts")]
    assert [line for line in asked if line in timed] == timed  # and in order, but for those that are side by side


def test_what_counts_most_comes_first_and_fits_one_call():
    first = [part.name for part in gpu.PARTS[:7]]
    assert first == ["machine", "kernels", "agreement", "texts", "rates", "speed", "phases"]
    taken = [max(part.limit for part in parts) for parts in gpu.side_by_side(gpu.PARTS[:7])]
    assert len(taken) == 5
    assert sum(taken) <= gpu.SECONDS
    judged_by = [target for target in targets.TARGETS if target.bound is not None]
    needed = {"speed", "peers", "length", "batch", "rates", "reading", "throughput", "methods_middle"}
    assert len(judged_by) > 15
    assert needed < {part.name for part in gpu.PARTS[:13]}


def test_a_file_is_whole_at_any_time(tmp_path, monkeypatch):
    path = tmp_path / "gpu.json"
    common.write(path, {"parts": 1}, {})
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        common.write(path, {"parts": 2}, {})
    assert json.loads(path.read_text())["parts"] == 1


def test_a_traced_layer_lasts_from_its_first_product_to_the_next_layers():
    names = ["qkv", "rotate", "attend", "out", "add_norm", "gate_up", "silu", "down", "norm"]
    of_names = dict.fromkeys(names, "mlp") | dict.fromkeys(["qkv", "rotate", "out"], "projections")
    of_names["attend"] = "attention"
    step = [Kernel(f"void {name}<1>(x)", 7, 10.0 * at, 10.0 * at + 4) for at, name in enumerate(names * 14)]
    phases = [of_names[name] for name in names * 14]
    found = steps.one_layer(step, phases)
    assert [row["kernel"] for row in found] == names
    assert [row["start_us"] for row in found] == [10.0 * at for at in range(len(names))]
    assert {(row["stream"], row["us"]) for row in found} == {(0, 4.0)}


def test_the_first_call_on_a_machine_without_an_index(tmp_path):
    output = tmp_path / "gpu.json"
    (tmp_path / "bundle").mkdir()
    words = [BENCHMARKS / "gpu_first.sh", tmp_path / "bundle", "--smoke", "--parts", "machine,rates", "-o", output]
    own = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run(["bash", *map(str, words)], capture_output=True, text=True, cwd=tmp_path, env=own)
    assert run.returncode == 0, run.stdout + run.stderr
    assert [kept(output)[name]["state"] for name in ("machine", "rates", "kernels")] == ["done", "done", "not run"]


@pytest.mark.exhaustive
def test_the_first_hour_in_small(warm, tmp_path):
    """All parts on a CPU, in calls of half a minute; what was measured once is not measured again."""
    output, before = tmp_path / "gpu.json", {}
    for _ in range(9):
        run = warm("--smoke", "--resume", "--seconds", "30", "-o", output, program=BENCHMARKS / "gpu.py")
        assert run.returncode == 0, run.stdout + run.stderr
        parts = {name: part for name, part in kept(output).items() if name != "machine"}
        assert all(row in parts[name]["rows"] for name, rows in before.items() for row in rows)
        before = {name: [row for row in part["rows"] if "failed" not in row] for name, part in parts.items()}
        waiting = [name for name, part in parts.items() if part["state"] != "done" and name not in ("phases", "static")]
        if not waiting:
            break
    assert waiting == []
    assert len(before["kernels"]) == len(CASES)
    assert len(before["methods_middle"]) == len(targets.BY_GRAPH)
    assert "NOT met" not in run.stdout  # nothing measured on a CPU is judged
