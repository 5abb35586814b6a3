"""Layers on several devices, from the command line: pieces of one CPU, a plan for GPUs that are not here, bad names."""

import json

import pytest
from command import assert_refused
from families import tiny_checkpoint

SHORT = ["--budget", "96", "--sink", "16", "--window", "32", "--page-size", "16", "--max-tokens", "6", "--ignore-eos"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog and runs " * 20)
    return path


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
        (["--device", "cpu,cpu", "--pipeline", "compiled"], ["compiled", "several devices"]),
        (["--device", "cpu,cpu", "--weights", "int8"], ["int8", "one device"]),
    ],
)
def test_what_cannot_be_is_one_line(warm, model, document, tmp_path, more, words):
    more = [each.replace("RUN", str(tmp_path / "run")) for each in more]
    assert_refused(warm("generate", "-m", model, document, *SHORT, *more), 2, *words)
