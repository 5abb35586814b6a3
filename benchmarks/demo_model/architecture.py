"""The demo model's architecture, and a start for its weights that saves most of the training.

Retrieval by name takes two steps: a head in the first layer tells every token what stood before it, and a later head
looks for the token whose predecessor is the one just read (Olsson et al., "In-context Learning and Induction Heads",
arXiv 2209.11895). A network with random weights needs about a thousand steps before the first of the two appears and
learns little until then. Here the heads of the first layer start out attending one, two, three and more tokens back,
those of the second and third start out comparing what these copied, and heads start out copying what they attend to.
Everything is trained from there on.
"""

import math

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HEAD_DIM = 32
KV_HEADS = 2
ROPE_BASE = 1e9

_CONSTANT = 4.0  # every embedding's first channel: a direction on which positions alone can be compared
_SHARPNESS = 8.0  # of the shifting heads: their logits stand about 20 above those of their neighbours
_SLOW = 6  # rotations from this one on turn so slowly that they can compare contents at any distance
_SHIFTED = 1.0  # scale of what the shifting heads write, beside the embeddings 1
_MATCHED = (((0, 1), (0, 1)), ((1, 2), (5, 2)))
"""What heads of the second and third layer look for, by KV head: the token so many before the query among the tokens
so many before the keys. In "Amber is 482" the value stands two behind its name; in an answer that repeats the name the
query stands one behind it, in one that begins with the value five: "Amber", "?", a line break, "Answer", ":", " "."""
_MATCHING = 5.0, 4.0  # scale of the matching heads' projections, in the second and third layer
_COPYING = 3.0, 1.0, 0.3, 0.3  # scale of what a head adds to the residual stream, from the second layer on


def demo_config(vocabulary: int, length: int, *, width: int = 192, layers: int = 4) -> LlamaConfig:
    """Return the Llama configuration of a demo model with heads of 32 channels and two KV heads.

    The RoPE base is large, so that half of the channels turn by less than one radian over the whole context and can
    compare contents at any distance.
    """
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_DIM,
        num_key_value_heads=KV_HEADS,
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
    """Set the weights of shifting heads in the first layer and of matching heads in the next two; see the module."""
    embeddings = model.model.embed_tokens.weight  # [vocabulary, width]
    width, d, half = embeddings.shape[1], HEAD_DIM, HEAD_DIM // 2
    group = width // d // KV_HEADS  # query heads of a KV head
    theta = ROPE_BASE ** (-torch.arange(half) / half)  # radians a token, [d/2]

    embeddings.normal_()
    embeddings[:, 0] = _CONSTANT
    model.lm_head.weight.copy_(0.06 * embeddings)
    model.lm_head.weight[:, 0] = 0.0
    constant = _CONSTANT / math.sqrt((width - 1 + _CONSTANT**2) / width)  # the first channel behind the RMS norm

    # First layer: logit(s, t) = sum_i a_i cos((s - t - shift) theta_i) over the five fastest rotations.
    shifting = model.model.layers[0].self_attn
    q, k, v, o = (p.weight for p in (shifting.q_proj, shifting.k_proj, shifting.v_proj, shifting.o_proj))
    amplitude = torch.zeros(half)
    amplitude[:5] = _SHARPNESS / constant
    q *= 0.1
    k *= 0.1
    for head in range(KV_HEADS * group):
        shift = head + 1
        q[head * d : head * d + half, 0] = amplitude * torch.cos(-shift * theta)
        q[head * d + half : (head + 1) * d, 0] = amplitude * torch.sin(-shift * theta)
    read = _directions(width)  # [width, width], rows
    write = _directions(width).T  # columns
    for kv_head in range(KV_HEADS):
        k[kv_head * d : kv_head * d + half, 0] = amplitude
        k[kv_head * d + half : (kv_head + 1) * d, 0] = 0.0
        v[kv_head * d : (kv_head + 1) * d] = read[:d]
    o.copy_(_SHIFTED * write)
    # What these heads attend to stays: left to training they drift off the token that the later layers count on.
    q.requires_grad_(False)
    k.requires_grad_(False)

    # Second and third layer: queries and keys read tokens or their shifted copies, in the slowly turning channels.
    slow = torch.cat([torch.arange(_SLOW, half), torch.arange(half + _SLOW, d)])
    copies = [read[:d], *(write[:, at * d : (at + 1) * d].T for at in range(KV_HEADS * group))]  # by shift, [d, width]
    for layer, pairs, sharpness in zip(model.model.layers[1:], _MATCHED, _MATCHING, strict=False):
        matching = layer.self_attn
        for kv_head, (asked, held) in enumerate(pairs):
            rows = (torch.arange(len(slow)) + (d - len(slow)) * kv_head) % d
            matching.k_proj.weight[kv_head * d + slow] = sharpness * copies[held][rows]
            for head in range(group * kv_head, group * (kv_head + 1)):
                matching.q_proj.weight[head * d + slow] = sharpness * copies[min(asked, len(copies) - 1)][rows]
    # From there on, what a head attends to is copied to where the last layer reads the next token.
    for scale, layer in zip(_COPYING, model.model.layers[1:], strict=False):
        copied = _directions(width)[: KV_HEADS * d]  # [Hk * d, width]
        layer.self_attn.v_proj.weight.copy_(copied)
        heads = copied.view(KV_HEADS, 1, d, width).expand(-1, group, -1, -1).reshape(width, width)
        layer.self_attn.o_proj.weight.copy_(scale * heads.T)


def _directions(width: int) -> Tensor:
    """Return orthonormal directions beside the constant channel, [width, width]; one of them is zero."""
    found = torch.zeros(width, width)
    found[: width - 1, 1:] = torch.linalg.qr(torch.randn(width - 1, width - 1))[0]
    return found
