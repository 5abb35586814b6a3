"""Weights that come to the device in turn: the same tokens as with all of them there, in the memory of two layers."""

import os
import threading
from dataclasses import replace

import gguf_files
import pytest
import torch
from families import FAMILIES, VOCAB, tiny_checkpoint, tiny_config, tiny_model, tiny_tokenizer

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.kernels.packed_linear import PackedWeight
from kvcli.memory.disk_tier import DiskError, UnbufferedFile
from kvcli.models.loading import ModelSpec, load_model, open_checkpoint
from kvcli.models.streamed import check_place, layout_of
from kvcli.runtime.cpu_layers import WholeLayer
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling

CPU = torch.device("cpu")
LAYERS = 4
SMALL = {"budget": 48, "sink": 8, "window": 16, "page_size": 8}


def spec_of(path, weights_on="disk", **more):
    return ModelSpec(str(path), device="cpu", weights_on=weights_on, **more)


def drawn(length, seed=1, vocab=VOCAB):
    return torch.randint(6, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def tokens(model, method="full", length=90, count=12, look=lambda ready: None, **settings):
    """What a model writes after a prompt drawn at random."""
    profile, sampling = resolve_profile(method, overrides=settings), Sampling(max_tokens=count, ignore_eos=True)
    with engine(model, [length + count]) as ready:
        made = ready.method(profile, ready.context(length, count))
        sequence = ready.sequence(made, sampling)
        sequence.accept(ready.prefill(drawn(length, vocab=model.geometry.vocab_size), [made], chunk=30)[0])
        look(ready)
        for _ in ready.decode([sequence]):
            pass
        look(ready)
    assert sequence.error is None
    return sequence.token_ids


def both(path, **more):
    """The same model with all weights there, and with weights that come in turn."""
    models = [load_model(spec_of(path, where, **more)) for where in ("device", "disk")]
    assert [layout_of(model.module) is None for model in models] == [True, False]
    return models


def held(model):
    """Bytes of memory that a model's weights refer to."""
    found = (weight.packed if isinstance(weight, PackedWeight) else weight for weight in model.module.parameters())
    memories = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}
    return sum(memories.values())


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_next", "deepseek_v3", "gemma3n", "zamba2", "llama4", "bamba"])
def test_every_kind_of_layer(family, tmp_path):
    there, in_turn = both(tiny_checkpoint(family, tmp_path))
    assert tokens(in_turn) == tokens(there)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_run_in_two_loops(dtype, tmp_path, monkeypatch):
    """The loops know the addresses of their weights, and wait for them like modules."""
    config = tiny_config("llama")
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 256, 320, LAYERS
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 4, 64
    tiny_model("llama", config=config).to(dtype).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    there, in_turn = both(tmp_path)
    loops, tried = [], WholeLayer._try
    monkeypatch.setattr(WholeLayer, "_try", lambda self, *args: loops.append(tried(self, *args)) or loops[-1])
    assert tokens(in_turn) == tokens(there)
    assert [loop is not None for loop in loops] == [True] * 2 * LAYERS


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_16_bits_in_several_files(family, tied, tmp_path):
    config = tiny_config(family)
    config.tie_word_embeddings = tied
    tiny_model(family, config=config).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="50KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    there, in_turn = both(tmp_path)
    assert any(isinstance(weight, PackedWeight) for weight in in_turn.module.parameters())
    assert tokens(in_turn) == tokens(there)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3_moe", "gemma3_text"])
def test_gguf_files(model_type, tmp_path):
    """Rows that llama.cpp's converter moved, and gate and up of experts that are one tensor."""
    path = tmp_path / "model.gguf"
    gguf_files.write(path, gguf_files.tiny(model_type, num_hidden_layers=LAYERS), "Q8_0", {"down": "F16"})
    there, in_turn = both(path)
    assert tokens(in_turn) == tokens(there)


@pytest.mark.parametrize("method", ["freekv", "freekv_layer", "infinigen", "quest", "infllm", "offload", "streaming"])
def test_every_way_to_read_and_to_step(method, llama):
    there, in_turn = both(llama)
    settings = SMALL if method in ("freekv", "freekv_layer", "quest") else {}
    assert tokens(in_turn, method, **settings) == tokens(there, method, **settings)


def test_a_query_made_ahead_for_a_layer_that_takes_the_place_of_the_one_that_runs(tmp_path):
    """Every fourth layer of a hybrid attends, and those share a place."""
    there, in_turn = both(tiny_checkpoint("qwen3_next", tmp_path, layers=12))
    assert tokens(in_turn, "freekv_layer", **SMALL) == tokens(there, "freekv_layer", **SMALL)


@torch.inference_mode()
def test_steps_between_the_parts_of_another_prompt(llama):
    """Meanwhile all layers pass, and the one that was reading a prompt comes again."""

    def write(model):
        profile, sampling = resolve_profile("full"), Sampling(max_tokens=20, ignore_eos=True)
        with engine(model, [110]) as ready:
            methods = [ready.method(profile, ready.context(90, 20)) for _ in range(2)]
            first, second = (ready.sequence(method, sampling, index=at) for at, method in enumerate(methods))
            first.accept(ready.prefill(drawn(90), [methods[0]], chunk=30)[0])
            steps = ready.decode([first])
            second.accept(ready.prefill(drawn(90, seed=2), [methods[1]], lambda _: next(steps, None), chunk=30)[0])
            for _ in ready.decode([second]):
                pass
        return first.token_ids, second.token_ids

    there, in_turn = both(llama)
    assert write(in_turn) == write(there)


def test_from_host_memory(llama):
    """As on a GPU, on a CPU for which it is a copy."""
    checkpoint = open_checkpoint(spec_of(llama))
    streaming = replace(checkpoint.geometry.streaming, where="host")
    checkpoint = replace(checkpoint, geometry=replace(checkpoint.geometry, streaming=streaming))
    model = checkpoint.load()
    wanted = tokens(load_model(spec_of(llama, "device")))
    assert [tokens(model) for _ in range(2)] == [wanted] * 2  # the second time host memory has them already
    assert sum(map(len, layout_of(model.module).host)) == streaming.on_host == streaming.a_pass


@pytest.mark.parametrize("layers", [4, 7, 12])
def test_memory_is_that_of_what_stays_and_two_layers(layers, tmp_path):
    there, in_turn = both(tiny_checkpoint("llama", tmp_path, layers=layers))
    geometry = in_turn.geometry
    assert held(in_turn) == geometry.held_bytes
    assert geometry.weight_bytes == there.geometry.weight_bytes == there.geometry.held_bytes
    a_layer = sum(weight.nbytes for weight in there.module.model.layers[0].parameters() if weight.dim() > 1)
    assert held(there) - held(in_turn) == (layers - layers % 2 - 2) * a_layer
    assert len(geometry.streaming.layers) == layers - layers % 2  # an even number passes


def test_more_memory_lets_more_layers_stay(tmp_path):
    path = tiny_checkpoint("llama", tmp_path, layers=12)
    least, total = (open_checkpoint(spec_of(path, where)).geometry.held_bytes for where in ("disk", "device"))
    wanted = tokens(load_model(spec_of(path, "device")))
    passing = []
    for memory in range(least, total, (total - least) // 4):
        model = load_model(spec_of(path, weights_memory=memory))
        assert held(model) == model.geometry.held_bytes <= memory
        assert tokens(model) == wanted
        passing.append(len(model.geometry.streaming.layers))
    assert passing == sorted(passing, reverse=True)
    assert len({*passing}) > 2
    assert layout_of(load_model(spec_of(path, weights_memory=total)).module) is None
    with pytest.raises(KvcliError, match="--weights-memory") as refused:
        open_checkpoint(spec_of(path, weights_memory=least - 1))
    assert refused.value.exit_code == ExitCode.WILL_NOT_FIT


def test_a_pass_reads_each_weight_once(llama):
    """A prompt is one pass, however many parts it has; each step is one more."""
    counted = []
    model = load_model(spec_of(llama))
    assert len(tokens(model, look=lambda ready: counted.append(ready.hook.streamed.taken()))) == 12
    layers, a_pass = len(model.geometry.streaming.layers), model.geometry.streaming.a_pass
    prefill, steps = counted
    assert prefill.nbytes == a_pass
    assert abs(steps.nbytes - 11 * a_pass) <= 2 * a_pass // layers  # the first layers of the next pass come already
    assert steps.waited > 0


def test_what_a_run_leaves_behind(llama):
    model = load_model(spec_of(llama))
    tokens(model)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]
    with pytest.raises(KvcliError, match="--weights-on"):  # not the weights of some other layer
        model.module(torch.tensor([drawn(5)]))


def test_gradients_need_all_weights(llama):
    model = load_model(spec_of(llama))
    with engine(model, [20]), pytest.raises(KvcliError, match="gradients"):
        model.module.model.layers[0](torch.zeros(1, 3, 64, requires_grad=True))


@pytest.mark.parametrize("cut", [0, 0.5])
def test_a_file_that_is_cut_off_meanwhile(cut, tmp_path):
    model = load_model(spec_of(tiny_checkpoint("llama", tmp_path)))
    (file,) = tmp_path.glob("*.safetensors")
    os.truncate(file, int(cut * file.stat().st_size))
    with pytest.raises(DiskError, match="ends too early") as failed:
        tokens(model)
    assert str(file) in str(failed.value)


def test_a_file_that_is_gone(tmp_path):
    model = load_model(spec_of(tiny_checkpoint("llama", tmp_path)))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(DiskError, match="No such file"):
        tokens(model)


def test_a_run_that_was_interrupted_goes_on(llama, monkeypatch):
    """As a chat does after Ctrl-C: what came is read again."""
    model = load_model(spec_of(llama))
    wanted, read, left = tokens(model), UnbufferedFile.read_into, [60]

    def interrupted(file, memory, offset):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        read(file, memory, offset)

    monkeypatch.setattr(UnbufferedFile, "read_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens(model)
    assert tokens(model) == wanted


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"weights_on": "host"}, "host memory is the device of a CPU"),
        ({"device": "cpu,cpu"}, "needs one device"),
        ({"load_format": "dummy"}, "dummy"),
        ({"weights": "int8"}, "int8"),
        ({"dtype": "bfloat16"}, "is F32, not BF16"),
        ({"weights_on": "device", "weights_memory": 1 << 30}, "--weights-memory needs --weights-on"),
    ],
)
def test_what_does_not_go_together(llama, more, words):
    with pytest.raises(KvcliError, match=words) as refused:
        open_checkpoint(replace(spec_of(llama), **more))
    assert refused.value.exit_code == ExitCode.USAGE
    assert refused.value.hint


def test_a_gpu_takes_weights_from_its_host():
    cuda = torch.device("cuda")
    check_place("host", None, [cuda])
    with pytest.raises(KvcliError, match="--weights-on disk serves a CPU"):
        check_place("disk", None, [cuda])


@pytest.mark.parametrize(("family", "layers"), [("gpt2", 4), ("llama", 3)])
def test_models_that_would_gain_nothing(family, layers, tmp_path):
    with pytest.raises(KvcliError, match="needs 4 layers"):
        open_checkpoint(spec_of(tiny_checkpoint(family, tmp_path, layers=layers)))
