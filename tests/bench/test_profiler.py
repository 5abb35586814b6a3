"""Whole profiles of a tiny checkpoint."""

import json
import statistics
from dataclasses import replace
from functools import partial
from operator import truediv

import pytest
from families import tiny_checkpoint

from kvcli.bench import profiler
from kvcli.bench.phases import step_parts
from kvcli.bench.profiler import ProfileRequest, profile
from kvcli.bench.report import notes
from kvcli.bench.runs import Decoding, Entry, Load, RandomContext, entries
from kvcli.capacity import memory, roofline
from kvcli.capacity.planning.probe import RandomKV
from kvcli.capacity.roofline import PHASES, MachineRates, Rate
from kvcli.conformance.crossed import some
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.options import DiskOptions
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.variants import variants
from kvcli.methods import get_method, method_names
from kvcli.models.loading import ModelSpec, load_model
from kvcli.runtime import pipeline
from kvcli.runtime.gpu.recorder import CaptureError
from kvcli.telemetry.counters import Count, Counters
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.timeline import Timeline

SMALL = {"budget": 96, "sink": 16, "window": 32, "page_size": 16, "chunk": 8, "outliers": 2, "rank": 8}


def entry(method, **overrides):
    known = type(resolve_profile(method).settings).model_fields
    settings = {key: value for key, value in SMALL.items() if key in known} | overrides
    return Entry(method, "method", resolve_profile(method, None, settings))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_checkpoint("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(ModelSpec(checkpoint))


@pytest.fixture(scope="module", autouse=True)
def machine():
    """Measuring the machine takes seconds, and is tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "measure_rates", lambda *_: MachineRates(*[Rate.given(1e9)] * 5))
        yield


@pytest.fixture(scope="module")
def outcome(checkpoint):
    wanted = request(checkpoint, "full", "quest", "freekv", contexts=(250, 400), batches=(1, 2), peers=True)
    return profile(wanted, Observer())


def request(checkpoint, *methods, **options):
    sizes = {"contexts": (200,), "steps": 4, "repeat": 2, "warmup": 1, **options}
    return ProfileRequest(ModelSpec(checkpoint), tuple(entry(method) for method in methods), **sizes)


def test_there_is_a_case_for_everything_asked_for(outcome):
    cases = [(case.label, case.context, case.batch) for case in outcome.report.cases]
    labels = ("full", "quest", "freekv", "transformers")
    assert cases == [(label, context, batch) for context in (250, 400) for batch in (1, 2) for label in labels]
    for case in outcome.report.cases:
        assert len(case.runs_ms) == 2
        assert case.step_ms.least <= case.step_ms.median <= case.step_ms.most
        assert case.tokens_per_s == pytest.approx(1000 * case.batch / case.step_ms.median)
        assert case.error is None
        assert case.pipeline == (None if case.kind == "peer" else "blocking")


def test_parts_add_up_to_the_step(outcome):
    broken = [case for case in outcome.report.cases if case.breakdown is not None]
    assert {case.label for case in broken} == {"full", "quest", "freekv"}
    for case in broken:
        parts = {part.phase: part for part in case.breakdown.parts}
        assert list(parts) == list(PHASES)
        assert sum(part.ms for part in parts.values()) == pytest.approx(case.breakdown.step_ms)
        assert all(parts[phase].ms > 0 for phase in ("projections", "attention", "mlp", "sampling", "host"))
        assert case.breakdown.disturbance.least > 0


def test_phases_are_those_of_the_method(outcome):
    for case in outcome.report.cases[:3]:
        there = {part.phase for part in case.breakdown.parts if part.ms > 0}
        assert ("score" in there) == ("select" in there) == (case.label != "full")
        assert ("recall" in there) == ("correction" in there) == ("offload" in there) == (case.label == "freekv")
        assert sum(part.floor_ms for part in case.breakdown.parts) == pytest.approx(case.floor_ms)


def test_ratios_are_taken_against_the_first_case_of_a_round(outcome):
    first, *others = outcome.report.cases[:4]
    assert first.ratio.median == first.ratio.most == 1
    for case in others:
        ratios = [a / b for a, b in zip(first.runs_ms, case.runs_ms, strict=True)]
        assert (case.ratio.least, case.ratio.most) == (min(ratios), max(ratios))


def test_the_floor_of_a_case_is_of_the_rates_beside_its_runs(checkpoint, monkeypatch):
    wanted = request(checkpoint, "full", "streaming", repeat=1)
    before = profile(wanted, Observer()).report.cases
    speeds = [2e9, 2e9, 2e9, 1e9, 1e9]  # at first, then before and after either of the two
    monkeypatch.setattr(roofline, "OLD", -1.0)
    monkeypatch.setattr(roofline, "measure_rates", lambda *_: MachineRates(*[Rate.given(speeds.pop(0))] * 5))
    found = profile(wanted, Observer()).report
    ratios = [old.floor_ms / new.floor_ms for old, new in zip(before, found.cases, strict=True)]
    assert ratios == pytest.approx([2, 1])
    assert found.ceilings["read"] == {"median": 2e9, "least": 1e9, "most": 2e9}


def test_counts_are_of_the_timed_steps_of_all_sequences(outcome):
    one, two = (case for case in outcome.report.cases[:8] if case.label == "freekv")
    for case in (one, two):
        assert len(case.counts.misses) == 4
        assert len(case.counts.misses[0]) == 4
        assert case.counts.misses[0][0] == 0  # the first layer is dense
        assert case.counts.by_head[0] is None
        of_layers = [sum(step[layer] for step in case.counts.misses) for layer in (1, 2, 3)]
        assert [sum(heads.misses) for heads in case.counts.by_head[1:]] == of_layers
    assert sum(map(sum, two.counts.pages_requested)) == 2 * sum(map(sum, one.counts.pages_requested)) > 0
    assert two.host_kv_bytes == 2 * one.host_kv_bytes > 0


def test_what_a_disk_did_in_the_timed_steps_is_counted(checkpoint, tmp_path):
    disk = DiskOptions(tmp_path, 40 << 10)
    one, two = profile(request(checkpoint, "full", "freekv", repeat=1, disk=disk), Observer()).report.cases
    assert one.disk_kv_bytes == sum(map(sum, one.counts.disk_reads)) == 0
    assert two.disk_kv_bytes > two.host_kv_bytes > 0
    counts = two.counts
    for count in (counts.host_hits, counts.disk_reads, counts.bytes_from_disk, counts.disk_wait_ms):
        assert (len(count), len(count[0])) == (4, 4)  # steps, layers
    tiers = zip(counts.misses, counts.host_hits, counts.disk_reads, counts.bytes_from_disk, strict=True)
    for missed, hits, reads, read in tiers:
        assert missed == [here + there for here, there in zip(hits, reads, strict=True)]
        assert [bool(each) for each in reads] == [bool(each) for each in read]
    assert sum(map(sum, counts.disk_reads)) > 0
    assert sum(map(sum, counts.disk_wait_ms)) > 0
    assert [*tmp_path.iterdir()] == []


def test_spans_of_a_run_that_was_taken_apart_are_kept_by_case(outcome):
    assert "freekv · 400 tokens · batch 2" in outcome.spans
    tracks = {span.track for span in outcome.spans["freekv · 400 tokens · batch 2"]}
    assert tracks == {"run", "sequence 0", "sequence 1"}
    assert not any(name.startswith("transformers") for name in outcome.spans)


def test_the_report_is_one_json_object(outcome):
    body = json.loads(outcome.report.to_json())
    assert next(iter(body)) == "schema_version"
    assert body["options"]["kv"] == "made up"
    assert body["cases"][0]["breakdown"]["parts"][0]["phase"] == "projections"
    assert body["ceilings"]["read"]["median"] > 0


@pytest.mark.parametrize("method", some(method_names(), method_names()[::2]))
def test_every_method_runs_on_made_up_kv_and_its_spans_make_up_the_step(model, method):
    each, timeline = entry(method), Timeline(enabled=True)
    source = RandomContext(RandomKV(0, model.device, model.dtype))
    load = Load(200, 1, 1, 8)
    run = Decoding(each.label, each.kind, each.profile, model, source).run(load, timeline)
    parts = step_parts(timeline.spans, offloaded=False)[load.warmup :]
    assert len(parts) == len(run.steps_ms) == load.steps
    covered = [sum(step.exposed.values()) / 1000 / ms for step, ms in zip(parts, run.steps_ms, strict=True)]
    assert statistics.median(covered) == pytest.approx(1, abs=0.02)
    assert all(step.exposed["attention"] > 0 for step in parts)


@pytest.mark.parametrize("served", ["graph", "piecewise"])
def test_a_run_goes_through_the_pipeline_that_its_row_names(model, served, monkeypatch):
    each, made = entry("quest" if served == "graph" else "infllm"), []
    monkeypatch.setattr("kvcli.bench.runs.pipeline_on", lambda *_: served)
    for name in ("SlotStepper", "PiecewiseStepper", "BlockingStepper"):
        kind = getattr(pipeline, name)
        monkeypatch.setattr(pipeline, name, lambda *args, kind=kind: made.append(kind.__name__) or kind(*args))
    source = RandomContext(RandomKV(0, model.device, model.dtype))
    run = Decoding(each.label, each.kind, each.profile, model, source).run(Load(200, 2, 1, 4), Timeline())
    assert made == [{"graph": "SlotStepper", "piecewise": "PiecewiseStepper"}[served]]
    assert len(run.steps_ms) == 4


class Broken:
    """A recorder whose captures fail."""

    def record(self, rehearse, work, leave=None):
        rehearse()
        raise CaptureError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(("promised", "method"), [("graph", "quest"), ("piecewise", "infllm")])
def test_a_row_names_what_ran_after_a_capture_that_failed_and_says_why(checkpoint, promised, method, monkeypatch):
    monkeypatch.setattr("kvcli.bench.runs.pipeline_on", lambda *_: promised)
    for name in ("SlotStepper", "PiecewiseStepper"):
        monkeypatch.setattr(pipeline, name, partial(getattr(pipeline, name), recorder=Broken()))
    report = profile(request(checkpoint, method, steps=3, repeat=1), Observer()).report
    (case,) = report.cases
    assert (case.error, case.pipeline, len(case.runs_ms)) == (None, "launched", 1)
    (notice,) = case.notices
    assert notice.endswith("launched one by one: operation not permitted when stream is capturing")
    assert ("pipeline", f"{method}: {notice}") in notes(report)
    assert (case.breakdown is None) == (promised == "graph")  # of which there are no phases but those of a trace
    assert json.loads(report.to_json())["cases"][0]["notices"] == [notice]


def test_runs_take_turns_and_each_is_followed_by_the_one_taken_apart(checkpoint, monkeypatch):
    order, plain = [], Decoding.run

    def noted(self, load, timeline):
        order.append((self.label, timeline.enabled))
        return plain(self, load, timeline)

    monkeypatch.setattr(Decoding, "run", noted)
    profile(request(checkpoint, "full", "quest", steps=1, repeat=3), Observer())
    full, quest = ([(label, False), (label, True)] for label in ("full", "quest"))
    assert order == full + quest + quest + full + full + quest


@pytest.mark.parametrize("read", [True, False])
def test_reading_is_said_and_gives_the_models_own_selections(checkpoint, read):
    found = profile(request(checkpoint, "freekv", "full", "infllm", read=read, batches=(2,)), Observer()).report
    assert found.options["kv"] == ("read" if read else "made up")
    assert all(case.error is None and case.batch == 2 for case in found.cases)
    freekv, full, infllm = (case.prefill_ms for case in found.cases)
    if read:  # exactly, together; and by windows, alone
        assert freekv == full != infllm
        assert min(full, infllm) > 0
    else:
        assert freekv is full is infllm is None


def test_a_document_is_cut_to_the_context_or_taken_whole(checkpoint):
    text = "the quick brown fox jumps over the lazy dog " * 30
    whole = profile(request(checkpoint, "full", contexts=(), document=text, steps=1, repeat=1), Observer()).report
    (context,) = whole.options["contexts"]
    assert context > 200
    cut = profile(request(checkpoint, "full", document=text, steps=1, repeat=1), Observer()).report
    assert [case.context for case in cut.cases] == [200]
    with pytest.raises(KvcliError) as error:
        profile(request(checkpoint, "full", contexts=(context + 1,), document=text), Observer())
    assert error.value.exit_code == ExitCode.USAGE
    assert f"{context:,} tokens" in error.value.what


def test_a_case_that_fails_leaves_the_others_alone(checkpoint, monkeypatch):
    plain = Decoding.run

    def failing(self, load, timeline):
        if self.label == "quest":
            raise KvcliError("quest is out of order")
        return plain(self, load, timeline)

    monkeypatch.setattr(Decoding, "run", failing)
    full, quest = profile(request(checkpoint, "full", "quest"), Observer()).report.cases
    assert full.error is None
    assert (quest.error, quest.step_ms, quest.breakdown) == ("quest is out of order", None, None)


def test_the_first_that_did_not_fail_is_the_baseline(checkpoint, monkeypatch):
    plain, rounds = Decoding.run, []

    def failing(self, load, timeline):
        rounds.append(self.label)
        if self.label == "full" and rounds.count("full") > 2:  # each round runs it twice
            raise KvcliError("full is out of order")
        return plain(self, load, timeline)

    monkeypatch.setattr(Decoding, "run", failing)
    full, quest, freekv = profile(request(checkpoint, "full", "quest", "freekv", repeat=2), Observer()).report.cases
    assert full.error == "full is out of order"
    assert quest.ratio.least == quest.ratio.most == 1
    assert freekv.ratio.median == statistics.median(map(truediv, quest.runs_ms, freekv.runs_ms))


def test_what_can_not_be_ablated_is_said(checkpoint):
    said = []

    class Listening(Observer):
        def notice(self, text):
            said.append(text)

    profile(replace(request(checkpoint, "full", steps=1, repeat=1), ablate=True), Listening())
    assert "--ablate: full has no parts to switch off" in said
    assert any("on a CPU, the ablations of page copies and buffers make no difference" in text for text in said)


def test_what_does_not_fit_is_left_out_and_refused_where_nothing_fits(checkpoint, monkeypatch):
    def check(profile, checkpoint, prompts, sampling, way_out, disk):
        assert "--context" in way_out
        if profile.method == "full":
            raise KvcliError(f"{prompts} will not fit", exit_code=ExitCode.WILL_NOT_FIT)

    monkeypatch.setattr(memory, "check", check)
    full, quest = profile(request(checkpoint, "full", "quest"), Observer()).report.cases
    assert full.error == "{200: 1} will not fit"
    assert quest.step_ms is not None
    with pytest.raises(KvcliError) as error:
        profile(request(checkpoint, "full"), Observer())
    assert error.value.exit_code == ExitCode.WILL_NOT_FIT


def test_a_peer_that_does_not_fit_is_a_row_and_stops_nothing(checkpoint, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda _: {"host": memory.RUNTIME_BYTES + (50 << 20)})
    wanted = request(checkpoint, "streaming", contexts=(200, 40_000), peers=True, repeat=1, steps=2)
    cases = profile(wanted, Observer()).report.cases
    assert [(case.context, case.label, case.error is None) for case in cases] == [
        (200, "streaming", True),
        (200, "transformers", True),
        (40_000, "transformers", False),
        (40_000, "streaming", True),
    ]
    assert cases[2].kind == "peer"
    assert "of host memory" in cases[2].error


def test_reading_for_many_methods_needs_room_for_all(checkpoint, monkeypatch):
    monkeypatch.setattr(memory, "check", lambda *_, **__: None)
    monkeypatch.setattr(memory, "available", lambda _: {"host": 1000})
    with pytest.raises(KvcliError) as error:
        profile(request(checkpoint, "full", "quest", read=True), Observer())
    assert error.value.exit_code == ExitCode.WILL_NOT_FIT


def test_an_interruption_keeps_what_there_is(checkpoint, monkeypatch):
    plain, done = Decoding.run, []

    def interrupted(self, load, timeline):
        done.append(self.label)
        if len(done) > 3:
            raise KeyboardInterrupt
        return plain(self, load, timeline)

    monkeypatch.setattr(Decoding, "run", interrupted)
    found = profile(request(checkpoint, "full", "quest", "freekv"), Observer()).report
    assert not found.finished
    full, quest = found.cases
    assert full.breakdown is not None
    assert quest.step_ms is not None
    assert quest.breakdown is None


def test_nvtx_needs_a_gpu(checkpoint):
    with pytest.raises(KvcliError) as error:
        profile(replace(request(checkpoint, "full"), nvtx=True), Observer())
    assert error.value.exit_code == ExitCode.USAGE


def test_ablation_lists_what_a_method_declares_and_nothing_else():
    compared = variants(["full", "freekv"], [], [], {"tau": "0.7"})
    found = entries(compared, ablate=True)
    steps = [f"freekv, {name}" for name in get_method("freekv").ablation]
    assert len(steps) == 4
    assert [(each.label, each.kind) for each in found] == [
        ("full", "method"),
        *((step, "ablation") for step in steps),
        ("freekv", "method"),
    ]
    assert [getattr(each.profile.settings, "tau", None) for each in found] == [None, 1.0, 1.0, 1.0, 1.0, 0.7]
    assert [each.profile.settings.host_layout for each in found[1:]] == ["nhd", "hnd", "hnd", "hnd", "hnd"]
    assert len(entries(compared, ablate=False)) == 2


def test_counts_add_up_sequences_without_the_warmup():
    def counters():
        made = Counters(2)
        made.warmup = 1
        for step in range(3):
            made.next_step()
            made.add_heads(1, Count.PAGES_REQUESTED, [4, 4])
            made.add_heads(1, Count.MISSES, [step, 1])
        return made

    found = profiler.counts([counters(), counters()], 1)
    assert found.misses == [[0, 4], [0, 6]]
    none, of_heads = found.by_head
    assert none is None
    assert of_heads.pages_requested == [16, 16]
    assert of_heads.misses == [6, 4]
    assert of_heads.heads_checked == [0, 0]
