"""The demo model's architecture, and a start for its weights that saves most of the training.

Retrieval by name takes two steps: a head in the first layer tells every token what stood before it, and a later head
looks for the token whose predecessor is the one just read (Olsson et al., "In-context Learning and Induction Heads",
arXiv 2209.11895). A network with random weights needs about a thousand steps before the first of the two appears and
learns little until then. Here three heads of the first layer attend one, two and five tokens back, those of the second
start out comparing what these copied, and heads start out copying what they attend to. All but the attention of the
first layer is trained from there on.
"""

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEAD_DIM = 32
KV_HEADS = 2
ROPE_BASE = 1e9

_CONSTANT = 4.0  # every embedding's first channel: a direction on which positions alone can be compared
_SHARPNESS = 8.0  # of the shifting heads: their logits stand about 20 above those of their neighbours
_SLOW = 6  # rotations from this one on turn so slowly that they can compare contents at any distance
_SHIFTS = 1, 2, 5  # tokens back that the shifting heads attend to
_CONFIDENCE = 0.06  # scale of the output embeddings, beside the input's 1
_MATCHED = ((1, (0,)), (2, (1, 5)))
"""What heads of the second layer look for, by KV head: keys read the token so many before them, queries in turn those
so many before them. In "Amber is 482" the value stands two behind its name. The query stands one behind it in an answer
that repeats the name, five in one that begins with the value: "Amber", "?", a line break, "Answer", ":", " "."""
_MATCHING = 3.5  # scale of the matching heads' projections
_COPYING = 3.0, 0.5, 0.3, 0.3  # scale of what a head adds to the residual stream, from the second layer on


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
    """Set the weights of shifting heads in the first layer and of matching heads in the second; see the module."""
    embeddings = model.model.embed_tokens.weight  # [vocabulary, width]
    width, d, half = embeddings.shape[1], HEAD_DIM, HEAD_DIM // 2
    group = width // d // KV_HEADS  # query heads of a KV head
    theta = ROPE_BASE ** (-torch.arange(half) / half)  # radians a token, [d/2]

    # Tokens and the copies of those before them lie in directions of their own, beside the constant channel.
    basis = torch.zeros(width, width)  # rows; the last one is none
    basis[: width - 1, 1:] = torch.linalg.qr(torch.randn(width - 1, width - 1))[0]
    places, own = basis[: group * d], basis[group * d : width - 1]
    shifts = _SHIFTS[:group]
    copies = {
        0: own[:d],
        **{shift: places[at * d : (at + 1) * d] for at, shift in enumerate(shifts)},
    }  # [d, width] each

    embeddings.copy_(torch.randn(len(embeddings), len(own)) @ own)
    embeddings[:, 0] = _CONSTANT
    model.lm_head.weight.copy_(_CONFIDENCE * embeddings)
    model.lm_head.weight[:, 0] = 0.0
    constant = _CONSTANT / math.sqrt((len(own) + _CONSTANT**2) / width)  # the first channel behind the RMS norm

    # First layer, first KV head: logit(s, t) = sum_i a_i cos((s - t - shift) theta_i) over the five fastest rotations.
    shifting = model.model.layers[0].self_attn
    q, k, v, o = (p.weight for p in (shifting.q_proj, shifting.k_proj, shifting.v_proj, shifting.o_proj))
    amplitude = torch.zeros(half)
    amplitude[:5] = _SHARPNESS / constant
    q[: group * d] *= 0.1
    k[:d] *= 0.1
    for head, shift in enumerate(shifts):
        q[head * d : head * d + half, 0] = amplitude * torch.cos(-shift * theta)
        q[head * d + half : (head + 1) * d, 0] = amplitude * torch.sin(-shift * theta)
        o[:, head * d : (head + 1) * d] = copies[shift].T
    k[:half, 0] = amplitude
    k[half:d, 0] = 0.0
    v[:d] = copies[0]
    # What these heads attend to stays: left to training they drift off the token that the later layers count on.
    q.requires_grad_(False)
    k.requires_grad_(False)

    # Second layer: queries and keys read tokens or their shifted copies, both in the slowly turning channels.
    matching = model.model.layers[1].self_attn
    slow = torch.cat([torch.arange(_SLOW, half), torch.arange(half + _SLOW, d)])
    for kv_head, (held, asked) in enumerate(_MATCHED):
        rows = (torch.arange(len(slow)) + (d - len(slow)) * kv_head) % d
        matching.k_proj.weight[kv_head * d + slow] = _MATCHING * copies.get(held, copies[1])[rows]
        for head in range(group):
            read = copies.get(asked[head % len(asked)], copies[0])[rows]
            matching.q_proj.weight[(group * kv_head + head) * d + slow] = _MATCHING * read
    # From there on, what a head attends to is copied to where the last layer reads the next token.
    for scale, layer in zip(_COPYING, model.model.layers[1:], strict=False):
        copied = own[torch.randperm(len(own))[: KV_HEADS * d]]
        copied = torch.cat([copied, torch.zeros(KV_HEADS * d - len(copied), width)])  # [Hk * d, width]
        layer.self_attn.v_proj.weight.copy_(copied)
        heads = copied.view(KV_HEADS, 1, d, width).expand(-1, group, -1, -1).reshape(width, width)
        layer.self_attn.o_proj.weight.copy_(scale * heads.T)
