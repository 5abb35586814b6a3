"""KVzip: the prompt is cut once, by what the model attends to when repeating its document (arXiv 2505.23416, sec. 3).

What lets a model write its context down again is enough to answer any question about it. So after the document the
model is asked to repeat it, and reads the expected answer, chunk by chunk: a request, for later chunks with the eight
tokens before them, and the chunk. The worth of a document token is the highest weight that any query of its KV head's
group gives it then, among the chunk's tokens, the sinks and the repetition read so far:

    worth_j = max over g, i of softmax(q_gi . [K_sink, K_chunk, K_repeated up to i] / sqrt(d))_j

No question is used, so that a document is cut the same way for all of them; the question after it stays. The cost is a
second prefill of the document, whose queries attend to all of it; `repeated_tokens` counts its tokens.

Decided: every KV head of every layer has its own budget, the paper's uniform allocation, where its main results share
one budget among all heads and layers; a layer's cache has the same rows for all its heads. The first `sink` tokens
stay, as the system message does in its code, and are not repeated. The `window` is SnapKV's, for prompts without a
question. Of a question longer than half of the budget, the last tokens stay.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from kvcli.kernels.prefill_attention import many_rows_by_kv_head
from kvcli.kernels.softmax import Softmax
from kvcli.kv.pruned import PrunedCache
from kvcli.methods._prompt_cut import DocumentCut, DocumentCutConfig
from kvcli.methods.config import setting
from kvcli.methods.contract import SequenceContext, last_used_here
from kvcli.models.geometry import LayerGeometry
from kvcli.sizes import slices

REQUEST = 32  # tokens assumed per request in plans; the actual number depends on the tokenizer


class KVzipConfig(DocumentCutConfig):
    """Settings of KVzip; defaults: section 4."""

    chunk: int = setting(2048, "tokens of the document that are repeated at once", "tokens", ge=1)

    @override
    def read_again(self, prompt: int) -> int:
        """Return the tokens of the document and of a request for each of its chunks."""
        if prompt <= self.budget:
            return 0
        return prompt + -(-prompt // self.chunk) * REQUEST


class KVzip(DocumentCut[KVzipConfig]):
    """Keeps the document tokens that the model needs to repeat it."""

    Config = KVzipConfig
    title = "prompt tokens attended to when the model repeats the text; evicted once"
    paper = "arXiv 2505.23416"
    long_generation = False
    offloads = False
    group_consistent = True
    device_memory = "O(B + g)"

    def __init__(self, config: KVzipConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.scores: dict[int, Tensor] = {}  # layer being read -> worth of the document's tokens [Hk, n]
        self.repeated_tokens = 0  # requests included

    @property
    @override
    def repeated(self) -> Sequence[slice]:
        """The document without its sinks, in chunks; empty for a prompt that is kept whole."""
        prompt, sink = self.context.prompt_tokens or 0, self.config.sink
        if prompt <= self.config.budget:
            return ()
        rest = slices(self.document_tokens(prompt) - sink, self.config.chunk)
        return [slice(sink + part.start, sink + part.stop) for part in rest]

    @override
    def observe_repeated(self, layer: int, part: slice, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Record the highest weights that tokens of the part receive."""
        if layer not in self.retrieval:
            return
        document, sink = self.document_tokens(self.context.prompt_tokens or 0), self.config.sink
        if layer == min(self.retrieval):
            self.repeated_tokens += q.shape[1]
        with self.span("score", layer):
            keys = torch.cat((k[:, :sink], k[:, part], k[:, document:]), 1)
            highest = highest_weights(q, keys, softmax)[:, sink : sink + part.stop - part.start]
            if layer not in self.scores:
                self.scores[layer] = highest.new_zeros(len(k), document - sink)
            known = self.scores[layer][:, part.start - sink : part.stop - sink]
            torch.maximum(known, highest, out=known)

    @override
    def take_prompt(self, layer: int, cache: PrunedCache, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        super().take_prompt(layer, cache, k, v, q, softmax)
        if layer in self.scores:
            last_used_here(self.scores.pop(layer))

    @override
    def worth(self, layer: int, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        scores = self.scores[layer][:, : k.shape[1]]
        return functional.pad(scores, (0, k.shape[1] - scores.shape[1]))

    @override
    def statistics(self) -> dict[str, Any]:
        """Add the number of tokens read for the scores."""
        return {**super().statistics(), "repeated_tokens": self.repeated_tokens}


def highest_weights(q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
    """Return the highest weight that each key gets from any of the newest n queries of its group.

    Shapes: q [H, n, d], k [Hk, m, d], n <= m -> [Hk, m], in at least fp32; zero for keys that no query sees.
    """
    highest = q.new_zeros(k.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for head, weights in many_rows_by_kv_head(q, k, softmax):  # [G, r, seen]
        seen = highest[head, : weights.shape[2]]
        torch.maximum(seen, weights.amax((0, 1)), out=seen)
    return highest
