"""Shared base of methods that cut a prompt once, before the first token is generated, to a budget of its tokens.

All generated tokens are kept: the budget is that of the prompt. Where a document is cut for whatever will be asked
about it, the question after it stays, as far as half of the budget goes.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import kept_tokens
from kvcli.kv.pruned import PrunedCache
from kvcli.methods.config import CountOrShare, MethodConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.step import StepPlan
from kvcli.models.geometry import LayerGeometry


class PromptCutConfig(MethodConfig):
    """The setting shared by methods that keep a budget of the prompt."""

    budget: CountOrShare = setting(
        2048, "tokens kept of the prompt per layer and KV head, window included", "tokens", ge=1
    )

    @override
    def beside_budget(self, prompt: int, generated: int) -> int:
        """Return the number of generated tokens."""
        return generated


ConfigT = TypeVar("ConfigT", bound=PromptCutConfig)


class PromptCut(Method[ConfigT, PrunedCache]):
    """Keeps the prompt tokens that a subclass chooses, and every token after the prompt."""

    def __init__(self, config: ConfigT, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.kept: dict[int, int] = {}  # layer -> tokens of the prompt

    def layer_budget(self, layer: int, prompt: int) -> int:  # noqa: ARG002
        """Return how many tokens a layer may keep of a prompt."""
        return self.config.budget

    def new_cache(self, layer: LayerGeometry) -> PrunedCache:
        """Make room for the layer's budget and the generated tokens; for everything while the prompt is unknown."""
        capacity, prompt = self.context.capacity, self.context.prompt_tokens or 0
        rows = capacity - max(0, prompt - self.layer_budget(layer.index, prompt))
        return PrunedCache(layer.num_kv_heads, layer.head_dim, rows, capacity, self.context.tiers)

    @abstractmethod
    def choose(self, layer: int, budget: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> Tensor:
        """Choose which tokens to keep of more than `budget`: [Hk, budget], ascending. Tensors are as in `prefill`."""

    def take_prompt(self, layer: int, cache: PrunedCache, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Keep the chosen tokens; keep a prompt within the budget whole."""
        budget = self.layer_budget(layer, k.shape[1])
        if k.shape[1] <= budget:
            cache.load(k, v)
        else:
            with self.span("prune", layer):
                cache.load_subset(k, v, self.choose(layer, budget, k, v, q, softmax))
        self.kept[layer] = cache.held

    @property
    @override
    def step_plan(self) -> StepPlan:
        return StepPlan()

    def statistics(self) -> dict[str, Any]:
        """Return how many prompt tokens each layer kept; sliding-window layers, which are not cut, do not count."""
        return {"kept_tokens": [self.kept[layer] for layer in sorted(self.kept)]}


class DocumentCutConfig(PromptCutConfig):
    """Settings shared by methods that cut a document for whatever will be asked about it."""

    budget: CountOrShare = setting(
        2048, "tokens kept of the prompt per layer and KV head, sink and window included", "tokens", ge=1
    )
    sink: int = setting(4, "first tokens of the prompt, which stay", "tokens", ge=0)
    window: int = setting(
        32, "last tokens of the prompt, which stay; after a document as many as its question has", "tokens", ge=0
    )

    @model_validator(mode="after")
    def _leaves_a_token(self) -> "DocumentCutConfig":
        beside = max(self.sink + self.window, 2 * self.sink)
        if self.budget <= beside:
            raise ValueError(
                f"budget {self.budget} leaves no token after sink {self.sink} and window {self.window}: "
                f"raise it to at least {beside + 1}, or lower sink and window"
            )
        return self


DocumentConfigT = TypeVar("DocumentConfigT", bound=DocumentCutConfig)


class DocumentCut(PromptCut[DocumentConfigT]):
    """Keeps the tokens of a document that a subclass rates highest, whatever the question is."""

    @abstractmethod
    def worth(self, layer: int, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Rate the tokens k, v [Hk, n, d] between sink and window; return [Hk, n]."""

    def document_tokens(self, prompt: int) -> int:
        """Return the number of tokens before the question; all of them without one, or if only sinks precede it."""
        known = self.context.document_tokens
        return prompt if known is None or known <= self.config.sink else known

    def choose(self, layer: int, budget: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> Tensor:  # noqa: ARG002
        """Keep sink and question, and the highest-rated tokens of the rest."""
        sink, length = self.config.sink, k.shape[1]
        last = max(self.config.window, min(length - self.document_tokens(length), budget // 2))
        between = slice(sink, length - last)
        worth = self.worth(layer, k[:, between], v[:, between], softmax)
        return kept_tokens(functional.pad(worth, (sink, 0), value=torch.inf), last, budget)
