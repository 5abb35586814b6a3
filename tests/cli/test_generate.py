"""The whole command on a tiny checkpoint."""

import json
import signal
import subprocess
import time
from functools import partial
from inspect import signature
from pathlib import Path

import pytest
from command import RETRIEVE, assert_refused, kvcli
from families import tiny_checkpoint
from transformers import AutoTokenizer

from kvcli.cli.generate import generate as command
from kvcli.runtime.sampling import Sampling

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = "the quick brown fox jumps over the lazy dog and then the dog runs there while the other fox sleeps "


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text(WORDS * 12)
    return path


@pytest.fixture
def generate(model, warm):
    return partial(warm, "generate", "-m", model)


def test_text_on_stdout_and_statistics_on_stderr(model, document):
    result = kvcli("generate", "-m", model, document, "-p", "which fox?", *RETRIEVE, "--max-tokens", 6)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "6 tokens, ended by --max-tokens" in result.stderr
    assert "corrected" in result.stderr
    assert "page hits" in result.stderr


def test_quiet_leaves_the_text_alone_and_the_same(generate, document):
    arguments = [document, *RETRIEVE, "--max-tokens", 5]
    loud, quiet = generate(*arguments), generate(*arguments, "-q")
    assert quiet.stderr == ""
    assert quiet.stdout == loud.stdout


def test_json_is_one_object_with_the_settings_asked_for(generate, document):
    arguments = [
        document,
        "--profile",
        "freekv-long-input",
        *RETRIEVE,
        "--set",
        "tau=1",
        "--max-tokens",
        4,
        "--no-stats",
    ]
    result = generate(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    body = json.loads(result.stdout)
    assert body["profile"]["name"] == "freekv-long-input"
    settings = body["profile"]["settings"]
    assert (settings["budget"], settings["sink"], settings["window"], settings["tau"]) == (96, 16, 32, 1.0)
    (sequence,) = body["sequences"]
    assert (sequence["source"], sequence["output_tokens"], sequence["finish_reason"]) == (str(document), 4, "length")
    assert sequence["correction"]["heads_corrected"] == sequence["correction"]["heads_checked"] > 0
    assert len(sequence["timing"]["decode_ms"]) == 3


def test_kv_of_a_few_bits_takes_less_of_the_host_and_of_the_bus(generate, document):
    arguments = [document, *RETRIEVE, "--max-tokens", 6, "--json", "-q"]
    whole, small = (json.loads(generate(*arguments, "--kv-dtype", held).stdout) for held in ("auto", "int8"))
    assert small["profile"]["settings"]["kv_dtype"] == "int8"
    assert small["memory"]["host_kv_bytes"] < 0.5 * whole["memory"]["host_kv_bytes"]
    caches = [run["sequences"][0]["cache"] for run in (whole, small)]
    for moved in ("bytes_to_device", "bytes_to_host"):
        assert 0 < caches[1][moved] < 0.5 * caches[0][moved]


@pytest.mark.parametrize(
    "held", ["int8", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("bfloat16", "k8v4"))]
)
def test_full_attention_holds_kv_in_a_narrow_form(generate, document, held):
    document.write_text(WORDS * 60)
    arguments = [document, "--method", "full", "--dtype", "float32", "--max-tokens", 6, "--json", "-q"]
    whole, small = (json.loads(generate(*arguments, "--kv-dtype", form).stdout) for form in ("auto", held))
    assert small["profile"]["settings"]["kv_dtype"] == held
    assert small["sequences"][0]["token_ids"][0] == whole["sequences"][0]["token_ids"][0]  # of the prompt, read exactly
    assert small["memory"]["device_kv_bytes"] < 0.7 * whole["memory"]["device_kv_bytes"]


def test_several_documents_one_of_them_missing(generate, document, tmp_path):
    (tmp_path / "dog.txt").write_text(WORDS)
    files = [tmp_path / "missing.txt", document, tmp_path / "dog.txt"]
    result = generate(*files, "-p", "why?", *RETRIEVE, "--max-tokens", 3, "--json")
    assert result.returncode == 4
    assert result.stderr.startswith(f"kvcli: error: {files[0]}: no such file\nhint: ")
    sequences = json.loads(result.stdout)["sequences"]
    assert [sequence["source"] for sequence in sequences] == [str(file) for file in files]
    assert [sequence["finish_reason"] for sequence in sequences] == ["error", "length", "length"]
    assert "no such file" in sequences[0]["error"]


def test_several_texts_stand_under_headers_on_stdout_as_in_a_file(generate, document, tmp_path):
    (tmp_path / "dog.txt").write_text(WORDS)
    arguments = [document, tmp_path / "dog.txt", "--num-samples", 2, "--temperature", 1, "--max-tokens", 3, "-q"]
    shown = generate(*arguments)
    assert [line for line in shown.stdout.splitlines() if line.startswith("==> ")] == [
        f"==> {path} (sample {i}) <==" for path in (document, tmp_path / "dog.txt") for i in (1, 2)
    ]
    written = generate(*arguments, "-o", tmp_path / "out.txt")
    assert (written.returncode, written.stdout) == (0, "")
    assert (tmp_path / "out.txt").read_text() == shown.stdout


def test_standard_input_is_a_document(generate):
    body = json.loads(generate("-", "--max-tokens", 2, "--json", text=WORDS).stdout)
    assert body["sequences"][0]["source"] == "stdin"
    assert body["sequences"][0]["prompt_tokens"] > 20


def test_the_timeline_has_a_line_a_step(generate, document):
    result = generate(document, *RETRIEVE, "--max-tokens", 7, "--timeline", "--no-stats")
    assert len(result.stderr.splitlines()) == 2 + 6
    assert "corrected" in result.stderr


def test_full_attention_has_no_corrections_to_show(generate):
    result = generate("-p", "hello", "--method", "full", "--max-tokens", 3)
    assert result.returncode == 0, result.stderr
    assert "decode" in result.stderr
    assert not any(word in result.stderr for word in ("corrected", "hits", "to device"))


def test_the_command_line_beats_the_environment_and_the_environment_the_profile(model, warm):
    def settings(*arguments, **variables):
        variables["KVCLI_MODEL"] = str(model)
        result = warm("generate", "-p", "x", "--max-tokens", 1, "--json", *arguments, **variables)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)["profile"]

    assert settings(KVCLI_SINK="256", KVCLI_TAU="0.5")["settings"]["sink"] == 256
    assert settings("--sink", "128", KVCLI_SINK="256")["settings"]["sink"] == 128
    assert settings("--set", "sink=64", KVCLI_SINK="256")["settings"]["sink"] == 64
    assert settings("--method", "quest", KVCLI_PROFILE="freekv-long-input")["name"] == "quest"
    assert settings("--method", "full", KVCLI_BUDGET="4K")["settings"] == {"prefill": "exact", "kv_dtype": "auto"}


def test_samples_without_temperature_are_warned_of(generate):
    result = generate("-p", "x", "--num-samples", 2, "--max-tokens", 1, "--no-stats")
    assert "all samples will be the same" in result.stderr


def test_a_file_that_cannot_be_written_costs_no_text(generate):
    shown = generate("-p", "fox", "--max-tokens", 3, "-q")
    result = generate("-p", "fox", "--max-tokens", 3, "-q", "-o", "/dev/full")
    assert result.returncode == 1
    assert result.stdout == shown.stdout
    assert "kvcli: error: /dev/full: cannot be written: No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("full", ["trace", "output", "stdout"])
def test_a_full_disk_costs_one_output_and_no_other(warm, model, document, tmp_path, full):
    files = {name: "/dev/full" if name == full else tmp_path / name for name in ("trace", "output", "stdout")}
    arguments = [document, *RETRIEVE, "--max-tokens", 4, "--trace", files["trace"]]
    arguments += [] if full == "stdout" else ["-o", files["output"], "--json"]
    with open(files["stdout"], "w") as stdout:  # noqa: PTH123 - a device
        process = warm.start("generate", "-m", model, *arguments, stdout=stdout, stderr=subprocess.PIPE)
    _, told = process.communicate()
    assert process.returncode == 1
    named = "standard output" if full == "stdout" else "/dev/full:"
    assert f"error: {named} cannot be written: No space left on device" in told
    assert "prefill" in told  # the statistics
    if full != "trace":
        assert json.loads((tmp_path / "trace").read_text())["traceEvents"]
    if full != "stdout":
        written = tmp_path / ("stdout" if full == "output" else "output")
        assert json.loads(written.read_text())["sequences"][0]["output_tokens"] == 4


def test_ctrl_c_keeps_the_text_and_the_statistics(warm, model, document):
    arguments = [document, *RETRIEVE, "--max-tokens", 3000, "-m", model]
    process = warm.start("generate", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = process.stdout.read(1)  # there is text: decode has begun
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first + rest) > 1
    assert "interrupted; the text so far was kept" in errors
    assert "Traceback" not in errors


def test_the_document_is_never_overwritten(generate, document):
    before = document.read_text()
    assert_refused(generate(document, "-o", document), 2, "-o", "would overwrite", str(document))
    assert_refused(generate("-p", "x", "--trace", document, document), 2, "--trace", str(document))
    assert document.read_text() == before


def test_no_file_of_the_checkpoint_is_overwritten(generate, model):
    assert_refused(generate("-p", "x", "-o", model / "model.safetensors"), 2, "would overwrite", "model.safetensors")


def test_a_dash_for_the_output_is_stdout(generate, tmp_path):
    result = generate("-p", "fox", "--max-tokens", 3, "-q", "-o", "-", cwd=tmp_path)
    assert result.stdout
    assert not (tmp_path / "-").exists()


def test_a_reader_that_leaves_ends_the_run_quietly(warm, model, document):
    arguments = [document, *RETRIEVE, "--max-tokens", 3000, "-m", model]
    process = warm.start("generate", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141


def test_the_defaults_of_the_command_are_those_of_sampling():
    defaults = {name: parameter.default for name, parameter in signature(command).parameters.items()}
    for name, value in vars(Sampling()).items():
        assert (defaults[name] or ()) == (value or ()), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no document and no prompt"]),
        (["missing.txt"], ["missing.txt: no such file"]),
        (["."], [".: is a directory"]),
        (["empty.txt"], ["empty.txt: is empty"]),
        (["blank.txt"], ["blank.txt: holds only blanks"]),
        (["binary.dat"], ["binary.dat: binary file", "NUL"]),
        (["latin.txt"], ["latin.txt: not UTF-8", "0xfc"]),
        (["-", "-"], ["standard input (-) is named twice"]),
        (["-"], ["stdin: is empty"]),
        (["-p", " "], ["the prompt ' ' is empty"]),
        (["-p", "x", "--method", "frekv"], ["unknown method 'frekv'"]),
        (["-p", "x", "--profile", "fast"], ["unknown profile 'fast'"]),
        (["-p", "x", "--profile", "none.toml"], ["none.toml", "No such file"]),
        (["-p", "x", "--profile", "bad.toml"], ["bad.toml", "line 2, column"]),
        (["-p", "x", "--method", "full", "--profile", "freekv"], ["--method full", "freekv"]),
        (["-p", "x", "--set", "bugdet=2K"], ["'bugdet'"]),
        (["-p", "x", "--set", "budget"], ["'budget'", "KEY=VALUE"]),
        (["-p", "x", "--set", "budget=1K", "--budget", "2K"], ["budget is set twice"]),
        (["-p", "x", "--budget", "lots"], ["budget = 'lots'", "integer"]),
        (["-p", "x", "--budget", "16"], ["budget 16", "at least"]),
        (["-p", "x", "--method", "freekv", "--tau", "2"], ["tau = 2"]),
        (["-p", "x", "--method", "freekv", "--page-size", "24"], ["page_size = 24", "power of two"]),
        (["-p", "x", "--method", "full", "--budget", "2K"], ["full has no setting 'budget'"]),
        (["-p", "x", "--method", "snapkv", "--kv-dtype", "int8"], ["snapkv has no setting 'kv_dtype'"]),
        (["-p", "x", "--method", "full", "--kv-dtype", "int4"], ["kv_dtype = 'int4'", "'k8v4'"]),
        (["-p", "x", "--method", "fier", "--kv-dtype", "int8"], ["kv_dtype int8", "offload = true"]),
        (
            ["-p", "x", "--method", "freekv", "--kv-dtype", "int4", "--set", "recall=copy"],
            ["kv_dtype int4", "ablations"],
        ),
        (["-p", "x", "--top-p", "0"], ["--top-p 0"]),
        (["-p", "x", "--min-p", "1.5"], ["--min-p 1.5"]),
        (["-p", "x", "--top-k", "-1"], ["--top-k -1"]),
        (["-p", "x", "--seed", "-1"], ["--seed -1"]),
        (["-p", "x", "--num-samples", "0"], ["--num-samples 0"]),
        (["-p", "x", "--max-tokens", "-5"], ["--max-tokens", "-5"]),
        (["-p", "x", "--chat-template-kwargs", "{"], ["--chat-template-kwargs", "bad JSON"]),
        (["-p", "x", "--chat-template-kwargs", "3"], ["--chat-template-kwargs", "'3'"]),
        (["-p", "x", "-o", "none/out.txt"], ["-o none/out.txt", "no directory none"]),
        (["-p", "x", "-o", "."], ["-o .", "is a directory"]),
        (["-p", "x", "--trace", "none/trace.json"], ["--trace none/trace.json"]),
        (["-p", "x", "--raw", "-s", "be brief"], ["--system", "--raw"]),
    ],
)
def test_bad_input_is_one_line_a_hint_and_exit_code_2(generate, tmp_path, arguments, words):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_bytes(b" \n")
    (tmp_path / "binary.dat").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes("grün".encode("latin-1"))
    (tmp_path / "bad.toml").write_text('method = "freekv"\nbudget 3\n')
    assert_refused(generate(*arguments, cwd=tmp_path), 2, *words)


def test_more_dense_layers_than_the_model_has_are_refused(generate):
    result = generate("-p", "x", "--method", "quest", "--set", "dense_layers=99")
    assert_refused(result, 2, "dense_layers = 99", "has 4 layers")


def test_a_context_that_will_not_fit_is_refused_before_the_work(generate):
    assert_refused(generate("-p", "x", "--max-tokens", "1000M", "--method", "freekv"), 3)


def test_pipelines_give_the_same_text_and_counts(generate, document):
    arguments = [document, *RETRIEVE, "--max-tokens", 6, "--json"]
    found = {
        pipeline: json.loads(generate(*arguments, "--pipeline", pipeline).stdout)["sequences"][0]
        for pipeline in ("auto", "blocking", "overlapped")
    }
    for name in ("token_ids", "correction", "cache"):
        assert found["auto"][name] == found["blocking"][name] == found["overlapped"][name]
    assert found["overlapped"]["cache"]["pages_requested"] > 0


def test_only_the_blocking_pipeline_audits(generate, document):
    result = generate(document, *RETRIEVE, "--max-tokens", 3, "--pipeline", "overlapped", "--audit", 2)
    assert_refused(result, 2, "--pipeline", "--audit looks into")


KEPT = ["--max-tokens", 60, "--temperature", "0.7", "--seed", 5, *RETRIEVE]


def test_a_killed_run_goes_on_from_its_checkpoint(warm, model, document, generate, tmp_path):
    """The text is that of a run that nobody killed, and a second --resume shows it again."""
    whole = json.loads(generate(document, "-p", "which fox?", *KEPT, "--json").stdout)["sequences"][0]
    kept = tmp_path / "kept"
    arguments = ["generate", "-m", model, document, "-p", "which fox?", *KEPT, "--checkpoint", kept, "--every", 4]
    with warm.start(*arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (kept / "segment-000004.safetensors").exists():
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
    assert not (kept / "report.json").exists()
    resumed = warm("generate", "--resume", kept, "--json")
    assert resumed.returncode == 0, resumed.stderr
    (again,) = json.loads(resumed.stdout)["sequences"]
    for clock in ("timing", "steps"):
        whole.pop(clock), again.pop(clock)
    assert again | {"source": ""} == whole | {"source": ""}
    shown = warm("generate", "--resume", kept)
    assert (shown.stdout.strip(), shown.returncode) == (whole["text"].strip(), 0)
    assert "has finished" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume", "nowhere"], "holds no journal.json"),
        (["--resume", ".", "--max-tokens", "9"], "--max-tokens cannot be given with --resume"),
        (["--resume", ".", "--method", "quest"], "--method cannot be given with --resume"),
        (["--resume", ".", "fox.txt"], "FILE cannot be given with --resume"),
        (["--resume", "."], "holds no journal.json"),
        (["fox.txt", "--checkpoint", "."], "holds something else, fox.txt"),
        (["fox.txt", "--checkpoint", "new", "--every", "0"], "--every"),
        (["fox.txt", "--checkpoint", "new", "--audit", "2"], "--audit"),
        (["fox.txt", "--checkpoint", "/proc/new"], "No such file"),
    ],
)
def test_what_cannot_be_kept_or_gone_on_with_is_one_line(warm, tmp_path, arguments, words):
    (tmp_path / "fox.txt").write_text(WORDS)
    assert_refused(warm("generate", "-q", *arguments, cwd=tmp_path), 2, words)


def test_without_a_method_short_documents_are_read_whole(generate, document):
    result = generate(document, "--max-tokens", 3, "--json")
    profile = json.loads(result.stdout)["profile"]
    assert profile["method"] == "full"
    assert profile["chosen"].startswith("no --method: using full attention, because reading all of")
    assert profile["chosen"] in " ".join(result.stderr.split())
    named = generate(document, "--max-tokens", 3, "--json", "--method", "freekv")
    assert json.loads(named.stdout)["profile"]["method"] == "freekv"
    assert "no --method" not in named.stderr
    audited = generate(document, "--max-tokens", 3, "--json", "--audit", 1)
    assert json.loads(audited.stdout)["profile"]["name"] == "retroinfer"
    assert "no --method: using retroinfer, because --audit is for retrieval" in " ".join(audited.stderr.split())


def test_without_a_method_the_form_of_kv_leaves_full_attention_and_other_settings_say_whose_they_are(
    generate, document
):
    narrow = generate(document, "--max-tokens", 3, "--json", "--kv-dtype", "int8")
    profile = json.loads(narrow.stdout)["profile"]
    assert (profile["method"], profile["settings"]["kv_dtype"]) == ("full", "int8")
    assert profile["chosen"] in " ".join(narrow.stderr.split())
    changed = generate(document, "--max-tokens", 3, "--json", "--budget", "1K")
    assert json.loads(changed.stdout)["profile"]["method"] == "retroinfer"
    assert "no --method: using retroinfer, the default where settings are given" in " ".join(changed.stderr.split())


def test_a_small_budget_scales_sink_and_window_with_a_notice(generate, document):
    result = generate(document, "--max-tokens", 3, "--json", "--profile", "freekv-long-input", "--budget", 128)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["profile"]["settings"]["budget"] == 128
    assert "budget 128 is small for sink 128 and window 128: using sink 16, window 16 and pages of 8" in result.stderr


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model without a chat template."""
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("base"), chat=False)


@pytest.mark.parametrize(
    ("arguments", "times"), [(("-p", "Who?", "-p", "When?"), 1), ((), 0), (("-p", "Who?", "--raw"), 0)]
)
def test_a_base_model_is_said_to_take_questions_as_plain_text(warm, base, document, arguments, times):
    result = warm("generate", "-m", base, document, *arguments, "--max-tokens", 2)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("a question (-p) is appended to the text as it is") == times


def test_a_question_alone_is_plain_text_to_a_base_model_too(warm, base):
    assert "has no chat template" in warm("generate", "-m", base, "-p", "Who?", "--max-tokens", 2).stderr
    assert "has no chat template" in warm("chat", "-m", base, "--max-tokens", 2, text="Who?\n").stderr


def test_the_demo_model_says_what_it_is_good_for(warm, document):
    result = warm("generate", document, "--max-tokens", 1)
    assert "only finds facts in documents like those in examples/" in " ".join(result.stderr.split())
    known = warm("generate", EXAMPLES / "needle-4k.txt", "--max-tokens", 1)
    assert "using the small demo model" in " ".join(known.stderr.split())


@pytest.fixture
def beyond(tmp_path):
    """A checkpoint whose tokenizer has a token that the model has no embedding for."""
    path = tiny_checkpoint("llama", tmp_path / "beyond")
    tokenizer = AutoTokenizer.from_pretrained(path)
    more = json.loads((path / "config.json").read_text())["vocab_size"] + 1 - len(tokenizer)
    tokenizer.add_tokens([f"<more{number}>" for number in range(max(more, 1))])
    tokenizer.save_pretrained(path)
    return path, f"<more{max(more, 1) - 1}>"


def test_a_token_that_the_model_lacks_is_refused(warm, beyond, tmp_path):
    model, token = beyond
    (tmp_path / "a.txt").write_text(f"the fox {token} runs")
    result = warm("generate", "-m", model, tmp_path / "a.txt", "--max-tokens", 2)
    assert_refused(result, 2, token, "is beyond the")
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "a", "prompt": f"the {token}"}) + "\n")
    checked = warm("batch", "-m", model, tmp_path / "in.jsonl", "--validate-only")
    assert checked.returncode == 4, checked.stderr
    assert "is beyond the" in " ".join(checked.stderr.split())
    asked = warm("chat", "-m", model, text=f"the {token}\nthe fox\n")
    assert "is beyond the" in " ".join(asked.stderr.split())
