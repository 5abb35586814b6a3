"""The demo model's architecture, and a start for its weights that saves most of the training.

Retrieval by name takes two steps: a head in the first layer tells every token what stood before it, and a later head
looks for the token whose predecessor is the one just read (Olsson et al., "In-context Learning and Induction Heads",
arXiv 2209.11895). A network with random weights needs about a thousand steps before the first of the two appears and
learns little until then. Here two heads of the first layer start out attending one and two tokens back, and the second
layer's keys start out in the subspace they write to. Everything is trained from there on.
"""

import math

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HEAD_DIM = 32
ROPE_BASE = 1e7

_CONSTANT = 4.0  # every embedding's first channel: a direction on which positions alone can be compared
_SHARPNESS = 8.0  # of the shifting heads: their logits stand about 20 above those of their neighbours
_MATCHING = 1.5  # scale of the matching heads' projections


def demo_config(vocabulary: int, length: int, *, width: int = 128, layers: int = 4) -> LlamaConfig:
    """Return the Llama configuration of a demo model with heads of 32 channels, two query heads to a KV head.

    The RoPE base is large, so that half of the channels turn by less than one radian over the whole context and can
    compare contents at any distance.
    """
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_DIM,
        num_key_value_heads=width // HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


@torch.no_grad()
def initialise(model: LlamaForCausalLM) -> None:
    """Set the weights of shifting heads in the first layer and of matching heads in the second; see the module."""
    embeddings = model.model.embed_tokens.weight  # [vocabulary, width]
    width, d, half = embeddings.shape[1], HEAD_DIM, HEAD_DIM // 2
    theta = ROPE_BASE ** (-torch.arange(half) / half)  # radians a token, [d/2]

    embeddings.normal_()
    embeddings[:, 0] = _CONSTANT
    model.lm_head.weight.copy_(0.02 * embeddings)
    model.lm_head.weight[:, 0] = 0.0
    constant = _CONSTANT / math.sqrt((width - 1 + _CONSTANT**2) / width)  # the first channel behind the RMS norm

    # First layer, first KV head: logit(s, t) = sum_i a_i cos((s - t - shift) theta_i) over the five fastest rotations.
    shifting = model.model.layers[0].self_attn
    q, k, v, o = (p.weight for p in (shifting.q_proj, shifting.k_proj, shifting.v_proj, shifting.o_proj))
    amplitude = torch.zeros(half)
    amplitude[:5] = _SHARPNESS / constant
    q[: 2 * d] *= 0.1
    k[:d] *= 0.1
    for head, shift in enumerate((1, 2)):
        q[head * d : head * d + half, 0] = amplitude * torch.cos(-shift * theta)
        q[head * d + half : (head + 1) * d, 0] = amplitude * torch.sin(-shift * theta)
    k[:half, 0] = amplitude
    k[half:d, 0] = 0.0
    read = _orthogonal(width)[:d]  # [d, width]
    read[:, 0] = 0.0
    v[:d] = read
    write = _orthogonal(width)
    write[0] = 0.0
    o[:, : 2 * d] = write[:, : 2 * d]

    # Second layer: queries read a token, keys read its shifted copy, both in the slowly turning half of the channels.
    matching = model.model.layers[1].self_attn
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, d)])
    for kv_head in range(width // d // 2):
        rows = (torch.arange(half) + half * kv_head) % d
        matching.k_proj.weight[kv_head * d + slow] = _MATCHING * write[:, :d].T[rows]
        for head in (2 * kv_head, 2 * kv_head + 1):
            matching.q_proj.weight[head * d + slow] = _MATCHING * read[rows]


def _orthogonal(width: int) -> Tensor:
    result: Tensor = torch.linalg.qr(torch.randn(width, width))[0]
    return result
