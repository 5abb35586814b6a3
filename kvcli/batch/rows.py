"""One row of a batch: the OpenAI batch form or a short one, validated, and made into a prompt.

Both forms give the same: a conversation, a plain text or a document with a question, and the row's own sampling.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from kvcli.errors import KvcliError, all_problems
from kvcli.inputs.options import Sampling
from kvcli.inputs.prompts import Prompt, read_document

Text = Annotated[str, Field(min_length=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Parameters(_Strict):
    """The sampling fields of a row; the command line sets the others."""

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Text | list[Text] | None = None
    n: Count | None = None
    ignore_eos: bool | None = None

    def sampling(self, default: Sampling) -> Sampling:
        """Replace the defaults by the given values."""
        given = self.model_dump(include=set(_Parameters.model_fields), exclude_none=True)
        names = {"n": "num_samples", "max_completion_tokens": "max_tokens"}
        values = {names.get(name, name): value for name, value in given.items()}
        if "stop" in values:
            values["stop"] = (values["stop"],) if isinstance(values["stop"], str) else tuple(values["stop"])
        return replace(default, **values)


class _TextPart(_Strict):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _no_image(cls, part: Any) -> Any:
        if isinstance(part, dict) and "text" not in str(part.get("type", "text")):
            raise ValueError(f"a part of type {part['type']}: kvcli reads only text, even with models that see images")
        return part


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_TextPart]

    @property
    def plain(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


def _refuse_true(value: bool) -> bool:
    if value:
        raise ValueError("should be false")
    return value


Off = Annotated[bool, AfterValidator(_refuse_true)]
Zero = Annotated[float, Field(ge=0, le=0)]
Nothing = Annotated[list[JsonValue] | dict[str, JsonValue], Field(max_length=0)]


class _PlainText(_Strict):
    type: Literal["text"]


class _Unused(_Strict):
    """Fields that clients send to say that they want nothing special; what asks for more is an error of the row."""

    stream: Off | None = None
    stream_options: None = None
    store: Off | None = None
    logprobs: Off | None = None
    top_logprobs: Zero | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Nothing | None = None
    best_of: Literal[1] | None = None
    echo: Off | None = None
    suffix: Literal[""] | None = None
    tools: Nothing | None = None
    functions: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: _PlainText | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None


class _Body(_Parameters, _Unused):
    """The request: a conversation or a plain text. `model`, `user` and `metadata` are accepted and not used."""

    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    prompt: Text | None = None
    model: str | None = None
    user: str | None = None
    metadata: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _one_input(self) -> _Body:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("give either messages or prompt")
        return self


class _ApiRow(_Strict):
    """A row of OpenAI's batch files."""

    custom_id: Text
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions"] | None = None
    body: _Body

    @model_validator(mode="after")
    def _url_of_its_body(self) -> _ApiRow:
        wanted = CHAT if self.body.messages is not None else COMPLETIONS
        if self.url is not None and self.url != wanted:
            raise ValueError(f"url {self.url} does not match a body with {_input_of(self.body)}")
        return self


class _ShortRow(_Parameters):
    """A document, as text or by its file, and a question on it; or one of them alone."""

    custom_id: Text
    document: Text | None = None
    document_file: Text | None = None
    prompt: Text | None = None
    question: Text | None = None

    @model_validator(mode="after")
    def _enough(self) -> _ShortRow:
        for one, other in (("document", "document_file"), ("prompt", "question")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"give either {one} or {other}")
        return self


class RowProblem(Exception):  # noqa: N818 - a problem of a row, not of the run
    """The problem of a row: a code for programs, a message for people, and the row's name and hash."""

    def __init__(self, code: str, message: str, custom_id: str = "", digest: str = ""):
        super().__init__(message)
        self.code, self.message, self.custom_id, self.digest = code, message, custom_id, digest


@dataclass(frozen=True)
class Row:
    """A row that can be run: a `conversation` of messages, or else a `prompt`, which `plain` passes on unchanged.

    `digest` is a hash of the whole row, including the text of its document's file.
    """

    custom_id: str
    digest: str
    sampling: Sampling
    prompt: Prompt
    conversation: tuple[dict[str, str], ...] = ()
    plain: bool = False
    model: str | None = None

    def without_text(self) -> Row:
        """Return the row without its text."""
        return replace(self, prompt=Prompt(self.custom_id, ""), conversation=())

    @property
    def chat(self) -> bool:
        """Whether the answer has the form of a chat completion, rather than of a text completion."""
        return not self.plain


def parse_row(number: int, data: bytes, default: Sampling, question: str | None, folder: Path) -> Row:
    """Parse line `number` of a file; documents are relative to `folder`, and `question` is for rows without one.

    Raises:
        RowProblem: malformed JSON, a missing or unknown field, a bad value, a document that cannot be read.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RowProblem("invalid_json", f"bad JSON: {error}", f"line-{number}", _digest(data)) from None
    named = isinstance(body, dict) and isinstance(body.get("custom_id"), str) and bool(body["custom_id"])
    custom_id = body["custom_id"] if named else f"line-{number}"
    content = {key: value for key, value in body.items() if key != "custom_id"} if isinstance(body, dict) else body
    digest = _digest(json.dumps(content, sort_keys=True).encode())
    try:
        if isinstance(body, dict) and body.keys() & {"body", "url", "method"}:
            return _from_api(_ApiRow.model_validate_json(data), digest, default)
        return _from_short(_ShortRow.model_validate_json(data), digest, default, question, folder)
    except ValidationError as error:
        raise RowProblem("invalid_row", "; ".join(all_problems(error)), custom_id, digest) from None
    except KvcliError as error:
        raise RowProblem("invalid_row", error.what, custom_id, digest) from None


def _from_api(row: _ApiRow, digest: str, default: Sampling) -> Row:
    body, sampling = row.body, row.body.sampling(default)
    if body.prompt is not None:
        return Row(row.custom_id, digest, sampling, Prompt(row.custom_id, body.prompt), plain=True, model=body.model)
    conversation = tuple(message.plain for message in body.messages or ())
    text = "\n\n".join(message["content"] for message in conversation)
    return Row(row.custom_id, digest, sampling, Prompt(row.custom_id, text), conversation, model=body.model)


def _from_short(row: _ShortRow, digest: str, default: Sampling, question: str | None, folder: Path) -> Row:
    text, asked = row.document, row.prompt or row.question or question or ""
    if row.document_file is not None:
        text = read_document(str(folder / row.document_file))
        digest = _digest(f"{digest} {_digest(text.encode())}".encode())
    if text is None:
        if not asked:
            raise KvcliError("no document, document_file, prompt or question")
        text, asked = asked, ""
    return Row(row.custom_id, digest, row.sampling(default), Prompt(row.custom_id, text, asked))


def _input_of(body: _Body) -> str:
    return "messages" if body.messages is not None else "a prompt"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def digest_of(value: Any) -> str:
    """Hash plain data into sixteen hexadecimal digits."""
    return _digest(json.dumps(value, sort_keys=True).encode())
