"""Models that select by themselves, with everything on the device and with KV in host memory."""

import json
import re
from dataclasses import replace

import pytest
import torch
from command import kvcli
from families import SELECTING, tiny_checkpoint, tiny_model
from saving import QUESTIONS, TEXT, tokens
from saving import run as run_saving
from transformers import AutoModelForCausalLM

from kvcli.bench.doctor import examine_model
from kvcli.bench.profiler import ProfileRequest, profile
from kvcli.bench.runs import entries
from kvcli.capacity import memory
from kvcli.capacity.workspace import Workspace
from kvcli.cli.command import compared
from kvcli.conformance.runs import in_memory, run
from kvcli.errors import KvcliError
from kvcli.generate import generate
from kvcli.inputs.options import Compared, DiskOptions
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.prompts import Prompt
from kvcli.kernels.softmax import Softmax
from kvcli.memory.state import capture
from kvcli.methods import get_method, method_names
from kvcli.models.geometry import geometry_of_model
from kvcli.models.loading import ModelSpec, load_model
from kvcli.quality.eval.evaluate import evaluate
from kvcli.quality.eval.suite import EvaluationPlan
from kvcli.request import GenerationRequest
from kvcli.runtime import own_selection
from kvcli.runtime.checkpoint.restoring import Restoring
from kvcli.runtime.decode import BlockingStepper, decode
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.timeline import Timeline

PROMPT, STEPS = 78, 16
SLOTS = {"full": {}, "native": {"slots": 16}}  # a step selects 12 tokens, or 15 with those of a block to be filled


def prompt(seed, length=PROMPT):
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=list(SELECTING))
def family(request):
    """A family's model, a prompt, and transformers' greedy continuation of it."""
    model, ids = tiny_model(request.param), prompt(1)
    reference = model.generate(torch.tensor([ids]), max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    return model, ids, reference[0, PROMPT:].tolist()


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa", "minimax_m3", "glm5_next", "deepseek_v4"])
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module", params=["glm_moe_dsa", "deepseek_v4"])
def path(request, tmp_path_factory):
    return str(tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


def selecting(sequence):
    return [layer for layer in sequence.method.retrieval if hasattr(sequence.method.retrieval[layer], "layer")]


def recalling(sequence):
    return [layer for layer in selecting(sequence) if sequence.method.retrieval[layer].pool is not None]


@pytest.mark.parametrize("chunk", [7, 30, 400])
@pytest.mark.parametrize("name", SLOTS)
def test_token_for_token_what_transformers_generates(family, name, chunk, monkeypatch):
    monkeypatch.setattr(own_selection, "SCORES_AT_ONCE", 1 << 14)  # a few queries at a time
    model, ids, reference = family
    assert len(set(reference)) > STEPS / 3, "a reference that repeats itself tests little"
    (sequence,) = run(model, name, SLOTS[name], [ids], STEPS, chunk=chunk)
    assert sequence.token_ids == reference
    for layer in selecting(sequence):
        attended, selects = sequence.method.attended(layer).sum(1), geometry_of_model(model).layers[layer].selects
        assert selects.tokens <= 15
        most = selects.near + selects.rate * (selects.tokens or (PROMPT + STEPS) // selects.rate)
        assert 0 < attended.max() <= most


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("length", [1, 3, 4, 10, 11, 12, 23, 24, 97])
def test_borders_of_entries_and_of_the_window(name, length):
    """Four tokens make an entry or twelve do, and the window has ten; steps cross all of them."""
    model, ids = tiny_model("deepseek_v4"), prompt(length, length)
    reference = model.generate(torch.tensor([ids]), max_new_tokens=26, do_sample=False, eos_token_id=None)
    for chunk in (1, 5, 12):
        (sequence,) = run(model, name, SLOTS[name], [ids], 26, chunk=chunk)
        assert sequence.token_ids == reference[0, length:].tolist()


def test_what_the_device_has_is_not_recalled_again(family):
    model, ids, _ = family
    found = {}
    for slots in (16, 24, 48, 4096):
        (sequence,) = run(model, "native", {"slots": slots}, [ids], STEPS)
        layers = [sequence.counters.cache().layers[layer] for layer in recalling(sequence)]
        assert all(each.pages_requested > 0 for each in layers)
        found[slots] = sum(each.misses for each in layers)
        for layer, each in zip(recalling(sequence), layers, strict=True):
            assert each.bytes_to_device == each.misses * sequence.method.retrieval[layer].pool.block_bytes
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert found[16] > found[48]
    assert found[4096] == 0


@pytest.mark.parametrize("name", [name for name in method_names() if name not in SLOTS])
def test_other_methods_are_refused_in_one_line(model, name):
    with pytest.raises(KvcliError, match="select by themselves, the top") as refused:
        run(model, name, {}, [prompt(2)], 2)
    assert "native" in refused.value.hint
    assert "full" in refused.value.hint
    assert "\n" not in str(refused.value)


def test_a_sparse_prefill_is_refused(model):
    with pytest.raises(KvcliError, match="prefill a-shape"):
        run(model, "native", {"prefill": "a-shape:8,8"}, [prompt(2)], 2)


@pytest.mark.parametrize("name", SLOTS)
def test_a_batch_of_different_lengths_is_the_runs_of_one(model, name):
    prompts = [prompt(5, 9), prompt(6, 90), prompt(7, 1)]
    alone = [run(model, name, SLOTS[name], [ids], STEPS)[0].token_ids for ids in prompts]
    assert [each.token_ids for each in run(model, name, SLOTS[name], prompts, STEPS)] == alone


def test_scores_are_bounded(monkeypatch):
    seen, update = [], own_selection.IndexCache.update_indexer
    model = tiny_model("deepseek_v32")
    scratch, most = geometry_of_model(model).selects.scratch, 1 << 20
    monkeypatch.setattr(own_selection, "SCORES_AT_ONCE", most)

    def watched(self, keys, layer_idx):
        found = update(self, keys, layer_idx)
        seen.append(keys.shape[1] * found.shape[1] * scratch)
        return found

    monkeypatch.setattr(own_selection.IndexCache, "update_indexer", watched)
    run(model, "native", {}, [prompt(1, 300)], 2, chunk=100)
    assert most / 4 < max(seen) <= most


@pytest.mark.parametrize("name", SLOTS)
def test_forks_and_branches(model, name):
    (sequence,) = run(model, name, SLOTS[name], [prompt(7)], 2)
    method, last = sequence.method, len(sequence.method.caches) - 1
    geometry = geometry_of_model(model).layers[last]
    heads = geometry.selects.heads
    q_channels = geometry.head_dim - geometry.index_channels

    def outputs(of, seed, count):
        torch.manual_seed(seed)
        outs = []
        for _ in range(count):
            q = torch.randn(geometry.num_heads, q_channels)
            k, v = torch.randn(2, geometry.num_kv_heads, geometry.head_dim)
            v = k if geometry.latent else v
            seen = of.caches[last].length
            chosen = torch.stack([torch.randperm(seen // geometry.rate)[:11] for _ in range(heads)])
            if geometry.rate == 1:  # the newest
                chosen = torch.cat((chosen, torch.full((heads, 1), seen)), 1)
            outs.append(of.attend(last, q, k, v, Softmax(0.25, selected=chosen[:, None])).clone())
        return torch.stack(outs)

    fork = method.fork(method.context.counters, "fork")
    assert fork.footprint().device == method.footprint().device
    assert fork.footprint().host + fork.footprint().shared == method.footprint().host
    wanted = outputs(method.fork(method.context.counters, "alone"), 2, 6)
    outputs(method.branch(), 1, 3)
    assert torch.equal(outputs(method.branch(), 2, 6), wanted)
    assert torch.equal(outputs(method, 2, 6), wanted)
    assert torch.equal(outputs(fork, 2, 6), wanted)


@pytest.mark.parametrize("name", SLOTS)
def test_a_sequence_goes_on_from_its_state(model, name):
    ids = prompt(9)
    with engine(in_memory(model), [PROMPT + STEPS]) as ready:

        def fresh():
            config = get_method(name).Config(**SLOTS[name])
            method = get_method(name)(config, ready.layers, ready.context(PROMPT, STEPS))
            sequence = ready.sequence(method, Sampling(max_tokens=STEPS))
            sequence.eos = ()
            return sequence

        whole, stepper = fresh(), BlockingStepper(ready.hook, ready.rope)
        whole.accept(*ready.prefill(ids, [whole.method], chunk=7))
        for step, _ in enumerate(decode(stepper, [whole], Timeline())):
            if step == STEPS // 2:
                state = capture([whole], {})
                parts = [part._replace(values=part.values.clone()) for part in (*state.added, *state.changing)]
                tree = json.dumps(state.tree)
        resumed = fresh()
        restoring = Restoring([resumed], json.loads(tree), resumed.method.context.tiers)
        for part in parts:
            restoring.put(part)
        restoring.finish()
        for _ in decode(stepper, [resumed], Timeline()):
            pass
    assert resumed.token_ids == whole.token_ids
    assert resumed.report().cache == whole.report().cache


@pytest.mark.parametrize("name", SLOTS)
def test_questions_on_one_document_are_the_questions_alone(path, name):
    alone = [tokens(run_saving(path, (question,), name))[0] for question in QUESTIONS]
    assert tokens(run_saving(path, QUESTIONS, name)) == alone


@pytest.mark.parametrize("name", SLOTS)
def test_a_checkpoint_is_read_as_transformers_reads_it(path, name):
    model, ids = load_model(ModelSpec(path, device="cpu")).module, prompt(4)
    (found,) = run(model, name, SLOTS[name], [ids], STEPS)
    same = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    wanted = same.generate(torch.tensor([ids]), max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    assert found.token_ids == wanted[0, PROMPT:].tolist()


@pytest.mark.parametrize("name", SLOTS)
def test_saved_kv_has_the_index(path, name, tmp_path):
    wanted = run_saving(path, method=name)
    saved = run_saving(path, method=name, save=tmp_path / "kv")
    loaded = run_saving(path, method=name, use=tmp_path / "kv")
    assert tokens(saved) == tokens(loaded) == tokens(wanted)
    assert loaded.sequences[0].kv.disk_tokens > 0


def request(method=None, **given):
    profile = resolve_profile(method)
    return GenerationRequest(profile, (Prompt("text", TEXT, "who?"),), Sampling(max_tokens=6, ignore_eos=True), **given)


class Notes(Observer):
    def __init__(self):
        self.notices = []

    def notice(self, message):
        self.notices.append(message)


def test_native_serves_if_no_method_is_named(path):
    observer = Notes()
    found = generate(ModelSpec(path, device="cpu"), request(), observer)
    assert found.profile["method"] == "native"
    assert any("using native, because this model's layers select by themselves" in each for each in observer.notices)
    assert tokens(found) == tokens(generate(ModelSpec(path, device="cpu"), request("full"), Observer()))


def test_a_chat_a_batch_and_a_plan_take_it_as_well(path, tmp_path):
    said = kvcli("chat", "-m", path, "--max-tokens", 4, text="who?\nwhere?\n")
    assert said.returncode == 0, said.stderr
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"custom_id": "a", "prompt": "who?"}\n')
    done = kvcli("batch", rows, "-m", path, "--max-tokens", 4, "-o", tmp_path / "answers.jsonl")
    assert done.returncode == 0, done.stderr
    plan = json.loads(kvcli("plan", "-m", path, "--context", 500, "--json").stdout)
    assert [each["profile"]["method"] for each in plan["plans"]] == ["full", "native"]


def test_comparisons_take_it_as_well(path):
    spec, variants = ModelSpec(path, device="cpu"), compared(Compared())
    load = {"contexts": (60,), "steps": 2, "repeat": 1, "warmup": 1}
    timed = profile(ProfileRequest(spec, entries(variants, ablate=False), **load), Observer())
    assert [case.label for case in timed.report.cases] == ["full", "native"]
    length = {"tasks": ["niah_single"], "lengths": [400], "depths": 1, "limit": 1, "max_tokens": 2, "max_length": None}
    scored = evaluate(EvaluationPlan(spec, variants, **length, sampling=Sampling(max_tokens=2)), Observer())
    assert [variant.label for variant in scored.variants] == ["full", "native"]
    named = compared(Compared(method="full,freekv"))
    with pytest.raises(KvcliError, match="select by themselves"):
        profile(ProfileRequest(spec, entries(named[1:], ablate=False), **load), Observer())


def test_kv_on_a_disk(path, tmp_path):
    disk = DiskOptions(tmp_path, host_memory=40_000)
    found = generate(ModelSpec(path, device="cpu"), request("native", disk=disk), Observer())
    assert tokens(found) == tokens(generate(ModelSpec(path, device="cpu"), request("full"), Observer()))


@pytest.mark.parametrize("option", [{"lossless": 4}, {"audit": 2}])
def test_drafts_and_audits_are_refused(path, option):
    with pytest.raises(KvcliError, match="compares with full attention"):
        generate(ModelSpec(path, device="cpu"), request(**option), Observer())


@pytest.mark.parametrize("name", SLOTS)
def test_memory_is_what_was_planned(model, name):
    (sequence,) = run(model, name, SLOTS[name], [prompt(3)], STEPS)
    profile = resolve_profile(name, overrides=SLOTS[name])
    capacity = sequence.method.context.capacity
    planned = memory.kv_footprint(profile, geometry_of_model(model), capacity, torch.float32)
    held = sequence.method.footprint()
    assert (planned.device, planned.host) == (held.device, held.host)


def test_all_streams_of_hidden_states_are_planned():
    geometry = geometry_of_model(tiny_model("hy_v4"))
    assert geometry.streams == 4
    one, four = (
        Workspace.of(replace(geometry, streams=streams), 500, None, torch.device("cpu"), 500, 4) for streams in (1, 4)
    )
    assert four.device["hidden states"] == 4 * one.device["hidden states"] == 4 * 500 * 64 * 4


def test_the_plan_counts_the_index_and_what_a_step_recalls():
    model = tiny_model("deepseek_v32")
    geometry = geometry_of_model(model)
    profile = resolve_profile("native", overrides={"slots": 100})
    method = memory.planned_method(profile, geometry, 1000, torch.float32, 900)
    token = 4 * (16 + 8)  # a latent and a rotary part
    moved = method.traffic(0, 900)
    assert (moved.scored, moved.attended, moved.recalled) == (900 * 4 * 16, 12 * token, 12 * token)
    assert method.traffic(0, 80).recalled == 0
    assert method.footprint().host == 4 * 1000 * token


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("deepseek_v32", {"native selection, top 12 of tokens": "0-3"}),
        (
            "glm_moe_dsa",
            {
                "native selection, top 12 of tokens": "0, 2",
                "native selection, top 12 of tokens, as the layer before": "1, 3",
            },
        ),
        ("minimax_m3", {"retrieve": "0", "native selection, top 3 of blocks of 4 tokens": "1-3"}),
        (
            "deepseek_v4",
            {
                "window of 10": "0",
                "native selection, top 3 of entries of 4 tokens, and the last 10 tokens": "1, 3",
                "native selection, entries of 12 tokens, and the last 10 tokens": "2",
            },
        ),
    ],
)
def test_doctor_says_what_layers_select(name, ways, tmp_path):
    spec = ModelSpec(str(tiny_checkpoint(name, tmp_path)), device="cpu")
    checks = {each.name: each.found for each in examine_model(spec)}
    for way, layers in ways.items():
        assert re.match(rf"{layers} \(", checks[way])
