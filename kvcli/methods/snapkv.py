"""SnapKV: the prompt is cut once, by what its last queries attend to (arXiv 2404.14469, section 4).

The last `window` tokens of a prompt, often its question, stay, and their attention votes for the tokens before them;
the maximum over `kernel` neighbours keeps the surroundings of a chosen token. The rest is dropped before the first
token is generated. All generated tokens are kept: the budget is that of the prompt.

Decided where the paper, written for one KV head per query head, says nothing: the tokens of a KV head are chosen by the
mean over its query heads of their pooled votes.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import AfterValidator, model_validator
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from kvcli.kernels.prefill_attention import last_rows_by_kv_head
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import kept_tokens
from kvcli.methods._prompt_cut import PromptCut, PromptCutConfig
from kvcli.methods.config import setting


def _odd(value: int) -> int:
    if value < 1 or value % 2 == 0:
        raise ValueError("must be odd")
    return value


Odd = Annotated[int, AfterValidator(_odd)]


class SnapKVConfig(PromptCutConfig):
    """Settings of SnapKV; defaults: section 5."""

    window: int = setting(32, "last tokens of the prompt, which stay and whose queries vote", "tokens", ge=1)
    kernel: Odd = setting(7, "neighbours that share the highest vote, odd", "tokens")

    @model_validator(mode="after")
    def _leaves_a_token(self) -> SnapKVConfig:
        if self.budget <= self.window:
            raise ValueError(f"budget {self.budget} leaves no token after window {self.window}: it must be larger")
        return self


class SnapKV(PromptCut[SnapKVConfig]):
    """Keeps the prompt tokens that its end attends to."""

    Config = SnapKVConfig
    title = "prompt tokens that its last queries attend to most; evicted once"
    paper = "arXiv 2404.14469"
    long_generation = False
    offloads = False
    group_consistent = False
    device_memory = "O(B + g)"

    @property
    @override
    def query_rows(self) -> int:
        return self.config.window

    @override
    def choose(self, layer: int, budget: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> Tensor:
        votes = window_votes(q, k, softmax, self.config.kernel)  # [Hk, s - window]
        return kept_tokens(votes, self.config.window, budget)


def window_votes(q: Tensor, k: Tensor, softmax: Softmax, kernel: int) -> Tensor:
    """Count the votes of the last r queries for the tokens before them, in at least fp32 (section 4, listing 1).

        a_j = sum_i w_ij      vote_j = mean over the group of max(a_t, |t - j| <= kernel // 2)

    q [H, r, d], k [Hk, s, d], r < s, `kernel` odd -> [Hk, s - r]. The weights w of one KV head are held at a time.
    """
    before = k.shape[1] - q.shape[1]
    votes = []
    for weights in last_rows_by_kv_head(q, k, softmax):  # [G, r, s]
        sums = weights[..., :before].sum(1)
        votes.append(functional.max_pool1d(sums, kernel, stride=1, padding=kernel // 2).mean(0))
    return torch.stack(votes)
