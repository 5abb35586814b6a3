import time

import pytest
import torch
from driver import storage_bytes
from engine import SPARE, run
from families import HEAD_DIM, HIDDEN, KV_HEADS, VOCAB, tiny_checkpoint, tiny_config, tiny_model
from stated import STATED, settings

from kvcli.capacity import memory
from kvcli.conformance.crossed import crossed
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.methods import get_method, method_names
from kvcli.models.geometry import geometry_of
from kvcli.models.loading import ModelSpec, open_checkpoint
from kvcli.runtime.gpu.recorder import SerialStreams
from kvcli.runtime.gpu.stepper import SlotStepper
from kvcli.runtime.sampling import Sampling

SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8}


def profile(name, **settings):
    fields = type(resolve_profile(method=name).settings).model_fields
    wanted = {**SMALL, **settings}
    return resolve_profile(method=name, overrides={key: value for key, value in wanted.items() if key in fields})


OF_LATENTS = [(name, "deepseek_v3") for name in ("full", "freekv", "quest", "offload", "snapkv", "h2o", "fier", "raas")]


@pytest.mark.parametrize(("name", "family"), [*crossed(method_names(), ["llama", "gemma3"]), *OF_LATENTS])
def test_planned_kv_is_what_a_run_allocates(name, family):
    planned, held = planned_and_held(profile(name), family)
    if get_method(name).planned_is_bound:
        assert held.device <= planned.device
        assert held.host <= planned.host
        planned, held = planned_and_held(profile(name, **{"budget": 4096, **get_method(name).exact}), family)
    assert planned == held


def planned_and_held(profile, family):
    model = tiny_model(family)
    ids = torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    (sequence,) = run(model, profile.method, profile.settings.model_dump(), [ids], 9)
    geometry = geometry_of(model.config, model.dtype)
    planned = memory.kv_footprint(
        profile, geometry, sequence.method.context.capacity, model.dtype, len(ids), memory.CPU
    )
    return planned, sequence.method.footprint()


def test_freekv_holds_o_of_budget_on_the_device_and_everything_on_the_host():
    geometry = geometry_of(tiny_config("llama"), torch.float32)
    short, long = (memory.kv_footprint(profile("freekv"), geometry, n, torch.float32) for n in (4096, 8192))
    kv_of_a_layer = 2 * 2 * 16 * 4  # K and V, 2 KV heads, head_dim 16, fp32: bytes a token
    summaries = kv_of_a_layer // 8 * 3  # one pair of bounds a page of 8 tokens, 3 layers
    assert long.device - short.device == 4096 * (kv_of_a_layer + summaries)  # the dense first layer, and the summaries
    assert long.host - short.host == 4096 * kv_of_a_layer * 3


def test_of_latents_a_token_takes_one_row_and_not_a_key_and_value_for_every_head():
    model = tiny_config("deepseek_v3")
    geometry = geometry_of(model, torch.float32)
    short, long = (memory.kv_footprint(profile("full"), geometry, n, torch.float32) for n in (4096, 8192))
    row = (model.kv_lora_rank + model.qk_rope_head_dim) * 4  # fp32: bytes a token
    assert long.device - short.device == 4096 * row * model.num_hidden_layers


def test_what_does_not_fit_is_refused_with_what_would(monkeypatch, tmp_path):
    tiny_checkpoint("llama", tmp_path)
    checkpoint = open_checkpoint(ModelSpec(str(tmp_path)))
    sampling = Sampling(max_tokens=16)
    memory.check(profile("freekv"), checkpoint, [3000], sampling)
    free = memory.need(profile("freekv"), checkpoint.geometry, torch.float32, [2000], 16, 1).on(torch.device("cpu"))
    monkeypatch.setattr(memory, "available", lambda _: free)
    memory.check(profile("freekv"), checkpoint, [2000], sampling)
    with pytest.raises(KvcliError) as caught:
        memory.check(profile("freekv"), checkpoint, [3000, 5], sampling)
    assert caught.value.exit_code is ExitCode.WILL_NOT_FIT
    assert "3,000 tokens" in caught.value.what
    fitting = int(caught.value.hint.removeprefix("up to ").partition(" ")[0].replace(",", ""))
    assert 1900 < fitting < 2001
    memory.check(profile("freekv"), checkpoint, [fitting, 5], sampling)
    with pytest.raises(KvcliError):
        memory.check(profile("freekv"), checkpoint, [fitting + 1, 5], sampling)


def test_no_room_for_the_weights(monkeypatch, tmp_path):
    tiny_checkpoint("llama", tmp_path)
    monkeypatch.setattr(memory, "available", lambda _: {"host": 1000})
    with pytest.raises(KvcliError, match="1000 B are free") as caught:
        memory.check(profile("full"), open_checkpoint(ModelSpec(str(tmp_path))), [10], Sampling())
    assert "not even the weights fit" in caught.value.hint


def test_need_adds_up_sequences_and_samples():
    geometry = geometry_of(tiny_config("llama"), torch.float32)
    one = memory.need(profile("freekv"), geometry, torch.float32, [500], 20, 1)
    many = memory.need(profile("freekv"), geometry, torch.float32, [500, 500], 20, 3)
    assert many.kv.device == 6 * one.kv.device
    pages, generated = 520 // 8, 520 // 8 - 500 // 8  # of every prompt two more samples hold these alone
    assert many.kv.host * pages == 2 * one.kv.host * (pages + 2 * generated)
    assert (many.weights, many.workspace) == (one.weights, one.workspace)
    assert sum(one.on(torch.device("cuda")).values()) == one.on(torch.device("cpu"))["host"] + memory.RUNTIME_BYTES


def test_questions_on_a_document_hold_it_once():
    geometry = geometry_of(tiny_config("llama"), torch.float32)
    sizes = [memory.PromptSize(500), memory.PromptSize(510, 480), memory.PromptSize(490, 480)]
    alone = memory.need(profile("freekv"), geometry, torch.float32, [500, 510, 490], 20, 1)
    together = memory.need(profile("freekv"), geometry, torch.float32, sizes, 20, 1, together=520)
    token = sum(2 * layer.num_kv_heads * layer.head_dim * 4 for layer in geometry.layers[1:])  # the first is dense
    assert alone.kv.host - together.kv.host == 2 * 480 * token
    assert together.kv.device == alone.kv.device
    assert together.workspace - alone.workspace == 10 * (
        geometry.hidden_size * 4 + 2 * 8
    )  # and their tokens and positions


def test_too_long_an_output_is_named_as_the_cause(monkeypatch, tmp_path):
    tiny_checkpoint("llama", tmp_path)
    monkeypatch.setattr(memory, "available", lambda _: {"host": 1 << 30})
    with pytest.raises(KvcliError) as caught:
        memory.check(profile("full"), open_checkpoint(ModelSpec(str(tmp_path))), [10], Sampling(max_tokens=10**9))
    assert "with 1,000,000,000 tokens of output no context fits" in caught.value.hint


def test_a_prompt_read_by_windows_needs_no_workspace_as_long_as_itself():
    geometry = geometry_of(tiny_config("llama"), torch.float32)
    workspaces = [
        [memory.need(profile(name), geometry, torch.float32, [n], 9, 1).workspace for n in (4096, 8192)]
        for name in ("freekv", "actqkv")
    ]
    tables = 4096 * 2 * 16 * 4
    assert workspaces[1][1] - workspaces[1][0] == tables
    assert workspaces[0][1] - workspaces[0][0] > 4 * tables


def test_a_million_prompts_of_one_length_are_counted_at_once():
    geometry = geometry_of(tiny_config("llama"), torch.float32)
    one = memory.need(profile("freekv"), geometry, torch.float32, [500], 20, 1)
    started = time.perf_counter()
    many = memory.need(profile("freekv"), geometry, torch.float32, {500: 10**9}, 20, 1)
    assert time.perf_counter() - started < 1
    assert many.kv.host == 10**9 * one.kv.host > 0


def test_a_sequence_that_torch_cannot_address_is_refused():
    geometry = geometry_of(tiny_config("llama"), torch.float32)
    with pytest.raises(KvcliError, match="10,000,000,000,000,000,000 tokens") as caught:
        memory.need(profile("full"), geometry, torch.float32, [10**19], 0, 1)
    assert caught.value.exit_code == ExitCode.WILL_NOT_FIT


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, {}) for name in STATED),
        ("streaming", {"positions": "cache"}),
        ("shadowkv", {"plus": True, "local": 4}),
    ],
)
def test_a_batch_over_slots_holds_what_a_gpu_is_planned_to_hold(name, more):
    """Its sequences, of different lengths, lie side by side as long as the longest; and what keys are rotated by."""
    model, lengths, made = tiny_model("llama"), (91, 33, 60), []

    def step(hook, rope, sequences):
        made.append(SlotStepper(hook, sequences, rope, streams=SerialStreams()))
        return made[0]

    run(model, name, settings(name, **more), [list(range(3, 3 + length)) for length in lengths], 3, step=step)
    slots = [layer.slots for layer in made[0].pipeline.layers]
    held = [x for each in slots for x in (each.rows.k, each.rows.v, *each.tensors.values())]
    rotations = {id(rotary): rotary for each in slots for rotary in each.rotary if rotary is not None}.values()
    held += [table for rotary in rotations if rotary._tables is not None for table in rotary._tables[:2]]
    shipped = Profile(name, name, "", "", get_method(name).Config(**settings(name, **more)))
    geometry = geometry_of(model.config, torch.float32)
    wanted = memory.need(shipped, geometry, torch.float32, lengths, 3 + SPARE, 1, device=torch.device("cuda"))
    assert 0.9 * wanted.kv.device <= storage_bytes(held) <= wanted.kv.device + 1024  # numbers of each sequence


def test_a_layer_of_a_batch_is_there_twice_while_it_is_laid_side_by_side():
    """Beside what a prefill holds; a sequence that is alone is not copied."""
    geometry = geometry_of(tiny_config("llama"), torch.float32)
    one, many = (
        memory.need(profile("full"), geometry, torch.float32, {500: number}, 20, 1, device=torch.device("cuda"))
        for number in (1, 1000)
    )
    tables = one.prefill.device["rotary tables"]
    assert many.workspace == tables + many.kv.device // len(geometry.layers)
    assert one.workspace == sum(one.prefill.device.values())


def test_recurrences_before_the_first_attention_have_no_buffers_of_kv_beside_them():
    """Temporaries of a state are the most that a prompt takes; behind a layer of attention KV waits beside them."""
    config = tiny_config("qwen3_next")
    config.linear_key_head_dim = config.linear_value_head_dim = 64
    kinds = [["linear_attention"] * 3 + ["full_attention"], ["full_attention"] + ["linear_attention"] * 3]
    name = profile("freekv", dense_layers=0)
    after, before = (
        memory.need(name, geometry_of(config, torch.float32), torch.float32, [1024], 1, 1).workspace
        for config.layer_types in kinds
    )
    assert before - after == 4 * 1024 * 2 * KV_HEADS * HEAD_DIM


def test_what_a_recurrence_takes_while_it_reads_a_chunk_is_counted():
    """The gated delta rule makes fp32 copies of its queries, keys and values, wider than all that an MLP makes."""
    config = tiny_config("qwen3_5")
    config.linear_key_head_dim = config.linear_value_head_dim = 64
    geometry = geometry_of(config, torch.float32)
    least = 4 * 3 * (4 + 4 + 4) * 64  # bytes a token: q and k repeated for 4 value heads, and v, each copied twice
    one, two = (memory.need(profile("full"), geometry, torch.float32, [n], 1, 1).workspace for n in (512, 1024))
    as_long = 512 * 4 * (HIDDEN + 4 * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM)
    assert two - one - as_long > 512 * least
    assert geometry.states[0].temporaries is geometry.states[1].temporaries  # found once for both


def test_the_longest_context_is_found_behind_a_step_down():
    """From 1,000 tokens on a context takes less again, as when its hidden states begin to lie in host memory."""

    def needed(length):
        return {"device": length if length <= 1024 else length // 2}

    assert memory.longest_fitting(needed, {"device": 700}, 1 << 20) == 1401
    assert memory.longest_fitting(needed, {"device": 400}, 1 << 20) == 400
    assert memory.longest_fitting(needed, {"device": 0}, 1 << 20) == 0
    assert memory.longest_fitting(needed, {"device": 1 << 30}, 1 << 20) == (1 << 20) - 1


def test_hidden_states_of_a_long_prompt_lie_in_host_memory_beside_a_gpu():
    geometry, cuda = geometry_of(tiny_config("llama"), torch.float32), torch.device("cuda")
    tokens = (1 << 30) // (4 * HIDDEN)  # as many as 128K of an 8B model
    short, long = (
        memory.need(profile("freekv"), geometry, torch.float32, [n], 9, 1, device=cuda) for n in (tokens - 8, tokens)
    )
    assert short.prefill.host == {}
    assert short.prefill.device["hidden states"] == (tokens - 8) * 4 * HIDDEN
    assert long.prefill.host["hidden states"] == 1 << 30
    assert long.prefill.device["hidden states"] == 4 * 4096 * 4 * HIDDEN  # chunks
    assert long.on(cuda)["host"] == long.kv.host + long.prefill.on_host + memory.RUNTIME_BYTES
    assert long.on(cuda)["device"] == sum((long.weights, long.kv.device, long.workspace, memory.RUNTIME_BYTES))


def test_what_torch_keeps_of_a_gpu_for_later_is_free(monkeypatch):
    """A turn of a chat has left it there; otherwise the next turn would count it as taken."""
    for name, value in (("mem_get_info", (100, 1000)), ("memory_reserved", 700), ("memory_allocated", 300)):
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert memory.available(torch.device("cuda", 0))["device"] == 500
