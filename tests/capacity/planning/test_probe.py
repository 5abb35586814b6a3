"""Loops are compiled before a run, once on a machine."""

import json
import os
import subprocess
import sys

import pytest
from families import tiny_config, tiny_tokenizer

from kvcli.capacity.planning import probe
from kvcli.inputs.profiles import resolve_profile
from kvcli.kernels import _numba
from kvcli.methods import get_method, method_names
from kvcli.models.loading import ModelSpec, open_checkpoint
from kvcli.runtime.decode import BlockingStepper
from kvcli.runtime.lossless import Verifier

pytestmark = pytest.mark.skipif(_numba.numba is None, reason="numba is not there")

CONTEXT = 600


@pytest.fixture
def checkpoint_of(tmp_path):
    def made(model):
        directory = tmp_path / model
        tiny_config(model).save_pretrained(directory)
        tiny_tokenizer().save_pretrained(directory)
        return open_checkpoint(ModelSpec(name=str(directory), device="cpu", dtype="float32", load_format="dummy"))

    return made


@pytest.fixture
def checkpoint(checkpoint_of):
    return checkpoint_of("llama")


@pytest.fixture
def steps(monkeypatch, tmp_path):
    taken, step = [], BlockingStepper.step
    monkeypatch.setattr(probe, "kept_in", lambda: tmp_path)
    monkeypatch.setattr(probe, "LEAST", 1)
    monkeypatch.setattr(BlockingStepper, "step", lambda self, batch: taken.append(len(batch)) or step(self, batch))
    return taken


def profile(method, budget=64):
    wanted = {"budget": budget, "sink": 8, "window": 8, "page_size": 8, "chunk": 4, "rank": 12, "outliers": 2}
    wanted |= {"local": 1, "prefill_window": 20}
    fields = get_method(method).Config.model_fields
    return resolve_profile(method, overrides={key: value for key, value in wanted.items() if key in fields})


@pytest.mark.parametrize("method", method_names())
def test_a_run_of_any_method_is_rehearsed_once(method, checkpoint, steps, tmp_path):
    probe.rehearse(profile(method), checkpoint, CONTEXT, lambda _: None)
    assert sum(steps) >= 2
    assert len([*tmp_path.glob("rehearsed-*")]) == 1
    del steps[:]
    probe.rehearse(profile(method), checkpoint, CONTEXT + 1, lambda _: None)
    assert not steps


def test_a_rehearsal_that_fails_leaves_it_to_the_run(checkpoint, steps, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("layers that cannot be made alone")

    monkeypatch.setattr(probe, "random_model", fail)
    probe.rehearse(profile("quest"), checkpoint, CONTEXT, lambda _: None)
    assert not steps
    assert not [*tmp_path.glob("rehearsed-*")]


def test_another_run_is_rehearsed_by_itself(checkpoint, steps):
    for chosen, context in ((profile("quest"), CONTEXT), (profile("quest", 80), CONTEXT), (profile("quest"), 2000)):
        del steps[:]
        probe.rehearse(chosen, checkpoint, context, lambda _: None)
        assert steps


def test_nothing_is_rehearsed_where_no_loop_serves_or_nothing_keeps_it(checkpoint, steps, monkeypatch):
    monkeypatch.setattr(probe, "kept_in", lambda: None)
    probe.rehearse(profile("quest"), checkpoint, CONTEXT, lambda _: None)
    monkeypatch.undo()
    probe.rehearse(profile("quest"), checkpoint, 30, lambda _: None)
    assert not steps


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_drafts_that_full_attention_checks_are_rehearsed_apart(model, checkpoint_of, steps, monkeypatch, tmp_path):
    passes, read = [], Verifier.read
    monkeypatch.setattr(Verifier, "read", lambda self, tokens: passes.append(len(tokens)) or read(self, tokens))
    checkpoint = checkpoint_of(model)
    probe.rehearse(profile("quest"), checkpoint, CONTEXT, lambda _: None)
    assert not passes
    probe.rehearse(profile("quest"), checkpoint, CONTEXT, lambda _: None, lossless=3)
    assert passes[0] == 4
    assert {1, 2, 4} <= set(passes)
    assert len([*tmp_path.glob("rehearsed-*")]) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [["full"], ["freekv"], ["streaming", "--lossless", "4"]])
def test_no_step_of_the_first_run_waits_for_loops(words, tmp_path):
    command = [sys.executable, "-m", "kvcli", "generate", "examples/needle-4k.txt", "--json", "--method", *words]
    done = subprocess.run(
        [*command, "--max-tokens", "8"],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("compiling loops for this processor") == 1
    timing = json.loads(done.stdout)["sequences"][0]["timing"]
    assert timing["compile_ms"] == 0
