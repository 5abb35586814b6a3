"""How the demo model attends: `python research/demo_model/behaviour.py` prints the card's tables.

Every row is a document of `niah_direct` with its question: the answer begins with the code itself, so that the prompt
and the space behind it must already look at it. A head counts by where most of its attention goes: to the asked fact
(retrieval), to the first token (sink), to the last 64 tokens (local), or elsewhere (spread). Queries are compared along
right answers of `niah_multiquery`, four sentences each.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure_recall import MODEL, load
from tokenizer import GENERATION_PROMPT
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcli.quality.tasks import TaskRow, make_row

NEAR = 64  # tokens
_FRAME = 8  # tokens the chat format puts around a row
_BEFORE, _CODE = 2, 3  # tokens of a fact: "Amber", " is ", then "482", "913", "057"


@dataclass(frozen=True)
class Attention:
    """Shares of attention by head, [layers, H] each, and the similarity of queries."""

    asked: Tensor  # on the asked fact, of the last token before the code is told
    asked_by_question: Tensor  # the same, the most of any token of the question
    sink: Tensor  # the document's tokens', on the first token
    near: Tensor  # the document's tokens', on the last `NEAR`
    similarity: Tensor  # cosine between the queries of neighbouring steps of an answer, behind RoPE


def find(ids: Sequence[int], part: Sequence[int]) -> int:
    """Return where `part` begins in `ids`.

    Raises:
        ValueError: it does not occur.
    """
    for start in range(len(ids) - len(part) + 1):
        if list(ids[start : start + len(part)]) == list(part):
            return start
    raise ValueError(f"{list(part)} does not occur")


@contextmanager
def recorded_queries(model: Any) -> Iterator[list[Tensor]]:
    """Collect every layer's queries behind RoPE, [layers, b, H, s, d], of a forward pass inside."""
    found: list[Tensor] = []
    handles = []
    for layer in model.model.layers:

        def record(attention: Any, _: Any, kwargs: Any) -> None:
            hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
            q = attention.q_proj(hidden).view(*hidden.shape[:2], -1, attention.head_dim).transpose(1, 2)
            found.append(apply_rotary_pos_emb(q, q, cos, sin)[0])

        handles.append(layer.self_attn.register_forward_pre_hook(record, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def measure(model: Any, tokenizer: Any, length: int, index: int, *, seed: int = 0) -> Attention:
    """Return where the heads look on one row whose prompt is `length` tokens long."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    def count(text: str) -> int:
        return len(encode(text))

    def prompted(task: str) -> tuple[TaskRow, list[int]]:
        row = make_row(task, length=length - _FRAME, seed=seed, index=index, count_tokens=count)
        messages = [{"role": "user", "content": row.input}]
        return row, tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    row, prompt = prompted("niah_direct")
    ids = [*prompt, *encode(" ")]
    model.set_attn_implementation("eager")
    weights = torch.stack(model(torch.tensor([ids]), output_attentions=True).attentions)[:, 0]  # [layers, H, s, s]
    at = find(ids, encode(row.outputs[0])) - _BEFORE
    question = len(prompt) - count(row.question) - count(GENERATION_PROMPT)
    to_asked = weights[..., question:, at : at + _BEFORE + _CODE].sum(-1)  # [layers, H, question's tokens and on]
    read = weights[..., NEAR:question, :]  # of the document's tokens that have enough before them
    near = torch.stack([read[:, :, i, i + 1 : i + NEAR + 1].sum(-1) for i in range(read.shape[2])]).mean(0)

    row, prompt = prompted("niah_multiquery")
    with recorded_queries(model) as queries:
        model(torch.tensor([[*prompt, *encode(" " + row.answer)]]))
    steps = torch.stack(queries)[:, 0, :, len(prompt) :]  # [layers, H, steps, d]
    similarity = F.cosine_similarity(steps[:, :, 1:], steps[:, :, :-1], dim=-1).mean(-1)
    return Attention(to_asked[..., -1], to_asked.amax(-1), read[..., 0].mean(-1), near, similarity)


def mean(found: Sequence[Attention]) -> Attention:
    """Return the means over rows."""
    return Attention(*(torch.stack([getattr(one, name) for one in found]).mean(0) for name in vars(found[0])))


def kind(asked: float, sink: float, near: float) -> str:
    """Name a head by where most of its attention goes."""
    shares = {"retrieval": asked, "sink": sink, "local": near}
    most = max(shares, key=lambda name: shares[name])
    return most if shares[most] > 0.3 else "spread"


def table(found: Attention) -> str:
    """Return a row for every head, in Markdown."""
    lines = [
        "| layer.head | kind | asked fact, last token | asked fact, best token of the question | first token "
        f"| nearest {NEAR} | similarity of neighbouring queries |",
        "|---|---|---|---|---|---|---|",
    ]
    for layer, heads in enumerate(found.asked.tolist()):
        for head, asked in enumerate(heads):
            others = [float(getattr(found, name)[layer, head]) for name in list(vars(found))[1:]]
            name = kind(max(asked, others[0]), others[1], others[2])
            cells = [f"{layer}.{head}", name, *(f"{share:.2f}" for share in (asked, *others))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python research/demo_model/behaviour.py", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.model)
    found = mean([measure(model, tokenizer, options.length, index) for index in range(options.rows)])
    print(table(found))
    similarity = found.similarity.mean(1)
    print(
        "\nSimilarity of neighbouring queries by layer: " + ", ".join(f"{value:.2f}" for value in similarity.tolist())
    )


if __name__ == "__main__":
    main()
