"""Streamed weights, from the command line."""

import json
from functools import partial

import pytest
from command import FAILING, RETRIEVE, assert_refused
from families import tiny_checkpoint

from kvcli.errors import ExitCode

WORDS = "the quick brown fox jumps over the lazy dog and then the dog runs there while the other fox sleeps "
DISK = ["--weights-on", "disk"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text(WORDS * 12)
    return path


@pytest.fixture
def generate(model, warm, document):
    return partial(warm, "generate", "-m", model, document, *RETRIEVE, "--max-tokens", 6)


def ids(result):
    assert result.returncode == 0, result.stderr
    return [sequence["token_ids"] for sequence in json.loads(result.stdout)["sequences"]]


def test_the_text_is_the_same_and_what_was_read_is_counted(generate):
    plain, found = generate("--json", "-q"), generate("--json", *DISK)
    assert ids(found) == ids(plain)
    assert "streamed weights" in found.stderr
    body = json.loads(found.stdout)
    counted, told = body["streamed_weights"], body["model"]
    assert (told["weights_on"], told["layers_streamed"]) == ("disk", 4)
    assert counted["steps"] == 5
    assert 0 < counted["prefill_bytes"] < counted["decode_bytes"] < told["weight_bytes"] * 7
    assert json.loads(plain.stdout)["streamed_weights"] is None


def test_saved_kv_and_kept_runs(generate, model, warm, document, tmp_path):
    wanted = ids(generate("--json", "-q"))
    assert ids(generate("--json", "-q", *DISK, "--save-kv", tmp_path / "kv")) == wanted
    again = warm("generate", "-m", model, "--kv", tmp_path / "kv", *RETRIEVE, "--max-tokens", 6, *DISK, "--json", "-q")
    assert ids(again) == wanted
    assert ids(generate("--json", "-q", *DISK, "--checkpoint", tmp_path / "run")) == wanted
    assert json.loads((tmp_path / "run" / "run.json").read_text())["weights_on"] == "disk"


def test_rows_of_a_batch_have_the_same_texts(warm, model, tmp_path):
    rows = [{"prompt": WORDS * (4 + at), "custom_id": str(at)} for at in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = []
    for name, more in (("plain", []), ("disk", DISK)):
        out = tmp_path / f"{name}.jsonl"
        done = warm("batch", "-m", model, "in.jsonl", "-o", out, "--max-tokens", 8, "-q", *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        results = map(json.loads, out.read_text().splitlines())
        texts.append(sorted((row["custom_id"], json.dumps(row["response"]["body"]["choices"])) for row in results))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("reads", [0, 30, 150])
def test_a_read_that_fails_is_one_line(generate, tmp_path, reads):
    program = tmp_path / "failing.py"
    program.write_text(FAILING.format(method="read_into"))
    result = generate(*DISK, program=program, READS=str(reads))
    assert result.returncode == ExitCode.RUNTIME
    assert "reading weights failed: Input/output error" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_plan_counts_what_stays_and_two_layers(warm, model):
    plain, found = (
        json.loads(warm("plan", "-m", model, "--method", "full", "--context", "1K", "--json", "-q", *more).stdout)
        for more in ([], [*DISK, "--disk-rate", "1MB"])
    )
    (there,), (streamed,) = plain["plans"], found["plans"]
    assert streamed["weights_on"] == "disk"
    assert streamed["memory"]["weights"] < there["memory"]["weights"]
    assert streamed["times"]["step_ms"] >= 1000 * streamed["memory"]["streamed_weights"] / 1e6
    shown = warm("plan", "-m", model, "--method", "full", "--context", "1K", *DISK)
    assert "4 layers are streamed from disk" in shown.stdout
    assert "--disk-rate" in shown.stdout


def test_advice_names_it_where_weights_fit_no_card(warm):
    """Half of the weights in 4 bits would not, either."""
    small = ["--device-memory", "5GiB", "--host-memory", "64GiB", "--context", "8K", "--method", "freekv"]
    shown = warm("plan", "-m", "llama-3.1-8b", "--advise", *small)
    assert "--weights-on host" in shown.stdout


def test_refusals(generate, warm, model):
    several = warm("plan", "-m", model, *DISK, "--device", "cpu,cpu")
    assert_refused(several, ExitCode.USAGE, "--weights-on disk", "needs one device")
    assert_refused(warm("plan", "-m", model, "--weights-memory", "1GB"), ExitCode.USAGE, "--weights-memory")
    assert_refused(generate("--weights-on", "host"), ExitCode.USAGE, "--weights-on host", "CPU")
    assert_refused(generate(*DISK, "--weights-memory", "1KB"), ExitCode.WILL_NOT_FIT, "--weights-memory", "too little")


def test_a_chat_counts_what_each_answer_read(warm, model, document):
    lines = "which fox?\n/stats\nand which dog?\n/quit\n"
    result = warm("chat", "-m", model, document, *DISK, "--method", "full", "--max-tokens", 6, "--json", text=lines)
    assert result.returncode == 0, result.stderr
    counted = json.loads(result.stdout)["streamed_weights"]
    assert counted["steps"] == 2 * 5
    assert 0 < counted["prefill_bytes"] < counted["decode_bytes"]
    assert result.stderr.count("streamed weights") == 1
    plain = warm("chat", "-m", model, document, "--method", "full", "--max-tokens", 6, "--json", text=lines)
    assert json.loads(plain.stdout)["streamed_weights"] is None
    assert [each["token_ids"] for each in json.loads(plain.stdout)["sequences"]] == ids(result)


def test_experts_are_counted_in_json_and_in_words(warm, document, tmp_path):
    path = tiny_checkpoint("qwen3_moe", tmp_path / "model")
    result = warm("generate", "-m", path, document, "--method", "full", "--max-tokens", 6, *DISK, "--json")
    plain = warm("generate", "-m", path, document, "--method", "full", "--max-tokens", 6, "--json")
    assert ids(result) == ids(plain)
    counted = json.loads(result.stdout)["streamed_weights"]
    asked, cached = counted["experts_asked"], counted["experts_cached"]
    assert asked == 5 * 4 * 2  # steps, layers, experts of a token
    assert 0 < cached < asked
    assert f"{cached} / {asked}" in " ".join(result.stderr.split())
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": WORDS, "custom_id": "0"}) + "\n")
    batch = ["batch", "-m", path, "in.jsonl", "-o", "out.jsonl", "--method", "full", "--max-tokens", 6]
    done = warm(*batch, *DISK, cwd=tmp_path)
    assert "experts cached" in done.stderr
    planned = warm("plan", "-m", path, "--method", "full", "--context", "1K", *DISK)
    assert "of experts those chosen" in " ".join(planned.stdout.split())
