"""Retrieval heads: scores against the attention matrices that transformers computes, and when the probe is run."""

import json

import pytest
import torch
from families import KV_HEADS, LAYERS, tiny_checkpoint
from transformers import AutoModelForCausalLM

from kvcli.inputs.profiles import resolve_profile
from kvcli.models.loading import ModelSpec, load_model
from kvcli.runtime.engine import engine
from kvcli.runtime.retrieval_heads import REPEATS, RepeatedTokens, head_scores


def checkpoint(path, family="llama", positions=200):
    tiny_checkpoint(family, path)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = positions
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def model(tmp_path):
    return load_model(ModelSpec(checkpoint(tmp_path)))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_oss"])
def test_scores_are_those_of_the_attention_matrices(family, tmp_path):
    model = load_model(ModelSpec(checkpoint(tmp_path, family)))
    probe = RepeatedTokens.of(model, period=17)
    with engine(model, [len(probe.ids)]) as ready:
        found = head_scores(model, ready.hook, probe)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    attentions = eager(torch.tensor([probe.ids]), output_attentions=True).attentions
    windows = [layer.window for layer in model.geometry.layers]
    assert None in windows
    for layer, weights in enumerate(attentions):
        if windows[layer] is not None:
            assert found.echo[layer].eq(-torch.inf).all()
            assert found.induction[layer].eq(-torch.inf).all()
            continue
        for head in range(KV_HEADS):
            group = weights[0].double().chunk(KV_HEADS)[head]  # [G, s, s]
            echo, induction = [], []
            for matrix in group.tolist():
                later = range(1 + 17, 1 + 17 * REPEATS)
                former = [(i, j) for i in later for j in range(1 + (i - 1) % 17, i, 17)]
                echo.append(sum(matrix[i][j] for i, j in former) / len(later))
                induction.append(sum(matrix[i][j + 1] for i, j in former) / len(later))
            assert float(found.echo[layer, head]) == pytest.approx(max(echo), rel=1e-3)
            assert float(found.induction[layer, head]) == pytest.approx(max(induction), rel=1e-3)


def test_the_probe_repeats_ordinary_tokens_as_often_as_the_model_has_positions_for(model):
    probe = RepeatedTokens.of(model)
    assert probe.period == 199 // REPEATS
    assert probe.ids[0] == model.tokenizer.bos_token_id
    period = probe.ids[1 : 1 + probe.period]
    assert probe.ids[1:] == period * REPEATS
    assert not set(period) & set(model.tokenizer.all_special_ids)
    assert len(set(period)) > probe.period / 2
    assert probe == RepeatedTokens.of(model)
    assert len(RepeatedTokens.of(model, period=5).ids) == 1 + 5 * REPEATS


def test_a_model_is_probed_once_and_says_so(model):
    notices, heads = [], []
    profile = resolve_profile(method="razor", overrides={"sparsity": 0.5})
    for capacity in (40, 50):
        with engine(model, [capacity], notices.append) as ready:
            method = ready.method(profile, ready.context(capacity - 10, 10))
            heads.append(method.statistics()["retrieval_heads"])
            (logits,) = ready.prefill([5] * (capacity - 10), [method])
            assert logits.isfinite().all()
    (notice,) = notices
    assert notice.startswith("no file of retrieval heads: looking for them on 197 random tokens")
    assert heads[0] == heads[1]
    assert len(heads[0]) == LAYERS * KV_HEADS // 2


def test_methods_that_need_nothing_do_not_probe(model):
    notices = []
    with engine(model, [40], notices.append) as ready:
        ready.method(resolve_profile(method="freekv"), ready.context(30, 10))
    assert notices == []
