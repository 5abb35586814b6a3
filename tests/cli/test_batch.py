"""`kvcli batch` as it is called: files in and out, kills, shards, and those that watch."""

import gzip
import json
import random
import signal
import socket
import subprocess
import time
import urllib.request
from functools import partial

import psutil
import pytest
from command import COMMAND, assert_refused, environment
from families import tiny_checkpoint

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "sleeps", "while"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def batch(model, warm, tmp_path):
    return partial(warm, "batch", "-m", model, cwd=tmp_path)


@pytest.fixture
def other(warm, tmp_path):
    """`merge` and `status`."""
    return partial(warm, "batch", cwd=tmp_path)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(12)))
    return path


def rows(count):
    drawn = random.Random(1)
    return [
        {"custom_id": f"r{n}", "prompt": " ".join(drawn.choices(WORDS, k=5 + 9 * n)), "max_tokens": 2 + 5 * n % 17}
        for n in range(count)
    ]


def answers(path):
    results = [json.loads(line) for line in path.read_text().splitlines()]
    found = {
        result["custom_id"]: (result["error"] or result["response"]["body"]["choices"][0]["message"])
        for result in results
    }
    assert len(found) == len(results)
    return found


def test_a_batch_and_what_is_said_of_it(batch, source, tmp_path, other):
    result = batch(source, "-o", "out.jsonl")
    assert (result.returncode, result.stdout) == (0, "")
    assert "12 of 12 have a result" in result.stderr
    assert len(answers(tmp_path / "out.jsonl")) == 12
    again = batch(source, "-o", "out.jsonl")
    assert "12 of 12 have a result, 12 of them from before" in again.stderr
    assert "0.0 per second" not in other("status", "out.jsonl").stdout


def test_bad_rows_are_listed_and_fail_alone(batch, tmp_path, other):
    bad = ['{"custom_id": "a", "prompt": "x", "tools": []}', "{nope", '{"custom_id": "b", "prompt": "the fox"}']
    (tmp_path / "in.jsonl").write_text("\n".join(bad))
    checked = batch("in.jsonl", "-o", "out.jsonl", "--validate-only")
    assert checked.returncode == 4
    assert "line 1: 'a': unknown field 'tools'" in checked.stderr
    assert "line 2: 'line-2': bad JSON" in checked.stderr
    assert checked.stderr.endswith("rows     3 checked, 1 can be run\nrefused  2\n")
    assert not (tmp_path / "out.jsonl").exists()
    result = batch("in.jsonl", "-o", "out.jsonl", "--max-tokens", 3)
    assert result.returncode == 4
    found = answers(tmp_path / "out.jsonl")
    assert [found["a"]["code"], found["line-2"]["code"], found["b"]["role"]] == [
        "invalid_row",
        "invalid_json",
        "assistant",
    ]
    shown = other("status", "out.jsonl")
    assert "3 of 3 have a result" in shown.stdout
    assert "failed     2" in shown.stdout
    assert "no run writes to it" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.jsonl", "-q"], ["none.jsonl", "No such file"]),
        (["in.jsonl", "--shard", "0/4"], ["0/4"]),
        (["in.jsonl", "--shard", "slurm", "-o", "x"], ["SLURM_ARRAY_TASK_ID"]),
        (["in.jsonl", "--shard", "1/4"], ["--shard needs -o"]),
        (["in.jsonl", "--prefill-share", "0"], ["--prefill-share"]),
        (["in.jsonl", "-o", "in.jsonl"], ["would overwrite"]),
        (["in.jsonl", "--max-inflight", "0"], ["--max-inflight"]),
        (["in.jsonl", "--workers", "2"], ["--workers", "--engine ray"]),
        (["in.jsonl", "--engine", "ray"], ["--engine ray"]),
        (["status", "none.jsonl"], ["none.jsonl"]),
        (["merge", "in.jsonl", "-o", "none.jsonl"], ["no shard files"]),
    ],
)
def test_what_is_refused(other, source, arguments, words):
    del source
    assert_refused(other(*arguments), 2, *words)


def test_packed_rows_and_standard_streams(batch, source, tmp_path):
    direct = batch(source, "-o", "out.jsonl", "-q")
    piped = batch("-", text=source.read_text())
    (tmp_path / "in.gz").write_bytes(gzip.compress(source.read_bytes()))
    packed = batch("in.gz", "-o", "packed.jsonl")
    assert (direct.stderr, piped.returncode, packed.returncode) == ("", 0, 0)
    (tmp_path / "piped.jsonl").write_text(piped.stdout)
    wanted = answers(tmp_path / "out.jsonl")
    assert answers(tmp_path / "piped.jsonl") == answers(tmp_path / "packed.jsonl") == wanted


def test_a_folder_of_documents_with_one_question(batch, tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "docs" / name).write_text(" ".join(WORDS))
    (tmp_path / "docs" / "c.bin").write_bytes(b"\0\1")
    result = batch("docs", "-p", "which fox?", "-o", "out.jsonl", "--max-tokens", 4)
    assert result.returncode == 4
    found = answers(tmp_path / "out.jsonl")
    assert list(map(str, sorted(found))) == ["a.txt", "b.txt", "c.bin"]
    assert "binary file" in found["c.bin"]["message"]


def test_shards_come_to_the_whole(batch, other, source, tmp_path):
    assert batch(source, "-o", "whole.jsonl").returncode == 0
    slurm = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_COUNT": "3"}
    assert batch(source, "-o", "out.jsonl", "--shard", "1/3").returncode == 0
    assert batch(source, "-o", "out.jsonl", "--shard", "slurm", **slurm).returncode == 0
    early = other("merge", source, "-o", "out.jsonl")
    assert early.returncode == 1
    assert "no file for shard 2 of 3" in early.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert batch(source, "-o", "out.jsonl", "--shard", "2/3").returncode == 0
    sizes = [len(answers(tmp_path / f"out.{n}-of-3.jsonl")) for n in (1, 2, 3)]
    assert sum(sizes) == 12
    assert min(sizes) > 1
    assert "12 of 12" in other("status", "out.jsonl").stdout
    assert other("merge", source, "-o", "out.jsonl").returncode == 0
    merged = answers(tmp_path / "out.jsonl")
    assert list(merged) == [f"r{n}" for n in range(12)]
    assert merged == answers(tmp_path / "whole.jsonl")
    source.write_text(source.read_text().replace("fox", "cat", 1))
    assert_refused(other("merge", source, "-o", "out.jsonl"), 2, "not in IN")


@pytest.fixture
def started(warm, model, tmp_path):
    """A batch that goes on while the test does."""
    return partial(warm.start, "batch", "-m", model, cwd=tmp_path, stderr=subprocess.PIPE)


def wait_for(path, lines, process):
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def long_rows(path):
    drawn = random.Random(2)
    prompts = (" ".join(drawn.choices(WORDS, k=40)) for _ in range(20))
    found = ({"custom_id": f"r{n}", "prompt": prompt, "ignore_eos": True} for n, prompt in enumerate(prompts))
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


def test_killed_and_started_again_every_row_is_there_once(batch, started, tmp_path):
    long_rows(tmp_path / "in.jsonl")
    arguments = ["in.jsonl", "-o", "out.jsonl", "--max-inflight", 3, "--max-tokens", 30]
    out, drawn = tmp_path / "out.jsonl", random.Random(3)
    process = started(*arguments)
    wait_for(out, 5, process)
    time.sleep(drawn.random() / 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert batch(*arguments).returncode == 0
    assert batch("in.jsonl", "-o", "whole.jsonl", "--max-tokens", 30).returncode == 0
    assert answers(out) == answers(tmp_path / "whole.jsonl")
    assert not list(tmp_path.glob(".out*"))


def test_sigterm_and_status_and_metrics_of_a_run(other, started, tmp_path):
    long_rows(tmp_path / "in.jsonl")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["in.jsonl", "-o", "out.jsonl", "--max-inflight", 2, "--max-tokens", 400, "--grace", 30]
    process = started(*arguments, "--metrics-port", port, "--log-json")
    wait_for(tmp_path / "out.jsonl", 2, process)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        metrics = dict(line.split() for line in answer.read().decode().splitlines() if not line.startswith("#"))
    assert float(metrics["kvcli_batch_rows"]) == 20
    assert float(metrics["kvcli_batch_output_tokens_total"]) > 0
    while "running" not in (shown := other("status", "out.jsonl").stdout) or "of 20" not in shown:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143
    logged = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert logged[-1]["total"] == 20
    assert "To resume, run the same command" in told
    kept = answers(tmp_path / "out.jsonl")
    assert 2 <= len(kept) < 20
    assert logged[-1]["done"] == len(kept)


def test_ray_replaces_a_worker_that_is_killed(batch, model, tmp_path):
    pytest.importorskip("ray")
    long_rows(tmp_path / "in.jsonl")
    arguments = ["in.jsonl", "-o", "out.jsonl", "--max-tokens", 20, "--max-inflight", 2]
    command = [*COMMAND, "batch", "-m", model, *map(str, arguments), "--engine", "ray", "--workers", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "out.1-of-2.jsonl", 1, process)
    children = psutil.Process(process.pid).children(recursive=True)
    next(child for child in children if "ShardWorker" in child.name()).kill()
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert batch("in.jsonl", "-o", "whole.jsonl", "--max-tokens", 20).returncode == 0
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "whole.jsonl")


def test_settings_have_options_of_their_own_as_in_generate(batch, source):
    own = ("--budget", "48", "--sink", "8", "--window", "16", "--page-size", "8")
    named = zip(own[::2], own[1::2], strict=True)
    by_set = [f"--set={name[2:].replace('-', '_')}={value}" for name, value in named]
    for output, settings in (("a.jsonl", own), ("b.jsonl", by_set)):
        assert batch(source, "-o", output, "--method", "quest", *settings, "-q").returncode == 0
    assert answers(source.with_name("a.jsonl")) == answers(source.with_name("b.jsonl"))
    assert_refused(batch(source, "--method", "quest", "--budget", "9"), 2, "budget 9 leaves no page")


def test_results_in_a_folder_of_documents_are_no_rows(batch, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("the quick brown fox")
    asked = (folder, "-p", "which fox?", "--max-tokens", 2, "-q")
    for _ in range(2):
        assert batch(*asked, "-o", folder / "answers.jsonl").returncode == 0
    assert {*answers(folder / "answers.jsonl")} == {"a.txt", "b.txt"}
    for shard in ("1/2", "2/2", "1/2"):
        assert batch(*asked, "-o", folder / "parts.jsonl", "--shard", shard).returncode == 0
    (folder / "begun.jsonl").touch()
    assert batch(*asked, "-o", folder / "answers.jsonl").returncode == 0
    assert {*answers(folder / "answers.jsonl")} == {"a.txt", "b.txt"}


def test_results_under_another_tokenizer_are_refused(warm, source, tmp_path):
    model = tiny_checkpoint("llama", tmp_path / "model")
    run = partial(warm, "batch", "-m", model, source, "-o", tmp_path / "out.jsonl")
    assert run().returncode == 0
    assert run().returncode == 0
    template = model / "chat_template.jinja"
    before = template.read_text()
    template.write_text("{{ messages[0].content }}")
    assert_refused(run(), 2, "tokenizer changed")
    template.write_text(before)
    ends = model / "generation_config.json"
    ends.write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert_refused(run(), 2, "tokenizer changed")
    assert run("--overwrite").returncode == 0


def test_a_system_message_goes_before_rows_of_messages_without_one(warm, tmp_path):
    model = tiny_checkpoint("llama", tmp_path / "model")
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    said = {"role": "user", "content": "the fox"}
    own = {"role": "system", "content": "the dog sleeps"}
    asked = [("bare", [said]), ("own", [own, said])]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"custom_id": name, "body": {"messages": each}}) + "\n" for name, each in asked)
    )
    used = []
    for options in ([], ["-s", "the lazy dog and then the quick fox"]):
        out = tmp_path / f"{len(used)}.jsonl"
        result = warm("batch", "-m", model, tmp_path / "in.jsonl", "-o", out, "--max-tokens", 2, *options)
        assert result.returncode == 0, result.stderr
        found = {(each := json.loads(line))["custom_id"]: each for line in out.read_text().splitlines()}
        used.append({name: each["response"]["body"]["usage"]["prompt_tokens"] for name, each in found.items()})
    assert used[1]["bare"] > used[0]["bare"] + 5
    assert used[1]["own"] == used[0]["own"]
