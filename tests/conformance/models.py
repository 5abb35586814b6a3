"""Tiny random models of many architectures.

All families share the sizes below, so that a test may be written once and run over `FAMILIES`.
"""

from collections.abc import Callable

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from kvcli.models.auto import model_class

LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
HIDDEN = 64
VOCAB = 300
WINDOW = 24
MAX_POSITIONS = 4096
BOS, EOS, PAD = 0, 1, 2

# The implementations that serve as the reference where sdpa is refused or lacks what the family needs.
EAGER = frozenset({"bloom", "gemma2", "gpt_neox_japanese", "gpt_oss", "hy_v4", "hy_v4_images", "mimo_v2_flash", "mpt"})
EAGER |= {"deepseek_v4", "xglm"}


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def config_of(name: str, **extra: object) -> PreTrainedConfig:
    return getattr(transformers, name)(**{**SIZES, "tie_word_embeddings": False, **extra})


def _alternating(*kinds: str) -> list[str]:
    return [kinds[i % len(kinds)] for i in range(LAYERS)]


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
EXPERTS |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1}
_SLIDING, _FULL = "sliding_attention", "full_attention"

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: config_of("LlamaConfig"),
    "llama_one_kv_head": lambda: config_of("LlamaConfig", num_key_value_heads=1),
    "qwen2": lambda: config_of("Qwen2Config"),
    "qwen3": lambda: config_of("Qwen3Config"),
    "mistral": lambda: config_of("MistralConfig", sliding_window=WINDOW),
    "gemma2": lambda: config_of(
        "Gemma2Config", sliding_window=WINDOW, query_pre_attn_scalar=24, layer_types=_alternating(_SLIDING, _FULL)
    ),
    "gemma3": lambda: config_of(
        "Gemma3TextConfig",
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        layer_types=_alternating(_SLIDING, _SLIDING, _SLIDING, _FULL),
    ),
    "phi3": lambda: config_of("Phi3Config"),
    "glm4": lambda: config_of("Glm4Config"),
    "granite": lambda: config_of(
        "GraniteConfig",
        attention_multiplier=0.2,
        embedding_multiplier=1.5,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    ),
    "qwen3_moe": lambda: config_of("Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "gpt_oss": lambda: config_of(
        "GptOssConfig",
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=_alternating(_SLIDING, _FULL),
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    ),
}

_FEW_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {f"linear_{name}": size for name, size in (("num_key_heads", 2), ("num_value_heads", 4))}
_DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_LINEAR = _alternating("linear_attention", _FULL)

# Some of their layers keep a state of fixed size. All of falcon_h1's layers also attend; jamba's cannot process several
# tokens at once from a state.
HYBRIDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": lambda: config_of(
        "Qwen3NextConfig",
        num_experts=4,
        shared_expert_intermediate_size=32,
        layer_types=_LINEAR,
        **_FEW_EXPERTS,
        **_DELTA,
    ),
    "qwen3_5": lambda: config_of("Qwen3_5TextConfig", layer_types=_LINEAR, **_DELTA),
    "nemotron_h": lambda: config_of(
        "NemotronHConfig",
        layers_block_type=["mamba", "attention", "moe", "attention"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=32,
        n_group=1,
        topk_group=1,
        **_FEW_EXPERTS,
    ),
    "granitemoehybrid": lambda: config_of(
        "GraniteMoeHybridConfig",
        layer_types=_alternating("mamba", "attention"),
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        position_embedding_type="nope",
        **_MAMBA,
    ),
    "falcon_h1": lambda: config_of("FalconH1Config", mamba_d_ssm=128, **_MAMBA),
    "jamba": lambda: config_of(
        "JambaConfig", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, num_experts=2
    ),
    "lfm2": lambda: config_of("Lfm2Config", layer_types=_alternating("conv", _FULL), block_multiple_of=16),
    "minimax": lambda: config_of(
        "MiniMaxConfig", layer_types=_LINEAR, block_size=16, num_local_experts=4, num_experts_per_tok=2
    ),
}


_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = {"image_size": 28, "patch_size": 14}
_GRID = {"depth": 1, "hidden_size": 32, "out_hidden_size": HIDDEN, "num_heads": 2, "intermediate_size": 48}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_GEMMA3 = {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "layer_types": _alternating(*[_SLIDING] * 3, _FULL)}


def _with_vision(
    name: str, text: PreTrainedConfig | dict[str, object], vision: dict[str, object], **extra: object
) -> PreTrainedConfig:
    """Make the config of a model that also takes images, with the text side `text`."""
    text = text if isinstance(text, dict) else text.to_dict()
    extra |= {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    return getattr(transformers, name)(**extra)


LATENT = {"num_key_value_heads": HEADS, "head_dim": 8, "kv_lora_rank": 16, "v_head_dim": 12}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
_YARN |= {"mscale": 1.0, "mscale_all_dim": 0.7}
_KIMI = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": HEADS, "head_dim": HEAD_DIM}
_KIMI |= {"short_conv_kernel_size": 4}
# Temperatures differ within a test's prompt.
_LLAMA4 = {"intermediate_size_mlp": 96, "num_local_experts": 2, "interleave_moe_layer_step": 2, "use_qk_norm": True}
_LLAMA4 |= {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 1, 1, 0], "floor_scale": 16, "attn_scale": 0.5}

_FALCON = {name: size for name, size in SIZES.items() if name != "head_dim"} | {"tie_word_embeddings": False}

# Two layers keep KV, one of each type, and the others read it.
_SHARED = {"sliding_window": WINDOW, "layer_types": _alternating(_SLIDING, _FULL), "num_kv_shared_layers": 2}
_SHARED |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}

KINDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3_images": lambda: _with_vision(
        "Gemma3Config", config_of("Gemma3TextConfig", **_GEMMA3), {**_VISION, **_PATCHES}, mm_tokens_per_image=4
    ),
    "qwen2_5_vl": lambda: _with_vision(
        "Qwen2_5_VLConfig", config_of("Qwen2_5_VLTextConfig", rope_parameters=dict(_AXES)), _GRID
    ),
    "qwen3_vl": lambda: _with_vision(
        "Qwen3VLConfig",
        config_of("Qwen3VLTextConfig", rope_parameters=dict(_AXES)),
        {**_GRID, "deepstack_visual_indexes": [0]},
    ),
    "mistral3": lambda: _with_vision(
        "Mistral3Config",
        config_of("MistralConfig"),
        {"model_type": "pixtral", "head_dim": HEAD_DIM, **_VISION, **_PATCHES},
        image_token_index=5,
    ),
    "llava": lambda: _with_vision(
        "LlavaConfig",
        config_of("LlamaConfig"),
        {"model_type": "clip_vision_model", **_VISION, **_PATCHES},
        image_token_index=5,
    ),
    "llama4": lambda: config_of("Llama4TextConfig", **_LLAMA4),
    "llama4_images": lambda: _with_vision(
        "Llama4Config",
        config_of("Llama4TextConfig", **_LLAMA4),
        {**_VISION, **_PATCHES, "intermediate_size": 128, "vision_output_dim": 32, "projector_output_dim": 32},
    ),
    "deepseek_v2": lambda: config_of("DeepseekV2Config", **EXPERTS, **LATENT, q_lora_rank=None),
    "deepseek_v3": lambda: config_of("DeepseekV3Config", **EXPERTS, **LATENT, q_lora_rank=24, rope_parameters=_YARN),
    "kimi_linear": lambda: config_of("KimiLinearConfig", num_experts=4, **EXPERTS, **LATENT, linear_attn_config=_KIMI),
    "minicpm3": lambda: config_of("MiniCPM3Config", **LATENT, q_lora_rank=24),
    "glm4_moe": lambda: config_of("Glm4MoeConfig", **EXPERTS),
    "mimo_v2_flash": lambda: config_of(
        "MiMoV2FlashConfig",
        head_dim=24,
        v_head_dim=HEAD_DIM,
        sliding_window=WINDOW,
        layer_types=_alternating(_SLIDING, _FULL),
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        **_FEW_EXPERTS,
    ),
    "longcat_flash": lambda: config_of(  # two attentions in each of two decoder layers
        "LongcatFlashConfig",
        q_lora_rank=24,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        **LATENT,
    ),
    "opt": lambda: config_of("OPTConfig", ffn_dim=96, word_embed_proj_dim=HIDDEN),
    "lfm3": lambda: config_of("Lfm3Config", sliding_window=WINDOW, layer_types=["conv", _SLIDING, "conv", _FULL]),
    "lfm2_moe": lambda: config_of(
        "Lfm2MoeConfig", layer_types=["conv", _FULL, "conv", _FULL], num_experts=4, num_dense_layers=1, **_FEW_EXPERTS
    ),
    "bamba": lambda: config_of("BambaConfig", attn_layer_indices=[1, 3], **_MAMBA),
    "beam": lambda: config_of(
        "BeamConfig",
        sliding_window=WINDOW,
        layer_types=_alternating(_SLIDING, _FULL),
        num_experts=4,
        n_group=1,
        topk_group=1,
        **_FEW_EXPERTS,
    ),
    "gpt2": lambda: config_of("GPT2Config"),  # layers under another name, whose output takes the shape of the input
    "gptj": lambda: config_of("GPTJConfig", rotary_dim=8),  # sines before cosines, tokens before heads
    "ctrl": lambda: config_of("CTRLConfig"),
    "dbrx": lambda: config_of(  # a module around the attention has its number, too
        "DbrxConfig",
        d_model=HIDDEN,
        n_heads=HEADS,
        n_layers=LAYERS,
        attn_config={"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN},
    ),
    "modernbert": lambda: config_of(  # a head that is called decoder
        "ModernBertDecoderConfig", sliding_window=WINDOW, layer_types=_alternating(_SLIDING, _FULL)
    ),
    "zaya": lambda: config_of("ZayaConfig", num_experts=4, router_hidden_size=16, moe_intermediate_size=32),
    "jetmoe": lambda: config_of(  # experts of queries, which keys are repeated for
        "JetMoeConfig", kv_channels=HEAD_DIM, num_local_experts=4, num_experts_per_tok=2
    ),
    "zamba2": lambda: config_of(  # one attention in several places, of two hidden states
        "Zamba2Config",
        layer_types=["mamba", "hybrid", "hybrid", "mamba"],
        hybrid_layer_ids=[1, 2],
        mamba_headdim=16,
        n_mamba_heads=8,
        num_key_value_heads=HEADS,
        use_mem_rope=True,
    ),
    # These attend by themselves: with ALiBi, with rotary positions, with a table of positions.
    "bloom": lambda: config_of("BloomConfig", num_attention_heads=2 * HEADS),
    "mpt": lambda: config_of("MptConfig", max_seq_len=MAX_POSITIONS),
    "falcon": lambda: transformers.FalconConfig(**_FALCON, num_kv_heads=KV_HEADS, new_decoder_architecture=True),
    "falcon_one_kv_head": lambda: transformers.FalconConfig(**_FALCON),
    "falcon_alibi": lambda: transformers.FalconConfig(**_FALCON, alibi=True, multi_query=False, parallel_attn=False),
    "gpt_neox_japanese": lambda: config_of("GPTNeoXJapaneseConfig", rotary_pct=0.5),
    "xglm": lambda: config_of("XGLMConfig", attention_heads=HEADS, num_layers=LAYERS, ffn_dim=96),
    "bert": lambda: config_of("BertConfig", is_decoder=True),  # layers within an encoder
    "gemma4": lambda: config_of("Gemma4TextConfig", global_head_dim=32, **_SHARED),
    "gemma3n": lambda: config_of(
        "Gemma3nTextConfig",
        altup_num_inputs=2,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        **_SHARED,
    ),
}
"""Models of other kinds than `FAMILIES`: some methods run on each every time, and all of them on demand."""

# So many heads that no two tokens score the same: what lies below zero in all of them scores nothing, and ties are
# broken by chance.
_INDEX = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 12}
_SHARED_INDEX = {"indexer_types": _alternating("full", "shared")}
_BLOCKS = {"index_n_heads": KV_HEADS, "index_head_dim": HEAD_DIM, "index_block_size": 4, "index_topk_blocks": 3}

_HY_V4 = {**EXPERTS, **LATENT, **_INDEX, **_SHARED_INDEX, "q_lora_rank": 24}
_HY_V4_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_WINDOWED = {**LATENT, "num_attention_heads": HEADS, "q_lora_rank": 24, "head_dim": 16}

_GLM5 = {**EXPERTS, **LATENT, **_INDEX, **_SHARED_INDEX, "q_lora_rank": 24, "qk_rope_head_dim": 0, "hc_mult": 2}
_GLM5 |= {"layer_types": ["linear_attention", *["indexed_attention"] * 3], "linear_head_dim": 16}
_GLM5 |= {"linear_num_heads": HEADS, "index_kpool": 4, "mlp_layer_types": ["dense", *["sparse"] * 3]}
_GLM5 |= {"indexer_types": ["full", "full", "shared", "full"]}

_V4 = {"partial_rotary_factor": 0.5, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16, "hc_mult": 2}
_V4 |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]}
_V4 |= {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12}}
_V4 |= {"layer_types": [_SLIDING, "compressed_sparse_attention", "heavily_compressed_attention"]}
_V4["layer_types"] += ["compressed_sparse_attention"]

SELECTING: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek_v32": lambda: config_of("DeepseekV32Config", **EXPERTS, **LATENT, **_INDEX, q_lora_rank=24),
    "glm_moe_dsa": lambda: config_of("GlmMoeDsaConfig", **EXPERTS, **LATENT, **_INDEX, **_SHARED_INDEX, q_lora_rank=24),
    "axk2": lambda: config_of("AXK2Config", **EXPERTS, **LATENT, **_INDEX, q_lora_rank=24),
    "hy_v4": lambda: config_of("HYV4Config", **_HY_V4),
    "hy_v4_images": lambda: _with_vision(
        "HYV4VLConfig",
        {**config_of("HYV4Config", **_HY_V4).to_dict(), "model_type": "hy_v4_vl_text", "rope_parameters": _HY_V4_AXES},
        {**_VISION, "num_key_value_heads": 2, "out_hidden_size": HIDDEN},
    ),
    "mistral_large4": lambda: _with_vision(
        "MistralLarge4Config",
        config_of("MistralLarge4TextConfig", **EXPERTS, **LATENT, **_INDEX, **_SHARED_INDEX, rope_parameters=_YARN),
        {"model_type": "pixtral", "head_dim": HEAD_DIM, **_VISION, **_PATCHES},
        image_token_index=5,
    ),
    "dots3_note": lambda: config_of(
        "Dots3NoteTextConfig",
        **{**EXPERTS, **LATENT, **_INDEX},
        **{f"swa_{name}": size for name, size in _WINDOWED.items()},
        q_lora_rank=24,
        sliding_window=WINDOW,
        layer_types=_alternating(_SLIDING, "indexed_attention"),
    ),
    "glm5_next": lambda: _with_vision("Glm5NextConfig", config_of("Glm5NextTextConfig", **_GLM5), _GRID),
    "qwen4_exp": lambda: config_of(
        "Qwen4ExpTextConfig",
        layer_types=_alternating("linear_attention", "indexed_attention"),
        num_experts=4,
        shared_expert_intermediate_size=32,
        hc_count=2,
        hc_lowrank=8,
        indexer_n_heads=16,
        indexer_kv_heads=1,
        indexer_head_dim=HEAD_DIM,
        indexer_budget=12,
        indexer_compress_ratio=4,
        **_FEW_EXPERTS,
        **_DELTA,
    ),
    "deepseek_v4": lambda: config_of(  # four tokens in an entry, or twelve, and a window
        "DeepseekV4Config", **{**_INDEX, "index_topk": 3}, **_V4, sliding_window=10, num_key_value_heads=1
    ),
    "minimax_m3": lambda: config_of(
        "MiniMaxM3VLTextConfig",
        layer_types=["full_attention", *["minimax_m3_sparse"] * (LAYERS - 1)],
        num_local_experts=4,
        num_experts_per_tok=2,
        dense_intermediate_size=96,
        shared_intermediate_size=32,
        rotary_dim=8,
        **_BLOCKS,
    ),
}
"""Models that select what they attend to by an index of their own."""


def tiny_config(family: str, layers: int = LAYERS) -> PreTrainedConfig:
    """Make the family's config, cut or repeated to `layers` layers; hybrids keep their own number of layers."""
    config = {**FAMILIES, **KINDS, **HYBRIDS, **SELECTING}[family]()
    if layers == LAYERS:
        return config
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i % LAYERS] for i in range(layers)]
    return config


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Draw weights that keep activations near one, so that attention is not flat and logits differ."""
    generator = torch.Generator().manual_seed(seed)
    tables = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            if weight in tables or ("embed" in name and weight.dim() > 1):
                weight.copy_(noise)
            elif weight.dim() > 1:
                gain = (
                    1.6
                    if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "query_key_value", "lm_head"))
                    else 1.0
                )
                weight.copy_(noise * gain / weight.shape[-1] ** 0.5)
            elif any(
                part in name.lower() for part in ("norm", "ln_", "scale", "temp")
            ):  # ones or zeros would hide a mistake
                weight.add_(0.1 * noise + (1.0 if any(part in name for part in ("q_norm", "temp")) else 0.0))
            else:  # biases and attention sinks, which transformers may have drawn from the global random state
                weight.copy_(noise if "sinks" in name else 0.1 * noise)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # the experts of each token, all of them the first otherwise
                drawn = torch.rand(len(table), model.config.n_routed_experts, generator=generator)
                table.copy_(drawn.argsort(-1)[:, : table.shape[1]])
    return model


def tiny_model(
    family: str, seed: int = 0, layers: int = LAYERS, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """Make a float32 model of the family, or of `config`, on the CPU in eval mode."""
    config = tiny_config(family, layers) if config is None else config
    model = model_class(config).from_config(
        config,
        dtype=torch.float32,
        attn_implementation="eager" if family in EAGER else "sdpa",
    )
    return randomize(model, seed).eval().requires_grad_(False)
