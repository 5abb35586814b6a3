"""The models and combinations that `plan_check.py` holds `kvcli plan` against."""

from __future__ import annotations

import copy
from typing import Any

from transformers import DeepseekV2Config, LlamaConfig, PreTrainedConfig, Qwen3NextConfig

SHAPES = {
    "small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "heads": (4, 2)},
    "mid": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "heads": (8, 4)},
    "wide": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "heads": (16, 4)},
}
# Forms in which checkpoints of one more shape are stored, planned from their files and loaded.
STORED = ("int8", "int4")
HEAVY = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6, "heads": (32, 8), "vocab_size": 4000}
KIND: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "moe_intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 131_072,
}
# A hybrid, of which each fourth layer attends and the others keep a state, and latent attention; both with experts.
KINDS: dict[str, PreTrainedConfig] = {
    "hybrid": Qwen3NextConfig(
        **KIND,
        num_key_value_heads=4,
        head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=8,
        shared_expert_intermediate_size=352,
    ),
    "latent": DeepseekV2Config(
        **KIND,
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
    ),
}
COMBINATIONS = [  # shape, method, context, batch
    ("small", "streaming", 8192, 1),
    ("small", "fier", 8192, 1),
    ("small", "freekv", 8192, 2),
    ("mid", "full", 4096, 1),
    ("mid", "full", 8192, 1),
    ("mid", "freekv", 4096, 1),
    ("mid", "quest", 8192, 1),
    ("mid", "shadowkv", 4096, 1),
    ("wide", "full", 4096, 2),
    ("wide", "freekv", 4096, 1),
    ("hybrid", "freekv", 4096, 1),
    ("hybrid", "freekv", 16_384, 1),
    ("latent", "freekv", 4096, 1),
    ("latent", "freekv", 16_384, 1),
    ("int8", "freekv", 2500, 1),
    ("int4", "freekv", 2500, 1),
    ("mid", "freekv on disk", 8192, 1),
]


def config_of(shape: str) -> PreTrainedConfig:
    """The config of a shape of `SHAPES` or `KINDS`."""
    if shape in KINDS:
        return copy.deepcopy(KINDS[shape])
    sizes: dict[str, Any] = {"vocab_size": 32_000, **(HEAVY if shape in STORED else SHAPES[shape])}
    heads, kv_heads = sizes.pop("heads")
    return LlamaConfig(
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=131_072, **sizes
    )
