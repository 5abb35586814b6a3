"""Retrieval heads on the command line: found by themselves, or given in a file."""

import json
from functools import partial

import pytest
import torch
from command import assert_refused
from families import KV_HEADS, LAYERS, tiny_checkpoint
from safetensors.torch import save_file

NOTICE = "no file of retrieval heads: looking for them on"


@pytest.fixture
def generate(warm, tmp_path):
    model = tiny_checkpoint("llama", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 200
    (model / "config.json").write_text(json.dumps(config))
    settings = ["--window", 8, "--set", "window_part=0", "--max-tokens", 3, "--ignore-eos", "--json"]
    return partial(warm, "generate", "-m", model, "--method", "razor", "-p", "the quick brown fox " * 5, *settings)


def test_without_a_file_a_probe_finds_them_and_says_so(generate):
    result = generate()
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(NOTICE) == 1
    assert len(json.loads(result.stdout)["sequences"][0]["method"]["retrieval_heads"]) == 2  # 0.15 of 8, rounded up


def test_a_file_is_taken_at_its_word(generate, tmp_path):
    heads = torch.zeros(LAYERS, KV_HEADS, dtype=torch.bool)
    heads[1, 1] = heads[3, 0] = True
    save_file({"heads": heads}, tmp_path / "heads.safetensors")
    result = generate("--set", f"heads={tmp_path / 'heads.safetensors'}")
    assert NOTICE not in result.stderr
    assert json.loads(result.stdout)["sequences"][0]["method"]["retrieval_heads"] == [[1, 1], [3, 0]]


def test_what_is_no_file_of_heads_is_refused_before_the_weights_are_read(generate, tmp_path):
    assert_refused(generate("--set", "heads=missing.safetensors"), 2, "missing.safetensors: No such file")
    save_file({"heads": torch.zeros(2, 2, dtype=torch.bool)}, tmp_path / "other")
    assert_refused(generate("--set", f"heads={tmp_path / 'other'}"), 2, "heads has shape [2, 2], not [4, 2]")
    assert_refused(generate("--set", "echo=0.5"), 2, "echo 0.5 is more than sparsity 0.15")
