"""Models that select by themselves, with everything on the device and with KV in host memory."""

import json
import re
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from families import SELECTING, WAYS_OF_SELECTING, tiny_checkpoint, tiny_model
from saving import QUESTIONS, TEXT, tokens
from saving import run as run_saving
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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
from kvcli.kernels import selected_attention
from kvcli.kernels.softmax import Softmax
from kvcli.memory.disk_tier import DiskTier
from kvcli.memory.host_pool import DiskPagePool
from kvcli.memory.state import capture
from kvcli.memory.tiers import Tiers
from kvcli.methods import get_method, method_names, native
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


ALWAYS = {(family, "native") for family in WAYS_OF_SELECTING if isinstance(family, str)}
ALWAYS |= {("deepseek_v32", "full"), ("deepseek_v4", "full")}  # tokens of latents, and entries of several tokens
EACH = [
    pytest.param(*pair, marks=[] if pair in ALWAYS else [pytest.mark.exhaustive]) for pair in product(SELECTING, SLOTS)
]


def prompt(seed, length=PROMPT):
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=list(SELECTING))
def family(request):
    """A family's model, a prompt, and transformers' greedy continuation of it."""
    model, ids = tiny_model(request.param), prompt(1)
    reference = model.generate(torch.tensor([ids]), max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    return model, ids, reference[0, PROMPT:].tolist()


@pytest.fixture(scope="module", params=WAYS_OF_SELECTING)
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module", params=["glm_moe_dsa", pytest.param("deepseek_v4", marks=pytest.mark.exhaustive)])
def path(request, tmp_path_factory):
    return str(tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module", params=WAYS_OF_SELECTING)
def each_path(request, tmp_path_factory):
    return str(tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


def selecting(sequence):
    return [layer for layer in sequence.method.retrieval if hasattr(sequence.method.retrieval[layer], "layer")]


def recalling(sequence):
    return [layer for layer in selecting(sequence) if sequence.method.retrieval[layer].pool is not None]


CHUNKS = [("full", 30), *(("native", chunk) for chunk in (7, 30, 400))]
CHUNKS += [pytest.param("full", chunk, marks=pytest.mark.exhaustive) for chunk in (7, 400)]


@pytest.mark.parametrize(("name", "chunk"), CHUNKS)
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


@cache
def continued(length):
    """A model, a prompt and what transformers writes after it."""
    model, ids = tiny_model("deepseek_v4"), prompt(length, length)
    reference = model.generate(torch.tensor([ids]), max_new_tokens=26, do_sample=False, eos_token_id=None)
    return model, ids, reference[0, length:].tolist()


ENTRIES = [("full", 5), *(("native", chunk) for chunk in (1, 5, 12))]
ENTRIES += [pytest.param("full", chunk, marks=pytest.mark.exhaustive) for chunk in (1, 12)]


@pytest.mark.parametrize("length", [1, 3, 4, 10, 11, 12, 23, 24, 97])
@pytest.mark.parametrize(("name", "chunk"), ENTRIES)
def test_borders_of_entries_and_of_the_window(name, chunk, length):
    """Four tokens make an entry or twelve do, and the window has ten; steps cross all of them."""
    model, ids, reference = continued(length)
    (sequence,) = run(model, name, SLOTS[name], [ids], 26, chunk=chunk)
    assert sequence.token_ids == reference


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


@pytest.fixture(scope="module", params=["deepseek_v32", "minimax_m3"])
def of_tokens_or_blocks(request):
    return tiny_model(request.param)


@pytest.mark.parametrize("name", [name for name in method_names() if name not in SLOTS])
def test_other_methods_are_refused_in_one_line(of_tokens_or_blocks, name):
    with pytest.raises(KvcliError, match="select by themselves, the top") as refused:
        run(of_tokens_or_blocks, name, {}, [prompt(2)], 2)
    assert "native" in refused.value.hint
    assert "full" in refused.value.hint
    assert "\n" not in str(refused.value)


def test_a_sparse_prefill_is_refused(model):
    with pytest.raises(KvcliError, match="prefill a-shape"):
        run(model, "native", {"prefill": "a-shape:8,8"}, [prompt(2)], 2)


@pytest.mark.parametrize(("model", "name"), EACH, indirect=["model"])
def test_a_batch_of_different_lengths_is_the_runs_of_one(model, name):
    prompts = [prompt(5, 9), prompt(6, 90), prompt(7, 1)]
    alone = [run(model, name, SLOTS[name], [ids], STEPS)[0].token_ids for ids in prompts]
    assert [each.token_ids for each in run(model, name, SLOTS[name], prompts, STEPS)] == alone


def test_the_least_recently_selected_tokens_make_room(of_tokens_or_blocks):
    layer = geometry_of_model(of_tokens_or_blocks).layers[-1]
    width, heads, generator = layer.index_channels, layer.selects.heads, torch.Generator().manual_seed(0)
    kv = torch.randn(layer.parts, layer.num_kv_heads, 150, layer.head_dim, generator=generator)
    tiers = replace(Tiers.for_device(torch.device("cpu"), torch.float32), parts=layer.parts)
    cache = native.RecalledCache(layer, 150, 24, tiers)
    cache.load(kv[0], kv[-1])
    last = [dict.fromkeys(range(126, 150), 0) for _ in range(heads)]  # the step that selected it last
    for step in range(1, 40):
        chosen = [torch.randperm(150, generator=generator)[:12] for _ in range(heads)]
        found = cache.look_up(torch.stack(chosen))
        cache.bring(found)
        for head, (its, known) in enumerate(zip(chosen, last, strict=True)):
            there = {*cache.token_in[head].tolist()}
            new = [token for token in its.tolist() if token not in known]
            assert found.missing[head].sum() == len(new) == found.missed[head]
            gone = [known.pop(token) for token in [*known] if token not in there]
            known |= dict.fromkeys(its.tolist(), step)
            assert {*known} == there
            assert len(gone) == len(new)
            assert max(gone, default=0) <= min(known.values())
            rows = cache.kv[:, head if heads > 1 else slice(None), found.slots[head]]
            assert torch.equal(rows, kv[:, head if heads > 1 else slice(None), its, width:])


class Largest(TorchDispatchMode):
    """Finds the `most` numbers of a tensor that is made, and `square` ones: two sides are as long as the prompt.

    Blocks may round a side up.
    """

    def __init__(self, length):
        super().__init__()
        self.length, self.most, self.square = length, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.numel())
                if sum(0 <= side - self.length < 8 for side in x.shape) > 1:
                    self.square.append((str(func), x.shape))
        return out


@pytest.mark.parametrize("name", [pytest.param("full", marks=pytest.mark.exhaustive), "native"])
def test_no_tensor_of_a_prefill_grows_with_the_square_of_the_prompt(model, name, monkeypatch):
    """A prompt four times as long, read in one piece, makes tensors four times as large at most, not sixteen."""
    monkeypatch.setattr(own_selection, "SCORES_AT_ONCE", 1 << 19)
    monkeypatch.setattr(selected_attention, "AT_ONCE", 1 << 19)
    found = {}
    for length in (151, 604):
        with engine(in_memory(model), [length + 1]) as ready:
            method = get_method(name)(get_method(name).Config(), ready.layers, ready.context(length, 1))
            with Largest(length) as largest:
                ready.prefill(prompt(3, length), [method], chunk=length)
        found[length] = largest.most
    assert not largest.square
    assert found[604] <= max(4 * found[151], (1 << 19) / 4)


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


@pytest.mark.parametrize(("model", "name"), EACH, indirect=["model"])
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


@pytest.mark.parametrize(("each_path", "name"), EACH, indirect=["each_path"])
def test_questions_on_one_document_are_the_questions_alone(each_path, name):
    alone = [tokens(run_saving(each_path, (question,), name))[0] for question in QUESTIONS]
    assert tokens(run_saving(each_path, QUESTIONS, name)) == alone


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "deepseek_v4"])
def test_a_checkpoint_is_read_as_transformers_reads_it(kind, tmp_path):
    path = str(tiny_checkpoint(kind, tmp_path))
    model, ids = load_model(ModelSpec(path, device="cpu")).module, prompt(4)
    (found,) = run(model, "native", SLOTS["native"], [ids], STEPS)
    same = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    wanted = same.generate(torch.tensor([ids]), max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    assert found.token_ids == wanted[0, PROMPT:].tolist()


@pytest.mark.parametrize(("each_path", "name"), EACH, indirect=["each_path"])
def test_saved_kv_has_the_index(each_path, name, tmp_path):
    wanted = run_saving(each_path, method=name)
    saved = run_saving(each_path, method=name, save=tmp_path / "kv")
    loaded = run_saving(each_path, method=name, use=tmp_path / "kv")
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


def test_a_chat_a_batch_and_a_plan_take_it_as_well(warm, path, tmp_path):
    said = warm("chat", "-m", path, "--max-tokens", 4, text="who?\nwhere?\n")
    assert said.returncode == 0, said.stderr
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"custom_id": "a", "prompt": "who?"}\n')
    done = warm("batch", rows, "-m", path, "--max-tokens", 4, "-o", tmp_path / "answers.jsonl")
    assert done.returncode == 0, done.stderr
    plan = json.loads(warm("plan", "-m", path, "--context", 500, "--json").stdout)
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


HOST = 24 << 10
"""Bytes of host memory of a sequence with a disk: a few lines of each layer."""


def with_and_without_a_disk(model, settings, prompts, folder):
    plain = run(model, "native", settings, prompts, STEPS)
    rates = [layer.rate for layer in geometry_of_model(model).layers if layer.selects is not None and layer.near]
    host = HOST // min(rates, default=1)  # there are fewer entries than tokens
    with DiskTier(folder, len(prompts) * host, sequences=len(prompts)) as disk:
        return run(model, "native", settings, prompts, STEPS, disk=disk), plain


def test_a_disk_below_changes_nothing_in_a_batch_of_different_lengths(model, tmp_path):
    """Missing tokens come from the disk while others are attended to, so that two parts of attention are merged."""
    parts = []
    found, plain = with_and_without_a_disk(model, SLOTS["native"], [prompt(5, 160), prompt(6, 90)], tmp_path)
    for one, other in zip(found, plain, strict=True):
        assert one.token_ids == other.token_ids
        parts += [one.counters.cache(), other.counters.cache()]
        for layer in selecting(one):
            assert torch.equal(one.method.attended(layer), other.method.attended(layer))
        for count in ("misses", "pages_requested", "bytes_to_device", "bytes_to_host"):
            assert getattr(parts[-2], count) == getattr(parts[-1], count)
    assert parts[0].disk_reads > 0
    assert parts[1].disk_reads == 0


def test_missing_tokens_are_on_their_way_while_others_are_attended_to(of_tokens_or_blocks, tmp_path, monkeypatch):
    order = []
    for kind, work in (
        (DiskPagePool, "announce"), (native.RecalledCache, "attend_part"), (native.RecalledCache, "bring")
    ):  # fmt: skip
        before = getattr(kind, work)
        monkeypatch.setattr(kind, work, lambda *args, before=before, work=work: order.append(work) or before(*args))
    with_and_without_a_disk(of_tokens_or_blocks, SLOTS["native"], [prompt(5, 160)], tmp_path)
    steps = " ".join(order)
    assert steps.count("announce attend_part bring attend_part") == order.count("attend_part") / 2 > STEPS


@pytest.mark.parametrize("held", ["int8", "k8v4", "int4"])
def test_quantised_kv_is_what_comes_back(model, held, tmp_path):
    """The device has a token as the model made it until the token leaves, and then as the host holds it."""
    if geometry_of_model(model).layers[0].latent is not None:
        with pytest.raises(KvcliError, match=f"kv_dtype {held}: this model's tokens have one latent"):
            run(model, "native", {"kv_dtype": held}, [prompt(2)], 2)
        return
    ids = [prompt(4, 160)]
    (whole,) = run(model, "native", {"slots": 4096, "kv_dtype": held}, ids, STEPS)
    (plain,) = run(model, "native", {"slots": 4096}, ids, STEPS)
    assert whole.token_ids == plain.token_ids  # nothing has left the device
    assert whole.method.footprint().host < 0.5 * plain.method.footprint().host
    (found,), (again,) = with_and_without_a_disk(model, {**SLOTS["native"], "kv_dtype": held}, ids, tmp_path)
    assert found.token_ids == again.token_ids
    came = 0
    for layer in selecting(again):
        cache = again.method.retrieval[layer]
        for head in range(cache.layer.num_kv_heads):
            its = cache.token_in[head if len(cache.token_in) > 1 else 0]
            slots = (its >= 0).nonzero()[:, 0]
            here = cache.kv[:, head, slots]
            there = cache.pool.fetch(its[slots], torch.full_like(slots, head))[:, :, 0].transpose(0, 1)
            came += int((here == there).all(-1).all(0).sum())
            assert (here - there).abs().max() < (0.5 if held == "int8" else 2)
    assert came > 0


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


def test_the_plan_counts_the_scores_of_all_sequences():
    for family, rows in (("deepseek_v32", 3), ("glm5_next", 1)):  # whose modules score one sequence at a time
        geometry = geometry_of_model(tiny_model(family))
        wanted = resolve_profile("native"), geometry, torch.float32
        one, three = (memory.need(*wanted, [90] * count, 10, 1).prefill.stacked for count in (1, 3))
        assert (one, three) == (100 * geometry.scratch, rows * 100 * geometry.scratch)


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
