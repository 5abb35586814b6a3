"""Weights that come in turn, from the command line."""

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


def test_the_text_is_the_same_and_what_came_is_counted(generate):
    plain, found = generate("--json", "-q"), generate("--json", *DISK)
    assert ids(found) == ids(plain)
    assert "weights in turn" in found.stderr
    body = json.loads(found.stdout)
    counted, told = body["weights_in_turn"], body["model"]
    assert (told["weights_on"], told["layers_passing"]) == ("disk", 4)
    assert counted["steps"] == 5
    assert 0 < counted["prefill_bytes"] < counted["decode_bytes"] < told["weight_bytes"] * 7
    assert json.loads(plain.stdout)["weights_in_turn"] is None


def test_saved_kv_and_kept_runs(generate, model, warm, document, tmp_path):
    wanted = ids(generate("--json", "-q"))
    assert ids(generate("--json", "-q", *DISK, "--save-kv", tmp_path / "kv")) == wanted
    again = warm("generate", "-m", model, "--kv", tmp_path / "kv", *RETRIEVE, "--max-tokens", 6, *DISK, "--json", "-q")
    assert ids(again) == wanted
    assert ids(generate("--json", "-q", *DISK, "--checkpoint", tmp_path / "run")) == wanted
    assert json.loads((tmp_path / "run" / "run.json").read_text())["weights_on"] == "disk"


def test_rows_of_a_batch_pass_together(warm, model, tmp_path):
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
    (there,), (in_turn,) = plain["plans"], found["plans"]
    assert in_turn["weights_on"] == "disk"
    assert in_turn["memory"]["weights"] < there["memory"]["weights"]
    assert in_turn["times"]["step_ms"] >= 1000 * in_turn["memory"]["weights_in_turn"] / 1e6
    shown = warm("plan", "-m", model, "--method", "full", "--context", "1K", *DISK)
    assert "weights in turn" in shown.stdout
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
