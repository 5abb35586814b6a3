"""Layers on several devices, from the command line: pieces of one CPU, a plan for GPUs that are not here, bad names."""

import json

import pytest
from command import RETRIEVE, assert_refused
from families import tiny_checkpoint

WORDS = "the quick brown fox jumps over the lazy dog and runs "
SETTINGS = ["--set", "budget=96", "--set", "sink=16", "--set", "window=32", "--set", "page_size=16"]
CHAT = ["--max-tokens", "5"]
SHORT = [*RETRIEVE, "--max-tokens", "6"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text(WORDS * 20)
    return path


def said(talk):
    return [turn["token_ids"] for turn in json.loads(talk.stdout)["sequences"]]


def test_pieces_of_a_cpu_write_the_same_text_and_are_named(warm, model, document):
    one, two = (
        warm("generate", "-m", model, document, *SHORT, "--json", "--device", device) for device in ("cpu", "cpu,cpu")
    )
    mine, its = json.loads(two.stdout), json.loads(one.stdout)
    assert mine["sequences"][0]["token_ids"] == its["sequences"][0]["token_ids"]
    assert [(piece["device"], piece["layers"]) for piece in mine["model"]["placement"]] == [
        ("cpu", [0, 1]),
        ("cpu", [2, 3]),
    ]
    assert "placement" not in its["model"]
    assert "cpu 0-1 · cpu 2-3" in two.stderr


@pytest.mark.parametrize("method", ["freekv", "offload"])
def test_a_conversation_goes_on_over_pieces(warm, model, document, method):
    talk = ["chat", "-m", model, document, "--method", method, *CHAT, "--json", "-q"]
    one, two, alone = (
        warm(*talk, "--device", device, text="which fox?\n/retry\nwhich dog?\n")
        for device in ("cpu", "cpu,cpu", "auto")
    )
    assert two.returncode == 0, two.stderr
    assert said(two) == said(one) == said(alone)
    assert len(said(two)) == 2


def test_rows_of_a_batch_run_over_pieces(warm, model, tmp_path):
    rows = [{"custom_id": f"r{n}", "prompt": WORDS * (3 + 4 * n), "max_tokens": 3 + n} for n in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = []
    for device in ("cpu", "cpu,cpu"):
        out = tmp_path / f"{device}.jsonl"
        ran = warm(
            "batch",
            "-m",
            model,
            tmp_path / "in.jsonl",
            "-o",
            out,
            "--method",
            "freekv",
            *SETTINGS,
            "--device",
            device,
            "-q",
        )
        assert ran.returncode == 0, ran.stderr
        found = [json.loads(line) for line in out.read_text().splitlines()]
        texts.append({row["custom_id"]: row["response"]["body"]["choices"][0]["message"] for row in found})
    assert texts[0] == texts[1]
    assert len(texts[0]) == 4


def test_tasks_are_answered_over_pieces(warm, model, document):
    asked = ["eval", "-m", model, "--tasks", f"ppl:{document}", "--length", "256", "--limit", "1", "--method"]
    one, two = (
        json.loads(warm(*asked, "full,freekv", *SETTINGS, "--json", "-q", "--device", device).stdout)["results"]
        for device in ("cpu", "cpu,cpu")
    )
    assert [each["score"] for each in two] == [each["score"] for each in one]
    assert [each["cost"]["bytes_to_device_step"] for each in two] == [
        each["cost"]["bytes_to_device_step"] for each in one
    ]


def test_steps_over_pieces_are_profiled(warm, model):
    runs = ["--context", "200", "--output-len", "2", "--repeat", "1", "--warmup", "1", "--read", "--json", "-q"]
    ran = warm("profile", "-m", model, "--method", "full,freekv", *SETTINGS, *runs, "--device", "cpu,cpu")
    assert ran.returncode == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert [piece["layers"] for piece in body["model"]["placement"]] == [[0, 1], [2, 3]]
    for case in body["cases"]:
        assert case["pipeline"] == "blocking"
        assert sum(part["ms"] for part in case["breakdown"]["parts"]) == pytest.approx(case["breakdown"]["step_ms"])
    assert sum(map(sum, body["cases"][1]["counts"]["pages_requested"])) > 0


def test_a_plan_counts_each_gpu_of_another_machine(warm):
    arguments = ["plan", "-m", "llama-3.1-8b", "--gpu", "rtx-4090", "--host-memory", "64GiB", "--method", "full"]
    one, two = (
        json.loads(warm(*arguments, "--context", "96K", "--device", device, "--json", "-q").stdout)["plans"][0]
        for device in ("cuda", "cuda:0,cuda:1")
    )
    assert not one["fits"]
    assert two["fits"]
    assert [piece["layers"] for piece in two["placement"]] == [[0, 15], [16, 31]]
    memory = two["memory"]
    beside = memory["workspace"] + memory["runtime"]
    needed = {name: memory["needed"][name] - beside for name in ("cuda:0", "cuda:1")}
    assert sum(needed.values()) == memory["weights"] + memory["kv_device"]
    kv = memory["kv_device"] // 2
    assert [needed[piece["device"]] - piece["weight_bytes"] for piece in two["placement"]] == [kv, kv]
    assert "cuda:0 has 0-15" in warm(*arguments, "--device", "cuda:0,cuda:1", "-q").stdout


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--device", "cuda:0,cuda:1"], ["cuda:0", "no CUDA device"]),
        (["--device", "cpu,cpu,cpu,cpu,cpu"], ["5 devices", "4 layers"]),
        (["--device", "cpu,gpu"], ["cpu,gpu", "cuda:0,cuda:1"]),
        (["--device", "cpu,cpu", "--checkpoint", "RUN"], ["--checkpoint", "cpu, cpu"]),
        (["--device", "cpu,cpu", "--weights", "int8"], ["int8", "one device"]),
    ],
)
def test_what_cannot_be_is_one_line(warm, model, document, tmp_path, more, words):
    more = [each.replace("RUN", str(tmp_path / "run")) for each in more]
    assert_refused(warm("generate", "-m", model, document, *SHORT, *more), 2, *words)
