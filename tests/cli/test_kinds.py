"""Checkpoints of other kinds by the real command: from files to tokens, samples, questions, saved KV."""

import json

import pytest
import torch
from families import tiny_checkpoint
from transformers import AutoTokenizer

from kvcli.conformance.crossed import some
from kvcli.models.auto import model_class
from kvcli.models.loading import ModelSpec, read_config

WORDS = "the quick brown fox jumps over the lazy dog and then the dog runs there while the other fox sleeps "
AMPLE = ["--method", "freekv", "--budget", "4096", "--sink", "16", "--window", "32", "--page-size", "16"]
SMALL = [*AMPLE[:2], "--budget", "96", *AMPLE[4:]]
STEPS = 8


KINDS = ["gpt2", "deepseek_v3", "llama4_images", "qwen3_vl", "gemma4", "gemma3n", "longcat_flash"]


@pytest.fixture(scope="module", params=some(KINDS, KINDS[::2]))
def model(request, tmp_path_factory):
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(WORDS * 8)
    return path


def tokens(result):
    assert result.returncode == 0, result.stderr
    return [sequence["token_ids"] for sequence in json.loads(result.stdout)["sequences"]]


def test_questions_samples_and_saved_kv_continue_as_transformers_does(model, document, warm, tmp_path):
    def ask(budget, *more):
        settings = [*budget, "--ignore-eos", "--max-tokens", STEPS, "--json"]
        return tokens(warm("generate", "-m", model, "-p", "which fox?", "-p", "why?", *settings, *more))

    module = model_class(read_config(ModelSpec(str(model)))).from_pretrained(model, dtype=torch.float32)
    tokenizer, expected = AutoTokenizer.from_pretrained(model), []
    for question in ("which fox?", "why?"):
        chat = [{"role": "user", "content": f"{document.read_text().rstrip()}\n\n{question}"}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        out = module.generate(ids, max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
        expected.append(out[0, ids.shape[1] :].tolist())
    assert ask(AMPLE, document, "--num-samples", 2) == [expected[0]] * 2 + [expected[1]] * 2
    small = ask(SMALL, document, "--save-kv", tmp_path / "fox.kv")
    assert ask(SMALL, "--kv", tmp_path / "fox.kv") == small
    assert ask(AMPLE, "--kv", tmp_path / "fox.kv") == expected
