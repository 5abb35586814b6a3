"""Streamed weights: the same tokens as with all of them in memory, in the memory of two layers."""

import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import gguf_files
import pytest
import torch
from families import FAMILIES, VOCAB, config_of, tiny_checkpoint, tiny_config, tiny_model, tiny_tokenizer
from safetensors.torch import save_file

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.kernels import _numba
from kvcli.kernels.packed_linear import PackedWeight
from kvcli.memory.disk_tier import DiskError, UnbufferedFile
from kvcli.models.loading import ModelSpec, load_model, open_checkpoint
from kvcli.models.streamed import check_place, layout_of
from kvcli.runtime.cpu_layers import WholeLayer
from kvcli.runtime.engine import engine
from kvcli.runtime.prefill import Branches
from kvcli.runtime.sampling import Sampling

CPU = torch.device("cpu")
LAYERS = 4
COUNT = 6
SMALL = {"budget": 48, "sink": 8, "window": 16, "page_size": 8}


def spec_of(path, weights_on="disk", **more):
    return ModelSpec(str(path), device="cpu", weights_on=weights_on, **more)


def drawn(length, seed=1, vocab=VOCAB):
    return torch.randint(6, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def tokens(model, method="full", length=70, count=COUNT, look=lambda ready: None, **settings):
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
    """The same model with all weights in memory, and with streamed ones."""
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
    there, streaming = both(tiny_checkpoint(family, tmp_path))
    assert tokens(streaming) == tokens(there)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_run_in_two_loops(dtype, tmp_path, monkeypatch):
    """The loops know the addresses of their weights, and wait for them like modules."""
    monkeypatch.setattr(_numba, "LEAST", 1)
    tiny_model("llama").to(dtype).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    there, streaming = both(tmp_path)
    loops, tried = [], WholeLayer._try
    monkeypatch.setattr(WholeLayer, "_try", lambda self, *args: loops.append(tried(self, *args)) or loops[-1])
    assert tokens(streaming) == tokens(there)
    assert [loop is not None for loop in loops] == [True] * 2 * LAYERS


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_16_bits_in_several_files(family, tied, tmp_path):
    config = tiny_config(family)
    config.tie_word_embeddings = tied
    tiny_model(family, config=config).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="50KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    there, streaming = both(tmp_path)
    assert any(isinstance(weight, PackedWeight) for weight in streaming.module.parameters())
    assert tokens(streaming) == tokens(there)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3_moe", "gemma3_text"])
def test_gguf_files(model_type, tmp_path):
    """Rows that llama.cpp's converter moved, and gate and up of experts that are one tensor."""
    path = tmp_path / "model.gguf"
    gguf_files.write(path, gguf_files.tiny(model_type, num_hidden_layers=LAYERS), "Q8_0", {"down": "F16"})
    there, streaming = both(path)
    assert tokens(streaming) == tokens(there)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_a_gguf_file_in_the_dtype_of_the_run(kind, dtype, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_files.write(path, gguf_files.tiny("llama", num_hidden_layers=LAYERS), kind)
    there, streaming = both(path, dtype=dtype)
    assert tokens(streaming) == tokens(there)


@pytest.mark.parametrize("method", ["freekv", "freekv_layer", "infinigen", "quest", "infllm", "offload", "streaming"])
def test_every_way_to_read_and_to_step(method, llama):
    there, streaming = both(llama)
    settings = SMALL if method in ("freekv", "freekv_layer", "quest") else {}
    assert tokens(streaming, method, **settings) == tokens(there, method, **settings)


def test_a_query_made_ahead_for_a_layer_in_the_buffer_of_the_one_that_runs(tmp_path):
    """Every fourth layer of a hybrid attends, and those share a buffer."""
    there, streaming = both(tiny_checkpoint("qwen3_next", tmp_path, layers=12))
    assert tokens(streaming, "freekv_layer", **SMALL) == tokens(there, "freekv_layer", **SMALL)


@torch.inference_mode()
def test_steps_between_the_parts_of_another_prompt(llama):
    """Meanwhile all layers are read, and the one that was reading a prompt once more."""

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

    there, streaming = both(llama)
    assert write(streaming) == write(there)


def test_from_host_memory(llama):
    """As on a GPU, on a CPU for which it is a copy."""
    checkpoint = open_checkpoint(spec_of(llama))
    streaming = replace(checkpoint.geometry.streaming, where="host")
    checkpoint = replace(checkpoint, geometry=replace(checkpoint.geometry, streaming=streaming))
    model = checkpoint.load()
    wanted = tokens(load_model(spec_of(llama, "device")))
    assert [tokens(model) for _ in range(2)] == [wanted] * 2  # the second time host memory has them already
    assert sum(map(len, layout_of(model.module).host)) == streaming.on_host == streaming.per_pass


@pytest.mark.parametrize("layers", [4, 7, 12])
def test_memory_is_that_of_what_stays_and_two_layers(layers, tmp_path):
    there, streaming = both(tiny_checkpoint("llama", tmp_path, layers=layers))
    geometry = streaming.geometry
    assert held(streaming) == geometry.held_bytes
    assert geometry.weight_bytes == there.geometry.weight_bytes == there.geometry.held_bytes
    a_layer = sum(weight.nbytes for weight in there.module.model.layers[0].parameters() if weight.dim() > 1)
    assert held(there) - held(streaming) == (layers - layers % 2 - 2) * a_layer
    assert len(geometry.streaming.layers) == layers - layers % 2  # an even number is streamed


def test_more_memory_lets_more_layers_stay(tmp_path):
    path = tiny_checkpoint("llama", tmp_path, layers=12)
    least, total = (open_checkpoint(spec_of(path, where)).geometry.held_bytes for where in ("disk", "device"))
    wanted = tokens(load_model(spec_of(path, "device")))
    streamed = []
    for memory in range(least, total, (total - least) // 4):
        model = load_model(spec_of(path, weights_memory=memory))
        assert held(model) == model.geometry.held_bytes <= memory
        assert tokens(model) == wanted
        streamed.append(len(model.geometry.streaming.layers))
    assert streamed == sorted(streamed, reverse=True)
    assert len({*streamed}) > 2
    assert layout_of(load_model(spec_of(path, weights_memory=total)).module) is None
    with pytest.raises(KvcliError, match="--weights-memory") as refused:
        open_checkpoint(spec_of(path, weights_memory=least - 1))
    assert refused.value.exit_code == ExitCode.WILL_NOT_FIT


def test_a_pass_reads_each_weight_once(llama):
    """A prompt is one pass, however many parts it has; each step is one more."""
    counted = []
    model = load_model(spec_of(llama))
    assert len(tokens(model, look=lambda ready: counted.append(ready.hook.streamed.taken()))) == COUNT
    layers, per_pass = len(model.geometry.streaming.layers), model.geometry.streaming.per_pass
    prefill, steps = counted
    assert prefill.nbytes == per_pass
    assert (
        abs(steps.nbytes - (COUNT - 1) * per_pass) <= 2 * per_pass // layers
    )  # the first layers of the next pass are read already
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


def interrupted_at(count):
    """Read weights, but for one read, which Ctrl-C ends."""
    read, left = UnbufferedFile.read_into, [count]

    def interrupted(file, memory, offset):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        read(file, memory, offset)

    return interrupted


def test_a_run_that_was_interrupted_goes_on(llama, monkeypatch):
    """As a chat does after Ctrl-C: what was read is read again."""
    model = load_model(spec_of(llama))
    wanted = tokens(model)
    monkeypatch.setattr(UnbufferedFile, "read_into", interrupted_at(60))
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


# Experts: only those that the router chooses are read.


def with_experts(path, kind="qwen3_moe", experts=16, dtype=torch.float32, whole=False, shard="1GB"):
    """A checkpoint with two of so many experts for a token; `whole`: with one tensor of all experts in the file."""
    if kind == "mixtral":
        config = config_of("MixtralConfig", num_local_experts=experts, num_experts_per_tok=2, intermediate_size=32)
    else:
        config = tiny_config(kind)
        config.num_experts, config.intermediate_size = experts, 32
    model = tiny_model(kind, config=config).to(dtype)
    model.save_pretrained(path, max_shard_size=shard)
    if whole:
        save_file({name: each.contiguous() for name, each in model.state_dict().items()}, path / "model.safetensors")
    tiny_tokenizer().save_pretrained(path)
    return path


def resident(model):
    """Bytes of the memory that the system has behind the addresses of experts."""
    rooms = [(room.data_ptr(), len(room)) for each in layout_of(model.module).experts for room in each.rooms.values()]
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(each, 16) for each in found.groups())
            counts = any(begin < at + size and at < end for at, size in rooms)
        elif counts and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def counted(model, **how):
    """The tokens of a run, and what was read for its prompt and for its steps."""
    found = []
    return tokens(model, look=lambda ready: found.append(ready.hook.streamed.taken()), **{"count": 12, **how}), *found


@pytest.mark.parametrize(
    ("kind", "dtype", "whole"),
    [
        ("qwen3_moe", "auto", False),
        ("mixtral", "auto", False),
        ("qwen3_moe", "bfloat16", False),
        ("qwen3_moe", "auto", True),
        ("gguf", "auto", False),
    ],
)
def test_only_chosen_experts_are_read(kind, dtype, whole, tmp_path):
    if kind == "gguf":
        path, experts = tmp_path / "model.gguf", 6
        made = gguf_files.tiny("qwen3_moe", num_hidden_layers=LAYERS)
        gguf_files.write(path, made, "Q8_0", {"down": "F16"})
    else:
        half = torch.bfloat16 if whole or dtype == "bfloat16" else torch.float32
        path, experts = with_experts(tmp_path, kind, dtype=half, whole=whole), 16
    there, streaming = both(path, dtype=dtype)
    how = streaming.geometry.streaming
    assert [each.number for each in how.experts] == [experts] * LAYERS
    assert how.cache == how.of_experts // 2  # those of two of four layers
    wanted = tokens(there, count=12)
    found, prefill, steps = counted(streaming)
    assert found == wanted
    assert prefill.nbytes <= how.per_pass + how.of_experts  # each weight is read once, whatever the chunks ask for
    assert steps.asked == 11 * LAYERS * 2
    assert 0 < steps.cached < steps.asked
    one = how.experts[0].nbytes
    experts_read = steps.nbytes - 11 * how.per_pass
    assert experts_read <= (steps.asked - steps.cached) * one + how.per_pass  # no other ones
    assert experts_read < 11 * how.of_experts / 3


def test_one_token_reads_what_its_router_asks_for(tmp_path):
    model = load_model(spec_of(with_experts(tmp_path)))
    how = model.geometry.streaming
    _, prefill, _ = counted(model, length=1, count=2)
    assert prefill.nbytes == how.per_pass + LAYERS * 2 * how.experts[0].nbytes
    assert (prefill.asked, prefill.cached) == (LAYERS * 2, 0)


def test_experts_take_no_more_memory_than_is_given(tmp_path):
    path = with_experts(tmp_path)
    least, total = (open_checkpoint(spec_of(path, where)).geometry.held_bytes for where in ("disk", "device"))
    wanted, shares, read = tokens(load_model(spec_of(path, "device")), count=12), [], []
    for memory in (least, (least + total) // 2, total - 1):
        model = load_model(spec_of(path, weights_memory=memory))
        how, seen = model.geometry.streaming, []
        assert model.geometry.held_bytes <= memory
        found, _, steps = counted(model)
        tokens(model, look=lambda ready, model=model, seen=seen: seen.append(resident(model)))
        assert found == wanted
        assert 0 < max(seen) <= how.cache
        shares.append(steps.cached / steps.asked)
        read.append(steps.nbytes)
    assert shares == sorted(shares)
    assert read == sorted(read, reverse=True)
    assert shares[-1] > 0.9  # there is room for all but one


def test_experts_stay_for_the_next_run(tmp_path):
    path = with_experts(tmp_path)
    total = open_checkpoint(spec_of(path, "device")).geometry.held_bytes
    model = load_model(spec_of(path, weights_memory=total - 1))
    first, *_ = counted(model)
    again, prefill, _ = counted(model)
    assert again == first
    assert prefill.cached > 0.9 * prefill.asked  # there is room for all but one


def test_experts_in_a_file_that_is_cut_off_or_read_after_an_interruption(tmp_path, monkeypatch):
    path = with_experts(tmp_path)
    model = load_model(spec_of(path))
    wanted = tokens(model)
    with monkeypatch.context() as within:
        within.setattr(UnbufferedFile, "read_into", interrupted_at(60))
        with pytest.raises(KeyboardInterrupt):
            tokens(model)
    assert tokens(model) == wanted
    (file,) = tmp_path.glob("*.safetensors")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(DiskError, match="ends too early"):
        tokens(model, length=200)


def test_experts_in_a_file_that_is_gone_for_a_while(tmp_path):
    """They are read once it is back, and not taken for read."""
    model = load_model(spec_of(with_experts(tmp_path, shard="30KB")))
    wanted = tokens(model)
    held = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    layers = {file for name, file in held.items() if ".experts." not in name}
    file = tmp_path / min(
        file for name, file in held.items() if ".layers.0.mlp.experts." in name and file not in layers
    )
    file.rename(tmp_path / "away")
    with pytest.raises(DiskError, match="No such file"):
        tokens(model)
    (tmp_path / "away").rename(file)
    assert tokens(model) == wanted


def test_experts_that_are_no_whole_pages_are_read_with_their_layer(tmp_path):
    config = tiny_config("qwen3_moe")
    config.moe_intermediate_size = 24
    tiny_model("qwen3_moe", config=config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    there, streaming = both(tmp_path)
    assert streaming.geometry.streaming.experts == ()
    assert tokens(streaming) == tokens(there)


def test_rows_share_a_pass_over_the_weights(llama):
    """A step of eight rows reads each weight once, and so do eight prompts that are read together."""
    model, profile = load_model(spec_of(llama)), resolve_profile("full")
    with torch.inference_mode(), engine(model, [100]) as ready:
        methods = [[ready.method(profile, ready.context(90, 10))] for _ in range(8)]
        prompts = [drawn(90, seed=row) for row in range(8)]
        logits = ready.prefill_branches(Branches((), prompts), methods)
        prefill = ready.hook.streamed.taken()
        sampling = Sampling(max_tokens=10, ignore_eos=True)
        rows = [ready.sequence(method, sampling, index=row) for row, (method,) in enumerate(methods)]
        for row, found in zip(rows, logits, strict=True):
            row.accept(found[0])
        for _ in ready.decode(rows):
            pass
        steps = ready.hook.streamed.taken()
    layers, per_pass = len(model.geometry.streaming.layers), model.geometry.streaming.per_pass
    assert prefill.nbytes == per_pass
    assert abs(steps.nbytes - 9 * per_pass) <= 2 * per_pass // layers
