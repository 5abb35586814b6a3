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
