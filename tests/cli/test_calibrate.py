import json
import math
import shutil

import pytest
from command import assert_refused
from families import tiny_checkpoint
from safetensors.torch import load_file, save_file

TEXT = "the quick brown fox jumps over the lazy dog and the number of the third key is 4711 " * 8
SMALL = [f"--set={key}={value}" for key, value in (("budget", 48), ("sink", 8), ("window", 8), ("page_size", 8))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrate")
    tiny_checkpoint("llama", path / "model")
    (path / "fox.txt").write_text(TEXT)
    (path / "empty.txt").write_text("")
    return path


def calibrate(warm, folder, *arguments):
    small = ("--length", 90, "--steps", 5, "--samples", 2)
    return warm("calibrate", *arguments, "-m", "model", "--offline", *small, *SMALL, cwd=folder)


def test_table_profile_page_and_generate(warm, folder):
    files = ("-o", "mine.toml", "--html", "page.html")
    result = calibrate(warm, folder, "tau", "fox.txt", "--max-loss", 9, *files)
    assert result.returncode == 0, result.stderr
    assert "corrected" in result.stdout
    assert "chosen" in result.stdout
    shown = [line.split("  ")[0] for line in result.stdout.splitlines() if line]
    first = shown.index("chosen")  # a list, what matters first
    assert shown[first : first + 4] == ["chosen", "from full attention", "added to tau 1.0", "limit"]
    assert "--profile mine.toml" in result.stderr
    page = (folder / "page.html").read_text()
    assert "kvcli calibrate tau" in page
    assert "KV head" in page
    assert 'src="http' not in page
    used = ("generate", "fox.txt", "--profile", "mine.toml", "--max-tokens", 2, "--json")
    own = warm(*used, "-m", "model", cwd=folder)
    assert own.returncode == 0, own.stderr
    provenance = json.loads(own.stdout)["profile"]["provenance"]
    assert provenance["target"] == "tau"
    assert provenance["loss_bound"] >= provenance["loss"] > 0
    assert f"from full attention it is {provenance['loss']:.3g} nats" in provenance["reason"]
    assert "calibrated for" not in own.stderr
    other = warm(*used, cwd=folder)
    assert other.returncode == 0, other.stderr
    sentence = next(line for line in other.stderr.splitlines() if "calibrated for model" in line)
    measured = warm("eval", "-q", "--tasks", "vt", "--length", 300, "--profile", "mine.toml", cwd=folder)
    assert_refused(measured, 2, sentence.partition("profile mine")[2])


def test_json_is_one_object(warm, folder):
    result = calibrate(warm, folder, "tau", "fox.txt", "--max-loss", 9, "--json", "--values", "tau=0.5,1")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [point["settings"] for point in found["points"]] == [{"tau": 0.5}, {"tau": 1.0}]
    assert found["chosen"] == {"tau": 0.5}
    assert found["profile"]["settings"]["tau"] == 0.5


def test_where_no_value_will_do_no_profile_is_written(warm, folder):
    values = ("--values", "budget=32,40", "--values", "page_size=8")
    result = calibrate(warm, folder, "budget", "fox.txt", "--max-loss", 0, *values, "-o", "none.toml")
    assert result.returncode == 1
    assert "none adds at most 0 nats" in result.stderr
    assert "larger --max-loss" in result.stderr
    assert not (folder / "none.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tao"], ["unknown target", "'tao'"]),
        (["tau", "missing.txt"], ["missing.txt", "no such file"]),
        (["tau", "empty.txt"], ["empty.txt", "empty"]),
        (["tau", "fox.txt", "-o", "x.json"], ["x.json", ".toml"]),
        (["tau", "fox.txt", "--max-loss", "-1"], ["--max-loss", "-1"]),
        (["tau", "fox.txt", "--max-loss", "nan"], ["--max-loss", "nan"]),
        (["tau"], ["90 tokens", "too short"]),
        (["tau", "fox.txt", "--values", "tau"], ["--values", "KEY=VALUE"]),
        (["tau", "fox.txt", "--values", "tau=2"], ["tau = 2"]),
        (["pca", "fox.txt", "--method", "loki", "--per-layer"], ["--per-layer"]),
        (["tau", "fox.txt", "--method", "quest"], ["quest", "'tau'"]),
    ],
)
def test_wrong_usage_is_refused(warm, folder, arguments, words):
    assert_refused(calibrate(warm, folder, *arguments), 2, *words)


def test_a_file_that_no_calibration_wrote_is_not_replaced_by_its_tensors(warm, folder):
    weights = folder / "model" / "model.safetensors"
    known = weights.read_bytes()
    for output in ("model/model.toml", "other.toml"):
        (folder / "other.safetensors").write_bytes(known)
        refused = calibrate(warm, folder, "pca", "fox.txt", "--method", "loki", "-o", output)
        assert_refused(refused, 2, output.replace(".toml", ".safetensors"))
        assert (folder / "other.safetensors").read_bytes() == weights.read_bytes() == known
        assert not (folder / output).exists()


def test_tensors_of_an_earlier_calibration_are_replaced(warm, folder):
    small = ("-m", "model", "--offline", "--length", 60, "--steps", 5, "--samples", 1)
    for _ in range(2):
        result = warm("calibrate", "pca", "fox.txt", *small, "-o", "axes.toml", cwd=folder)
        assert result.returncode == 0, result.stderr
        assert "axes.safetensors" in result.stderr


@pytest.mark.parametrize("target", ["tau", "pca", "heads"])
def test_weights_that_are_no_numbers_are_named(warm, folder, target):
    shutil.copytree(folder / "model", folder / f"broken-{target}")
    file = folder / f"broken-{target}" / "model.safetensors"
    weights = load_file(file)
    broken = next(name for name in weights if "layers.1" in name)
    weights[broken][0] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    text = () if target == "heads" else ("fox.txt",)
    options = (*text, "-q", "-m", f"broken-{target}", "--length", 60, "--steps", 5, "--samples", 1)
    settings = SMALL if target == "tau" else ()
    refused = warm("calibrate", target, *options, *settings, cwd=folder)
    assert_refused(refused, 1, "NaN or infinity", broken)
