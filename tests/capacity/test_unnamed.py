from dataclasses import replace

import pytest
import torch

from kvcli.capacity import memory, unnamed
from kvcli.capacity.planning.estimate import Machine, PlannedRun
from kvcli.capacity.planning.plan import choice
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.devices import placed
from kvcli.models.loading import ModelSpec, open_checkpoint, read_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30
CONTEXT = 128 << 10


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(ModelSpec(None))


@pytest.fixture(scope="module")
def llama():
    """Return Llama-3.1-8B: 15 GiB of weights, and 16 of KV for 128K tokens."""
    return PlannedRun.of(read_config(ModelSpec("llama-3.1-8b", load_format="dummy")), torch.bfloat16)


def chosen(checkpoint, *capacities, lack=lambda _: None, place=CPU, **settings):
    costs = checkpoint.geometry, checkpoint.dtype, place, capacities
    return unnamed.choose(resolve_profile(overrides=settings), *costs, lack)


def test_what_fits_is_read_whole_and_the_line_says_whether_that_is_cheap(checkpoint):
    for tokens, words in (
        (8192, "reading all of 8,192 tokens is cheap"),
        (8193, "--method retroinfer reads about 2,0"),
    ):
        found = chosen(checkpoint, tokens)
        assert found.method == "full"
        assert words in found.chosen


def test_beneath_large_weights_a_long_context_is_cheap(checkpoint):
    full = resolve_profile("full")
    kv = unnamed.kv_footprint(full, checkpoint.geometry, 20_000, checkpoint.dtype).device
    large = replace(checkpoint, geometry=replace(checkpoint.geometry, weight_bytes=2 * kv))
    assert "is cheap" in chosen(large, 20_000).chosen
    assert "is cheap" not in chosen(large, 20_000, 20_000).chosen


def test_a_budget_that_is_a_share_grows_with_the_context(checkpoint):
    costs = checkpoint.geometry, checkpoint.dtype, CPU, [20_000]
    assert not unnamed.is_cheap(resolve_profile(method="freekv", overrides={"budget": "10%"}), *costs)
    assert unnamed.is_cheap(resolve_profile(method="freekv", overrides={"budget": "50%"}), *costs)


def test_a_gpu_keeps_as_many_layers_as_fit(checkpoint):
    """Of four layers the leading ones stay on the device; the line names the approximation and the exact method."""
    for most, reads in ((3, "in 1 of 4"), (0, "in 4 of 4")):
        tried = []

        def lack(profile, most=most, tried=tried):
            tried.append(getattr(profile.settings, "dense_layers", None))
            return "CONTEXT lacks" if profile.method == "full" or profile.settings.dense_layers > most else None

        found = chosen(checkpoint, 100_000, lack=lack, place=CUDA)
        assert (found.method, found.settings.dense_layers) == ("retroinfer", most)
        assert tried == [None, *range(3, most - 1, -1)]
        for words in (
            "an approximation",
            reads,
            "because with full attention CONTEXT lacks",
            "--method offload is exact",
        ):
            assert words in found.chosen


def test_where_no_approximation_fits_layers_are_brought_whole_or_nothing_is(checkpoint):
    only = chosen(checkpoint, 100, lack=lambda profile: None if profile.method == "offload" else "lacks", place=CUDA)
    assert only.chosen.startswith("no --method: using offload")
    narrow = chosen(
        checkpoint, 100, lack=lambda each: None if each.method == "offload" else "", place=CUDA, kv_dtype="int4"
    )
    assert (narrow.method, narrow.settings.kv_dtype) == ("offload", "int4")
    none = chosen(checkpoint, 100, lack=lambda _: "lacks", place=CUDA)
    assert (none.method, "nothing fits" in none.chosen) == ("offload", True)
    assert chosen(checkpoint, 100, lack=lambda _: "lacks").method == "full"  # a CPU has one memory
    assert "saves no memory on a CPU" in chosen(checkpoint, 100_000, lack=lambda _: "lacks").chosen


@pytest.mark.parametrize("held", ["int8", "k8v4"])
def test_a_form_of_kv_alone_is_that_of_full_attention_where_it_serves(checkpoint, held):
    found = chosen(checkpoint, 8192, kv_dtype=held)
    assert (found.method, found.settings.kv_dtype) == ("full", held)
    assert "is cheap" in found.chosen


@pytest.mark.parametrize(("held", "place", "where"), [("int4", CPU, ""), ("int8", CUDA, " on a GPU")])
def test_a_form_that_full_attention_has_not_takes_retrieval_and_the_line_says_so(checkpoint, held, place, where):
    found = chosen(checkpoint, 8192, place=place, kv_dtype=held)
    dense = resolve_profile().settings.dense_layers if place is CPU else 3
    assert (found.method, found.settings.kv_dtype, found.settings.dense_layers) == ("retroinfer", held, dense)
    assert f"because full attention does not keep KV as {held}{where}; --method offload is exact" in found.chosen


def test_less_kv_is_cheap_beneath_smaller_weights(checkpoint):
    full = resolve_profile("full")
    kv = unnamed.kv_footprint(full, checkpoint.geometry, 20_000, checkpoint.dtype).device
    larger = replace(checkpoint, geometry=replace(checkpoint.geometry, weight_bytes=kv))
    assert "is cheap" not in chosen(larger, 20_000).chosen
    assert "is cheap" in chosen(larger, 20_000, kv_dtype="int8").chosen


@pytest.mark.parametrize(
    ("free", "method", "dense"),
    [
        ({"device": 24, "host": 64}, "retroinfer", 14),
        ({"device": 22.4, "host": 64}, "retroinfer", 11),  # a card of 24 GB
        ({"device": 80, "host": 64}, "full", None),
        ({"host": 16}, "full", None),  # a CPU, where nothing that is kept elsewhere saves memory
        ({"cuda:0": 24, "cuda:1": 24, "host": 64}, "full", None),
        ({"device": 18, "host": 64}, "retroinfer", 1),
        ({"device": 17, "host": 64}, "offload", None),
    ],
)
def test_128k_tokens_of_an_8b_on_planned_machines(llama, free, method, dense):
    sizes = {name: size * GIB for name, size in free.items()}
    device, placement = CUDA if len(free) > 1 else CPU, None
    if "cuda:1" in free:
        devices = [torch.device(name) for name in free if name != "host"]
        known = llama.config, llama.dtype, llama.geometry
        placement = placed("cuda:0,cuda:1", *known, devices, [sizes[str(each)] for each in devices])
    machine = Machine(device, sizes, None, here=False, placement=placement)
    found = choice(resolve_profile(), llama, machine, CONTEXT, 1, 256)
    assert (found.method, getattr(found.settings, "dense_layers", None)) == (method, dense)
    if dense is not None:
        needed = [
            memory.need(profile, llama.geometry, llama.dtype, [CONTEXT], 256, 1, device=CUDA).on(CUDA)["device"]
            for profile in (found, resolve_profile(method, overrides={"dense_layers": dense + 1}))
        ]
        assert needed[0] <= sizes["device"] < needed[1]
