"""Tiny random models of many architectures, and tiny checkpoints of them on disk, for every test that needs one.

All families share the sizes below, so that a test may be written once and run over `FAMILIES`.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

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
EAGER = frozenset({"gemma2", "gpt_oss"})

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_TEXT = (
    "the quick brown fox jumps over the lazy dog and then the dog runs there, while the other fox sleeps under the old "
    "tree; the number of the third key is 4711 and the value of the first one is 1234."
)


def _config(name: str, **extra: object) -> PreTrainedConfig:
    sizes = {
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
        "tie_word_embeddings": False,
    }
    return getattr(transformers, name)(**{**sizes, **extra})


def _alternating(*kinds: str) -> list[str]:
    return [kinds[i % len(kinds)] for i in range(LAYERS)]


_SLIDING, _FULL = "sliding_attention", "full_attention"

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _config("LlamaConfig"),
    "llama_one_kv_head": lambda: _config("LlamaConfig", num_key_value_heads=1),
    "qwen2": lambda: _config("Qwen2Config"),
    "qwen3": lambda: _config("Qwen3Config"),
    "mistral": lambda: _config("MistralConfig", sliding_window=WINDOW),
    "gemma2": lambda: _config(
        "Gemma2Config", sliding_window=WINDOW, query_pre_attn_scalar=24, layer_types=_alternating(_SLIDING, _FULL)
    ),
    "gemma3": lambda: _config(
        "Gemma3TextConfig",
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        layer_types=_alternating(_SLIDING, _SLIDING, _SLIDING, _FULL),
    ),
    "phi3": lambda: _config("Phi3Config"),
    "glm4": lambda: _config("Glm4Config"),
    "granite": lambda: _config(
        "GraniteConfig",
        attention_multiplier=0.2,
        embedding_multiplier=1.5,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    ),
    "qwen3_moe": lambda: _config("Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "gpt_oss": lambda: _config(
        "GptOssConfig",
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=_alternating(_SLIDING, _FULL),
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    ),
}

# What kvcli refuses, and a word its message has to contain.
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "deepseek_v3": (
        lambda: _config(
            "DeepseekV3Config",
            num_key_value_heads=HEADS,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        ),
        "latent",
    ),
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, state_size=4, num_hidden_layers=2),
        "state-space",
    ),
    "jamba": (
        lambda: _config(
            "JambaConfig", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, num_experts=2
        ),
        "state-space",
    ),
    "lfm2": (
        lambda: _config("Lfm2Config", layer_types=["conv", _FULL, "conv", _FULL], block_multiple_of=16),
        "conv",
    ),
    "qwen3_next": (
        lambda: _config(
            "Qwen3NextConfig",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", _FULL, "linear_attention", _FULL],
        ),
        "linear",
    ),
    "llama4": (
        lambda: _config(
            "Llama4TextConfig",
            intermediate_size_mlp=96,
            num_local_experts=2,
            attention_chunk_size=WINDOW,
            layer_types=["chunked_attention", "chunked_attention", "chunked_attention", _FULL],
        ),
        "chunked",
    ),
    "t5": (
        lambda: transformers.T5Config(vocab_size=VOCAB, d_model=HIDDEN, d_kv=16, d_ff=96, num_layers=2, num_heads=4),
        "encoder-decoder",
    ),
    "bart": (
        lambda: transformers.BartConfig(
            vocab_size=VOCAB,
            d_model=HIDDEN,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
        ),
        "encoder-decoder",
    ),
}


def tiny_config(family: str, layers: int = LAYERS) -> PreTrainedConfig:
    """The family's config, cut or repeated to `layers` layers."""
    config = FAMILIES[family]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i % LAYERS] for i in range(layers)]
    return config


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Draw weights that keep activations near one, so that attention is not flat and logits are apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            if "embed" in name:
                weight.copy_(noise)
            elif weight.dim() > 1:
                gain = 1.6 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "lm_head")) else 1.0
                weight.copy_(noise * gain / weight.shape[-1] ** 0.5)
            elif "norm" in name:  # away from the ones or zeros that would hide a mistake
                weight.add_(0.1 * noise + (1.0 if "q_norm" in name else 0.0))
            else:  # biases and attention sinks, which transformers may have drawn from the global random state
                weight.copy_(noise if "sinks" in name else 0.1 * noise)
    return model


def tiny_model(
    family: str, seed: int = 0, layers: int = LAYERS, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """Make a float32 model of the family on the CPU, in eval mode; `config` instead of the family's own where given."""
    model = AutoModelForCausalLM.from_config(
        tiny_config(family, layers) if config is None else config,
        dtype=torch.float32,
        attn_implementation="eager" if family in EAGER else "sdpa",
    )
    return randomize(model, seed).eval().requires_grad_(False)


@cache
def _byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 4,  # some families' tokenizers add a special token of their own
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    assert tokenizer.get_vocab_size() <= VOCAB - 4
    return tokenizer.to_str()


def tiny_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most VOCAB entries; any text survives encoding and decoding."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level_json()),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE if chat else None,
    )


def tiny_checkpoint(
    family: str, path: Path, seed: int = 0, layers: int = LAYERS, chat: bool = True, max_shard_size: str = "1GB"
) -> Path:
    """Write config, safetensors, generation config and tokenizer into the directory `path` and return it."""
    model = tiny_model(family, seed, layers)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    tiny_tokenizer(chat).save_pretrained(path)
    return Path(path)
