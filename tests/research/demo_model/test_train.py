"""Batches and training on a configuration small enough to train here."""

import math
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvcli.quality.tasks.phrases import sentence

sys.path.append(str(Path(__file__).parents[3] / "research" / "demo_model"))

from documents import IGNORED, KINDS, VALUE, Facts, Writer, passage
from tokenizer import build_tokenizer
from train import (
    Muon,
    Stage,
    Trainer,
    dense_batch,
    loss_and_hits,
    orthogonalised,
    question_batch,
    skipping_positions,
)

MICRO = (Stage(72, 2, 2), Stage(320, 1, 3, rate=(2e-3, 1e-4), short=0.5, kinds={"facts": 1.0}))
SIZE = {"layers": 2, "length": 1024}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(512)


@pytest.fixture(scope="module")
def writer(tokenizer):
    return Writer(tokenizer)


def weights(trainer):
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()])


@pytest.mark.parametrize("seed", range(4))
def test_every_value_of_a_dense_batch_can_be_known(seed):
    """It follows on the same token as before: of a repeated segment, or within a record of four tokens."""
    batch = dense_batch(random.Random(seed), 64, 3, range(3, 100_000), 64)
    assert batch.ids.shape == batch.kinds.shape == batch.positions.shape == (3, 64)
    for ids, kinds in zip(batch.ids.tolist(), batch.kinds.tolist(), strict=True):
        assert VALUE in kinds
        for at in (at for at, kind in enumerate(kinds) if kind == VALUE):
            earlier = ids.index(ids[at - 1])
            assert earlier < at - 1
            assert ids[earlier + 1] == ids[at]
    assert batch.ids.min() >= 3
    assert len(batch.tags) == (batch.kinds == VALUE).sum()


def test_positions_grow_and_reach_beyond_the_sequence():
    positions = skipping_positions(random.Random(1), 50, 40, 4000)
    assert (positions.diff(dim=1) >= 1).all()
    assert (positions[:, 0] == 0).all()
    assert positions.max() > 2000
    assert positions.max() < 4000
    assert 5 < (positions[:, -1] == 49).sum() < 35
    assert torch.equal(skipping_positions(random.Random(1), 50, 4, 50), torch.arange(50).repeat(4, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [160, 400, 1000, 6000])
def test_question_batches_fit_and_mark_what_is_to_be_found(tokenizer, writer, kind, length):
    batch = question_batch(kind, random.Random(5), writer, length=length, size=3, reach=length)
    assert batch.ids.shape == (3, length)
    assert len(batch.tags) == (batch.kinds == VALUE).sum()
    for ids, kinds in zip(batch.ids, batch.kinds, strict=True):
        assert ids[0] == tokenizer.bos_token_id
        document, asked = tokenizer.decode(ids).split("\n\n", 1)
        assert "\nAnswer: " in asked
        wanted = {tokenizer.decode([i]) for i in ids[kinds == VALUE]}
        assert wanted
        assert all(piece in document or piece in "123456789" for piece in wanted)
        assert (kinds[ids == 0] == IGNORED).all()


def test_a_document_asked_at_once_has_answers_of_nothing_but_values():
    said = Facts(random.Random(1), 12, at_once=True)
    for _ in range(10):
        _, answer, (value,), tag = said.ask(4)
        assert (answer, tag) == (f"{value}.", "direct")


@pytest.mark.parametrize("seed", range(12))
def test_what_is_asked_stands_in_the_document(seed):
    said = Facts(random.Random(seed), 30)
    text = " ".join(statement for group in said.statements for statement in group)
    for _ in range(20):
        question, answer, wanted, tag = said.ask(4)
        assert all(value in " " + answer for value in wanted)
        assert all(value in text for value in wanted)
        assert question.endswith(("?", "."))
        assert tag in ("code", "pair", "direct", "mixed", "names", "values", "chain", "late")


def test_asked_once_and_in_any_order():
    said = Facts(random.Random(5), 40, any_order=True, once=True)
    asked = [said.ask(4) for _ in range(100)]
    for tag, of in (("values", said.several), ("chain", said.chains)):
        questions = [question for question, _, _, found in asked if found == tag]
        assert len(questions) == len(set(questions)) == len(of) > 0
    told = [tuple(wanted) for _, _, wanted, tag in asked if tag == "values"]
    assert {frozenset(values) for values in told} == {frozenset(values) for values in said.several.values()}
    assert set(told) != {tuple(values) for values in said.several.values()}


def test_a_passage_says_the_same_words_again():
    def share_of_new(sentences):
        words = [word.strip(".,") for text in sentences for word in text.split()]
        return len(set(words)) / len(words)

    rng = random.Random(3)
    passages = [share_of_new(passage(rng)) for _ in range(100)]
    plain = [share_of_new([sentence(rng) for _ in range(5)]) for _ in range(100)]
    assert sum(passages) < 0.85 * sum(plain)


def test_training_sequences_have_the_format_of_the_chat_template(tokenizer, writer):
    writer.start(["A document."])
    writer.ask("A question?", "An answer 123456789.", ["123456789"], "code")
    messages = [{"role": "user", "content": "A document.\n\nA question?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert writer.ids[: len(prompt)] == prompt
    assert tokenizer.decode(writer.ids[len(prompt) :]) == " An answer 123456789.<|eos|>"
    values = [i for i, kind in zip(writer.ids, writer.kinds, strict=True) if kind == VALUE]
    assert tokenizer.decode(values) == "123456789"
    assert writer.tags == ["code"] * 3


@pytest.mark.exhaustive
def test_two_trainings_with_one_seed_are_equal_and_another_seed_differs():
    runs = []
    for seed in (7, 7, 8):
        trainer = Trainer(MICRO, seed=seed, **SIZE)
        assert "length 320 done" in list(trainer.run())[-1]
        runs.append(weights(trainer))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_batch_whose_questions_were_cut_off_has_a_finite_loss():
    stage = Stage(40, 1, 1, dense=0.0, kinds={"facts": 1.0})
    assert math.isfinite(Trainer([stage], seed=1, **SIZE).step(stage)[0])


def test_plain_products_attend_as_the_fused_kernel_does(monkeypatch):
    trainer = Trainer(MICRO, seed=1, **SIZE)
    batch = trainer.batch(MICRO[0])
    plain = loss_and_hits(trainer.model, batch, torch.Generator().manual_seed(0))[0]
    monkeypatch.setattr("train._FUSED_FROM", 0)
    fused = loss_and_hits(trainer.model, batch, torch.Generator().manual_seed(0))[0]
    assert plain.item() == pytest.approx(fused.item(), rel=0.01)


@pytest.mark.exhaustive
def test_training_lowers_the_loss(monkeypatch):
    stage = Stage(72, 2, 25, dense=0.0, kinds={"facts": 1.0})
    trainer = Trainer([stage], seed=1, **SIZE)
    batch = trainer.batch(stage)
    monkeypatch.setattr(trainer, "batch", lambda stage: batch)
    losses = [trainer.step(stage)[0] for _ in range(25)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    whole = Trainer(MICRO, seed=3, **SIZE)
    list(whole.run())
    first = Trainer(MICRO, seed=3, **SIZE)
    for _ in range(1):  # within the first stage
        first.step(MICRO[0])
    first.save(tmp_path / "resume.pt")
    second = Trainer(MICRO, seed=4, **SIZE)
    second.load(tmp_path / "resume.pt")
    list(second.run())
    assert torch.equal(weights(whole), weights(second))


def test_export_loads_as_a_llama_of_the_trained_length(tmp_path):
    trainer = Trainer(MICRO, seed=3, **SIZE)
    trainer.export(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert model.config.model_type == "llama"
    assert model.config.max_position_embeddings == 1024
    assert model.generation_config.eos_token_id == 2


def test_singular_values_come_out_near_one_in_both_shapes():
    torch.manual_seed(0)
    for shape in ((3, 8, 20), (2, 20, 8)):
        matrices = torch.randn(shape)
        found = orthogonalised(matrices)
        values = torch.linalg.svdvals(found)
        assert ((values > 0.6) & (values < 1.3)).all()
        u, _, v = torch.linalg.svd(matrices, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(found.flatten(), (u @ v).flatten(), dim=0) > 0.97


def test_steps_are_those_of_torch_in_bfloat16_up_to_rounding():
    torch.manual_seed(0)
    start = [torch.randn(8, 20), torch.randn(20, 8), torch.randn(8, 20)]
    moved = []
    for make in (
        lambda weights: Muon(weights, lr=1e-2),
        lambda weights: torch.optim.Muon(weights, lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    ):
        weights = [torch.nn.Parameter(weight.clone()) for weight in start]
        optimizer = make(weights)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        moved.append(torch.cat([(weight - own).detach().flatten() for weight, own in zip(weights, start, strict=True)]))
    assert torch.allclose(moved[0], moved[1], atol=0.05 * float(moved[1].abs().max()))


def test_a_weight_without_gradient_stays():
    weights = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(2, 3))]
    weights[0].grad = torch.randn(2, 3)
    Muon(weights).step()
    assert not torch.equal(weights[0], torch.ones(2, 3))
    assert torch.equal(weights[1], torch.ones(2, 3))
