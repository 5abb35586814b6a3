import json
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from families import REFUSED, tiny_checkpoint, tiny_config
from huggingface_hub import errors as hub
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from mutations import mutated_bytes, mutated_json
from safetensors.torch import load_file, save_file

from kvcli.errors import ExitCode, KvcliError
from kvcli.models.checkpoint import check_config, check_files, explain, notices, quiet
from kvcli.models.loading import ModelSpec, load_model, read_config
from kvcli.models.place import find

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints")
    tiny_checkpoint("llama", path / "whole", layers=1)
    tiny_checkpoint("llama", path / "sharded", layers=1, max_shard_size="100KB")
    return path


@pytest.fixture
def whole(pristine, tmp_path):
    return Path(shutil.copytree(pristine / "whole", tmp_path / "whole"))


@pytest.fixture
def sharded(pristine, tmp_path):
    return Path(shutil.copytree(pristine / "sharded", tmp_path / "sharded"))


def failure(name, **spec):
    with pytest.raises(KvcliError) as caught:
        load_model(ModelSpec(str(name), **{"device": "cpu", "offline": True, **spec}))
    error = caught.value
    assert "\n" not in error.what
    assert not error.what.endswith(".")
    return error


def truncate(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/such/dir", "~/no-such-dir", "a b", "org/name/extra", "tests/../none"]
)
def test_a_missing_directory_is_never_taken_for_a_hub_id(name):
    error = failure(name)
    assert error.exit_code == ExitCode.USAGE
    assert error.what == f"no such directory: {name}"
    assert "GGUF" in error.hint
    assert "config.json" in error.hint


def test_a_missing_directory_beside_others_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "models" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert failure("models/b", offline=False).what == "no such directory: models/b"
    assert find("models/a", dummy=False) == Path("models/a")


def test_hub_ids_are_left_to_the_hub():
    assert find("org/name-1.0_x", dummy=False) is None
    assert find("gpt2", dummy=False) is None


def test_empty_directory(tmp_path):
    error = failure(tmp_path)
    assert error.exit_code == ExitCode.USAGE
    assert error.what == f"{tmp_path} is empty"


def test_file_instead_of_directory(whole):
    error = failure(whole / "config.json")
    assert error.exit_code == ExitCode.USAGE
    assert "is a file" in error.what


def test_directory_without_config(whole):
    (whole / "config.json").unlink()
    error = failure(whole)
    assert error.exit_code == ExitCode.USAGE
    assert "no config.json" in error.what


@pytest.mark.parametrize("text", ["", '{"model_type": "llama",', "\x00\x01", "[1, 2]"])
def test_broken_config(whole, text):
    (whole / "config.json").write_text(text)
    error = failure(whole)
    assert error.exit_code == ExitCode.RUNTIME
    assert str(whole / "config.json") in error.what
    assert "JSON" in error.what


def test_config_is_a_pointer(whole):
    (whole / "config.json").write_text(LFS_POINTER)
    error = failure(whole)
    assert "Git LFS pointer" in error.what
    assert "git lfs pull" in error.hint


@pytest.mark.parametrize("content", [{"hidden_size": 4}, {"model_type": "no_such_model"}])
def test_unknown_architecture(whole, content):
    (whole / "config.json").write_text(json.dumps(content))
    error = failure(whole)
    assert error.exit_code == ExitCode.USAGE
    assert transformers.__version__ in error.what


def test_custom_code_is_never_run(whole):
    (whole / "configuration_own.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    (whole / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    error = failure(whole)
    assert error.exit_code == ExitCode.USAGE
    assert "custom code" in error.what


@pytest.mark.parametrize("family", REFUSED)
def test_refused_models_are_refused_before_their_weights_are_looked_at(family, tmp_path):
    config, word = REFUSED[family]
    config().save_pretrained(tmp_path)
    error = failure(tmp_path)
    assert error.exit_code == ExitCode.USAGE
    assert word in error.what


def test_no_weights(whole):
    (whole / "model.safetensors").unlink()
    error = failure(whole)
    assert error.exit_code == ExitCode.USAGE
    assert "no weights" in error.what


def test_missing_shard(sharded):
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    error = failure(sharded)
    assert error.exit_code == ExitCode.RUNTIME
    assert str(shards[1]) in error.what


@pytest.mark.parametrize("keep", [0, 5, 40, -1, -1000])
def test_truncated_weights(sharded, keep):
    shard = max(sharded.glob("model-*.safetensors"), key=lambda path: path.stat().st_size)
    truncate(shard, keep if keep >= 0 else shard.stat().st_size + keep)
    error = failure(sharded)
    assert error.exit_code == ExitCode.RUNTIME
    assert str(shard) in error.what
    assert "truncated" in error.what or "damaged" in error.what


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_pointer_instead_of_file(whole, file):
    (whole / file).write_text(LFS_POINTER)
    error = failure(whole)
    assert error.exit_code == ExitCode.RUNTIME
    assert "Git LFS pointer" in error.what
    assert str(whole) in error.hint


def test_pointer_instead_of_a_shard(sharded):
    min(sharded.glob("model-*.safetensors")).write_text(LFS_POINTER)
    assert "Git LFS pointer" in failure(sharded).what


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}'])
def test_broken_index(sharded, text):
    index = sharded / "model.safetensors.index.json"
    index.write_text(text)
    error = failure(sharded)
    assert error.exit_code == ExitCode.RUNTIME
    assert str(index) in error.what


def test_header_of_garbage(whole):
    (whole / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"\xff\xfe{}" + b"\0" * 64)
    assert "damaged" in failure(whole).what


def test_missing_weight_is_never_made_up(whole):
    weights = load_file(whole / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    del weights[name]
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    error = failure(whole)
    assert error.exit_code == ExitCode.RUNTIME
    assert name in error.what
    assert "1 of its weights" in error.what


def test_weight_of_another_shape_is_never_made_up(whole):
    weights = load_file(whole / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name][:-1].contiguous()
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    error = failure(whole)
    assert error.exit_code == ExitCode.RUNTIME
    assert f"{name}: [95, 64], not [96, 64]" in error.what


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_missing_tokenizer_is_noticed(family, tmp_path):
    # Without files, transformers gives qwen2 and gemma3 an empty tokenizer and no error.
    tiny_checkpoint(family, tmp_path, layers=1)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    error = failure(tmp_path)
    assert error.exit_code == ExitCode.RUNTIME
    assert "no usable tokenizer" in error.what
    assert "tokenizer.json" in error.hint


def test_broken_tokenizer(whole):
    (whole / "tokenizer.json").write_text('{"version": ')
    assert str(whole / "tokenizer.json") in failure(whole).what
    (whole / "tokenizer.json").write_text('{"version": "1.0"}')
    assert "no usable tokenizer" in failure(whole).what


def test_offline_and_not_in_the_cache():
    error = failure("no-such-org/no-such-model")
    assert error.exit_code == ExitCode.RUNTIME
    assert "not in the local hub cache" in error.what


@pytest.mark.parametrize(
    ("kind", "word", "code"),
    [
        (hub.GatedRepoError, "gated", ExitCode.RUNTIME),
        (hub.RepositoryNotFoundError, "no model on the hub", ExitCode.USAGE),
        (hub.LocalEntryNotFoundError, "cannot be reached", ExitCode.RUNTIME),
        (hub.OfflineModeIsEnabled, "local hub cache", ExitCode.RUNTIME),
    ],
)
def test_what_the_hub_says_is_explained(kind, word, code):
    cause = kind.__new__(kind)
    Exception.__init__(cause, "from the hub")
    try:
        raise OSError("wrapped\nin two lines") from cause
    except OSError as error:
        told = explain(error, "org/name", offline=False)
    assert word in told.what
    assert told.exit_code == code
    assert told.hint


def test_other_errors_keep_their_message_in_one_line():
    told = explain(RuntimeError("first\nsecond"), "x", offline=False)
    assert told.what == "cannot load x: first second"
    assert told.exit_code == ExitCode.RUNTIME
    assert (
        explain(RuntimeError("DefaultCPUAllocator: not enough memory"), "x", False).exit_code == ExitCode.WILL_NOT_FIT
    )
    assert "not installed" in explain(ImportError("no tiktoken"), "x", False).what


def test_loading_says_nothing(whole, capfd):
    load_model(ModelSpec(str(whole), device="cpu"))
    out = capfd.readouterr()
    assert out.out == ""
    assert out.err == ""


def settings():
    log = transformers.logging
    bars = log.is_progress_bar_enabled(), are_progress_bars_disabled()
    return log.get_verbosity(), huggingface_hub.logging.get_verbosity(), bars, list(warnings.filters)


def fail_quietly():
    with quiet():
        assert settings()[2] == (False, True)
        raise ValueError("boom")


def test_quiet_gives_everything_back():
    before = settings()
    with pytest.raises(ValueError, match="boom"):
        fail_quietly()
    assert settings() == before


def test_whole_checkpoints_pass(whole, sharded):
    for path in (whole, sharded):
        check_config(path)
        check_files(path)
        assert read_config(ModelSpec(str(path))).model_type == "llama"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"head_dim": 0}, "head_dim 0"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_attention_heads": 10**30}, "num_attention_heads"),
        ({"hidden_act": "swoosh"}, "hidden_act 'swoosh': is not an activation"),
        ({"dtype": "float99"}, "dtype 'float99': is not a torch dtype"),
        ({"rope_parameters": "linear"}, "rope_parameters 'linear'"),
        ({"text_config": {"hidden_size": "wide"}}, "text_config.hidden_size 'wide'"),
    ],
)
def test_a_bad_value_in_the_config_is_named(whole, change, words):
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | change))
    error = failure(whole)
    assert str(whole / "config.json") in error.what
    assert words in error.what


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_may_have_the_name_of_its_module(whole, key):
    config = json.loads((whole / "config.json").read_text())
    del config["dtype"]
    (whole / "config.json").write_text(json.dumps(config | {key: "torch.bfloat16"}))
    assert read_config(ModelSpec(str(whole))).dtype == torch.bfloat16
    assert load_model(ModelSpec(str(whole), device="cpu")).dtype == torch.float32
    tiny = tiny_config("gemma3_images").to_dict()
    tiny["text_config"][key] = tiny[key] = "torch.float32"
    (whole / "config.json").write_text(json.dumps(tiny, default=str))
    assert read_config(ModelSpec(str(whole))).get_text_config().dtype == torch.float32


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn", "nonsense"])
@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_an_attention_implementation_in_the_config_is_ignored_with_a_notice(whole, key, name):
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {key: name}))
    load_model(ModelSpec(str(whole), device="cpu"))
    (notice,) = notices(whole)
    assert name in notice


def test_an_ordinary_checkpoint_has_no_notices(whole):
    assert notices(whole) == notices(None) == []


def test_an_adapter_is_never_left_out_in_silence(whole):
    (whole / "adapter_config.json").write_text("{}")
    error = failure(whole)
    assert error.exit_code == ExitCode.USAGE
    assert "LoRA adapter" in error.what
    assert "merge" in error.hint


def test_a_panic_of_the_tokenizer_library_is_one_line(whole, monkeypatch):
    panic = type("PanicException", (BaseException,), {})

    def fail(*_, **__):
        raise panic("index out of bounds")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    assert "no usable tokenizer (index out of bounds)" in failure(whole).what


def test_the_variable_that_keeps_the_hub_away_is_named(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE=1" in failure("no-such-org/no-such-model", offline=False).hint


@pytest.mark.parametrize(
    "file",
    ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"],
)
def test_mutated_files_load_or_are_refused(pristine, tmp_path, file):
    source = pristine / ("sharded" if "index" in file else "whole")
    data = (source / file).read_bytes()
    for seed in range(20):
        path = Path(shutil.copytree(source, tmp_path / f"{seed}"))
        if file.endswith(".json") and seed % 4:
            (path / file).write_text(json.dumps(mutated_json(json.loads(data), seed)))
        else:
            (path / file).write_bytes(mutated_bytes(data[:2000], seed) + data[2000:])
        with suppress(KvcliError):
            load_model(ModelSpec(str(path), device="cpu", offline=True))
        shutil.rmtree(path)
