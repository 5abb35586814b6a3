"""Expected Attention: the prompt is cut once, by the attention that future queries are expected to give.

As in arXiv 2510.00636, section 3. Queries of a head are taken to be normal before their rotation, q ~ N(mu, Sigma),
with mean and covariance estimated over the document. The next `future` queries stand at positions whose rotations are
averaged, R. Then a future query is N(R mu, R Sigma R^T) = N(m, S), and the unnormalised weight that it gives a token is
expected to be z; |v| tells how much of the token would be seen of it.

    z_j = exp(m.k_j / sqrt(d) + k_j^T S k_j / 2d)      a_j = z_j / sum_i z_i      worth_j = (a_j + epsilon) |v_j|

No query that asks something is used, so what is kept suits every question. Therefore the question, where the prompt has
one, belongs neither to the estimate nor to what is cut, and several questions on a document find the same tokens.

Decided as in the reference code: the sinks stay and are left out of moments and norm, the mean over the query heads of
a KV head rates its tokens, and |v| stands for the norm after the output projection. `epsilon` is that of its authors'
evaluation (NVIDIA/kvpress, evaluation/evaluate_registry.py): where expectations differ by orders of magnitude, it ranks
tokens with little expected attention by their values (`--ablate` shows the effect). That code keeps no last tokens; the
`window` is SnapKV's, for prompts that are to be continued. The model's own scale is used for 1/sqrt(d). A softcap is
left out, because no closed form is known for it, and attention sinks of the model join the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.softmax import Softmax
from kvcli.kv.pruned import PrunedCache
from kvcli.methods._prompt_cut import DocumentCut, DocumentCutConfig
from kvcli.methods.config import setting
from kvcli.methods.contract import SequenceContext, last_used_here
from kvcli.models.geometry import LayerGeometry

KEYS_AT_ONCE = 1 << 13  # keys whose products with the covariances of a KV head are held at once


class QueryMoments(NamedTuple):
    """The number of queries, their mean [H, d], sum of products of deviations [H, d, d], and their end position."""

    seen: int
    mean: Tensor
    scatter: Tensor
    end: int

    @classmethod
    def of(cls, q: Tensor, end: int) -> QueryMoments:
        """Return the moments of queries q [H, n, d], n >= 1, in at least fp32."""
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        mean = q.mean(1)
        apart = q - mean[:, None]
        return cls(q.shape[1], mean, apart.transpose(1, 2) @ apart, end)

    @property
    def covariance(self) -> Tensor:
        """The maximum-likelihood estimate, not the unbiased one."""
        return self.scatter / self.seen

    def joined(self, later: QueryMoments) -> QueryMoments:
        """Return the moments of both together (Chan, Golub and LeVeque, 1979)."""
        seen = self.seen + later.seen
        delta = later.mean - self.mean
        scatter = self.scatter + later.scatter
        scatter += delta[:, :, None] * delta[:, None] * (self.seen * later.seen / seen)
        return QueryMoments(seen, self.mean + delta * (later.seen / seen), scatter, later.end)


def expected_attention(mean: Tensor, covariance: Tensor | None, k: Tensor, softmax: Softmax) -> Tensor:
    """Return the expected attention of each token, in at least fp32; without a covariance that of the mean query."""
    attention, groups = [], mean.shape[0] // k.shape[0]
    for head, keys in enumerate(k):
        mine = slice(head * groups, (head + 1) * groups)
        scores = [
            _log_expected(mean[mine], None if covariance is None else covariance[mine], part, softmax.scale)
            for part in torch.split(keys, KEYS_AT_ONCE)
        ]
        logits = torch.cat(scores, 1)  # [G, n]
        weights = logits.softmax(1)
        if softmax.sinks is not None:
            weights *= torch.sigmoid(logits.logsumexp(1) - softmax.sinks[mine])[:, None]
        attention.append(weights.mean(0))
    return torch.stack(attention)


def _log_expected(mean: Tensor, covariance: Tensor | None, k: Tensor, scale: float) -> Tensor:
    """Return log z [G, n] of keys k [n, d]."""
    k = k.to(mean.dtype)
    scores = scale * (mean @ k.T)
    return scores if covariance is None else scores + scale**2 / 2 * ((k @ covariance) * k).sum(-1)


class ExpectedAttentionConfig(DocumentCutConfig):
    """Settings of Expected Attention; defaults: section 4."""

    future: int = setting(512, "positions to come over which rotations are averaged", "tokens", ge=1)
    epsilon: float = setting(0.01, "what is added to the attention expected before values weigh it", ge=0)
    covariance: bool = setting(True, "whether queries have a covariance; else their mean alone is asked")
    value_norm: bool = setting(True, "whether the norms of values weigh the attention expected")


class ExpectedAttention(DocumentCut[ExpectedAttentionConfig]):
    """Keeps the prompt tokens that future queries are expected to attend to."""

    Config = ExpectedAttentionConfig
    title = "prompt tokens that later queries are expected to attend to; evicted once"
    paper = "arXiv 2510.00636"
    long_generation = False
    offloads = False
    group_consistent = True
    device_memory = "O(B + g)"
    ablation: ClassVar[dict[str, dict[str, Any]]] = {
        "mean alone": {"covariance": False, "value_norm": False},
        "no values": {"value_norm": False},
        "no epsilon": {"epsilon": 0.0},
        "no covariance": {"covariance": False},
    }

    def __init__(self, config: ExpectedAttentionConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.latents = {layer.index: layer.latent for layer in layers}
        self.moments: dict[int, QueryMoments] = {}  # of the document's queries, for the layer being read

    @override
    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Add the document's queries, except those of sinks, to the moments."""
        first = k.shape[1] - q.shape[1]
        start = max(self.config.sink, first)
        stop = min(self.document_tokens(k.shape[1]), k.shape[1])
        if layer not in self.retrieval or start >= stop:
            return
        with self.span("score", layer):
            queries, rotary = q[:, start - first : stop - first], self.context.rotary[layer]
            if rotary is not None:
                queries = rotary.unrotate(queries, torch.arange(start, stop, device=q.device))
            moments = QueryMoments.of(queries, stop)
            self.moments[layer] = self.moments[layer].joined(moments) if layer in self.moments else moments

    @override
    def take_prompt(self, layer: int, cache: PrunedCache, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        super().take_prompt(layer, cache, k, v, q, softmax)
        if layer in self.moments:
            moments = self.moments.pop(layer)
            last_used_here(moments.mean, moments.scatter)

    @override
    def worth(self, layer: int, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        mean, covariance = self._queries_to_come(layer)
        worth = expected_attention(mean, covariance, k, softmax) + self.config.epsilon
        latent = self.latents[layer]
        values = v if latent is None else v[..., -latent:]
        return worth * torch.linalg.vector_norm(values, dim=-1, dtype=worth.dtype) if self.config.value_norm else worth

    def _queries_to_come(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return mean [H, d] and covariance [H, d, d] of a layer's queries after the document."""
        moments, rotary = self.moments[layer], self.context.rotary[layer]
        mean, covariance = moments.mean, moments.covariance if self.config.covariance else None
        if rotary is not None:
            positions = torch.arange(moments.end, moments.end + self.config.future, device=mean.device)
            mean = rotary.rotate_on_average(mean[:, None], positions)[:, 0]
            if covariance is not None:  # R Sigma R^T: one side, then the other
                covariance = rotary.rotate_on_average(covariance, positions).transpose(1, 2)
                covariance = rotary.rotate_on_average(covariance, positions)
        return mean, covariance
