import pytest
import torch
from families import tiny_checkpoint, tiny_config

from kvcli.capacity import memory, smaller
from kvcli.capacity.smaller import in_words, smaller_forms, that_fit
from kvcli.errors import KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.geometry import geometry_of
from kvcli.models.loading import ModelSpec, open_checkpoint
from kvcli.models.weights import ON_LOADING
from kvcli.runtime.sampling import Sampling

CPU = torch.device("cpu")


def forms_of(dtype, form=None, path=None):
    config = tiny_config("llama")
    return [*smaller_forms(config, dtype, geometry_of(config, dtype, form), path, CPU)]


def test_each_form_is_smaller_than_what_was_asked_for():
    config = tiny_config("llama")
    asked = geometry_of(config, torch.float32).weight_bytes
    options = [" ".join(form.options) for form in forms_of(torch.float32)]
    assert options == [
        "--dtype bfloat16",
        "--weights int8",
        "--weights int4",
        "--dtype bfloat16 --weights int8",
        "--dtype bfloat16 --weights int4",
    ]
    assert all(form.geometry.weight_bytes < asked for form in forms_of(torch.float32))


@pytest.mark.parametrize(
    ("dtype", "form", "options"),
    [
        (torch.bfloat16, None, ["--weights int8", "--weights int4"]),
        (torch.bfloat16, ON_LOADING["int8"], ["--weights int4"]),
        (torch.bfloat16, ON_LOADING["int4"], []),
    ],
)
def test_nothing_is_named_that_the_model_has_already(dtype, form, options):
    assert [" ".join(each.options) for each in forms_of(dtype, form)] == options


def test_weights_of_files_can_lie_on_a_disk(tmp_path):
    (last,) = forms_of(torch.bfloat16, path=tmp_path)[2:]
    assert last.options == ("--weights-on disk",)
    geometry = last.geometry
    assert geometry.held_bytes < geometry.weight_bytes == geometry_of(tiny_config("llama"), torch.bfloat16).weight_bytes


def test_two_options_are_named_only_where_no_single_one_is_enough():
    forms = forms_of(torch.float32)
    assert that_fit(forms, lambda form: True) == ["--dtype bfloat16", "--weights int8", "--weights int4"]
    assert that_fit(forms, lambda form: len(form.options) == 2) == [" ".join(form.options) for form in forms[3:]]
    assert that_fit(forms, lambda form: False) == []


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr("kvcli.models.weights.installed", lambda name: True)
    assert in_words(["a"]) == "a"
    assert in_words(["a", "b", "--weights int8"]) == "a, b or --weights int8"
    monkeypatch.setattr("kvcli.models.weights.installed", lambda name: False)
    assert in_words(["a", "b"]) == "a or b"
    assert in_words(["a", "--weights int8"]) == "a or --weights int8 (pip install 'kvcli[weights]')"


def test_a_refusal_names_the_forms_that_fit_and_they_do(monkeypatch, tmp_path):
    tiny_checkpoint("llama", tmp_path)
    checkpoint, full = open_checkpoint(ModelSpec(str(tmp_path), dtype="float32")), resolve_profile("full")
    sampling = Sampling(max_tokens=16)
    narrow = open_checkpoint(ModelSpec(str(tmp_path), dtype="bfloat16"))
    enough = memory.need(full, narrow.geometry, torch.bfloat16, [3000], 16, 1).on(CPU)
    monkeypatch.setattr(memory, "available", lambda _: enough)
    with pytest.raises(KvcliError) as refused:
        memory.check(full, checkpoint, [3000], sampling)
    assert "; it fits with --dtype bfloat16; or use" in refused.value.hint
    memory.check(full, narrow, [3000], sampling)
    for less, named in ((enough["host"] - 1, "--dtype bfloat16;"), (1000, "it fits with")):
        monkeypatch.setattr(memory, "available", lambda _, less=less: {"host": less})
        with pytest.raises(KvcliError) as refused:
            memory.check(full, checkpoint, [3000], sampling)
        assert named not in refused.value.hint


def test_a_model_that_is_loaded_has_its_form(monkeypatch, tmp_path):
    tiny_checkpoint("llama", tmp_path)
    checkpoint = open_checkpoint(ModelSpec(str(tmp_path), dtype="float32"))
    monkeypatch.setattr(memory, "available", lambda _: {"host": 1 << 20})
    monkeypatch.setattr(smaller, "describe", None)
    with pytest.raises(KvcliError) as refused:
        memory.check(resolve_profile("full"), checkpoint, [3000], Sampling(), loaded=True)
    assert "it fits with" not in refused.value.hint
