"""Calibration end to end on a tiny checkpoint and on the demo model."""

import json
import tomllib

import pytest
import torch
from families import tiny_checkpoint

from kvcli.capacity import memory
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import profile_mismatch, refuse_mismatch, resolve_profile
from kvcli.models.loading import ModelSpec, fingerprint, load_model, open_checkpoint
from kvcli.quality.calibrate.plan import CalibrationPlan, built_in, from_files
from kvcli.quality.calibrate.run import calibrate
from kvcli.quality.calibrate.sweep import Spectrum
from kvcli.quality.calibrate.targets import SWEEPS, target_of
from kvcli.quality.fidelity import measure
from kvcli.runtime.engine import engine
from kvcli.telemetry.observer import Observer

TEXT = "the quick brown fox jumps over the lazy dog and the number of the third key is 4711 "
SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8}
DEMO = {"budget": 160, "sink": 32, "window": 32, "page_size": 32}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint("llama", path)
    return ModelSpec(str(path))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT * 12)
    return str(path)


def plan(checkpoint, text, target="tau", method="freekv", settings=SMALL, **more):
    profile = resolve_profile(method=method, overrides=settings)
    given = {"length": 90, "steps": 6, "samples": 3, "max_loss": 10.0, **more}
    return SWEEPS[target], CalibrationPlan(checkpoint, profile, [text], **given)


class Stages(Observer):
    def __init__(self, interrupt_at=None):
        self.total, self.done, self.interrupt_at = None, 0, interrupt_at

    def stage(self, name, total=None):
        self.total = total

    def advance(self, amount=1):
        self.done += amount
        if self.interrupt_at is not None and self.done >= self.interrupt_at * self.total:
            raise KeyboardInterrupt


def test_tau_gives_the_papers_table_and_a_profile_that_a_run_takes(checkpoint, text, tmp_path):
    observer = Stages()
    found = calibrate(*plan(checkpoint, text), observer)
    assert observer.done == observer.total
    assert [point.settings["tau"] for point in found.points] == [0.0, 0.7, 0.8, 0.9, 1.0]
    corrected = [point.heads_corrected for point in found.points]
    assert corrected == sorted(corrected)
    assert (corrected[0], corrected[-1]) == (0, 1)
    exposed = [point.bytes_exposed for point in found.points]
    assert exposed == sorted(exposed)
    assert exposed[0] < exposed[-1]
    assert all(point.bytes_exposed <= point.bytes_to_device for point in found.points)
    assert found.points[-1].added == found.points[-1].added_bound == 0
    assert found.choice.point is found.points[0]  # everything is allowed, and it is the cheapest

    path = tmp_path / "mine.toml"
    path.write_text(found.to_toml())
    profile = resolve_profile(profile=str(path))
    assert profile.settings == found.chosen.settings
    assert profile.hash == found.chosen.hash
    opened = open_checkpoint(checkpoint)
    written = tomllib.loads(path.read_text())["provenance"]
    assert written == profile.provenance
    assert written["model_hash"] == fingerprint(opened)
    assert [row["tau"] for row in written["curve"]] == [0.0, 0.7, 0.8, 0.9, 1.0]
    assert written["passages"] == 3
    assert written["steps"] == 18
    assert written["text"] == [f"{text} {i}" for i in range(3)]
    assert profile_mismatch(profile, opened) is None


def test_a_profile_of_another_model_is_pointed_out_and_not_measured(checkpoint, text, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(calibrate(*plan(checkpoint, text, samples=1), Observer()).to_toml())
    profile = resolve_profile(profile=str(path))
    demo, plain = open_checkpoint(ModelSpec()), resolve_profile(method="freekv")
    sentence = profile_mismatch(profile, demo)
    assert "profile mine was calibrated for" in sentence
    assert checkpoint.name in sentence
    with pytest.raises(KvcliError) as raised:
        refuse_mismatch(profile, demo)
    assert raised.value.what == sentence
    assert raised.value.exit_code == ExitCode.USAGE
    assert profile_mismatch(plain, demo) is None
    refuse_mismatch(plain, demo)


def test_a_model_is_told_by_its_weights(tmp_path, checkpoint):
    from pathlib import Path
    from shutil import copytree

    other = tmp_path / "other"
    copytree(checkpoint.name, other)
    first = fingerprint(open_checkpoint(checkpoint))
    assert fingerprint(open_checkpoint(ModelSpec(str(other)))) == first
    (weights,) = Path(other).glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    assert fingerprint(open_checkpoint(ModelSpec(str(other)))) != first


@pytest.mark.parametrize("target", ["rank", "budget", "threshold"])
def test_every_target_has_a_curve_tables_and_json(checkpoint, text, target):
    method = SWEEPS[target].method
    fields = type(resolve_profile(method=method).settings).model_fields
    small = {key: value for key, value in {**SMALL, "chunk": 4, "outliers": 2, "local": 1}.items() if key in fields}
    found = calibrate(*plan(checkpoint, text, target, method, small, samples=2), Observer())
    costs = [found.sweep.cost.of(point) for point in found.points]
    assert len(set(costs)) > 1
    body = json.loads(found.to_json())
    assert body["schema_version"] == 1
    assert len(body["points"]) == len(found.points)
    title, table = found.tables()[0]
    assert target in title
    assert len(table.rows) == len(found.points)
    assert sum("chosen" in row for row in table.rows) == 1


def test_threshold_zero_is_full_attention(checkpoint, text):
    found = calibrate(*plan(checkpoint, text, "threshold", "refreekv", {}, samples=1), Observer())
    exact = next(point for point in found.points if point.settings["threshold"] == 0)
    assert exact.mass == pytest.approx(1)
    assert exact.loss == pytest.approx(0, abs=1e-8)
    loosest = next(point for point in found.points if point.settings["threshold"] == 0.3)
    assert loosest.attended < exact.attended


def test_spectrum_is_that_of_the_keys_before_their_rotation(checkpoint, text):
    _, spec = plan(
        checkpoint, text, "rank", "shadowkv", {"budget": 32, "chunk": 4, "outliers": 1, "local": 1}, samples=1
    )
    model = load_model(checkpoint)
    (passage,) = from_files([text], model.tokenizer, 90, 6, 1)
    spectrum = Spectrum(spec.profile.settings)
    keys, handles = {}, []
    for index, layer in enumerate(model.module.model.layers):
        hook = layer.self_attn.k_proj.register_forward_hook(
            lambda _, __, out, index=index: keys.setdefault(index, []).append(out[0].double())
        )
        handles.append(hook)
    with engine(model, [passage.capacity]) as ready:
        _, reference = measure(ready, passage, [spec.profile])
        spectrum.end_passage(reference, passage)
    for hook in handles:
        hook.remove()
    for layer in spectrum.figures()["spectrum"]:
        exact = torch.cat(keys[layer["layer"]])[:90]  # the projection's output, before rotation
        values = torch.linalg.svdvals(exact) ** 2
        for rank, error in enumerate(layer["error"]):
            assert error == pytest.approx(float((values[rank:].sum() / values.sum()).sqrt()), abs=2e-4)


def test_ctrl_c_leaves_what_was_measured(checkpoint, text):
    found = calibrate(*plan(checkpoint, text), Stages(interrupt_at=0.5))
    assert not found.complete
    assert found.provenance["passages"] == 1
    assert found.points[-1].heads_corrected == 1
    with pytest.raises(KeyboardInterrupt):  # nothing was measured yet
        calibrate(*plan(checkpoint, text), Stages(interrupt_at=0.1))


def test_each_layer_may_have_its_own_tau(checkpoint, text, tmp_path):
    every = calibrate(*plan(checkpoint, text), Observer())
    allowed = max(point.added_bound for point in every.points) / 2
    found = calibrate(*plan(checkpoint, text, max_loss=allowed), Observer())
    mixed = calibrate(*plan(checkpoint, text, max_loss=allowed, per_layer=True), Observer())
    assert mixed.complete
    assert [point.settings for point in mixed.points[-5:]] == [point.settings for point in every.points]
    tried = [point.settings["tau"] for point in mixed.points[:-5]]
    layers = len(open_checkpoint(checkpoint).geometry.layers)
    assert tried
    assert all(isinstance(tau, tuple) and len(tau) == layers for tau in tried)
    assert mixed.choice.point.added_bound <= allowed
    assert mixed.choice.point.bytes_exposed <= found.choice.point.bytes_exposed
    path = tmp_path / "mine.toml"
    path.write_text(mixed.to_toml())
    assert resolve_profile(profile=str(path)).hash == mixed.chosen.hash
    assert len(tomllib.loads(path.read_text())["provenance"]["curve"]) == len(mixed.points)
    assert " ".join(f"{tau:g}" for tau in tried[0]) in mixed.tables()[0][1].rows[0][0]


def test_ctrl_c_among_layers_leaves_what_was_measured_before(checkpoint, text):
    class Second(Stages):
        stages = 0

        def stage(self, name, total=None):
            super().stage(name, total)
            self.stages += name == "calibrate"
            self.done, self.interrupt_at = 0, 0.5 if self.stages == 2 else None

    found = calibrate(*plan(checkpoint, text, per_layer=True), Second())
    assert not found.complete
    assert [point.settings["tau"] for point in found.points] == [0.0, 0.7, 0.8, 0.9, 1.0]
    assert found.provenance["passages"] == 3


@pytest.mark.parametrize(
    ("target", "method", "values"),
    [("threshold", "refreekv", {}), ("tau", "freekv", {"tau": ["0.5"], "budget": ["48"]})],
)
def test_layers_have_no_values_of_their_own_elsewhere(checkpoint, text, target, method, values):
    settings = SMALL if method == "freekv" else {}
    with pytest.raises(KvcliError, match="layer") as refused:
        calibrate(*plan(checkpoint, text, target, method, settings, values=values, per_layer=True), Observer())
    assert refused.value.exit_code == ExitCode.USAGE


def test_values_that_are_asked_for_take_the_place_of_the_targets_own(checkpoint, text):
    asked = {"tau": ["0.5", "1"], "budget": ["48", "56"]}
    found = calibrate(*plan(checkpoint, text, values=asked, samples=1), Observer())
    assert [point.settings for point in found.points] == [
        {"tau": tau, "budget": budget} for tau in (0.5, 1.0) for budget in (48, 56)
    ]


def test_budgets_are_shares_where_that_is_asked_for(checkpoint, text):
    asked = {"budget": ["60%", "80%"], "page_size": ["8"]}
    found = calibrate(*plan(checkpoint, text, "budget", values=asked, samples=1), Observer())
    assert [point.settings["budget"] for point in found.points] == ["60%", "80%"]
    assert found.points[0].attended < found.points[1].attended
    assert 'budget = "' in found.to_toml()
    with pytest.raises(KvcliError, match=r"budget 1% of a prompt"):
        calibrate(*plan(checkpoint, text, "budget", values={"budget": ["1%"]}, samples=1), Observer())


def test_what_does_not_fit_is_refused(checkpoint, text, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda _: {"host": 1 << 20})
    with pytest.raises(KvcliError) as refused:
        calibrate(*plan(checkpoint, text), Observer())
    assert refused.value.exit_code == ExitCode.WILL_NOT_FIT
    assert "5 settings" in refused.value.what


def test_bad_targets_and_texts_are_named(checkpoint, tmp_path):
    with pytest.raises(KvcliError, match="unknown target 'tao'") as refused:
        target_of("tao")
    assert "'tau'" in refused.value.hint
    with pytest.raises(KvcliError, match="quest has no setting 'tau'"):
        calibrate(*plan(checkpoint, "unread", method="quest"), Observer())
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(KvcliError, match="too few to continue"):
        calibrate(*plan(checkpoint, str(short)), Observer())


def test_built_in_text_is_made_to_measure_and_by_seed():
    tokenizer = open_checkpoint(ModelSpec()).tokenizer
    passages = built_in(tokenizer, 600, 16, 5, seed=0)
    assert len(passages) == 5
    for passage in passages:
        assert 560 < len(passage.prompt) <= 600
        assert 1 <= len(passage.continuation) <= 16
    assert built_in(tokenizer, 600, 16, 5, seed=0) == passages
    assert built_in(tokenizer, 600, 16, 5, seed=1) != passages
    assert "access code" in tokenizer.decode(passages[0].continuation)


@pytest.mark.parametrize(
    ("target", "method", "settings", "values", "per_layer"),
    [
        ("tau", "freekv", DEMO, {"tau": ["0.0", "1.0"]}, False),
        ("tau", "freekv", DEMO, {"tau": ["0.0", "1.0"]}, True),
        (
            "rank",
            "shadowkv",
            {"budget": 128, "outliers": 4, "local": 4},
            {"rank": ["8", "64"], "outliers": ["4"]},
            False,
        ),
    ],
)
def test_a_chosen_value_keeps_its_promise_on_text_that_was_was_not_seen(target, method, settings, values, per_layer):
    profile = resolve_profile(method=method, overrides=settings)
    asked = CalibrationPlan(
        ModelSpec(), profile, length=600, steps=12, samples=3, max_loss=0.05, values=values, per_layer=per_layer
    )
    chosen = calibrate(SWEEPS[target], asked, Observer()).choice.point
    assert chosen is not None
    setting = next(iter(values))
    other = {**values, setting: [json.dumps(chosen.settings[setting]), values[setting][-1]]}
    held_out = calibrate(
        SWEEPS[target],
        CalibrationPlan(ModelSpec(), profile, length=600, steps=12, samples=3, seed=1000, values=other),
        Observer(),
    )
    assert held_out.points[0].settings[setting] == chosen.settings[setting]
    assert held_out.points[0].added <= asked.max_loss
