import json
import re
import subprocess
import sys

import pytest
from command import assert_refused, environment

from kvcli.inputs.profiles import profile_names
from kvcli.methods import get_method, method_names
from kvcli.methods.card import read_card


def test_the_list_names_every_method_and_profile(warm):
    result = warm("methods")
    assert result.returncode == 0
    assert result.stderr == ""
    for name in [*method_names(), *profile_names()]:
        assert name in result.stdout


def test_the_list_begins_with_what_is_needed_and_names_methods_and_profiles_that_there_are(warm):
    from kvcli.methods.card import NEEDS

    lines = warm("methods", COLUMNS="200").stdout.splitlines()
    for line, (need, served_by) in zip(lines, NEEDS.items(), strict=False):
        assert " ".join(line.split()) == f"{need} {served_by}".replace("`", "")
        for name in re.findall("`([^`]+)`", served_by):
            assert name.removeprefix("--profile ") in {*method_names(), *profile_names()}
    assert "kvcli methods NAME" in lines[-1]


@pytest.mark.parametrize("columns", [80, 100])
def test_the_list_says_what_each_can_do_within_the_terminal(warm, columns):
    lines = warm("methods", COLUMNS=str(columns)).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    (row,) = [number for number, line in enumerate(lines) if line.startswith("shadowkv ")]
    gpu_step = read_card("shadowkv").gpu_step
    assert " ".join(lines[row].split()) == f"shadowkv no yes yes {gpu_step} O(B+L·r/w+L/p+g) 2410.21465"
    assert lines[row + 1] == f"  {get_method('shadowkv').title}"
    assert lines[row + 2] == "  profiles shadowkv, shadowkv-plus"


def test_the_list_waits_for_no_torch():
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; from kvcli.cli import main; main()"
    for arguments in ([], ["--markdown"]):
        command = [sys.executable, "-c", code, "methods", *arguments]
        result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert "freekv" in result.stdout


def test_markdown_is_the_list_alone(warm):
    lines = warm("methods", "--markdown").stdout.splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == method_names()
    assert "| `quest` | pages scored by bounds on their keys | yes | no | pooled | graph | O(L) |" in "\n".join(lines)
    assert "[2406.10774](https://arxiv.org/abs/2406.10774)" in "\n".join(lines)
    assert_refused(warm("methods", "--markdown", "--json"), 2, "not --json")
    assert_refused(warm("methods", "freekv", "--markdown"), 2, "freekv")


def test_a_page_shows_settings_profiles_and_paper(warm):
    text = warm("methods", "freekv", COLUMNS="200").stdout
    method = get_method("freekv")
    assert method.paper in text
    for key, field in method.Config.model_fields.items():
        assert key in text
        assert field.description.split(",")[0] in text
    assert "0..1" in text
    assert "mean_qk" in text
    assert "O(B + L/p)" in text
    assert "freekv-long-input" in text
    assert "tau 0.8" in text
    for part in method.ablation:
        assert part in text


def test_how_prompts_are_read_is_a_setting_of_every_method(warm):
    assert "a-shape or vertical-slash" in " ".join(warm("methods", "full").stdout.split())


def test_json_is_one_object(warm):
    body = json.loads(warm("methods", "--json").stdout)
    assert body["schema_version"] == 1
    assert [entry["name"] for entry in body["methods"]] == method_names()
    freekv = next(entry for entry in body["methods"] if entry["name"] == "freekv")
    assert (freekv["long_generation"], freekv["offloads"], freekv["group_consistent"]) == (True, True, True)
    assert freekv["device_memory"] == "O(B + L/p)"
    tau = next(setting for setting in freekv["settings"] if setting["name"] == "tau")
    assert (tau["type"], tau["default"], tau["minimum"], tau["maximum"]) == ("number or array", 0.9, 0, 1)
    assert {"name": "no speculation", "settings": {"tau": 1.0}} in freekv["ablations"]
    assert {"freekv", "freekv-long-input"} <= {profile["name"] for profile in freekv["profiles"]}


def test_the_list_can_go_to_a_file(warm, tmp_path):
    result = warm("methods", "-o", tmp_path / "methods.txt", FORCE_COLOR="1")
    assert (result.returncode, result.stdout) == (0, "")
    text = (tmp_path / "methods.txt").read_text()
    assert "freekv" in text
    assert "\x1b" not in text


def test_an_unknown_method_comes_with_the_nearest(warm):
    result = warm("methods", "frekv")
    assert_refused(result, 2, "'frekv'")
    assert "did you mean 'freekv'?" in result.stderr
    assert "magicpig" not in result.stderr, "the near name alone"
