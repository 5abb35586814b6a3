"""Models of every kind of rotary positions, for tests."""

import torch
import transformers
from families import EAGER, FAMILIES, HEAD_DIM, HEADS, KV_HEADS, MAX_POSITIONS, VOCAB, randomize, tiny_config
from transformers import AutoModelForCausalLM

SHORT = 48  # the original length of the rules that stretch positions
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": SHORT,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": SHORT}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [2.0 + 0.5 * i for i in range(HEAD_DIM // 2)],
    "factor": 32.0,
    "original_max_position_embeddings": SHORT,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def config_of(family, rope=None, **changes):
    config = FAMILIES[family]()
    if rope is not None:
        config.rope_parameters = rope
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def other(name, **extra):
    """A family beside FAMILIES, of the same sizes."""
    sizes = {key: getattr(FAMILIES["llama"](), key) for key in ("hidden_size", "intermediate_size")}
    return getattr(transformers, name)(
        vocab_size=VOCAB,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=2,
        **sizes,
        **extra,
    )


CONFIGS = {
    **{family: (lambda family=family: tiny_config(family)) for family in FAMILIES},
    "llama3": lambda: config_of("llama", LLAMA3),
    "linear": lambda: config_of("llama", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "yarn": lambda: config_of("qwen2", YARN),
    "dynamic": lambda: config_of("llama", DYNAMIC, max_position_embeddings=SHORT),
    "longrope": lambda: config_of("phi3", LONG, original_max_position_embeddings=SHORT),
    "gpt_oss_yarn": lambda: config_of("gpt_oss", {**YARN, "truncate": False}),
    "phi": lambda: other("PhiConfig"),
    "stablelm": lambda: other("StableLmConfig"),
    "glm": lambda: other("GlmConfig", head_dim=HEAD_DIM),
    "cohere": lambda: other("CohereConfig"),
    "smollm3": lambda: other("SmolLM3Config", no_rope_layer_interval=2),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    ),
}


def model_of(name):
    config = CONFIGS[name]()
    implementation = "eager" if config.model_type in EAGER else "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)
    return randomize(model).eval().requires_grad_(False)
