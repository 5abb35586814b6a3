import json

import pytest
import torch
from families import FAMILIES, tiny_checkpoint, tiny_config
from transformers import AutoConfig

from kvcli.errors import ExitCode, KvcliError
from kvcli.models import place
from kvcli.models.dummy import fallback_tokenizer, random_model
from kvcli.models.loading import ModelSpec, load_model, read_config
from kvcli.models.shapes import shape_names, shape_path

CPU = torch.device("cpu")
TEXT = "naïve 京都 \x00\n\t9"


def dummy(name, **spec):
    return ModelSpec(str(name), **{"device": "cpu", "load_format": "dummy", "offline": True, **spec})


@pytest.fixture
def no_demo(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "__file__", str(tmp_path / "place.py"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_drawn_and_the_same_each_time(family):
    config = tiny_config(family)
    torch.manual_seed(7)
    first = random_model(config, torch.bfloat16, CPU).state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(1), drawn)  # the global random state was left alone
    second = random_model(config, torch.bfloat16, CPU).state_dict()
    for name, weight in first.items():
        assert weight.dtype == torch.bfloat16
        assert torch.isfinite(weight).all()
        assert weight.abs().max() < 2, name  # memory that nobody wrote to holds anything
        assert torch.equal(weight, second[name])
        if weight.dim() > 1 and "bias" not in name:
            assert weight.float().std() > 1e-3, name


def test_a_dummy_model_runs():
    model = load_model(dummy("tiny"))
    logits = model.module(torch.arange(11)[None]).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 1e-3
    assert (model.name, model.source) == ("tiny", "dummy")
    assert model.tokenizer.decode(model.tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT


def test_a_dummy_comes_from_a_config_file_or_a_directory(tmp_path):
    tiny_config("qwen3").save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        model = load_model(dummy(name))
        assert model.module.config.model_type == "qwen3"
        assert model.tokenizer is not None
        assert model.source == "dummy"


def test_a_directory_lends_its_tokenizer(tmp_path):
    tiny_checkpoint("llama", tmp_path, layers=1)
    (tmp_path / "model.safetensors").unlink()
    assert load_model(dummy(tmp_path)).tokenizer.chat_template is not None


def test_unknown_shapes_name_the_nearest():
    with pytest.raises(KvcliError, match=r"'llama-3\.1-8'") as caught:
        read_config(dummy("llama-3.1-8"))
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.hint.startswith("did you mean llama-3.1-8b")
    with pytest.raises(KvcliError) as caught:
        read_config(dummy("zzz"))
    assert all(name in caught.value.hint for name in shape_names())


def test_a_shape_without_dummy_weights_says_how():
    with pytest.raises(KvcliError, match="without weights") as caught:
        read_config(ModelSpec("qwen3-8b"))
    assert caught.value.exit_code == ExitCode.USAGE
    assert "--load-format dummy" in caught.value.hint


def test_a_config_file_that_is_none(tmp_path):
    file = tmp_path / "own.json"
    file.write_text("{")
    with pytest.raises(KvcliError, match="not valid JSON"):
        load_model(dummy(file))
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": -8}))
    with pytest.raises(KvcliError, match="hidden_size -8: should be greater") as caught:
        load_model(dummy(file))
    assert caught.value.exit_code == ExitCode.RUNTIME


def test_shapes_keep_their_rope_settings():
    config = AutoConfig.from_pretrained(shape_path("llama-3.1-8b"))
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["factor"] == 8.0
    assert AutoConfig.from_pretrained(shape_path("llama-3-8b-1m")).rope_parameters["rope_theta"] == 3580165449.0
    assert AutoConfig.from_pretrained(shape_path("glm-4-9b")).rope_parameters["partial_rotary_factor"] == 0.5
    assert AutoConfig.from_pretrained(shape_path("qwen2.5-7b")).layer_types == ["full_attention"] * 28


@pytest.mark.usefixtures("no_demo")
def test_without_the_demo_model_bytes_are_tokens():
    tokenizer = fallback_tokenizer(256)
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT.encode())
    assert max(ids) < 256
    assert tokenizer.decode(ids) == TEXT
    with pytest.raises(KvcliError, match="255") as caught:
        fallback_tokenizer(255)
    assert caught.value.exit_code == ExitCode.USAGE


def test_the_demo_models_tokenizer_is_taken_where_it_fits(tmp_path, monkeypatch):
    package = tmp_path / "demo"
    tiny_checkpoint("llama", package, layers=1)
    monkeypatch.setattr(place, "__file__", str(tmp_path / "place.py"))
    assert fallback_tokenizer(300).chat_template is not None
    assert fallback_tokenizer(260).chat_template is None
