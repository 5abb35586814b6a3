"""GGUF files of tiny models, made on the spot by the package `gguf` as llama.cpp's converter makes them."""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = ["t h", "th e", "Ġ the", "Ġ a", "i n"]
MERGED = ["th", "the", "Ġthe", "Ġa", "in"]
VOCAB = len(TOKENS) + len(CONTROL) + len(MERGED)

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": None,
}
OF_TYPE = {
    "llama": {"head_dim": 64, "rope_theta": 50000.0, "tie_word_embeddings": True},
    "qwen2": {"rope_theta": 1e6, "tie_word_embeddings": False},
    "qwen3": {"head_dim": 32, "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 256,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "gemma2": {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64},
    "gemma3_text": {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64},
    "phi3": {"tie_word_embeddings": False, "sliding_window": None},
    "starcoder2": {"rope_theta": 1e5, "use_bias": True, "tie_word_embeddings": True, "sliding_window": None},
}
ARCHITECTURES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}


def tiny(model_type, **changed):
    """A model of small numbers, its norms and biases drawn as well."""
    config = AutoConfig.for_model(model_type, **SIZES | OF_TYPE[model_type] | changed)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            weight.data.copy_(0.05 * torch.randn_like(weight) + (weight.dim() == 1))
    return model.requires_grad_(False).eval()


def permuted(rows, heads):
    """What llama.cpp does to the rows of queries and keys."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(path, model, kind="Q8_0", kinds=None, scaling=None, metadata=None, without=(), experts=None, **spelling):
    """Write a model's file; its weights become what the file holds. `kinds` has other formats by parts of names.

    `experts` are keys that are told otherwise, None for one that is not told.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    if config.model_type == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "qwen3_moe":
        sizes = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
        keys = dict(zip(("expert_count", "expert_used_count", "expert_feed_forward_length"), sizes, strict=True))
        for key, value in (keys | (experts or {})).items():
            if value is not None:
                writer.add_uint32(f"{architecture}.{key}", value)
    for key, value in (metadata or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    write_tokenizer(writer, **spelling)
    for name, values in (scaling or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    tied = config.tie_word_embeddings
    for name, weight in model.named_parameters():
        if ".experts." in name:
            write_experts(writer, name, weight, kind, kinds or {})
            continue
        stem, _, suffix = name.rpartition(".")
        named = f"{names.get_name(stem)}.{suffix}"
        if named in without or (tied and name == "lm_head.weight"):
            continue
        values = weight.detach().numpy().copy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem.split(".")[-1])
        turned = config.model_type == "llama" and heads
        if turned:
            values = permuted(values, heads)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        own = next((each for part, each in (kinds or {}).items() if part in named), kind)
        if values.ndim < 2:
            own = "F32"
        of = GGMLQuantizationType[own]
        packed = quants.quantize(values, of)
        writer.add_tensor(named, packed, raw_dtype=of)
        back = quants.dequantize(packed, of)
        if turned:
            back = back.reshape(heads, -1, 2, *back.shape[1:]).swapaxes(1, 2).reshape(back.shape)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            back = back - np.float32(1)
        weight.data.copy_(torch.from_numpy(back.copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_experts(writer, name, weight, kind, kinds):
    """Write what a layer has of all its experts; gate and up are two tensors."""
    layer, half = name.split(".")[2], weight.shape[1] // 2
    parts = {"down": weight} if "down" in name else {"gate": weight[:, :half], "up": weight[:, half:]}
    for part, values in parts.items():
        named = f"blk.{layer}.ffn_{part}_exps.weight"
        of = GGMLQuantizationType[next((each for piece, each in kinds.items() if piece in named), kind)]
        packed = quants.quantize(values.detach().numpy().copy(), of)
        writer.add_tensor(named, packed, raw_dtype=of)
        values.data.copy_(torch.from_numpy(quants.dequantize(packed, of)))


def write_tokenizer(writer, template=TEMPLATE, pre="smollm", tokenizer="gpt2"):
    """Describe a byte-level tokenizer of a few merges."""
    tokens = [*TOKENS, *CONTROL, *MERGED]
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    if template is not None:
        writer.add_chat_template(template)
