import dataclasses
import json
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import (
    EAGER,
    FAMILIES,
    VOCAB,
    randomize,
    tiny_checkpoint,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from kvcli.errors import ExitCode, KvcliError
from kvcli.models import loading, place
from kvcli.models.devices import resolve_device
from kvcli.models.geometry import geometry_of
from kvcli.models.loading import ModelSpec, load_model, open_checkpoint, read_config, resolve_dtype

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_model_is_the_one_that_was_saved(family, tmp_path):
    tiny_checkpoint(family, tmp_path, seed=3)
    model = load_model(ModelSpec(str(tmp_path), device="cpu"))
    ids = torch.randint(3, VOCAB, (1, 37), generator=torch.Generator().manual_seed(0))
    if family in EAGER:
        model.module.set_attn_implementation("eager")
    assert torch.equal(model.module(ids).logits, tiny_model(family, seed=3)(ids).logits)
    assert not model.module.training
    assert not any(weight.requires_grad for weight in model.module.parameters())
    assert model.geometry == geometry_of(model.module.config, torch.float32)
    assert (model.device, model.dtype) == (CPU, torch.float32)
    assert (model.name, model.source) == (str(tmp_path), "directory")
    text = "Ünïcode, 123\n"
    assert model.tokenizer.decode(model.tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_model_from_a_gguf_file_that_was_saved_is_planned_as_it_was_saved(tmp_path):
    tiny_checkpoint("llama", tmp_path, seed=3)
    plain = open_checkpoint(ModelSpec(str(tmp_path), device="cpu")).geometry
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = dict.fromkeys(load_file(tmp_path / "model.safetensors"), "Q8_0")
    config["quantization_config"] = {"quant_method": "gguf", "tensors": tensors}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(ModelSpec(str(tmp_path), device="cpu"))
    assert checkpoint.geometry == plain
    assert checkpoint.geometry.weight_bytes == sum(w.nbytes for w in checkpoint.load().module.parameters())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_a_load_leaves_no_memory_of_what_it_freed(monkeypatch):
    """glibc gives a heap back only up to the newest block that is still held."""
    weights = loading._weights

    def with_more(checkpoint):
        blocks = [bytes(1 << 16) for _ in range(1024)]
        module = weights(checkpoint)
        blocks.append(bytes(1 << 16))
        module.newest = blocks[-1]
        return module

    def held():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    load_model(ModelSpec(device="cpu"))  # whatever a first one brings
    before = held()
    monkeypatch.setattr(loading, "_weights", with_more)
    model = load_model(ModelSpec(device="cpu"))
    assert held() - before < (1 << 25) + model.geometry.weight_bytes


@pytest.mark.parametrize("family", ["gemma3_images", "qwen3_vl", "mistral3"])
def test_what_only_images_pass_is_not_loaded(family, tmp_path):
    config = tiny_config(family)
    whole = randomize(AutoModelForImageTextToText.from_config(config, dtype=torch.float32)).eval()
    tiny_tokenizer().save_pretrained(tmp_path)
    whole.save_pretrained(tmp_path)
    model = load_model(ModelSpec(str(tmp_path), device="cpu"))
    names = [name for name, _ in model.module.named_parameters()]
    assert not [name for name in names if not name.startswith(("model.language_model.", "lm_head."))]
    assert model.geometry.weight_bytes == sum(weight.nbytes for weight in model.module.parameters())
    assert model.geometry.weight_bytes < sum(weight.nbytes for weight in whole.parameters())
    ids = torch.randint(6, VOCAB, (1, 37), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.module(ids).logits, whole(ids).logits)


def test_tied_weights_are_not_missing(tmp_path):
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    tiny_checkpoint("llama", tmp_path)
    tiny_model("llama", config=config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_model(ModelSpec(str(tmp_path), device="cpu"))
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight


def test_sharded_checkpoints_and_dtypes_load(tmp_path):
    tiny_checkpoint("qwen2", tmp_path, max_shard_size="100KB")
    model = load_model(ModelSpec(str(tmp_path), device="cpu", dtype="bfloat16"))
    assert {weight.dtype for weight in model.module.parameters()} == {torch.bfloat16}
    assert model.geometry.weight_bytes == 2 * sum(weight.numel() for weight in model.module.parameters())


def test_a_config_can_be_changed_before_loading(tmp_path):
    tiny_checkpoint("llama", tmp_path)
    spec = ModelSpec(str(tmp_path), device="cpu")
    config = read_config(spec)
    config.max_position_embeddings = 99
    assert load_model(spec, config).geometry.max_positions == 99


@pytest.mark.parametrize(
    ("written", "found"), [('{"chat_template": "{{ messages[0].content }}"}', True), ('{"x": 1}', False), ("[]", False)]
)
def test_a_template_that_only_the_processor_has_is_used(tmp_path, written, found):
    tiny_checkpoint("llama", tmp_path, chat=False)
    (tmp_path / "chat_template.json").write_text(written)
    template = open_checkpoint(ModelSpec(str(tmp_path), device="cpu")).tokenizer.chat_template
    assert template == ("{{ messages[0].content }}" if found else None)


def test_opening_reads_no_weights(tmp_path, monkeypatch):
    tiny_checkpoint("llama", tmp_path)
    monkeypatch.setattr("kvcli.models.loading._weights", lambda _: pytest.fail("read the weights"))
    opened = open_checkpoint(ModelSpec(str(tmp_path), device="cpu"))
    assert opened.geometry.vocab_size == VOCAB
    assert (opened.name, opened.source, opened.dtype) == (str(tmp_path), "directory", torch.float32)


def test_no_name_is_the_bundled_model(tmp_path, monkeypatch):
    package = tmp_path / "demo"
    tiny_checkpoint("llama", package)
    monkeypatch.setattr(place, "__file__", str(tmp_path / "place.py"))
    model = load_model(ModelSpec(device="cpu"))
    assert (model.name, model.source) == ("demo", "bundled")
    (package / "config.json").unlink()
    with pytest.raises(KvcliError, match="no bundled demo model") as caught:
        load_model(ModelSpec(device="cpu"))
    assert "-m" in caught.value.hint


def test_spec_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelSpec().name = "other"


def pretend_cuda(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")


def test_devices_where_there_is_cuda(monkeypatch):
    pretend_cuda(monkeypatch, 2)
    assert resolve_device("auto") == torch.device("cuda", 1)
    assert resolve_device("cuda") == torch.device("cuda", 1)
    assert resolve_device("cuda:0") == CUDA
    assert resolve_device("cpu") == CPU
    with pytest.raises(KvcliError, match="cuda:2") as caught:
        resolve_device("cuda:2")
    assert caught.value.exit_code == ExitCode.USAGE
    assert "cuda:0 (GPU 0), cuda:1 (GPU 1)" in caught.value.hint


def test_devices_where_there_is_none(monkeypatch):
    pretend_cuda(monkeypatch, 0)
    assert resolve_device("auto") == CPU
    for name in ("cuda", "cuda:0"):
        with pytest.raises(KvcliError, match="no CUDA device") as caught:
            resolve_device(name)
        assert caught.value.exit_code == ExitCode.USAGE
        assert "cpu" in caught.value.hint


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "", "mps"])
def test_unknown_devices(name):
    with pytest.raises(KvcliError, match="unknown device") as caught:
        resolve_device(name)
    assert caught.value.exit_code == ExitCode.USAGE


def test_dtype_auto_is_the_checkpoints_on_cuda_and_float32_on_the_cpu():
    config = tiny_config("llama")
    config.dtype = torch.float16
    assert resolve_dtype("auto", config, CUDA) == torch.float16
    assert resolve_dtype("auto", config, CPU) == torch.float32
    assert resolve_dtype("bfloat16", config, CPU) == torch.bfloat16
    config.dtype = None
    assert resolve_dtype("auto", config, CUDA) == torch.bfloat16


def test_dtype_of_a_composite_config_is_its_text_parts():
    text = SimpleNamespace(dtype=torch.float16)
    config = SimpleNamespace(dtype=None, get_text_config=lambda decoder: text if decoder else None)
    assert resolve_dtype("auto", config, CUDA) == torch.float16


def test_unknown_dtype():
    with pytest.raises(KvcliError, match="'int8'") as caught:
        resolve_dtype("int8", tiny_config("llama"), CPU)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "bfloat16" in caught.value.hint
