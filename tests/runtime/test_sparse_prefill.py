"""Prompts that are read sparsely, against transformers with the same mask, and what the audit says of it."""

import pytest
import torch
from engine import in_memory, profile_of, run
from families import LAYERS, VOCAB, tiny_model

from kvcli.errors import KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.methods.config import PrefillPattern
from kvcli.runtime.engine import engine

LENGTH, CHUNK = 150, 40  # of which each is a block
IDS = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
SHAPE = "a-shape:5,16"


def a_shape(sink, window):
    """Which keys every query sees, bool [n, n]."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    return (j <= i) & ((j < sink) | (j > i // CHUNK * CHUNK - window))


def read(model, *readings, ids=IDS):
    """Read a prompt in each of these ways at once -> logits and what is said of it, each."""
    with engine(in_memory(model), [len(ids) + 4]) as ready:
        methods = [
            ready.method(profile_of("full", {"prefill": reading}), ready.context(len(ids), 4)) for reading in readings
        ]
        logits = ready.prefill(ids, methods, chunk=CHUNK)
    return [(each, method.context.prefill_statistics) for each, method in zip(logits, methods, strict=True)]


def test_a_model_reads_as_transformers_with_the_same_mask():
    ((logits, said),) = read(tiny_model("llama"), SHAPE)
    model, mask = tiny_model("llama"), a_shape(5, 16)
    model.set_attn_implementation("eager")
    given = {"input_ids": torch.tensor([IDS]), "use_cache": False, "output_attentions": True}
    bias = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill_(~mask, torch.finfo(torch.float32).min)
    assert torch.allclose(logits, model(**given, attention_mask=bias).logits[0, -1], rtol=1e-3, atol=1e-4)
    exact = model(**given)
    assert not torch.allclose(logits, exact.logits[0, -1], rtol=1e-2, atol=1e-2)
    covered = (exact.attentions[0][0] * mask).sum(-1)  # [H, n]; what the first layer is given is the same
    assert said["prefill_mass_by_layer"][0] == pytest.approx(float(covered.mean()), rel=1e-4)
    assert said["prefill"] == SHAPE
    assert len(said["prefill_error_by_layer"]) == LAYERS
    assert 0.01 < said["prefill_error"] < 2


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_next"])
def test_all_there_is_is_exact(family):
    """Softcaps, the model's own sinks, windows and states stay what they are."""
    model = tiny_model(family)
    (exact, nothing), *others = read(model, "exact", "a-shape:1,1K", "vertical-slash:1K,1")
    assert nothing is None
    for logits, said in others:
        assert torch.allclose(logits, exact, rtol=1e-3, atol=1e-4)
        assert said["prefill_mass"] == pytest.approx(1, rel=1e-4)
        assert said["prefill_error"] < 1e-3


def test_what_is_read_at_once_is_what_each_would_read_alone():
    model, readings = tiny_model("llama"), ("vertical-slash:40,40", "exact", SHAPE)
    for (logits, said), reading in zip(read(model, *readings), readings, strict=True):
        ((alone, same),) = read(model, reading)
        assert torch.equal(logits, alone)
        assert said == same


def test_columns_and_diagonals_cover_more_than_as_many_newest_tokens():
    slash, shape = (said for _, said in read(tiny_model("llama"), "vertical-slash:60,1", "a-shape:1,60"))
    assert 0 < slash["prefill_error_by_layer"][0] < shape["prefill_error_by_layer"][0]


def test_a_run_says_how_its_prompt_was_read():
    (sequence,) = run(tiny_model("llama"), "snapkv", {"prefill": SHAPE}, [IDS], 2)
    said = sequence.report().method
    assert said["prefill"] == SHAPE
    assert {"prefill_mass", "prefill_error", "kept_tokens"} <= said.keys()


@pytest.mark.parametrize(
    ("text", "found"),
    [("exact", "exact"), ("a-shape", "a-shape:1024,4096"), ("vertical-slash:64,1K", "vertical-slash:64,1024")],
)
def test_a_reading_is_written_with_its_sizes(text, found):
    assert str(PrefillPattern.of(text)) == found
    assert resolve_profile(method="full", overrides={"prefill": text}).settings.prefill == found


@pytest.mark.parametrize("wrong", ["", "slash", "exact:1,2", "a-shape:", "a-shape:4", "a-shape:0,4", "a-shape:x,4"])
def test_what_is_no_reading_is_refused(wrong):
    with pytest.raises(KvcliError, match="prefill"):
        resolve_profile(method="full", overrides={"prefill": wrong})


def test_methods_that_read_in_their_own_way_take_none():
    with engine(in_memory(tiny_model("llama")), [9]) as ready, pytest.raises(KvcliError, match="infllm"):
        ready.method(profile_of("infllm", {"prefill": SHAPE}), ready.context(5, 4))
