import json

import pytest
from command import assert_refused
from families import tiny_checkpoint

from kvcli.inputs.profiles import DEFAULT_PROFILE

SHORT = ("--context", "600,1200", "--max-tokens", "16")
OTHER = ("--device-memory", "8GiB", "--host-memory", "64GiB")
RATES = ("--bandwidth", "1TB", "--bus", "20GB", "--compute", "100")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config.json alone: no weights, no tokenizer."""
    directory = tmp_path_factory.mktemp("config")
    tiny_checkpoint("llama", directory)
    for file in directory.iterdir():
        if file.name != "config.json":
            file.unlink()
    return directory


def test_a_config_is_enough_and_every_combination_is_a_row(warm, config):
    result = warm("plan", "-m", config, "--method", "full,streaming", "--batch-size", "1,2", *SHORT, COLUMNS="200")
    assert (result.returncode, result.stderr) == (0, "")
    rows = [line for line in result.stdout.splitlines() if " yes " in line]
    assert [row.split()[0] for row in rows] == ["full"] * 4 + ["streaming"] * 4
    assert "weights counted" in result.stdout
    assert "measured on 4 of 4 layers at 600 tokens" in result.stdout


def test_json_says_what_stands_on_what(warm, config):
    result = warm("plan", "-m", config / "config.json", "--method", "freekv,refreekv", *SHORT, "--json")
    body = json.loads(result.stdout)
    assert body["schema_version"] == 1
    assert body["machine"]["here"] is True
    assert set(body["machine"]["ceilings"]) == {"read", "copy", "to_device", "to_host", "matmul"}
    assert [entry["context"] for entry in body["plans"]] == [600, 1200] * 2
    for entry in body["plans"]:
        memory, times = entry["memory"], entry["times"]
        assert entry["disk"]["bytes"] > 0
        assert entry["disk"]["load_ms"] is None
        parts = ("weights", "kv_device", "kv_host", "workspace", "runtime")
        assert memory["needed"] == {"host": sum(memory[part] for part in parts)}
        assert memory["compiler_in_first_run"] == 256 << 20
        assert entry["fits"]
        assert entry["longest_context"] > 1200
        assert sum(phase["floor_ms"] for phase in times["phases"]) == pytest.approx(times["floor_ms"])
        assert 0 < times["floor_ms"] < times["step_ms"]
        assert entry["basis"]["workspace"] == "estimated"
    assert body["plans"][0]["basis"]["kv"] == "counted"
    assert "the most" in body["plans"][2]["basis"]["kv"]


def test_another_machine_is_planned_for_by_what_is_told(warm):
    arguments = ("plan", "-m", "llama-3.1-8b", "--method", "full,freekv", "--context", "1M", *OTHER)
    body = json.loads(warm(*arguments, *RATES, "--json").stdout)
    assert body["model"]["dtype"] == "bfloat16"
    full, freekv = body["plans"]
    assert full["memory"]["free"] == {"device": 8 << 30, "host": 64 << 30}
    assert "compiler_in_first_run" not in full["memory"]
    assert not full["fits"]
    assert full["longest_context"] == 0  # the weights alone are larger
    assert freekv["memory"]["kv_host"] > freekv["memory"]["kv_device"]
    assert full["times"]["step_ms"] == full["times"]["floor_ms"]
    assert full["basis"]["times"].startswith("estimated")
    attention = next(phase for phase in full["times"]["phases"] if phase["phase"] == "attention")
    assert attention["floor_ms"] == pytest.approx(1000 * attention["read"] / 1e12)
    assert attention["read"] == (2**20 + 1) * 2 * 8 * 128 * 2 * 32  # tokens, K and V, heads, bf16, layers
    without = warm(*arguments, COLUMNS="200").stdout
    assert "not known without --bandwidth" in without
    assert " none\n" in without


def test_without_a_method_a_plan_says_what_generate_would_choose(warm):
    arguments = ("plan", "-q", "-m", "llama-3.1-8b", "--host-memory", "64GiB", "--context", "32K,128K")
    found = json.loads(warm(*arguments, "--gpu", "rtx-4090", "--json").stdout)["choices"]
    assert [(each["context"], each["profile"]["method"]) for each in found] == [(32768, "full"), (131072, "retroinfer")]
    assert found[1]["profile"]["settings"]["dense_layers"] > 0
    assert found[1]["profile"]["chosen"] in warm(*arguments, "--gpu", "rtx-4090", COLUMNS="400").stdout
    named = warm(*arguments, "--gpu", "rtx-4090", "--method", "full", "--json")
    assert json.loads(named.stdout)["choices"] == []


def test_what_does_not_fit_comes_with_the_forms_that_do(warm):
    arguments = ("plan", "-m", "llama-3.1-8b", "--method", "full", "--context", "8K")
    small = ("--device-memory", "12GiB", "--host-memory", "64GiB")
    (found,) = json.loads(warm(*arguments, *small, "--json").stdout)["plans"]
    assert (found["fits"], found["fits_with"]) == (False, ["--weights int8", "--weights int4", "--weights-on host"])
    for weights, fits in (("int8", True), ("int4", True)):
        (again,) = json.loads(warm(*arguments, *small, "--weights", weights, "--json").stdout)["plans"]
        assert again["fits"] == fits
    said = "full at 8,192, batch 1: --weights int8, --weights int4 or --weights-on host"
    assert said in warm(*arguments, *small, COLUMNS="200").stdout


def test_the_tables_of_one_combination_say_where_memory_and_time_go(warm, tmp_path):
    arguments = ("plan", "-m", "llama-3.1-8b", "--profile", "freekv-long-input", *OTHER, *RATES)
    result = warm(*arguments, "-o", tmp_path / "plan.txt")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    text = (tmp_path / "plan.txt").read_text()
    for word in ("workspace", "KV, host", "recall", "to device", "offload", "given"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--context", "8K,,1M"), ["--context", "empty"]),
        (("--context", "long"), ["--context", "'long'"]),
        (("--context", "0"), ["--context", "0"]),
        (("--batch-size", "two"), ["--batch-size", "'two'"]),
        (("--method", "frekv"), ["'frekv'"]),
        (("--device-memory", "80GiB"), ["--device-memory", "--host-memory"]),
        (("--bandwidth", "1TB"), ["--bandwidth", "--device-memory"]),
        ((*OTHER, "--bus", "1GB"), ["--bandwidth", "--bus", "--compute"]),
        ((*OTHER, "--bandwidth", "0"), ["--bandwidth", "0"]),
        ((*OTHER, "--compute", "-1"), ["--compute", "-1"]),
        ((*OTHER, "--device", "cpu"), ["--device-memory", "--device cpu"]),
        (("--device-memory", "much", "--host-memory", "1GiB"), ["--device-memory", "'much'"]),
        (("-m", "no/such/place/here"), ["no/such/place/here"]),
        (("-m", "llama-3.1-9b"), ["llama-3.1-9b"]),
        (("--dtype", "int4"), ["'int4'"]),
    ],
)
def test_wrong_usage_is_one_line_with_a_way_out(warm, arguments, words):
    assert_refused(warm("plan", "-q", *arguments), 2, *words)


def test_every_row_says_what_its_times_stand_on_and_positions_are_heeded(warm):
    result = warm("plan", "--method", "full,freekv", "--context", "2K,17K,2K")
    assert "more than the 16,384 positions the demo model was made for" in result.stderr
    notes = " ".join(result.stdout.split())
    for row in ("full at 2,048", "full at 17,408", "freekv 2048 at 2,048", "freekv 2048 at 17,408"):
        assert notes.count(f"{row}, batch 1: step measured on 4 of 4 layers") == 1
    assert notes.count("prefill measured on 256 tokens, estimated beyond") == 4
    assert "of host memory free" in notes


def test_a_result_that_its_file_cannot_take_is_shown(warm):
    result = warm("plan", "--method", "streaming", "--context", "2K", "-o", "/dev/full", "-q")
    assert result.returncode == 1
    assert "streaming" in result.stdout
    assert "/dev/full: cannot be written" in result.stderr


def test_a_broken_config_is_named(warm, tmp_path):
    (tmp_path / "config.json").write_bytes(b"\x00\xff")
    result = warm("plan", "-m", tmp_path)
    assert result.returncode in (1, 2)
    assert str(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr


def test_advice_tries_what_is_taken_if_nothing_is_named(warm):
    place = ("--gpu", "rtx-4090", "--host-memory", "64GiB", "--context", "128K")
    found = json.loads(warm("plan", "-m", "llama-3.1-8b", "--advise", *place, "--json").stdout)
    assert {each["profile"]["method"] for each in found["plans"]} >= {DEFAULT_PROFILE, "full", "offload"}


def test_advice_is_the_most_exact_form_that_fits_and_how_to_run_it(warm):
    arguments = ("plan", "-m", "llama-3.1-8b", "--advise", "--method", "full,freekv", "--context", "128K")
    small = ("--gpu", "rtx-4090", "--host-memory", "12GiB")
    (found,) = json.loads(warm(*arguments, *small, "--json").stdout)["plans"]
    assert found["fits"]
    assert found["profile"]["settings"]["kv_dtype"] == "int8"  # as the model computes it, 15 GiB would be needed
    assert found["memory"]["free"] == {"device": 24 * 10**9, "host": 12 << 30}
    options = "--method freekv --kv-dtype int8 --max-tokens 256"
    assert found["command"] == f"kvcli generate -m llama-3.1-8b DOCUMENT {options}"
    text = warm(*arguments, "--gpu", "rtx-4090", "--host-memory", "1GiB", COLUMNS="200").stdout
    assert "nothing fits" in text
    assert "Ada" in text


def test_a_gpu_that_is_not_listed_is_refused_and_sizes_beside_a_name_count_more(warm):
    assert_refused(warm("plan", "--gpu", "voodoo", "--host-memory", "1GiB"), 2, "unknown --gpu 'voodoo'")
    assert_refused(
        warm("plan", "-m", "llama-3.1-8b", "--gpu", "l4"), 2, "--gpu l4 plans for another machine, but --host-memory"
    )
    told = ("--gpu", "l4", "--device-memory", "20GiB", "--host-memory", "8GiB", "--method", "full")
    body = json.loads(warm("plan", "-m", "llama-3.1-8b", *told, "--json").stdout)
    assert body["machine"]["free"]["device"] == 20 << 30
    assert body["machine"]["ceilings"]["read"]["median"] == 300e9


PLACES = [
    # device, host, context, disk; KV, weights, whether the disk is used
    ("8GiB", "64GiB", "128K", (), "auto", "int4", False),
    ("16GiB", "32GiB", "128K", (), "auto", "int8", False),
    ("24GiB", "64GiB", "1M", (), "int4", "auto", False),
    ("24GiB", "64GiB", "1M", ("--disk", "1TB"), "auto", "auto", True),
]


@pytest.mark.parametrize(("device", "host", "context", "disk", "kv", "weights", "tiered"), PLACES)
def test_advice_climbs_the_ladder_of_weights_kv_and_disk(warm, device, host, context, disk, kv, weights, tiered):
    place = ("--device-memory", device, "--host-memory", host, "--context", context, *disk)
    body = warm("plan", "-m", "llama-3.1-8b", "--advise", "--method", "freekv", *place, "--json").stdout
    (found,) = json.loads(body)["plans"]
    assert found["fits"]
    assert found["profile"]["settings"]["kv_dtype"] == kv
    assert ("--weights" in found["command"]) == (weights != "auto")
    assert weights in (found["weights"], "auto")
    assert ("--kv-disk DIR" in found["command"]) == tiered == bool(found["memory"]["kv_disk"])


def test_advice_names_a_cache_of_less_than_a_gibibyte(warm):
    place = ("--device-memory", "24GiB", "--host-memory", "1GiB", "--disk", "1TB", "--context", "32K")
    body = warm("plan", "-m", "llama-3.1-8b", "--advise", "--method", "freekv", *place, "--json").stdout
    (found,) = json.loads(body)["plans"]
    assert "--kv-disk DIR --host-memory 512MiB" in found["command"]


@pytest.mark.parametrize(
    ("card", "arguments"),
    [
        ("8gb", ("8GiB", "--host-memory", "16GiB", "--context", "128K", "--weights", "int4")),
        ("16gb", ("16GB", "--host-memory", "64GiB", "--context", "512K", "--weights", "int8")),
        ("24gb", ("24GiB", "--host-memory", "64GiB", "--context", "1M")),
    ],
)
def test_a_profile_of_a_card_fits_it_as_it_says(warm, card, arguments):
    told = ("--profile", f"card-{card}", "--device-memory", *arguments)
    (found,) = json.loads(warm("plan", "-m", "llama-3.1-8b", *told, "--json").stdout)["plans"]
    assert found["fits"]
    assert found["profile"]["description"].startswith(("an ", "a "))
