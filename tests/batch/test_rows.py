"""Rows in both forms, and where they come from."""

import gzip
import io
import json

import pytest
import zstandard

from kvcli.batch.rows import RowProblem, parse_row
from kvcli.batch.source import RowSource
from kvcli.errors import KvcliError
from kvcli.inputs.options import Sampling


def parsed(row, folder="/", question=None, **default):
    data = row if isinstance(row, bytes) else json.dumps(row).encode()
    return parse_row(7, data, Sampling(**default), question, folder)


def problem(row, **options):
    with pytest.raises(RowProblem) as caught:
        parsed(row, **options)
    return caught.value


def api(**body):
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_the_form_of_the_api():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "?"}]},
    ]
    row = parsed(api(messages=messages, model="m", max_tokens=9, temperature=1, top_p=0.5, seed=3, stop="x", n=2))
    assert row.conversation == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"})
    assert row.sampling == Sampling(9, 1.0, 0.5, seed=3, stop=("x",), num_samples=2)
    assert (row.custom_id, row.model, row.chat) == ("a", "m", True)


def test_fields_that_ask_for_nothing():
    messages = [{"role": "user", "content": "Who?"}]
    nothing = {
        "logprobs": False,
        "stream": False,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "n": 1,
        "store": False,
    }
    nothing |= {"tools": None, "tool_choice": "auto", "logit_bias": {}, "response_format": {"type": "text"}}
    row = parsed(api(messages=messages, **nothing), max_tokens=9)
    assert (row.conversation, row.sampling) == (tuple(messages), Sampling(9))
    plain = {"prompt": "Once", "logprobs": None, "echo": False, "best_of": 1, "suffix": None, "repetition_penalty": 1.1}
    assert parsed({"custom_id": "a", "body": plain}).sampling == Sampling(repetition_penalty=1.1)


def test_a_plain_text():
    row = parsed({"custom_id": "a", "body": {"prompt": "Once", "stop": ["x", "y"]}})
    assert (row.prompt.content, row.chat, row.sampling.stop) == ("Once", False, ("x", "y"))


@pytest.mark.parametrize("name", ["prompt", "question"])
def test_the_short_form(name):
    row = parsed({"custom_id": "a", "document": "Text.", name: "Who?", "max_completion_tokens": 3}, temperature=0.5)
    assert row.prompt.content == "Text.\n\nWho?"
    assert row.sampling == Sampling(3, 0.5)


def test_a_question_for_rows_without_one():
    assert parsed({"custom_id": "a", "document": "Text."}, question="Who?").prompt.question == "Who?"
    assert parsed({"custom_id": "a", "document": "Text.", "prompt": "Why?"}, question="Who?").prompt.question == "Why?"
    assert parsed({"custom_id": "a", "prompt": "Why?"}).prompt.content == "Why?"


def test_a_document_file_counts_by_what_it_holds(tmp_path):
    file, row = tmp_path / "a.txt", {"custom_id": "a", "document_file": "a.txt"}
    file.write_text("One.")
    first = parsed(row, folder=tmp_path)
    assert first.prompt.text == "One."
    file.write_text("Two.")
    assert parsed(row, folder=tmp_path).digest != first.digest


def test_the_digest_is_of_all_but_the_name():
    row = {"custom_id": "a", "prompt": "x", "seed": 1}
    same = {"seed": 1, "prompt": "x", "custom_id": "b"}
    assert parsed(row).digest == parsed(same).digest != parsed({**row, "seed": 2}).digest


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (api(messages=[{"role": "user", "content": "x"}], max_tokens=0, tool=[]), ["max_tokens", "'body.tool'"]),
        (api(messages=[{"role": "user", "content": "x"}], tools=[{"type": "function"}]), ["body.tools"]),
        (
            api(messages=[{"role": "user", "content": "x"}], logprobs=True, stream=True),
            ["body.logprobs", "body.stream"],
        ),
        (api(messages=[{"role": "user", "content": "x"}], logprobs=0, presence_penalty=0.5), ["logprobs", "presence"]),
        (
            api(messages=[{"role": "user", "content": "x"}], response_format={"type": "json_object"}),
            ["response_format"],
        ),
        (api(prompt="x"), ["url", "a prompt"]),
        (api(), ["either messages or prompt"]),
        (api(messages=[]), ["messages"]),
        (api(messages=[{"role": "robot", "content": "x"}]), ["role"]),
        (
            api(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            ["image_url", "only text"],
        ),
        ({"custom_id": "a"}, ["no document"]),
        ({"custom_id": "a", "document": "x", "document_file": "y"}, ["document_file"]),
        ({"custom_id": "a", "prompt": "x", "top_p": 2}, ["top_p"]),
        ({"custom_id": "a", "prompt": "x", "temperature": "warm", "n": 0}, ["temperature", "n "]),
        ({"custom_id": "a", "document_file": "none.txt"}, ["no such file"]),
    ],
)
def test_what_is_wrong_with_a_row_is_said_all_at_once(row, words, tmp_path):
    found = problem(row, folder=tmp_path)
    assert found.code == "invalid_row"
    assert found.custom_id == "a"
    assert all(word in found.message for word in words), found.message


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{nope", "invalid_json"),
        (b"[1]", "invalid_row"),
        (b'{"prompt": "x"}', "invalid_row"),
        (b"\xff", "invalid_json"),
    ],
)
def test_a_row_without_a_name_goes_by_its_line(data, code):
    found = problem(data)
    assert (found.code, found.custom_id) == (code, "line-7")


ROWS = [b'{"custom_id": "a"}\n', b"\n", b'{"custom_id": "b"}']


def lines(name):
    with RowSource(str(name)) as source:
        found = list(source.lines())
        assert all(source.read(line) == data for line, data in found)
        return [(line.number, data) for line, data in found]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstd"])
def test_lines_of_files(tmp_path, pack):
    path = tmp_path / "rows"
    path.write_bytes(pack(b"\xef\xbb\xbf" + b"".join(ROWS)))
    assert lines(path) == [(1, ROWS[0]), (3, ROWS[2])]


def test_lines_of_standard_input(monkeypatch):
    packed = io.BufferedReader(io.BytesIO(gzip.compress(b"".join(ROWS))))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(packed))
    assert lines("-") == [(1, ROWS[0]), (3, ROWS[2])]


def test_a_folder_has_a_row_for_each_document(tmp_path):
    for name in ("b.txt", "sub/a.txt", ".hidden", ".git/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [json.loads(data)["custom_id"] for _, data in lines(tmp_path)] == ["b.txt", "sub/a.txt"]


@pytest.mark.parametrize(
    "data", [gzip.compress(b"x" * 999)[:-9], b"\x28\xb5\x2f\xfd" + b"x" * 20, b""], ids=["cut off", "broken", "empty"]
)
def test_files_that_cannot_be_unpacked_or_are_empty(tmp_path, data):
    path = tmp_path / "rows"
    path.write_bytes(data)
    with pytest.raises(KvcliError, match=r"rows: (cannot be read|no rows)"):
        lines(path)
