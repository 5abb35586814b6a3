"""Q-LLM: InfLLM that has read the question first, and keeps it (QuickLLaMA, arXiv 2406.07528, section 3).

The prompt is read in windows, each attending to sinks, the question, retrieved blocks, local tokens and itself. Blocks
are scored for the window and for the question: the inner product of a block's key with the window's mean query, plus
`question_weight` times that with the question's probe, in prefill as in decode. The probe is the mean query of those
tokens of the question that its other tokens attend to most.

Where the prompt is a document and a question, the question is read alone before the document, after the prompt's first
token. Its KV then takes the place of as many retrieved blocks, half of them at most. The paper puts the question in
front of the document instead, within the sinks; `--question-first` does that, and `keep_question` can be left out then.
A question longer than a window counts by its last tokens.

Windows, blocks, representatives, positions and exactness are those of InfLLM; without a question the methods are the
same. Defaults are for Llama 3 and about 2K tokens; for Mistral the paper weighs the question once.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.prefill_attention import FarTokens, far_near_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import topk_pages
from kvcli.kv.blocks import BlockCache, dot_scores
from kvcli.methods.config import CountOrShare, PowerOfTwo, setting
from kvcli.methods.contract import SequenceContext
from kvcli.methods.infllm import InfLLM, InfLLMConfig
from kvcli.models.geometry import LayerGeometry


class QLLMConfig(InfLLMConfig):
    """Settings of Q-LLM; defaults: section 4, sizes for Llama 3."""

    budget: CountOrShare = setting(
        2176, "tokens attended per layer and KV head, sink, window and question included", "tokens", ge=1
    )
    sink: int = setting(128, "first tokens, always attended, rounded up to whole pages", "tokens", ge=0)
    window: int = setting(1024, "most recent tokens, always attended, rounded up to whole pages", "tokens", ge=1)
    page_size: PowerOfTwo = setting(128, "tokens in a page, a power of two", "tokens")
    prefill_window: int = setting(512, "tokens of the prompt read at once", "tokens", ge=1)
    question_weight: float = setting(
        4.0, "weight of the question's probe relative to the window's; 0 leaves it out", ge=0
    )
    keep_question: bool = setting(True, "attend to the question throughout, in the place of retrieved blocks")

    @property
    @override
    def beside(self) -> int:
        """Blocks whose place the question can take."""
        return min(-(-self.prefill_window // self.page_size), self.pages.selected // 2) if self.keep_question else 0


class QLLM(InfLLM):
    """Searches with the mean queries of window and question, by inner products with block keys; keeps the question."""

    Config = QLLMConfig
    title = "the question, and blocks retrieved by it and the window; in prefill too"
    paper = "arXiv 2406.07528"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(B + L/p)"

    config: QLLMConfig
    ablation: ClassVar[dict[str, dict[str, Any]]] = {
        "no question": {"question_weight": 0.0, "keep_question": False},  # InfLLM
        "question scored, not kept": {"keep_question": False},
        "question weighed once": {"question_weight": 1.0},
    }

    def __init__(self, config: QLLMConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.question: dict[int, Tensor] = {}  # layer -> the question's probe [H, d]

    @property
    @override
    def preview(self) -> Sequence[int]:
        """The question, if there is one and it is used."""
        return self.context.question if self.config.question_weight or self.config.keep_question else ()

    @override
    def take_preview(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> None:
        """Make the question's probe from its representative tokens, and keep the question."""
        if layer not in self.retrieval:
            return
        cache = self.retrieval[layer]
        _, mass = far_near_attention(q, k, v, FarTokens(q, k[:, :0], v[:, :0]), softmax)
        asked = mass[1:]  # without the prompt's first token
        tokens = topk_pages(asked[None], min(self.config.representatives, len(asked)))[0]
        self.question[layer] = cache.unrotate(q[:, 1:], 1)[:, tokens].mean(1)
        if self.config.keep_question:
            cache.keep(k[:, 1:], v[:, 1:], 1)

    @override
    def window_scores(self, layer: int, cache: BlockCache, queries: Tensor) -> Tensor:
        return self.step_scores(layer, cache, queries.mean(1))

    @override
    def step_scores(self, layer: int, cache: BlockCache, query: Tensor) -> Tensor:
        if layer in self.question:  # inner products are linear
            query = query + self.config.question_weight * self.question[layer]
        return dot_scores(query, cache.block_keys)
