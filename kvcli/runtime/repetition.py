"""Read a document once more: the model is asked to repeat it, for methods that observe its attention meanwhile.

A repetition is a further prompt on the document: a request, the end that the chat template puts after a question, and
the tokens that the model would have to write. Like a question it follows the common document, and none of it is kept
(arXiv 2505.23416, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.encoding import bare_tokens, document_tokens
from kvcli.kernels.softmax import Softmax
from kvcli.methods.contract import AnyMethod
from kvcli.models.rope import Rope
from kvcli.runtime.prefill import Branches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUEST, REQUEST_FROM = "\n\nRepeat the previous context:", "\n\nRepeat the previous context starting with "
LEAD = 8  # tokens before a later part, which its request quotes as the beginning


class Repetition:
    """A consumer that takes nothing, but shows methods how the model repeats a part of a document."""

    query_rows = 0

    def __init__(self, part: slice, document: int):
        self.part, self.document, self.methods = part, document, list[AnyMethod]()

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Show the queries after the document, see `PrefillConsumer.observe`."""
        rows = min(q.shape[1], k.shape[1] - self.document)
        for method in self.methods if rows > 0 else ():
            method.observe_repeated(layer, self.part, q[:, q.shape[1] - rows :], k, softmax)

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Keep nothing."""


def find_documents(branches: Branches, methods: Sequence[Sequence[AnyMethod]]) -> None:
    """Tell methods, a row of them for each prompt, where its document ends."""
    for rest, row in zip(branches.rests, methods, strict=True):
        ids = [*branches.common, *rest]
        for method in row:
            method.context.document_tokens = document_tokens(ids, method.context.question)


def with_repetitions(
    branches: Branches, methods: Sequence[Sequence[AnyMethod]], tokenizer: PreTrainedTokenizerBase
) -> tuple[Branches, list[Repetition]]:
    """Add the repetitions that methods, a row of them for each prompt, need, before the prompts.

    Prompts on the same document share its repetitions. The common part then ends where the first of the documents does;
    with nothing to repeat it stays as it is.
    """
    prompts = [[*branches.common, *rest] for rest in branches.rests]
    found: dict[tuple[tuple[int, ...], ...], Repetition] = {}  # by document, and the tokens read after it
    for ids, row in zip(prompts, methods, strict=True):
        for method in row:
            document = method.context.document_tokens or len(ids)
            for part in (parts := method.repeated):
                read = _request(ids, part, part is parts[0], method, tokenizer), tuple(ids[part])
                key = tuple(ids[:document]), *read
                found.setdefault(key, Repetition(part, document)).methods.append(method)
    if not found:
        return branches, []
    shared = len(branches.common) if len(prompts) > 1 else len(prompts[0]) - 1
    common = min(shared, *(len(document) for document, *_ in found))
    skip, known = branches.skip, branches.known
    if known is not None and skip > common:
        skip = known.cut(common)
    rests = [[*document[common:], *request, *part] for document, request, part in found]
    rests += [ids[common:] for ids in prompts]
    return Branches(prompts[0][:common], rests, known if skip else None, skip), list(found.values())


def reach(rope: Rope, branches: Branches, capacity: int) -> None:
    """Extend rotary positions to repetitions that exceed the room of sequences.

    Raises:
        KvcliError: the model would rotate all tokens of such a long sequence by other angles (usage).
    """
    longest = len(branches.common) + max(map(len, branches.rests))
    if longest <= capacity:
        return
    rope.cover(longest)
    if not rope.alike([capacity, longest]):
        what = f"the repeated document needs {longest:,} positions, where this model rotates all tokens differently"
        raise KvcliError(what, "use a method that repeats nothing, such as expected_attention", ExitCode.USAGE)
    rope.use([longest])


def _request(
    ids: Sequence[int], part: slice, first: bool, method: AnyMethod, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Return the tokens that ask for a part of the document, with the template's end of a question."""
    request = bare_tokens(REQUEST if first else REQUEST_FROM, tokenizer)
    lead = [] if first else [*ids[max(0, part.start - LEAD) : part.start], *bare_tokens(":", tokenizer)]
    document, question = method.context.document_tokens or len(ids), method.context.question
    return *request, *lead, *ids[document + len(question) if document < len(ids) else document :]
