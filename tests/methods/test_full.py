"""KV in narrow forms on a CPU, of all heads and of some, against float64 over what it holds; and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch
from driver import HK, SOFTMAX, D, H, Stream
from engine import new_method, run
from families import tiny_model
from narrow_oracle import rounded
from safetensors.torch import save_file

from kvcli.capacity.memory import kv_footprint
from kvcli.errors import KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.kernels.narrow_attention import TILE, TileFormat
from kvcli.kernels.quant import channel_sizes
from kvcli.kv import dense
from kvcli.methods.contract import Method
from kvcli.models.geometry import LayerGeometry, geometry_of

RECENT = 8
FORMS = ["bfloat16", "int8", "k8v4"]
LAYERS = [LayerGeometry(0, H, HK, D, None, True)]


@pytest.fixture(autouse=True)
def few_are_recent(monkeypatch):
    monkeypatch.setattr(dense, "RECENT", RECENT)


def held_of(k, v, held, prompt, recent=RECENT):
    """What full attention holds of k, v [Hk, n, d], whose first `prompt` tokens came at once."""
    sizes, found = channel_sizes(k[:, :prompt]), []
    for part, x in enumerate((k, v)):
        found.append(rounded(x, held, part, sizes))
        found[-1][:, x.shape[1] - recent :] = x[:, x.shape[1] - recent :]
    return found


def attention(q, k, v, scale):
    queries = q.double().view(len(k), -1, k.shape[2])
    return ((queries @ k.transpose(1, 2) * scale).softmax(-1) @ v).view(q.shape)


@pytest.mark.parametrize("held", FORMS)
def test_a_model_attends_to_what_is_held(held, monkeypatch):
    kv, attend, prefill, checked = {}, Method.attend, Method.prefill, []

    def prefilled(method, layer, k, v, q, softmax):
        kv[layer] = k.clone(), v.clone(), k.shape[1]
        prefill(method, layer, k, v, q, softmax)

    def attended(method, layer, q, k, v, softmax):
        before_k, before_v, first = kv[layer]
        keys, values = torch.cat((before_k, k[:, None]), 1), torch.cat((before_v, v[:, None]), 1)
        kv[layer] = keys, values, first
        out = attend(method, layer, q, k, v, softmax)
        exact = attention(q, *held_of(keys, values, held, first), softmax.scale)
        torch.testing.assert_close(out.double(), exact, atol=1e-4, rtol=1e-3)
        assert method.attended(layer).all()
        checked.append(layer)
        return out

    monkeypatch.setattr(Method, "prefill", prefilled)
    monkeypatch.setattr(Method, "attend", attended)
    prompt = torch.randint(3, 90, (75,), generator=torch.Generator().manual_seed(8)).tolist()
    (sequence,) = run(tiny_model("llama"), "full", {"kv_dtype": held}, [prompt], 12)
    assert len(checked) == 11 * len(sequence.method.caches)


@pytest.mark.parametrize("held", FORMS)
def test_tokens_taken_back_windows_and_copies(held):
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, HK, 150, D, generator=generator)
    q = torch.randn(H, 150, D, generator=generator)
    method = new_method("full", {"kv_dtype": held}, LAYERS, 150)
    for tiles in method.caches[0].tiles:
        tiles.fill_(255)
    method.prefill(0, k[:, :60], v[:, :60], q[:, :0], SOFTMAX)
    for at in range(60, 70):
        method.attend(0, q[:, at], -k[:, at], -v[:, at], SOFTMAX)
    method.caches[0].rewind(61)
    other = copy.deepcopy(method.caches[0])
    method.attend_window(0, q[:, 61:140], k[:, 61:140], v[:, 61:140], SOFTMAX)
    assert other.length == 61
    mixed = [torch.cat((x[:, :60], -x[:, 60:61], x[:, 61:]), 1) for x in (k, v)]
    found = method.attend_window(0, q[:, 140:142], k[:, 140:142], v[:, 140:142], SOFTMAX)
    keys, values = held_of(*(x[:, :142] for x in mixed), held, 60)
    for row, at in enumerate((140, 141)):
        exact = attention(q[:, at], keys[:, : at + 1], values[:, : at + 1], SOFTMAX.scale)
        torch.testing.assert_close(found[:, row].double(), exact, atol=1e-4, rtol=1e-3)
    for tiles, settled in zip(method.caches[0].tiles, method.caches[0].settled(), strict=True):
        assert settled[0] is tiles
        assert settled[1:] == (1, 142 // TILE, 1 + 142 // TILE)
    for recent, length in ((3, 137), (0, 120)):  # of the recent tokens, some are taken back, or all
        method.caches[0].rewind(length)
        found = method.attend(0, q[:, length], k[:, length], v[:, length], SOFTMAX)
        seen = [x[:, : length + 1] for x in mixed]
        exact = attention(q[:, length], *held_of(*seen, held, 60, recent + 1), SOFTMAX.scale)
        torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("held", FORMS)
@pytest.mark.parametrize(("name", "file"), [("duoattention", "gates"), ("razor", "heads")])
def test_heads_that_keep_everything_hold_it_in_the_form_and_others_as_computed(name, file, held, tmp_path):
    """Compared with full attention in this form, and with the method as computed."""
    save_file({file: torch.tensor([[1.0, 1.0], [0.0, 1.0]])}, tmp_path / "kept.safetensors")
    settings = {file: str(tmp_path / "kept.safetensors"), "sink": 3, "window": 13}
    settings |= {"retrieval": 0.75} if name == "duoattention" else {"window_part": 0.0}
    stream = Stream(75, steps=60, seed=4)
    methods = [("full", {"kv_dtype": held}), (name, settings), (name, {**settings, "kv_dtype": held})]
    for whole, computed, narrow in zip(*(stream.run(*each) for each in methods), strict=True):
        step, method, out = narrow
        assert torch.equal(out[H // HK :], whole[2][H // HK :]), f"output of step {step}"
        assert torch.equal(out[: H // HK], computed[2][: H // HK])
        assert not torch.allclose(out[H // HK :], computed[2][H // HK :], atol=1e-7, rtol=1e-7)
        assert torch.equal(method.attended(1), computed[1].attended(1))
    assert method.footprint().device < computed[1].footprint().device


@pytest.mark.parametrize("held", FORMS)
def test_bytes_are_planned_as_they_are_held(held):
    geometry = geometry_of(tiny_model("llama").config, torch.float32)
    profile = resolve_profile("full", overrides={"kv_dtype": held})
    planned = kv_footprint(profile, geometry, 90, torch.float32, place=torch.device("cpu"))
    (sequence,) = run(tiny_model("llama"), "full", {"kv_dtype": held}, [[5] * 78], 12)
    assert sequence.method.footprint().device >= planned.device  # the run has some tokens to spare
    layer = geometry.layers[0]
    of_a_tile = sum(TileFormat(held, layer.head_dim).bytes)
    beside = 4 * layer.head_dim + 2 * 4 * RECENT * layer.head_dim  # channel sizes, recent tokens
    assert planned.device == len(geometry.layers) * layer.num_kv_heads * (2 * of_a_tile + beside)


@pytest.mark.parametrize("name", ["full", "duoattention", "razor"])
def test_refusals(name):
    profile = resolve_profile(name, overrides={"kv_dtype": "int8"})
    geometry = geometry_of(tiny_model("llama").config, torch.float32)
    with pytest.raises(KvcliError, match=f"kv_dtype int8 of {name} is for a CPU") as refused:
        kv_footprint(profile, geometry, 90, torch.float32, place=torch.device("cuda"))
    assert "--method offload" in refused.value.hint


def test_latents_are_held_as_computed():
    latent = replace(LAYERS[0], latent=D // 2, num_kv_heads=1)
    with pytest.raises(KvcliError, match="kv_dtype int8: latents, "):
        new_method("full", {"kv_dtype": "int8"}, [latent], 9)
