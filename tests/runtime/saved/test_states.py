"""States of layers that keep one, saved beside KV and kept between turns: what goes on from them is as if read anew."""

import pytest
import torch
from families import tiny_checkpoint
from saving import QUESTIONS, TEXT, run, tokens

from kvcli.capacity.planning.estimate import Machine, PlannedRun
from kvcli.capacity.planning.plan import plan
from kvcli.conformance.crossed import some
from kvcli.conformance.models import tiny_model
from kvcli.conformance.runs import in_memory
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.kv import recurrent
from kvcli.models.loading import ModelSpec, open_checkpoint
from kvcli.runtime.conversation import Conversation, NewTurn
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.saved.manifest import PAGE, read_manifest
from kvcli.runtime.saved.reader import verify
from kvcli.telemetry.observer import Observer


@pytest.fixture(scope="module", params=some(["qwen3_next", "jamba"], ["qwen3_next"]))
def path(request, tmp_path_factory):
    """A model whose layers go on from a state, and one whose do so token by token."""
    path = tmp_path_factory.mktemp(request.param)
    tiny_checkpoint(request.param, path)
    return str(path)


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(recurrent, "STATE_PAGES", 2)


def test_a_document_is_gone_on_from_where_states_were_saved(path, tmp_path):
    folder = tmp_path / "notes"
    (entry,) = run(path, ("",), "full", save=folder).saved
    manifest = verify(folder)
    last = entry.tokens - 4 * PAGE
    assert last > 2 * PAGE
    for state in manifest.states:
        assert state.marks == ([last] if "jamba" in path else [*range(64, last, 64), last])
    for method in ("freekv", "snapkv"):
        report = run(path, method=method, use=folder)
        assert tokens(report) == [tokens(run(path, (question,), method))[0] for question in QUESTIONS]
        assert report.sequences[0].kv.disk_tokens == last


def test_a_cache_grows_by_what_a_longer_document_has_more(path, tmp_path):
    cache = tmp_path / "cache"
    longer = TEXT + "and then some more of it. " * 12
    run(path, QUESTIONS[:1], cache=cache)
    for text in (longer, longer, TEXT):
        report = run(path, QUESTIONS[:1], text=text, cache=cache)
        assert tokens(report) == tokens(run(path, QUESTIONS[:1], text=text))
        assert report.sequences[0].kv.disk_tokens > 0
    assert [bool(read_manifest(folder).states) for folder in cache.iterdir()] == [True, True]


def test_a_damaged_state_is_found_and_not_used(path, tmp_path):
    folder = tmp_path / "notes"
    run(path, ("",), "full", save=folder)
    file = folder / "state-0001.safetensors"
    data = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[:header] + bytes(byte ^ 1 for byte in data[header:]))
    for read in (lambda: verify(folder), lambda: run(path, use=folder)):
        with pytest.raises(KvcliError, match=r"state-0001.safetensors: the checksum of .* is wrong") as caught:
            read()
        assert caught.value.exit_code == ExitCode.RUNTIME


@pytest.mark.parametrize("family", ["lfm2", "nemotron_h"])
def test_a_turn_reads_from_where_the_state_was_kept(family):
    model = in_memory(tiny_model(family))
    ids = torch.randint(3, 300, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    sampling, profile = Sampling(max_tokens=6, ignore_eos=True), resolve_profile("quest", overrides={"budget": 256})

    def answer(conversation, length):
        *_, (sequence, _) = conversation.answer(NewTurn(ids[:length]), profile, sampling)
        return sequence

    going_on, marks = Conversation(model, Observer()), []
    for length in (200, 300, 400):
        sequence = answer(going_on, length)
        assert sequence.token_ids == answer(Conversation(model, Observer()), length).token_ids
        marks.append(length - sequence.kv.read_tokens)
    assert marks == [0, 64, 160]  # 4 pages before the end of what the turn before has read
    kept = going_on.footprint().host
    assert kept > 384 // PAGE * PAGE * sum(
        2 * 4 * layer.num_kv_heads * layer.head_dim for layer in model.geometry.layers
    )


def test_a_run_holds_what_was_planned(path, tmp_path):
    """KV and states of a run, and what it saves, are those of its plan."""
    folder = tmp_path / "notes"
    report = run(path, ("why?",), "full", save=folder)
    checkpoint, (sequence,) = open_checkpoint(ModelSpec(path, device="cpu")), report.sequences
    subject = PlannedRun(checkpoint.config, checkpoint.dtype, checkpoint.geometry)
    machine = Machine(torch.device("cpu"), {"host": 1 << 40}, None, here=False)
    (planned,) = plan(subject, machine, [("full", resolve_profile("full"))], [sequence.prompt_tokens], [1], 8)
    assert planned.need.kv.device == report.memory.device_kv_bytes
    assert planned.need.states == sum(layer.nbytes for layer in checkpoint.geometry.states) > 0
    token = 4 * sum(layer.token_size for layer in subject.geometry.layers)
    assert planned.disk == report.saved[0].bytes + sequence.prompt_tokens % PAGE * token
