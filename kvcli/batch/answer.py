"""What is written of a row: its answer in the form of the API, or its error, and what kvcli knows besides."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvcli.batch.jobs import Job
from kvcli.batch.results import Key
from kvcli.batch.rows import Row, RowProblem
from kvcli.telemetry import report

# Of what the report says of a sequence, what a line of results leaves out: the answer itself, and lists with an entry
# for every step or layer.
_LEFT_OUT = ("text", "token_ids", "steps", "source", "question", "id", "error")
_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


class Writer:
    """Makes the lines of results of one run: `model` is its name, `facts` go into every `kvcli` object."""

    def __init__(self, model: str, facts: Mapping[str, Any]):
        self.model, self.facts = model, facts

    def answer(self, job: Job, key: Key, row: Row, samples: Sequence[report.Sequence]) -> dict[str, Any]:
        """The line of a row that was run, by its samples in their order."""
        first = samples[0]
        completion = sum(sample.output_tokens for sample in samples)
        usage = {
            "prompt_tokens": first.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": first.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": first.kv.shared_tokens + first.kv.disk_tokens},
        }
        name = f"{key.row}{key.sampling}"
        body = {
            "id": f"{'chatcmpl' if row.chat else 'cmpl'}-{name}",
            "object": "chat.completion" if row.chat else "text_completion",
            "created": int(time.time()),
            "model": row.model or self.model,
            "choices": [_choice(index, sample, row.chat) for index, sample in enumerate(samples)],
            "usage": usage,
        }
        response = {"status_code": 200, "request_id": f"req-{name}", "body": body}
        statistics = [_statistics(sample) for sample in samples]
        return self._line(job, key, response, None, {"statistics": statistics})

    def error(self, job: Job, key: Key, problem: RowProblem) -> dict[str, Any]:
        """The line of a row that came to nothing."""
        return self._line(job, key, None, {"code": problem.code, "message": problem.message}, {})

    def _line(self, job: Job, key: Key, response: Any, error: Any, more: dict[str, Any]) -> dict[str, Any]:
        kvcli = {"key": key.model_dump(), "line": job.line.number, **self.facts, **more}
        return {"custom_id": job.custom_id, "response": response, "error": error, "kvcli": kvcli}


def _choice(index: int, sample: report.Sequence, chat: bool) -> dict[str, Any]:
    text = {"message": {"role": "assistant", "content": sample.text}} if chat else {"text": sample.text}
    return {"index": index, **text, "logprobs": None, "finish_reason": _FINISH[sample.finish_reason]}


def _statistics(sample: report.Sequence) -> dict[str, Any]:
    found = {name: value for name, value in asdict(sample).items() if name not in _LEFT_OUT}
    decode_ms = found["timing"].pop("decode_ms")
    found["timing"]["decode_ms"] = sum(decode_ms)
    del found["cache"]["layers"]
    return found
