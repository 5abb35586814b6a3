"""A method that keeps KV in host memory gives the same results with a disk below it, in each form of KV."""

import pytest
import torch

from kvcli.conformance.crossed import crossed
from kvcli.conformance.models import HEAD_DIM, HEADS, KV_HEADS, LAYERS, tiny_model
from kvcli.conformance.runs import index_on_host, run
from kvcli.conformance.test_host_kv import HOLDING
from kvcli.conformance.test_method import SMALL, prompt, settings
from kvcli.kernels.softmax import Softmax
from kvcli.memory.disk_tier import DiskTier

LENGTH, STEPS = 180, 9
SHARE = 12 << 10
"""Host memory of a sequence in bytes: a few lines of each layer."""


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


def check_counts(sequence):
    """Check the counters against what was done, and the footprint against the promise."""
    cache, held = sequence.report().cache, sequence.method.footprint()
    on_disk = [cache.disk for cache in sequence.method.caches if cache.disk is not None]
    assert cache.bytes_to_disk == sum(blocks._flushed * blocks.line_bytes for blocks in on_disk)
    assert cache.bytes_from_disk <= cache.disk_reads * max([blocks.line_bytes for blocks in on_disk], default=0)
    assert held.disk == sum(blocks.lines * blocks.line_bytes for blocks in on_disk)
    if len(on_disk) == len(sequence.method.retrieval):
        beside = sum(blocks.layout.used + 16 * (blocks.lines + blocks.slots) for blocks in on_disk)
        beside += index_on_host(sequence.method)
        assert held.host <= SHARE + beside
    return cache, on_disk


@pytest.mark.parametrize(("name", "kv_dtype"), crossed(HOLDING, ["auto", "int8", "k8v4", "int4"]))
def test_tokens_and_selections_are_those_without_a_disk(llama, name, kv_dtype, tmp_path):
    wanted = settings(name, {**SMALL, "kv_dtype": kv_dtype, "offload": True})
    prompts = [prompt(8, LENGTH), prompt(9, 90)][: 2 if kv_dtype == "auto" else 1]
    expected = run(llama, name, wanted, prompts, STEPS)
    with DiskTier(tmp_path, len(prompts) * SHARE, sequences=len(prompts)) as disk:
        found = run(llama, name, wanted, prompts, STEPS, disk=disk)
        assert not [*tmp_path.iterdir()]
    for mine, its in zip(found, expected, strict=True):
        assert mine.token_ids == its.token_ids
        first, second = mine.report(), its.report()
        for count in ("misses", "pages_requested", "bytes_to_device", "bytes_exposed", "bytes_to_host"):
            assert getattr(first.cache, count) == getattr(second.cache, count)
        assert first.method == second.method
    cache, on_disk = check_counts(found[0])
    if kv_dtype == "auto":
        assert on_disk
        assert cache.disk_reads > 0
        assert cache.bytes_from_disk > 0


@pytest.mark.parametrize("name", HOLDING)
def test_a_fork_goes_on_from_what_lies_on_the_disk(llama, name, tmp_path):
    """Both attend like a sequence without a disk; the fork writes new tokens to a file of its own."""
    wanted = settings(name, {**SMALL, "offload": True})
    with DiskTier(tmp_path, SHARE) as disk, torch.inference_mode():
        (sequence,) = run(llama, name, wanted, [prompt(8, LENGTH)], 3, disk=disk)
        (plain,) = run(llama, name, wanted, [prompt(8, LENGTH)], 3)
        method, expected = sequence.method, plain.method
        fork, last, softmax = method.fork(method.context.counters, "fork"), LAYERS - 1, Softmax(0.25)
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            q = torch.randn(HEADS, HEAD_DIM, generator=generator)
            k, v = torch.randn(2, KV_HEADS, HEAD_DIM, generator=generator)
            out = expected.attend(last, q, k, v, softmax)
            assert torch.equal(method.attend(last, q, k, v, softmax), out)
            assert torch.equal(fork.attend(last, q, k, v, softmax), out)
