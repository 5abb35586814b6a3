"""All causal model types of transformers, by a tiny config of the shape of real ones: which run, and why others do not.

A type that is in neither list is new: look which it is, and add it. That one runs means that its layers were found;
that it continues as transformers does is tested on models (`kvcli.conformance.models`).
"""

import logging
from typing import Any

import pytest
import torch
from families import EXPERTS, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LATENT, LAYERS, SIZES, VOCAB, tiny_config
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvcli.errors import KvcliError
from kvcli.models.geometry import geometry_of

LEFT_OUT = object()
OWN_NAMES = dict.fromkeys(SIZES, LEFT_OUT)  # for configs that call their sizes otherwise

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ALTERNATING = [_SLIDING, _FULL] * 2
_LATENT = {**LATENT, **EXPERTS, "q_lora_rank": 24}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_SHARED = {"layer_types": _ALTERNATING, "num_kv_shared_layers": 2}
_SHARED |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
_WITH_IMAGES = {**OWN_NAMES, "text_config": SIZES | _SHARED}
_NOT_GROUPED = {"num_key_value_heads": HEADS}
_GEMMA3N = {**_SHARED, "altup_num_inputs": 2, "laurel_rank": 8}
_CONVOLUTIONS = ["conv", _FULL] * 2

_DECODER = {"is_decoder": True}  # what is otherwise an encoder
_DECODERS = ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta")
_DECODERS += ("megatron-bert", "rembert", "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl")
_ROTATED = {"rotary_dim": 8}
_QWEN4 = {"layer_types": ["linear_attention", "indexed_attention"] * 2, "indexer_n_heads": 4, "indexer_kv_heads": 1}
_QWEN4 |= {"indexer_head_dim": HEAD_DIM, "indexer_budget": 16, "indexer_compress_ratio": 4, "num_experts": 4}
_QWEN4 |= {"num_experts_per_tok": 2}

OTHER_SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "dots3_note", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu"), _LATENT),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _SHARED),
    **dict.fromkeys(("gemma4", "gemma4_unified"), _WITH_IMAGES),
    **dict.fromkeys(("diffllama", "dots3_note_text"), _NOT_GROUPED),
    "bailing_hybrid": {**_LATENT, "layer_group_size": 2, "num_experts": 4, "head_dim": HEAD_DIM},
    **dict.fromkeys(("codegen", "gptj"), _ROTATED),
    **dict.fromkeys(_DECODERS, _DECODER),
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {_FULL: {"rope_type": "default", "rope_theta": 10_000.0}}},
    "dbrx": {**OWN_NAMES, "d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS}
    | {"attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10_000.0, "clip_qkv": 8}}
    | {"ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN}},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None},
    "dots1": EXPERTS,
    "dots3_note": {**OWN_NAMES, **{f"{side}_config": {"adapter_out_dim": HIDDEN} for side in ("vision", "audio")}}
    | {"text_config": tiny_config("dots3_note").to_dict()},
    "falcon": {"head_dim": LEFT_OUT, "num_kv_heads": HEADS},
    "gemma3n": {**OWN_NAMES, "text_config": SIZES | _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": LAYERS}
    | dict.fromkeys(("num_hidden_layers", "intermediate_size"), LEFT_OUT),
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "kimi_linear": {**_LATENT, "num_experts": 4}
    | {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": HEADS, "head_dim": 16}},
    "lfm2": {"layer_types": _CONVOLUTIONS, "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": _CONVOLUTIONS, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", _SLIDING, "conv", _FULL]},
    "longcat_flash": {**_LATENT, "num_hidden_layers": 2 * LAYERS, "intermediate_size": LEFT_OUT, "zero_expert_num": 2}
    | {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": HEAD_DIM, "layer_types": _ALTERNATING, "n_routed_experts": 4},
    "xmod": {**_DECODER, "languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
    "qwen4_exp": {**OWN_NAMES, "text_config": SIZES | _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "zamba": {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 5}
    | {"n_mamba_heads": 2, "mamba_dt_rank": 4, "head_dim": LEFT_OUT},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]}
    | {"mamba_headdim": 16, "n_mamba_heads": 8},
}

RUNS = """
afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bamba beam bert bert-generation biogpt bitnet
bloom camembert codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2
deepseek_v3 deepseek_v32 deepseek_v4 dots1 dots3_note dots3_note_text electra emu3 ernie ernie4_5 ernie4_5_moe exaone
exaone4 exaone_moe falcon falcon_h1 flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4
gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2
gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jamba jetmoe
kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4 llama4_text longcat_flash megatron-bert mellum
mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder
moss_transcribe_diarize mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3
phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
qwen4_exp qwen4_exp_text rembert roberta roberta-prelayernorm roc_bert sarvam_mla sarvam_moe seed_oss smollm3 solar_open
stablelm starcoder2 vaultgemma xglm xlm-roberta xlm-roberta-xl xmod youtu zamba zamba2 zaya
"""

REFUSED = {  # words of the message -> types
    "encoder-decoder": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus plbart
        whisper
    """,
    "not a stack of layers": "big_bird gpt_neo openai-gpt rwkv xlm xlstm",
    "gives its layers no rotary positions": "moshi recurrent_gemma trocr",
    "attention interface": "git roformer",
    "none of its layers attends": "falcon_mamba mamba mamba2",
    "attends several times": "diffllama",
    "a mask of its own": "doge",
    "runs several times a token": "dory inkling2_loop_text inkling2_text",
    "keeps something else than keys and values": "gemma4_unified_assistant",
    "several stacks of layers": "blt hrm_text",
    "attends to images": "mllama",
    "has an unknown form": "cpmant inkling_text",
}
NO_TINY_CONFIG = "gemma4_assistant prophetnet reformer xlnet"
"""Configs of these types need more than sizes."""

REASONS = {kind: reason for reason, kinds in REFUSED.items() for kind in kinds.split()}


def config_of(kind):
    sizes = {**SIZES, **OTHER_SIZES.get(kind, {})}
    return AutoConfig.for_model(kind, **{name: size for name, size in sizes.items() if size is not LEFT_OUT})


def test_every_type_is_in_one_list():
    listed = [*RUNS.split(), *REASONS, *NO_TINY_CONFIG.split()]
    assert len(listed) == len(set(listed))
    assert not set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(listed), "types that nobody has looked at"


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR)  # configs and models warn of sizes so small


@pytest.mark.parametrize("kind", [kind for kind in RUNS.split() if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_a_type_that_runs(kind):
    geometry = geometry_of(config_of(kind), torch.float32)
    assert len(geometry.layers) == sum(len(layer.attention) for layer in geometry.decoder) > 0


@pytest.mark.parametrize("kind", [kind for kind in REASONS if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_a_type_that_is_refused(kind):
    with pytest.raises(KvcliError, match=REASONS[kind]):
        geometry_of(config_of(kind), torch.float32)
