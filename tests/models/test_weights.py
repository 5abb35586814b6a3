"""Weights that are quantised, on loading or in the files: what is loaded, how large it is, and what is refused."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
import transformers
from families import VOCAB, tiny_checkpoint, tiny_model
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import kvcli
from kvcli.capacity import pipelines
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.kernels.packed_linear import PackedWeight
from kvcli.models import weights as weight_form
from kvcli.models.geometry import geometry_of
from kvcli.models.loading import ModelSpec, fingerprint, load_model, open_checkpoint, read_config
from kvcli.models.weights import form_of, installed, is_plain, quantise, settle
from kvcli.runtime.gpu.fused import fused_layers
from kvcli.runtime.linear import cpu_linears

IDS = torch.randint(3, VOCAB, (1, 37), generator=torch.Generator().manual_seed(0))
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LIBRARIES = {"int8": "bitsandbytes", "int4": "bitsandbytes", "fp8": "torchao"}
ERRORS = {"int8": 0.1, "int4": 0.5, "fp8": 0.25}
"""How far logits of a tiny random model may be off, as a part of them."""
ORDERED = {"int8": 0, "int4": 0.02, "fp8": 0}
"""How much of its bytes a library may save by what it makes of weights at the first product, in such a model."""
BLOCK = 128  # rows and columns of weights of FP8 that share a scale
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def needs(package):
    return pytest.mark.skipif(not installed(package), reason=f"{package} is not installed (the extra kvcli[weights])")


ON_LOADING = [pytest.param(name, marks=needs(library)) for name, library in LIBRARIES.items()]


def checkpoint(folder, how=None, change=lambda name, weight: {name: weight}, family="llama"):
    """A tiny checkpoint, each weight of which is changed, with a quantization_config."""
    tiny_checkpoint(family, folder, seed=3)
    stored = load_file(folder / "model.safetensors")
    changed = {name: weight for each, whole in stored.items() for name, weight in change(each, whole).items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    if how is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    return ModelSpec(str(folder), device="cpu")


def parts(weight):
    """The tensors that one of torchao is made of, or the tensor itself."""
    library = type(weight).__module__.startswith("torchao")
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]] if library else [weight]


def held(model: nn.Module) -> int:
    """Bytes of all weights with their scales, wherever a library keeps these."""
    tensors = [part for weight in model.parameters() for part in parts(weight)]
    for module in model.modules():
        for place in (module, getattr(module, "state", None), getattr(module, "weight", None)):
            tensors += [getattr(place, "SCB", None), getattr(getattr(place, "quant_state", None), "absmax", None)]
    return sum({each.data_ptr(): each.nbytes for each in tensors if each is not None}.values())


def off(model, family="llama"):
    """How far logits are off those of the model that was not quantised, as a part of them."""
    wanted = tiny_model(family, seed=3)(IDS).logits
    return float((model.module(IDS).logits - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("weights", ON_LOADING)
def test_weights_are_quantised_on_loading_and_take_the_bytes_that_were_counted(weights, tmp_path):
    spec = checkpoint(tmp_path)
    opened = open_checkpoint(ModelSpec(spec.name, device="cpu", weights=weights))
    before = fingerprint(opened)
    model = opened.load()
    assert held(model.module) == pytest.approx(model.geometry.weight_bytes, rel=ORDERED[weights])
    assert model.geometry.weight_bytes < geometry_of(opened.config, torch.float32).weight_bytes
    assert 0 < off(model) < ERRORS[weights]
    assert fingerprint(opened) == before != fingerprint(open_checkpoint(spec))
    assert model.as_dict()["weights"] == weights
    assert not any(weight.requires_grad for weight in model.module.parameters())


@pytest.mark.parametrize("weights", ON_LOADING)
def test_a_made_up_model_is_quantised_like_one_that_is_read(weights, tmp_path):
    spec = checkpoint(tmp_path)
    read = load_model(ModelSpec(spec.name, device="cpu", weights=weights))
    shape = str(tmp_path / "config.json")
    made = load_model(ModelSpec(shape, device="cpu", load_format="dummy", weights=weights))
    layers = {name: (type(module), is_plain(module)) for name, module in read.module.named_modules()}
    assert layers == {name: (type(module), is_plain(module)) for name, module in made.module.named_modules()}
    assert held(made.module) == held(read.module)
    assert made.geometry.weight_bytes == read.geometry.weight_bytes
    assert bool(made.module(IDS).logits.isfinite().all())


@pytest.mark.parametrize("weights", ON_LOADING)
def test_what_transformers_saves_quantised_loads_and_generates_as_it_is(weights, tmp_path):
    model = load_model(ModelSpec(checkpoint(tmp_path).name, device="cpu", weights=weights))
    model.module.save_pretrained(tmp_path)
    again = load_model(ModelSpec(str(tmp_path), device="cpu"))
    assert torch.equal(again.module(IDS).logits, model.module(IDS).logits)
    assert again.geometry.form.stored
    assert again.geometry.form.made is weight_form.ON_LOADING[weights]
    assert again.geometry.weight_bytes == pytest.approx(held(again.module), rel=0.03)
    # From config.json alone the same is counted, but for what files hold beside.
    alone = geometry_of(again.module.config, torch.float32, again.geometry.form)
    assert alone.weight_bytes == pytest.approx(again.geometry.weight_bytes, rel=0.03)
    loaded = kvcli.load(str(tmp_path), device="cpu")
    answer = loaded.generate("the quick brown fox " * 20, raw=True, max_tokens=8, method="freekv")
    assert answer.text == loaded.generate("the quick brown fox " * 20, raw=True, max_tokens=8, method="full").text
    with pytest.raises(KvcliError, match=r"are stored as .*, so --weights int8 has no effect") as refused:
        open_checkpoint(ModelSpec(str(tmp_path), device="cpu", weights="int8"))
    assert refused.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    "lost", ["layers.1.self_attn.k_proj", "layers.1.self_attn.k_proj.SCB", "lm_head", "model.norm.weight"]
)
@needs("bitsandbytes")
def test_a_quantised_checkpoint_that_lacks_a_tensor_is_refused(lost, tmp_path):
    load_model(ModelSpec(checkpoint(tmp_path).name, device="cpu", weights="int8")).module.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in stored.items() if lost not in name}
    assert len(kept) < len(stored)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KvcliError, match="lacks") as refused:
        load_model(ModelSpec(str(tmp_path), device="cpu"))
    assert "download them again" in refused.value.hint


def in_fp8(name, weight):
    """FP8 by blocks, as DeepSeek-V3 stores it."""
    if not name.endswith("proj.weight"):
        return {name: weight}
    rows, columns = weight.shape
    assert max(rows, columns) <= BLOCK
    scale = weight.abs().amax()[None, None] / torch.finfo(torch.float8_e4m3fn).max
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def in_mxfp4(name, weight):
    """Experts [E, in, out] in MXFP4, as gpt-oss stores them: two numbers a byte, a power of two for 32 of them."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: weight}
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))  # [E, out, in / 32, 32]
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = ((groups / exponent.exp2()[..., None])[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    return {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{name}_scales": (exponent + 127).byte()}


def in_channels(name, weight):
    """8-bit integers with a scale a row, as compressed-tensors stores them."""
    if not name.endswith("proj.weight"):
        return {name: weight}
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
WIDENED = {
    "fp8": (in_fp8, "llama", {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}),
    "mxfp4": (in_mxfp4, "gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "self_attn"]}),
    "compressed-tensors": (
        in_channels,
        "llama",
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": CHANNELS}},
        },
    ),
}


@pytest.mark.parametrize(
    "form",
    ["fp8", "mxfp4", pytest.param("compressed-tensors", marks=needs("compressed-tensors"))],
)
def test_a_form_that_nothing_here_multiplies_by_is_made_wide_and_counted_so(form, tmp_path):
    change, family, how = WIDENED[form]
    spec = checkpoint(tmp_path, how, change, family)
    if form == "compressed-tensors" and Version(transformers.__version__) < Version("5.23"):
        with pytest.raises(KvcliError, match="lacks") as refused:  # it packs this form's weights, which are not packed
            load_model(spec)
        assert "transformers is too old for compressed-tensors" in refused.value.hint
        return
    model = load_model(spec)
    assert model.as_dict()["weights"] == f"{form}, widened"
    assert {weight.dtype for weight in model.module.parameters()} == {torch.float32}
    assert held(model.module) == model.geometry.weight_bytes
    before = dict(tiny_model(family, seed=3).named_parameters())
    errors = [float((weight - before[name]).norm() / before[name].norm()) for name, weight in named(model.module)]
    assert 0 < max(errors) < (0.15 if form == "mxfp4" else 0.05)
    if form != "compressed-tensors":  # nothing multiplies by that anywhere
        there = form_of(read_config(spec), "auto", CUDA, here=False)
        assert not there.widened
        assert geometry_of(read_config(spec), torch.float32, there).weight_bytes < model.geometry.weight_bytes


def named(model):
    chosen = ("proj.weight", "experts.gate_up_proj", "experts.down_proj")
    return [(name, weight) for name, weight in model.named_parameters() if name.endswith(chosen)]


@needs("bitsandbytes")
def test_the_projection_of_latents_is_plain_and_sides_that_do_not_fit_blocks_are_spared(tmp_path):
    spec = checkpoint(tmp_path, family="deepseek_v3")
    model = load_model(ModelSpec(spec.name, device="cpu", weights="int4"))
    modules = dict(model.module.named_modules())
    assert is_plain(modules["model.layers.0.self_attn.kv_b_proj"])
    assert not is_plain(modules["model.layers.0.mlp.up_proj"])  # [96, 64]
    assert is_plain(modules["model.layers.0.self_attn.o_proj"])  # [64, 48]
    assert held(model.module) == pytest.approx(model.geometry.weight_bytes, rel=0.01)
    answer = kvcli.load(spec.name, device="cpu", weights="int4").generate(
        "the quick brown fox " * 20, raw=True, max_tokens=8, method="freekv", budget=64, sink=16, window=16, page_size=8
    )
    assert len(answer.to_dict()["sequences"][0]["token_ids"]) == 8


@needs("bitsandbytes")
def test_latents_that_are_stored_quantised_are_attended_to(tmp_path):
    spec = checkpoint(tmp_path, family="deepseek_v3")
    loaded = load_model(ModelSpec(spec.name, device="cpu"))
    how = weight_form.ON_LOADING["int8"].arguments(torch.float32)["quantization_config"]
    stored = type(loaded.module).from_pretrained(tmp_path, quantization_config=how, device_map={"": CPU})
    assert not is_plain(stored.model.layers[0].self_attn.kv_b_proj)
    stored.save_pretrained(tmp_path)
    again = load_model(spec)
    made, before = (each.model.layers[0].self_attn.kv_b_proj.weight for each in (again.module, loaded.module))
    assert made.dtype == before.dtype
    assert float((made - before).norm() / before.norm()) < 0.02
    assert off(again, "deepseek_v3") < 0.15


@pytest.mark.parametrize("weights", ON_LOADING)
def test_fewer_kernels_leave_products_to_the_library(weights, tmp_path):
    model = load_model(ModelSpec(checkpoint(tmp_path).name, device="cpu", weights=weights)).module
    with torch.inference_mode():
        wanted = model(IDS, use_cache=False).logits
        with fused_layers(model), cpu_linears(model):
            changed = {name for name, module in model.named_modules() if "forward" in vars(module)}
            torch.testing.assert_close(model(IDS, use_cache=False).logits, wanted, rtol=1e-3, atol=1e-3)
    assert "model.layers.0.input_layernorm" in changed
    assert "lm_head" in changed
    assert not [name for name in changed if name.endswith(("q_proj", "k_proj", "v_proj", "up_proj"))]


@pytest.mark.parametrize(("weights", "pipeline"), [("int8", "blocking"), ("int4", "overlapped"), ("fp8", "overlapped")])
def test_steps_are_captured_where_a_graph_can_hold_the_products(weights, pipeline, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_form, "installed", lambda _: True)
    opened = open_checkpoint(ModelSpec(checkpoint(tmp_path).name, device="cpu", weights=weights))
    opened, profile = replace(opened, device=CUDA), resolve_profile("freekv")
    assert pipelines.choose("auto", profile, opened) == pipeline
    if pipeline == "blocking":
        with pytest.raises(KvcliError, match="a CUDA graph cannot hold the products with int8 weights"):
            pipelines.choose("overlapped", profile, opened)


@pytest.mark.parametrize(
    ("how", "package", "extra"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "gptqmodel and optimum", "gptq"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "gptqmodel", "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", "weights"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors", "weights"),
        ({"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}, "torchao", "weights"),
        (None, "bitsandbytes", "weights"),
    ],
)
def test_a_package_that_is_absent_is_one_line_with_the_extra_to_install(how, package, extra, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_form, "installed", lambda _: False)
    spec = checkpoint(tmp_path, how)
    with pytest.raises(KvcliError) as refused:
        open_checkpoint(ModelSpec(spec.name, device="cpu", weights="auto" if how else "int4"))
    assert refused.value.exit_code == ExitCode.USAGE
    assert f"need {package}, which is not installed" in refused.value.what
    assert "\n" not in refused.value.what
    assert refused.value.hint == f"pip install 'kvcli[{extra}]'"


def test_weights_of_other_forms_are_counted_from_config_json(tmp_path):
    spec = checkpoint(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    config = read_config(spec)
    whole = geometry_of(config, torch.bfloat16)
    form = form_of(config, "auto", CUDA, here=False)
    assert form.made is None
    found = geometry_of(config, torch.bfloat16, form)
    numbers = whole.parts.counts.projections + whole.parts.counts.mlp - 4 * 2 * 64  # norms stay
    assert whole.weight_bytes - found.weight_bytes == numbers * (16 - 4 - 20 / 32) / 8
    assert found.parts.head == whole.parts.head
    assert found.parts.counts == whole.parts.counts


@pytest.mark.parametrize("rows", [8, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", ON_LOADING)
def test_a_product_takes_what_is_planned_beside_its_weight(weights, dtype, rows):
    """What a library makes wide on its way, as torch's profiler sees it; copies of the input are small beside it."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 50}
    model, form = LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype), weight_form.ON_LOADING[weights]
    quantise(model, form, dtype)
    settle(model, dtype)
    model.train(weights == "int4")  # else some processors multiply by four bits, and nothing is made wide
    up, x = model.model.layers[0].mlp.up_proj, torch.randn(1, rows, 256, dtype=dtype)
    with torch.inference_mode():
        up(x)  # the first one takes more
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            up(x)
    events = [each.nbytes() for each in found.profiler.kineto_results.events() if each.name() == "[memory]"]
    most, out = max(itertools.accumulate(events)), rows * 1024
    as_it_is = weights == "int8" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    planned = form.beside(0 if as_it_is else 1024 * 256, out, CPU, dtype.itemsize) + out * dtype.itemsize
    assert planned == pytest.approx(most, rel=0.12)
    assert weight_form.ON_LOADING["int8"].beside(1024, out, CUDA, 2) == 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2", "qwen3"])  # qwen2 has biases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_stay_so_on_a_cpu(family, dtype, tmp_path):
    """The same numbers as in fp32, in half of the bytes."""
    tiny_checkpoint(family, tmp_path)
    tiny_model(family).to(dtype).save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path), device="cpu")
    halves, wide = load_model(spec), load_model(replace(spec, dtype="float32"))
    packed = [weight for weight in halves.module.parameters() if isinstance(weight, PackedWeight)]
    assert packed
    assert halves.geometry.weight_bytes == sum(weight.nbytes for weight in halves.module.parameters())
    assert (halves.geometry.weights, halves.dtype, wide.dtype) == ("auto", torch.float32, torch.float32)
    for (name, one), (_, other) in zip(halves.module.named_parameters(), wide.module.named_parameters(), strict=True):
        assert torch.equal(one.unpack() if isinstance(one, PackedWeight) else one, other), name
    ids = torch.randint(6, VOCAB, (1, 37), generator=torch.Generator().manual_seed(0))
    found, wanted = (model.module(ids, use_cache=False).logits for model in (halves, wide))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert vars(halves.module.generation_config) == vars(wide.module.generation_config)
