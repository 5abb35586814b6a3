"""Where the layers of a model lie on several devices, and how a model comes to lie there."""

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from kvcli.conformance.models import LAYERS, config_of, tiny_model
from kvcli.errors import ExitCode, KvcliError
from kvcli.models.auto import decoder_of, model_class
from kvcli.models.devices import another_machine, device_map, parts_of, place, placed, resolve_devices, take_hooks_out
from kvcli.models.dummy import allocate, random_model
from kvcli.models.geometry import build_on_meta, geometry_of
from kvcli.models.weights import ON_LOADING

DTYPE, MIB = torch.float32, 1 << 20
PAIR = torch.device("cuda", 0), torch.device("cuda", 1)
CPU = torch.device("cpu")


def placed_on(config, free, devices=None):
    model, geometry = build_on_meta(config, DTYPE), geometry_of(config, DTYPE)
    return place(model, geometry, devices or [torch.device("cuda", at) for at in range(len(free))], free)


def test_equal_devices_have_as_many_layers_each_and_the_ends_of_the_model():
    config = config_of("LlamaConfig", num_hidden_layers=8)
    placement = placed_on(config, [64 * MIB] * 2)
    assert placement.layers == PAIR[:1] * 4 + PAIR[1:] * 4
    assert placement.modules["model.embed_tokens"] == PAIR[0]
    assert placement.modules["lm_head"] == placement.modules["model.norm"] == PAIR[1]
    assert [piece.label for piece in placement.pieces] == ["cuda:0 has 0-3", "cuda:1 has 4-7"]
    assert sum(map(placement.weights, PAIR)) == geometry_of(config, DTYPE).weight_bytes
    assert set(placement.modules) == set(parts_of(build_on_meta(config, DTYPE)))


def test_a_layer_is_never_split_and_a_larger_device_has_more_of_them():
    placement = placed_on(config_of("LlamaConfig", num_hidden_layers=9), [32 * MIB, 64 * MIB])
    counts = [piece.last - piece.first + 1 for piece in placement.pieces]
    assert counts == [3, 6]
    assert list(placement.layers) == sorted(placement.layers, key=PAIR.index)


def test_embeddings_that_are_the_head_lie_once_with_the_first():
    placement = placed_on(config_of("LlamaConfig", tie_word_embeddings=True), [64 * MIB] * 2)
    assert placement.modules["lm_head"] == placement.modules["model.embed_tokens"] == PAIR[0]
    assert (
        sum(piece.weights for piece in placement.pieces)
        == geometry_of(config_of("LlamaConfig", tie_word_embeddings=True), DTYPE).weight_bytes
    )


def test_room_goes_by_what_the_caches_of_layers_grow_by():
    """Of layers with a window the caches do not grow: four of them lie beside one that attends to everything."""
    config = config_of("Gemma2Config", num_hidden_layers=8, sliding_window=24)
    config.layer_types = ["full_attention", *["sliding_attention"] * 6, "full_attention"]
    geometry = geometry_of(config, DTYPE)
    placement = place(build_on_meta(config, DTYPE), geometry, PAIR, [64 * MIB] * 2)
    full = [layer.index for layer in geometry.layers if layer.window is None]
    assert {placement.attending[layer] for layer in full} == set(PAIR)


def test_what_does_not_fit_or_cannot_be_is_refused():
    config = config_of("LlamaConfig")
    size = geometry_of(config, DTYPE).weight_bytes
    with pytest.raises(KvcliError, match=r"and whole layers do not fit: cuda:0 .* free") as refused:
        placed_on(config, [size // 4] * 2)
    assert refused.value.exit_code == ExitCode.WILL_NOT_FIT
    with pytest.raises(KvcliError, match=f"{LAYERS + 1} devices are named for {LAYERS} layers") as refused:
        placed_on(config, [64 * MIB] * (LAYERS + 1))
    assert refused.value.exit_code == ExitCode.USAGE
    geometry = geometry_of(config, DTYPE, ON_LOADING["int8"])
    with pytest.raises(KvcliError, match="weights in int8 need one device"):
        placed("cpu,cpu", config, DTYPE, geometry, [CPU, CPU])


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ("cpu,cuda:0", "do not run together"),
        ("cuda:1,cuda:1", "names cuda:1 among others"),
        ("cuda:0,auto", "names auto among others"),
        ("cuda:0,cuda:2", "no device 'cuda:2'"),
    ],
)
def test_devices_that_are_not_there_or_do_not_go_together_are_refused(names, what, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    assert resolve_devices("cuda:1,cuda:0") == (PAIR[1], PAIR[0])
    with pytest.raises(KvcliError, match=what) as refused:
        resolve_devices(names)
    assert refused.value.exit_code == ExitCode.USAGE


def test_auto_takes_all_gpus_where_one_does_not_hold_the_weights(monkeypatch):
    config = config_of("LlamaConfig")
    geometry = geometry_of(config, DTYPE)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for free, expected in ((geometry.weight_bytes + 1, None), (3 * geometry.weight_bytes // 4, PAIR)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, free))
        found = placed("auto", config, DTYPE, geometry, PAIR[:1])
        assert (found and found.devices) == expected


def test_gpus_of_another_machine_need_not_be_here():
    assert another_machine("auto") == (torch.device("cuda"),)
    assert another_machine("cuda:0,cuda:1") == PAIR
    assert another_machine("cuda:1") == another_machine("cpu,cpu") == ()


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_made_up_part_by_part_is_the_one_made_up_at_once(tied):
    config = config_of("LlamaConfig", tie_word_embeddings=tied)
    placement = placed_on(config, [64 * MIB] * 2, [CPU, CPU])
    with torch.device("meta"):
        model = model_class(config).from_config(config, dtype=DTYPE)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        allocate(model, placement)
        model.init_weights()
    expected = random_model(config, DTYPE, CPU)
    pairs = list(zip(model.parameters(), expected.parameters(), strict=True))
    # What is tied may be drawn at another place of the sequence.
    assert all(torch.equal(*pair) or (tied and abs(pair[0].std() / pair[1].std() - 1) < 0.1) for pair in pairs)
    rotary = decoder_of(model).rotary_emb, decoder_of(expected).rotary_emb
    assert torch.equal(*(each.inv_freq for each in rotary))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_hooks_of_accelerate_are_taken_out():
    model = tiny_model("llama")
    for module in (model.model.layers[0], model.lm_head):
        add_hook_to_module(module, AlignDevicesHook(CPU, io_same_device=True))
    assert "forward" in vars(model.lm_head)
    take_hooks_out(model)
    assert not any("forward" in vars(module) or hasattr(module, "_hf_hook") for module in model.modules())


def test_transformers_is_told_where_each_part_lies():
    assert device_map(CPU) == {"": CPU}
    placement = placed_on(config_of("LlamaConfig"), [64 * MIB] * 2)
    assert device_map(placement) == {**placement.modules, "": PAIR[0]}
