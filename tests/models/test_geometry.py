import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from families import (
    FAMILIES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MAX_POSITIONS,
    REFUSED,
    VOCAB,
    WINDOW,
    config_of,
    tiny_config,
    tiny_model,
)
from transformers import RecurrentGemmaConfig

from kvcli.conformance.runs import run
from kvcli.errors import ExitCode, KvcliError
from kvcli.models.geometry import attention_modules, geometry_of, positions_of
from kvcli.models.loading import ModelSpec, read_config
from kvcli.models.shapes import shape_names

WINDOWS = {
    "mistral": [WINDOW] * LAYERS,
    "gemma2": [WINDOW, None, WINDOW, None],
    "gemma3": [WINDOW, WINDOW, WINDOW, None],
    "gpt_oss": [WINDOW, None, WINDOW, None],
}

# Published parameter counts.
MADE_UP = {"tiny": 32, "small": 64}  # head dimension of shapes that are nobody's
HEAD_DIMS = {**MADE_UP, "deepseek-v2-lite": 576, "lfm2-1.2b": 64, "qwen3-next-80b-a3b": 256}
PARAMETERS = {
    "deepseek-v2-lite": 15_706_484_224,
    "glm-4-9b": 9_399_951_360,
    "llama-3-8b-1m": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "lfm2-1.2b": 1_170_340_608,
    "qwen3-next-80b-a3b": 79_674_391_296,  # without its layer for multi-token prediction
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
}


SMALLEST = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": VOCAB, "lru_width": 64}


@pytest.mark.parametrize("family", FAMILIES)
def test_geometry_is_that_of_the_model(family):
    geometry = geometry_of(FAMILIES[family](), torch.bfloat16)
    kv_heads = 1 if family == "llama_one_kv_head" else KV_HEADS
    assert [layer.index for layer in geometry.layers] == list(range(LAYERS))
    for layer, window in zip(geometry.layers, WINDOWS.get(family, [None] * LAYERS), strict=True):
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (HEADS, kv_heads, HEAD_DIM)
        assert layer.window == window
        assert layer.rope
    assert geometry.weight_bytes == 2 * sum(weight.numel() for weight in tiny_model(family).parameters())
    assert (geometry.vocab_size, geometry.max_positions) == (VOCAB, MAX_POSITIONS)


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),  # states the whole
        ({"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 256}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256}, 256),
        ({"full": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, "near": {}}, 1024),
    ],
    ids=str,
)
def test_stretched_rope_serves_more_positions(parameters, found):
    assert positions_of(SimpleNamespace(max_position_embeddings=256, rope_parameters=parameters)) == found
    assert positions_of(SimpleNamespace(rope_parameters=parameters)) is None


def test_the_config_of_a_model_card_with_yarn(tmp_path):
    """As it is written into config.json by hand: in the older spelling."""
    config = tiny_config("qwen2").to_dict() | {"max_position_embeddings": 256}
    config.pop("rope_parameters", None)
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_config(ModelSpec(str(tmp_path), load_format="dummy"))
    assert geometry_of(read, torch.float32).max_positions == 1024


def test_weight_bytes_count_tied_weights_once():
    config = FAMILIES["llama"]()
    untied = geometry_of(config, torch.float32).weight_bytes
    config.tie_word_embeddings = True
    assert untied - geometry_of(config, torch.float32).weight_bytes == 4 * VOCAB * config.hidden_size


def test_layers_without_rotary_positions_are_told_apart():
    config = transformers.SmolLM3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        no_rope_layer_interval=2,
        pad_token_id=2,
    )
    expected = [bool(flag) for flag in config.no_rope_layers]
    assert False in expected
    assert [layer.rope for layer in geometry_of(config, torch.float32).layers] == expected


def test_a_composite_config_is_described_by_its_text_part():
    text = FAMILIES["gemma3"]()
    config = transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
    )
    composite = geometry_of(config, torch.float32)
    alone = geometry_of(text, torch.float32)
    assert composite.layers == alone.layers
    assert composite.hidden_size == alone.hidden_size
    assert composite.weight_bytes == alone.weight_bytes  # no images are read


def test_the_config_is_left_as_it_was():
    config = FAMILIES["qwen3"]()
    before = config.to_dict(), config._attn_implementation
    geometry_of(config, torch.bfloat16)
    assert (config.to_dict(), config._attn_implementation) == before


@pytest.mark.parametrize("family", REFUSED)
def test_unsupported_models_are_refused_by_name_and_reason(family):
    make, word = REFUSED[family]
    config = make()
    with pytest.raises(KvcliError) as caught:
        geometry_of(config, torch.float32)
    assert caught.value.exit_code == ExitCode.USAGE
    assert config.model_type in caught.value.what
    assert word in caught.value.what
    assert caught.value.hint


def test_a_model_whose_output_layer_is_not_given_is_refused(monkeypatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "get_output_embeddings", lambda _: None)  # as nemotron_h_omni
    with pytest.raises(KvcliError, match="names no output layer"):
        geometry_of(tiny_config("llama"), torch.float32)


def test_layers_that_are_given_no_positions_are_refused():
    """Those of Recurrent Gemma rotate by tables of their own."""
    with pytest.raises(KvcliError, match="gives its layers no rotary positions"):
        geometry_of(RecurrentGemmaConfig(**SMALLEST), torch.float32)


def test_several_stacks_of_layers_are_refused():
    with pytest.raises(KvcliError, match="several stacks of layers"):
        geometry_of(config_of("HrmTextConfig", num_layers_per_stack=2), torch.float32)


def test_what_depends_on_numbers_is_found_on_zeros():
    """The experts of JetMoE's queries count tokens, which shapes have none of; keys are repeated for each."""
    geometry = geometry_of(tiny_config("jetmoe"), torch.float32)
    assert [(layer.num_heads, layer.num_kv_heads) for layer in geometry.layers] == [
        (2 * KV_HEADS, 2 * KV_HEADS)
    ] * LAYERS
    chosen = geometry_of(tiny_config("qwen4_exp"), torch.float32).selects
    assert (chosen.tokens, chosen.channels, chosen.alone, chosen.all_angles) == (12 + 3, HEAD_DIM, True, True)


def test_entries_of_several_tokens_are_found():
    geometry = geometry_of(tiny_config("deepseek_v4"), torch.float32)
    window, indexed, whole, again = geometry.layers
    assert (window.window, window.selects, window.latent, window.head_dim) == (10, None, HEAD_DIM - 8, HEAD_DIM)
    assert (indexed.selects.tokens, indexed.selects.channels, indexed.rate, indexed.near) == (3, 16, 4, 10)
    assert (whole.selects.tokens, whole.selects.channels, whole.rate, whole.near) == (0, 0, 12, 10)
    assert again == replace(indexed, index=3)
    assert [layer.window for layer in geometry.layers] == [10, None, None, None]
    assert [layer.head_dim for layer in geometry.layers[1:]] == [16 + 2 * HEAD_DIM, 2 * HEAD_DIM, 16 + 2 * HEAD_DIM]
    assert [layer.grows for layer in geometry.layers] == [0, 8, 2, 8]
    assert [len(state.tensors) for state in geometry.states] == [8, 2, 8]  # keys and gates: buffers, and an overlap
    assert {part.shape for part in geometry.states[1].tensors} == {(11, HEAD_DIM)}
    assert all(state.resumes for state in geometry.states)
    assert geometry.beside_hidden == 1  # experts are chosen by the token itself


@pytest.mark.parametrize(("name", "rotary"), [("opt", False), ("gpt2", False), ("ctrl", False), ("gptj", True)])
def test_a_model_with_a_table_of_positions_has_no_others(name, rotary):
    geometry = geometry_of(tiny_config(name), torch.float32)
    assert geometry.ends
    assert [layer.rope for layer in geometry.layers] == [rotary] * LAYERS
    assert geometry.beyond_positions(geometry.max_positions, name) is None
    words = rf"{geometry.max_positions + 1:,} tokens .* are more than the {geometry.max_positions:,} positions {name} "
    with pytest.raises(KvcliError, match=words) as caught:
        geometry.beyond_positions(geometry.max_positions + 1, name)
    assert caught.value.exit_code == ExitCode.USAGE


def test_other_positions_have_no_end():
    assert not any(geometry_of(tiny_config(name), torch.float32).ends for name in ("gemma4", "gemma3", "jamba"))


def test_a_run_beyond_learned_positions_is_refused():
    model = tiny_model("opt")
    with pytest.raises(KvcliError, match="4,096 positions"):
        run(model, "full", {}, [[5, 6, 7]], MAX_POSITIONS)


def test_a_bidirectional_or_headless_model_is_refused():
    with pytest.raises(KvcliError, match="not supported"):
        geometry_of(transformers.BertConfig(num_hidden_layers=1), torch.float32)
    with pytest.raises(KvcliError, match="not a causal language model"):
        geometry_of(transformers.ViTConfig(num_hidden_layers=1), torch.float32)


def test_attention_that_cannot_be_replaced_is_refused():
    with pytest.raises(KvcliError, match="not a stack of layers"):
        geometry_of(transformers.OpenAIGPTConfig(n_layer=1, n_embd=32, n_head=2, vocab_size=VOCAB), torch.float32)


@pytest.mark.parametrize("name", ["MegatronBertConfig", "RemBertConfig"])
def test_an_encoder_whose_modules_attend_themselves_is_refused_unless_it_decodes(name):
    config = config_of(name, is_decoder=True)
    assert all(layer.by_itself for layer in geometry_of(config, torch.float32).layers)
    config.is_decoder = False
    with pytest.raises(KvcliError, match="mask of both directions"):
        geometry_of(config, torch.float32)


def test_a_bias_of_keys_is_two_channels_of_them():
    for family, more in (("bloom", 2), ("mpt", 2), ("falcon_alibi", 2), ("falcon", 0)):
        geometry = geometry_of(tiny_config(family), torch.float32)
        heads = geometry.layers[0].num_heads
        assert {layer.head_dim for layer in geometry.layers} == {HIDDEN // heads + more}
    bounded = geometry_of(config_of("MptConfig", max_seq_len=99), torch.float32)
    assert (bounded.ends, bounded.max_positions) == (True, 99)


def test_attention_with_a_mask_of_its_own_is_refused():
    config = transformers.DogeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(KvcliError, match="hands a mask of its own to attention"):
        geometry_of(config, torch.float32)


def test_attention_with_unknown_arguments_is_refused(monkeypatch):
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda self, *args, **kwargs: forward(self, *args, tilt=3, **kwargs))
    monkeypatch.setattr("kvcli.models.layers._with_cache", lambda layer, indexed: [layer.self_attn])
    taken = {"hidden_states", "attention_mask", "position_embeddings"}
    monkeypatch.setattr("kvcli.models.layers._parameters", lambda _: taken)
    with pytest.raises(KvcliError, match="hands tilt to attention"):
        geometry_of(FAMILIES["llama"](), torch.float32)


def test_impossible_sizes_are_a_usage_error():
    config = FAMILIES["llama"]()
    config.num_key_value_heads = 0
    with pytest.raises(KvcliError, match="llama") as caught:
        geometry_of(config, torch.float32)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_modules_are_in_the_order_of_the_layers(family):
    assert [module.layer_idx for module in attention_modules(tiny_model(family))] == list(range(LAYERS))


@pytest.mark.parametrize("shape", shape_names())
def test_shipped_shapes_have_the_published_size(shape):
    config = read_config(ModelSpec(shape, load_format="dummy"))
    geometry = geometry_of(config, torch.float32)  # of which nothing is kept wider
    if shape in MADE_UP:
        assert geometry.weight_bytes < 2**28
    else:
        assert geometry.weight_bytes == 4 * PARAMETERS[shape]
    assert {layer.head_dim for layer in geometry.layers} == {HEAD_DIMS.get(shape, 128)}


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_a_latent_is_one_head_that_is_key_and_value(family):
    for layer in geometry_of(tiny_config(family), torch.float32).layers:
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.latent) == (HEADS, 1, 16 + 8, 16)
        assert layer.parts == 1


def test_layers_with_chunks_are_those_of_the_config():
    layers = geometry_of(tiny_config("llama4"), torch.float32).layers
    assert [(layer.window, layer.chunked, layer.rope) for layer in layers] == [(WINDOW, True, True)] * 3 + [
        (None, False, False)
    ]


def test_an_unknown_kind_of_rotary_scaling_is_named_with_those_that_are_known():
    config = FAMILIES["llama"]()
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 10000.0}
    with pytest.raises(KvcliError, match=r"rope_type 'spiral' in config\.json") as caught:
        geometry_of(config, torch.float32)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "install a newer transformers" in caught.value.hint
    assert "known: default, linear, dynamic, yarn" in caught.value.hint


def test_a_decoder_layer_may_attend_several_times():
    geometry = geometry_of(tiny_config("longcat_flash"), torch.float32)
    assert [len(layer.attention) for layer in geometry.decoder] == [2, 2]
    assert [layer.index for layer in geometry.layers] == [0, 1, 2, 3]
    assert geometry.strides == [1, 0, 1, 0]
    assert geometry.depth == 2
