"""What is planned for a long prefill against what one takes on a fake CUDA device, and a million tokens of an 8B model.

What a prefill takes is the same for every chunk and layer, or grows with the tokens: it is run on a few of each, with
the sizes beyond which hidden states and KV are treated as a long prompt's set so low that it is one.
"""

import functools

import pytest
import torch
from fake_prefill import Prefilled

from kvcli.capacity import memory
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.geometry import geometry_of
from kvcli.models.loading import ModelSpec, read_config
from kvcli.runtime import layer_major as hidden_states
from kvcli.runtime import prefill as prefill_offloader

CUDA, GIB = torch.device("cuda"), 1 << 30
CHUNK, LAYERS, MORE = 4096, 4, 256  # an odd number of layers takes another buffer with the first step
MILLION = 1 << 20
SETTINGS = {"freekv": {"dense_layers": 0}, "arkvale": {"dense_layers": 0}}


def config_of(layers=None):
    config = read_config(ModelSpec("llama-3-8b-1m", load_format="dummy"))
    config.num_hidden_layers = layers or config.num_hidden_layers
    return config


def profile(name):
    return resolve_profile(method=name, overrides=SETTINGS.get(name, {}))


def planned(name, length, layers=None):
    geometry = geometry_of(config_of(layers), torch.bfloat16)
    return memory.need(profile(name), geometry, torch.bfloat16, [length], MORE, 1, device=CUDA)


def in_prefill(need):
    """Bytes beside the weights while the prompt is read."""
    return need.kv.device + sum(need.prefill.device.values()) - need.prefill.away


def at_the_end(need):
    """Bytes beside the weights when everything is back on the device."""
    return need.kv.device + need.prefill.device["rotary tables"]


@pytest.fixture
def long_prompts(monkeypatch):
    """A few chunks are a long prompt."""
    monkeypatch.setattr(hidden_states, "STREAMED_BYTES", 0)
    monkeypatch.setattr(prefill_offloader, "ALONE_BYTES", 0)


@pytest.mark.usefixtures("long_prompts")
@pytest.mark.parametrize("name", ["freekv", "offload", "full"])
def test_a_prefill_takes_what_is_planned_and_waits_for_nothing(name, monkeypatch):
    config, chunks, taken, said = config_of(LAYERS), (3, 5), [], []
    for count in chunks:
        with monkeypatch.context() as patch:
            taken.append(Prefilled(config, profile(name), count * CHUNK, MORE, patch))
        said.append(planned(name, count * CHUNK, LAYERS))
    for run, need in zip(taken, said, strict=True):
        promised = max(in_prefill(need), at_the_end(need))
        assert run.after == pytest.approx(at_the_end(need), abs=1 << 19)
        # Of the intermediates of a layer a part is gone when the next ones come.
        chunk = need.prefill.device["a chunk in a layer"]
        assert promised - 0.15 * chunk <= run.peak <= promised
    # A token takes as much as is planned for it, so that this holds at any length.
    grown = in_prefill(said[1]) - in_prefill(said[0])
    assert taken[1].peak - taken[0].peak == pytest.approx(grown, rel=0.001)
    copies, count = taken[1].bytes.copies, chunks[1]
    waiting = {"freekv": 2, "offload": 0, "full": 0}[name] * LAYERS  # tensors of a layer
    # Hidden states of all layers but the last, a layer's KV by chunks, and once what waits for the prompt's end.
    kv = {"freekv": 1, "offload": 2, "full": 0}[name]
    assert copies["to the host"] == count * (LAYERS - 1) + kv * count * LAYERS + waiting
    assert copies["to the device"] == count * (LAYERS - 1) + 1 + waiting
    assert taken[1].bytes.waits == {}
    assert taken[1].uploads == 2  # tokens and positions
    assert taken[1].syncs == 1  # when the prompt is read


@pytest.mark.parametrize("name", ["freekv", "arkvale", "offload"])
def test_a_prefill_of_a_million_tokens_takes_6_gib_beside_the_weights(name):
    need = planned(name, MILLION)
    terms = dict(need.prefill.device)
    assert terms == {
        "rotary tables": 2 * 128 * 2 * MILLION,
        "tokens and positions": 16 * MILLION,
        "hidden states": 4 * CHUNK * 4096 * 2,
        "KV of a layer": 2 * 8 * 128 * 2 * MILLION,
        "a chunk in a layer": CHUNK * (3 * 14336 + 3 * 4096 + 2 * 128) * 2,
    }
    present = need.kv.device - need.prefill.away  # of one layer, or nothing
    assert present == pytest.approx(0 if name == "offload" else need.kv.device / 32, rel=0.001)  # and page tables
    assert in_prefill(need) == sum(terms.values()) + present
    assert in_prefill(need) <= 6 * GIB
    assert need.on(CUDA)["device"] == need.weights + max(in_prefill(need), at_the_end(need)) + memory.RUNTIME_BYTES
    assert need.prefill.host["hidden states"] == MILLION * 4096 * 2


@functools.cache
def fits(name, **settings):
    """Whether a million tokens fit into 24 GiB beside 64 GiB of host memory, KV there in four bits."""
    chosen = resolve_profile(method=name, overrides={"kv_dtype": "int4", **settings})
    geometry = geometry_of(config_of(), torch.bfloat16)
    need = memory.need(chosen, geometry, torch.bfloat16, [MILLION], MORE, 1, device=CUDA)
    return memory.fits(need.on(CUDA), {"device": 24 * GIB, "host": 64 * GIB}), at_the_end(need)


def test_a_million_tokens_of_an_8b_model_fit_into_24_gib_with_16_bit_weights():
    assert fits("freekv", dense_layers=0)[0]
    assert fits("freekv", dense_layers=0)[1] < 6 * GIB  # while decoding, too
    assert fits("freekv")[0]
    assert fits("offload")[0]
