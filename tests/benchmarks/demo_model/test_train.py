"""Batches and training on a configuration small enough to train here."""

import math
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "demo_model"))

from architecture import demo_config, initialise
from batches import IGNORED, KINDS, VALUE, Writer, dense_batch, question_batch
from tokenizer import build_tokenizer
from train import Stage, Trainer

MICRO = (Stage(72, 2, 1, 2, 2.0, 1, 2), Stage(300, 5, 4, 1, 2.0, 1, 3, decay=True, short=0.5))


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(512)


def weights(trainer):
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()])


def test_dense_batches_repeat_a_segment_and_ask_for_what_can_be_known():
    batch = dense_batch(random.Random(2), 61, 3, 500)
    assert batch.ids.shape == batch.kinds.shape == (3, 61)
    known = (batch.kinds == VALUE).nonzero()
    period = known[0, 1].item() - 1
    assert 7 <= period <= 30
    assert torch.equal(batch.ids[:, period:], batch.ids[:, :-period])
    assert batch.ids.min() >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_question_batches_fit_and_ask_for_what_the_document_says(tokenizer, kind):
    writer = Writer(tokenizer)
    batch = question_batch(kind, random.Random(5), writer, length=400, facts=6, questions=4, size=2)
    assert batch.ids.shape == (2, 400)
    for ids, kinds in zip(batch.ids, batch.kinds, strict=True):
        assert ids[0] == tokenizer.bos_token_id
        document, asked = tokenizer.decode(ids).split("\n\n", 1)
        wanted = {tokenizer.decode([i]) for i in ids[kinds == VALUE]}
        assert wanted
        assert all(piece in document for piece in wanted)
        assert "\nAnswer: " in asked
        assert (kinds[ids == 0] == IGNORED).all()


def test_few_questions_are_one_to_three(tokenizer):
    writer = Writer(tokenizer)
    batch = question_batch("codes", random.Random(1), writer, length=600, facts=9, questions=8, size=12, few=1.0)
    counts = [tokenizer.decode(ids).count("\nAnswer:") for ids in batch.ids]
    assert set(counts) == {1, 2, 3}
    batch = question_batch("codes", random.Random(1), writer, length=600, facts=20, questions=8, size=12, few=0.0)
    assert max(tokenizer.decode(ids).count("\nAnswer:") for ids in batch.ids) == 8


def test_training_sequences_have_the_format_of_the_chat_template(tokenizer):
    writer = Writer(tokenizer)
    writer.start("A document.")
    writer.ask("A question?", "An answer 123456789.", ["123456789"])
    messages = [{"role": "user", "content": "A document.\n\nA question?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert writer.ids[: len(prompt)] == prompt
    assert tokenizer.decode(writer.ids[len(prompt) :]) == " An answer 123456789.<|eos|>"
    values = [i for i, kind in zip(writer.ids, writer.kinds, strict=True) if kind == VALUE]
    assert tokenizer.decode(values) == "123456789"


def test_a_start_that_attends_one_and_two_tokens_back(tokenizer):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(demo_config(len(tokenizer), 512, layers=2), attn_implementation="eager")
    initialise(model)
    ids = torch.randint(3, len(tokenizer), (1, 301))
    probabilities = model(ids, output_attentions=True).attentions[0][0]  # [H, s, s]
    for head, shift in ((0, 1), (1, 2)):
        assert probabilities[head].diagonal(-shift).mean() > 0.7


def test_two_trainings_with_one_seed_are_equal_and_another_seed_differs():
    runs = []
    for seed in (7, 7, 8):
        trainer = Trainer(MICRO, seed=seed, width=64, layers=2)
        lines = list(trainer.run())
        assert lines[-1] == "length 300 done"
        runs.append(weights(trainer))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_batch_whose_questions_were_cut_off_has_a_finite_loss():
    stage = Stage(40, 4, 4, 1, 2.0, 1, 1, dense=0.0, kinds={"multiquery": 1.0})
    trainer = Trainer([stage], seed=1, width=64, layers=2)
    assert math.isfinite(trainer.step(stage)[1])


def test_training_lowers_the_loss():
    stage = Stage(72, 2, 1, 2, 2.0, 1, 30, dense=0.0, kinds={"codes": 1.0})
    trainer = Trainer([stage], seed=1, width=64, layers=2)
    losses = [trainer.step(stage)[1] for _ in range(30)]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    whole = Trainer(MICRO, seed=3, width=64, layers=2)
    list(whole.run())

    first = Trainer(MICRO, seed=3, width=64, layers=2)
    for line in first.run():
        if line.endswith("done"):
            break
    first.save(tmp_path / "resume.pt")
    second = Trainer(MICRO, seed=4, width=64, layers=2)
    second.load(tmp_path / "resume.pt")
    list(second.run())
    assert torch.equal(weights(whole), weights(second))


def test_export_loads_as_a_llama_of_the_trained_length(tmp_path):
    trainer = Trainer(MICRO, seed=3, width=64, layers=2)
    trainer.export(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert model.config.model_type == "llama"
    assert model.config.max_position_embeddings == 300
    assert model.generation_config.eos_token_id == 2
