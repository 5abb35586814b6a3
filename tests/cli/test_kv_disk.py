"""KV on a disk below host memory, from the command line: the same text, what is counted, and what can go wrong."""

import json
import signal
import subprocess
from functools import partial

import pytest
from command import FAILING, RETRIEVE, assert_refused
from families import tiny_checkpoint

from kvcli.errors import ExitCode

WORDS = "the quick brown fox jumps over the lazy dog and then the dog runs there while the other fox sleeps "
CACHE = ["--host-memory", "40KiB"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    yield place
    assert [*place.iterdir()] == []


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text(WORDS * 12)
    return path


@pytest.fixture
def generate(model, warm, document):
    return partial(warm, "generate", "-m", model, document)


def test_the_text_is_the_same_and_what_the_disk_did_is_counted(generate, disk, tmp_path):
    arguments = [*RETRIEVE, "--max-tokens", 6, "--json", "-q"]
    plain = json.loads(generate(*arguments).stdout)
    trace = tmp_path / "trace.json"
    shown = generate(*arguments[:-1], "--kv-disk", disk, *CACHE, "--trace", trace, "--timeline")
    found = json.loads(shown.stdout)
    for words in ("host hits", "from disk", "to disk", "on the disk"):
        assert words in shown.stderr
    mine, its = (body["sequences"][0] for body in (found, plain))
    assert mine["token_ids"] == its["token_ids"]
    cache = mine["cache"]
    assert cache["misses"] == its["cache"]["misses"] == cache["host_hits"] + cache["disk_reads"]
    assert cache["disk_reads"] > 0
    for count in ("host_hits", "disk_reads", "bytes_from_disk"):
        assert sum(step[count] for step in mine["steps"]) == cache[count]
        assert sum(layer[count] for layer in cache["layers"]) == cache[count]
    assert cache["bytes_to_disk"] >= cache["prefill_bytes_to_disk"] > 0
    memory = found["memory"]
    assert memory["disk_kv_bytes"] >= plain["memory"]["host_kv_bytes"] > memory["host_kv_bytes"] > 0
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "disk"]
    assert sum(span["args"]["bytes"] for span in spans) == cache["bytes_from_disk"]


def test_samples_and_questions_share_what_lies_there(generate, disk):
    arguments = ["-p", "which fox?", "-p", "why?", *RETRIEVE, "--max-tokens", 4, "--num-samples", 2]
    arguments += ["--temperature", "0.8", "--json", "-q"]
    plain, found = (
        json.loads(generate(*arguments, *more).stdout) for more in ([], ["--kv-disk", disk, "--host-memory", "160KiB"])
    )
    assert [each["token_ids"] for each in found["sequences"]] == [each["token_ids"] for each in plain["sequences"]]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--method", "full", "--kv-disk", "DISK"], ["--kv-disk", "full", "no KV on a disk"]),
        (["--kv-disk", "DISK", "--method", "freekv", "--set", "host_layout=nhd"], ["--kv-disk", "ablations"]),
        (["--kv-disk", "DISK", "--lossless", "4"], ["--lossless", "--kv-disk"]),
        (["--kv-disk", "DISK", "--checkpoint", "DISK/run"], ["--checkpoint", "--kv-disk"]),
        (["--kv-disk", "FILE/below"], ["FILE/below", "Not a directory"]),
        (["--kv-disk", "FILE"], ["FILE", "not a directory"]),
        (["--host-memory", "1GiB"], ["--host-memory", "disk"]),
    ],
)
def test_what_does_not_go_together_is_refused(generate, disk, document, more, words):
    places = {"DISK": str(disk), "FILE": str(document)}

    def placed(text):
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    assert_refused(generate("-q", *map(placed, more)), ExitCode.USAGE, *map(placed, words))


def test_a_cache_that_is_too_small_is_refused_with_one_that_is_not(generate, disk):
    result = generate(*RETRIEVE, "-q", "--kv-disk", disk, "--host-memory", "1KiB")
    assert_refused(result, ExitCode.WILL_NOT_FIT, "--host-memory 1.00 KiB")
    least = result.stderr.split("hint: give ")[1].split(" at least")[0].replace(" ", "")
    new = disk.parent / "made" / "on" / "demand"
    assert generate(*RETRIEVE, "-q", "--max-tokens", 3, "--kv-disk", new, "--host-memory", least).returncode == 0
    assert list(new.iterdir()) == []


def test_a_disk_that_is_full_is_one_line(generate, disk):
    """The system grants files of 10,000 bytes, as a disk that has no more."""
    result = generate(*RETRIEVE, "-q", "--kv-disk", disk, *CACHE, file_size=10_000)
    assert_refused(result, ExitCode.WILL_NOT_FIT, "--kv-disk", str(disk), "free")


@pytest.mark.parametrize("reads", [0, 40])
def test_a_disk_that_fails_ends_the_text_where_it_is(generate, disk, tmp_path, reads):
    program = tmp_path / "failing.py"
    program.write_text(FAILING.format(method="read_scattered"))
    arguments = [*RETRIEVE, "--max-tokens", 30, "--kv-disk", disk, *CACHE, "--json", "-q"]
    whole = json.loads(generate(*arguments).stdout)["sequences"][0]
    result = generate(*arguments, program=program, READS=str(reads))
    assert result.returncode == ExitCode.RUNTIME
    assert "reading KV failed: Input/output error" in result.stderr
    (sequence,) = json.loads(result.stdout)["sequences"]
    assert sequence["finish_reason"] == "error"
    assert 0 < sequence["output_tokens"] < 30
    assert sequence["token_ids"] == whole["token_ids"][: sequence["output_tokens"]]
    assert whole["text"].startswith(sequence["text"])


def test_nothing_is_left_of_a_run_that_is_ended(model, warm, document, disk):
    arguments = ["generate", "-m", model, document, *RETRIEVE, "--max-tokens", 4000, "--kv-disk", disk, *CACHE]
    with warm.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.read(1)  # it decodes, and files are open
        process.send_signal(signal.SIGINT)


def test_plan_counts_the_tier(model, warm, disk):
    arguments = ["plan", "-m", model, "--method", "full,freekv", "--context", 600, "--max-tokens", 6, *CACHE]
    arguments += ["--kv-disk", disk, "--set", "page_size=16", "--set", "sink=16", "--set", "window=32"]
    result = warm(*arguments, "--budget", 96, "--json", "-q")
    assert result.returncode == 0, result.stderr
    full, freekv = json.loads(result.stdout)["plans"]
    assert full["memory"]["kv_disk"] == 0
    assert freekv["fits"]
    held = freekv["memory"]["kv_host"]
    assert 0.9 * 40 * 1024 < held < 1.3 * 40 * 1024
    assert freekv["memory"]["kv_disk"] > held


def test_a_batch_on_a_disk_answers_the_same(warm, model, disk, document, tmp_path):
    rows = tmp_path / "rows.jsonl"
    asked = [{"custom_id": f"{at}", "document": document.read_text(), "prompt": text} for at, text in enumerate("ab")]
    rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
    arguments = [
        "batch",
        rows,
        "-m",
        model,
        "--method",
        "freekv",
        "--set",
        "budget=96",
        "--set",
        "sink=16",
        "--set",
        "window=32",
    ]
    arguments += ["--set", "page_size=16", "--max-tokens", 4, "--ignore-eos", "-q", "--max-inflight", 2]
    texts = []
    for name, more in (("plain", []), ("disk", ["--kv-disk", disk, "--host-memory", "160KiB"])):
        out = tmp_path / f"{name}.jsonl"
        result = warm(*arguments, "-o", out, *more)
        assert result.returncode == 0, result.stderr
        lines = map(json.loads, out.read_text().splitlines())
        texts.append({line["custom_id"]: line["response"]["body"]["choices"][0] for line in lines})
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
    small = warm(*arguments[:-4], "--kv-disk", disk, "--host-memory", "4KiB", "-o", tmp_path / "small.jsonl")
    assert small.returncode == 4
    assert "--host-memory 4.00 KiB gives" in small.stderr


def test_eval_and_profile_run_on_one(warm, model, disk, tmp_path):
    arguments = ["eval", "-m", model, "--tasks", "niah_single", "--length", "512", "--limit", "1", "-q"]
    arguments += ["--method", "freekv", "--budget", "128", "--set", "sink=32", "--set", "window=32"]
    answers = []
    for name, more in (("plain", []), ("disk", ["--kv-disk", disk, "--host-memory", "256KiB"])):
        kept = tmp_path / f"{name}.jsonl"
        result = warm(*arguments, "--predictions", kept, *more)
        assert result.returncode == 0, result.stderr
        lines = map(json.loads, kept.read_text().splitlines())
        answers.append([line for line in lines if "text" in line])
    (plain,), (found,) = answers
    assert found["text"] == plain["text"] != ""
    assert found["host_kv_bytes"] < plain["host_kv_bytes"]
    timed = ["profile", "-m", model, "--context", "512", "--output-len", "3", "--warmup", "1", "--repeat", "1"]
    result = warm(*timed, "--method", "full,freekv", "--kv-disk", disk, "--host-memory", "256KiB", "-q", "--json")
    body = json.loads(result.stdout)
    assert body["options"]["kv_disk"] == str(disk)
    assert [case["error"] for case in body["cases"]] == [None, None]


def test_a_conversation_refuses_one_in_a_line(warm, model, disk, document):
    assert_refused(warm("chat", "-m", model, document, "--kv-disk", disk), 2, "--kv-disk", "chat", "host memory")
    refused = warm("profile", "-m", model, "--method", "full", "--kv-disk", disk, "--context", "64")
    assert_refused(refused, 2, "--kv-disk", "full", "no KV on a disk")
