"""What is found once for a model, against transformers' own queries and keys, and taken by the methods it is for."""

import json

import pytest
import torch
from families import KV_HEADS, LAYERS, tiny_checkpoint
from safetensors import safe_open
from safetensors.torch import load

from kvcli.errors import KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.loading import ModelSpec, load_model, open_checkpoint
from kvcli.quality.calibrate.plan import CalibrationPlan, passages_of
from kvcli.quality.calibrate.run import find
from kvcli.quality.calibrate.targets import SEARCHES
from kvcli.quality.fidelity import measure
from kvcli.runtime.engine import engine
from kvcli.telemetry.observer import Observer

TEXT = "the quick brown fox jumps over the lazy dog and the number of the third key is 4711 "
SMALL = {"loki": {"budget": 32, "rank": 4}, "infinigen": {"budget": 32}, "razor": {"window": 16, "window_part": 0.0}}
SMALL |= {"duoattention": {"sink": 4, "window": 16}}


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr("kvcli.quality.calibrate.tensors.ROUNDS", 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint("llama", path)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = 401  # what the probe of the heads is cut to
    (path / "config.json").write_text(json.dumps(config))
    (path / "fox.txt").write_text(TEXT * 12)
    return ModelSpec(str(path))


def plan(checkpoint, search, **more):
    profile = resolve_profile(method=search.method, overrides=SMALL[search.method])
    files = [f"{checkpoint.name}/fox.txt"] if search.reads_text else []
    return CalibrationPlan(checkpoint, profile, files, **{"length": 90, "steps": 6, "samples": 2, **more})


@torch.inference_mode()
def exact_keys(checkpoint, passages):
    """Keys of each layer and passage [Hk, s, d] in float64, as transformers caches them: rotated."""
    model = load_model(checkpoint).module
    runs = [model(torch.tensor([each.prompt + each.continuation]), use_cache=True) for each in passages]
    return [[run.past_key_values.layers[layer].keys[0].double() for run in runs] for layer in range(LAYERS)]


def test_pca_are_the_principal_axes_of_the_keys(checkpoint):
    search = SEARCHES["pca"]
    asked = plan(checkpoint, search)
    tensors = find(search, asked, Observer()).source.tensors()
    passages = passages_of(asked, open_checkpoint(checkpoint))
    assert set(tensors) == {f"layer.{layer}" for layer in range(LAYERS)}
    for layer, keys in enumerate(exact_keys(checkpoint, passages)):
        for head in range(KV_HEADS):
            centred = [key[head] - key[head].mean(0) for key in keys]
            covariance = sum(each.T @ each for each in centred)
            values = torch.linalg.eigvalsh(covariance).flip(0)
            axes = tensors[f"layer.{layer}"][head].double()
            assert torch.allclose(axes.T @ axes, torch.eye(len(axes)).double(), atol=1e-5)
            variance = torch.diag(axes.T @ covariance @ axes)
            assert torch.allclose(variance, values, rtol=1e-3, atol=1e-3 * float(values[0]))


def test_skew_is_orthogonal_and_gathers_the_product_in_few_columns(checkpoint):
    search = SEARCHES["skew"]
    asked = plan(checkpoint, search)
    found = find(search, asked, Observer())
    passages = passages_of(asked, open_checkpoint(checkpoint))
    for layer, keys in enumerate(exact_keys(checkpoint, passages)):
        skew = found.source.tensors()[f"layer.{layer}"].double()
        assert skew.shape == (KV_HEADS, *skew.shape[1:])
        for head in range(KV_HEADS):
            assert torch.allclose(skew[head].T @ skew[head], torch.eye(skew.shape[1]).double(), atol=1e-5)
            moments = sum(key[head].T @ key[head] for key in keys)
            seen = found.source.keys[layer][head].double()
            assert torch.allclose(seen, moments, rtol=1e-3, atol=1e-3 * float(moments.abs().max()))
            queries = found.source.queries[layer][head].double()
            strength = torch.diag(skew[head].T @ queries @ skew[head]) * torch.diag(skew[head].T @ moments @ skew[head])
            assert (strength.diff() <= 1e-4 * strength[0]).all(), "columns stand by falling strength"


def test_heads_are_those_that_the_method_finds_for_itself(checkpoint):
    search = SEARCHES["heads"]
    found = find(search, plan(checkpoint, search), Observer())
    (heads,) = found.source.tensors().values()
    assert heads.shape == (LAYERS, KV_HEADS)
    assert heads.dtype == torch.bool
    with engine(load_model(checkpoint), [50]) as ready:
        method = ready.method(resolve_profile(method="razor"), ready.context(40, 10))
    for layer in range(LAYERS):
        expected = method.keep.get(layer, torch.zeros(KV_HEADS, dtype=torch.bool))
        assert torch.equal(heads[layer], expected)
    assert heads.any()
    assert "text" not in found.provenance  # it plays no part
    with pytest.raises(KvcliError, match="not found on text"):
        find(search, plan(checkpoint, SEARCHES["pca"]), Observer())


@pytest.mark.parametrize("name", SEARCHES)
def test_the_file_is_taken_by_the_method_it_is_for(checkpoint, name, tmp_path):
    search = SEARCHES[name]
    asked = plan(checkpoint, search)
    found = find(search, asked, Observer())
    file, toml = tmp_path / "mine.safetensors", tmp_path / "mine.toml"
    file.write_bytes(found.tensor_file())
    toml.write_text(found.to_toml(file))
    with safe_open(str(file), framework="pt") as opened:
        assert json.loads(opened.metadata()["provenance"])["model_hash"] == found.provenance["model_hash"]
    assert load(file.read_bytes()).keys() == found.source.tensors().keys()
    profile = resolve_profile(profile=str(toml))
    assert getattr(profile.settings, search.name) == str(file.resolve())
    assert profile.provenance["target"] == name
    text = passages_of(plan(checkpoint, SEARCHES["pca"], samples=1), open_checkpoint(checkpoint))[0]
    with engine(load_model(checkpoint), [text.capacity]) as ready:
        ((measured,), _) = measure(ready, text, [profile])
    assert 0 < measured.fidelity.attention()["mass"] < 1
    body = json.loads(found.to_json())
    assert body["target"] == name
    assert body["tables"][0]["rows"]
    with pytest.raises(KvcliError, match=f"takes no {name} file"):
        find(search, CalibrationPlan(checkpoint, resolve_profile(method="full")), Observer())
