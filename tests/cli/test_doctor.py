import json

from command import assert_refused


def test_every_check_is_a_line_for_people(warm):
    result = warm("doctor")
    assert result.returncode == 0
    assert result.stderr == ""
    for name in (
        "versions",
        "device",
        "memory",
        "bandwidth",
        "pinned memory",
        "triton",
        "CUDA graphs",
        "threads",
        "disk",
    ):
        assert name in result.stdout


def test_json_is_one_object(warm, tmp_path):
    result = warm("doctor", "--json", "-o", tmp_path / "doctor.json")
    assert (result.returncode, result.stdout) == (0, "")
    body = json.loads((tmp_path / "doctor.json").read_text())
    assert body["schema_version"] == 1
    assert body["usable"] is True
    assert {check["state"] for check in body["checks"]} <= {"ok", "note"}
    assert all(set(check) == {"name", "state", "found", "fix"} for check in body["checks"])


def test_an_output_that_cannot_be_written_is_refused_first(warm, tmp_path):
    assert_refused(warm("doctor", "-o", tmp_path), 2, "is a directory")


def test_a_model_is_told_by_its_layers(warm):
    result = warm("doctor", "-m", "lfm2-1.2b", "--dtype", "bfloat16", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    found = {check["name"]: check["found"] for check in json.loads(result.stdout)["checks"]}
    assert found["model"] == "lfm2, 16 layers: kvcli runs it"
    assert found["retrieve"] == "2, 5, 8, 10, 12, 14 (6 layers)"
    assert found["keep a state"].startswith("0-1, 3-4, 6-7, 9, 11, 13, 15 (10 layers); ")


def test_a_model_that_memory_does_not_hold_is_not_said_to_run(warm, tmp_path):
    sizes = {"hidden_size": 1 << 16, "intermediate_size": 1 << 22, "num_attention_heads": 512, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    result = warm("doctor", "-m", tmp_path / "config.json", "--json")
    assert (result.returncode, result.stderr) == (3, "")
    found = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert "kvcli runs it" not in found["model"]["found"]
    assert found["memory"]["state"] == "broken"
    assert "of host memory" in found["memory"]["found"]
    assert found["memory"]["fix"]


def test_a_model_that_cannot_run_is_told_by_its_reason(warm, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 2}))
    result = warm("doctor", "-m", tmp_path / "config.json")
    assert (result.returncode, result.stderr) == (1, "")
    assert "none of its layers attends" in " ".join(result.stdout.split())
