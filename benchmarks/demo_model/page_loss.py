"""A training loss that makes the demo model's keys easy to retrieve by page.

Page-wise retrieval ranks a page by an upper bound of its logits, taken from the channel-wise minimum and maximum of
its keys (Tang et al., "Quest", arXiv 2406.10774). Small heads whose keys all look alike make that bound useless: 32
random keys cover the whole range of every channel. The loss asks that the softmax over the pages' bounds agree with
where the attention goes, so that tokens that are never asked for learn to keep their keys out of the way.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PAGE = 32  # tokens
SINK = 64  # tokens at the start that are always attended
WINDOW = 64  # tokens before the query that are always attended

_NAME = "kvcli_demo_recording"


class Recorder:
    """Keeps the queries and keys, behind the rotation, of every layer of a model's latest forward pass."""

    def __init__(self, model: nn.Module):
        self.queries: dict[int, Tensor] = {}  # layer -> [b, H, s, d]
        self.keys: dict[int, Tensor] = {}  # layer -> [b, Hk, s, d]

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
            self.queries[module.layer_idx] = query
            self.keys[module.layer_idx] = key
            return sdpa_attention_forward(module, query, key, value, mask, **options)

        AttentionInterface.register(_NAME, attend)
        model.set_attn_implementation(_NAME)


def page_loss(query: Tensor, key: Tensor, rows: Tensor) -> Tensor:
    """Return the cross-entropy between attention per page and the softmax of the pages' bounds, for some queries.

    Args:
        query: one layer's queries [b, H, s, d].
        key: its keys [b, Hk, s, d].
        rows: the queries to look at, [r, 2] of batch index and position.

    Only pages between sink and window take part; what a query attends to elsewhere weighs nothing, and a head weighs
    as much as its attention is concentrated on one page. The mean is over rows and query heads.
    """
    total = query.new_zeros(())
    for batch in torch.unique(rows[:, 0]):
        position = rows[rows[:, 0] == batch, 1]
        total = total + _page_loss_of_one(query[batch], key[batch], position)
    return total / max(len(rows) * query.shape[1], 1)


def _page_loss_of_one(query: Tensor, key: Tensor, position: Tensor) -> Tensor:
    """Return the sum of the loss over queries at `position` [r] of one sequence: query [H, s, d], key [Hk, s, d]."""
    heads, s, d = query.shape
    kv_heads = key.shape[0]
    n = s // PAGE
    scale = d**-0.5
    asked = query[:, position].view(kv_heads, heads // kv_heads, -1, d)  # [Hk, G, r, d]
    first = torch.arange(n) * PAGE
    candidate = (first >= SINK) & (first + PAGE <= position[:, None] + 1 - WINDOW)  # [r, n]

    with torch.no_grad():
        logits = asked @ key[:, None].transpose(-1, -2) * scale  # [Hk, G, r, s]
        logits.masked_fill_(torch.arange(s) > position[:, None], -torch.inf)
        mass = logits.softmax(-1)[..., : n * PAGE]
        mass = mass.reshape(*mass.shape[:3], n, PAGE).sum(-1)  # [Hk, G, r, n]
        mass.masked_fill_(~candidate, 0.0)
        mass *= mass.amax(-1, keepdim=True)  # heads that look everywhere at once retrieve nothing: leave them alone

    paged = key[:, : n * PAGE].reshape(kv_heads, n, PAGE, d)
    low, high = paged.amin(2)[:, None], paged.amax(2)[:, None]  # [Hk, 1, n, d]
    # sum_c max(q_c low_c, q_c high_c), as two products: the positive channels with high, the negative ones with low
    bounds = asked.clamp(min=0) @ high.transpose(-1, -2) + asked.clamp(max=0) @ low.transpose(-1, -2)
    bounds = (bounds * scale).masked_fill(~candidate, -1e9)  # [Hk, G, r, n]
    loss: Tensor = -(mass * bounds.log_softmax(-1)).sum()
    return loss
