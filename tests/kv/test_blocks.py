"""The block cache against lists of tokens."""

import pytest
import torch
from families import tiny_config, tiny_model

from kvcli.kernels.softmax import Softmax
from kvcli.kv.blocks import EMPTY, BlockCache, BlockLayout
from kvcli.kv.cache import DenseCache, Tiers
from kvcli.kv.pages import PageBudget
from kvcli.kv.sliding import ChunkCache, SlidingCache
from kvcli.memory.tiers import Footprint
from kvcli.models.geometry import LayerGeometry
from kvcli.models.rope import installed

H, HK, D, P = 4, 2, 8, 4
TIERS = Tiers.for_device(torch.device("cpu"), torch.float32)
BUDGET = PageBudget(size=P, sink=1, window=2, selected=3)
SOFTMAX = Softmax(D**-0.5)


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, HK, count, D, generator=generator).unbind()


def dense(q, k, v):
    scores = torch.einsum("hgd,hnd->hgn", q.view(HK, -1, D), k) * SOFTMAX.scale
    return torch.einsum("hgn,hnd->hgd", scores.softmax(-1), v).reshape(q.shape)


def block_cache(capacity=80, slots=3, chunk=7, tiers=TIERS):
    layout = BlockLayout(BUDGET, slots, chunk, representatives=2, positions="capped")
    cache = BlockCache(LayerGeometry(0, H, HK, D, None, True), capacity, layout, None, tiers)
    for tensor in vars(cache).values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor is not cache.mass:
            tensor.fill_(float("nan"))  # nothing may be read that was not written
    return cache


@pytest.mark.parametrize("prompt", [1, 3, 4, 8, 12, 13, 24, 25, 47])
@pytest.mark.parametrize("slots", [3, 5])
def test_attends_to_sinks_recalled_blocks_and_the_local_window(prompt, slots):
    k, v = tokens(prompt + 21)
    cache = block_cache(slots=slots)
    written = cache.load(k[:, :prompt].clone(), v[:, :prompt].clone())
    for at in range(prompt, prompt + 21):
        written += cache.append(k[:, at], v[:, at])
        first = max(0, -(-(at + 1) // P) - 2) * P
        assert cache.num_blocks == max(0, first // P - 1)
        wanted = torch.randperm(cache.num_blocks)[:3]
        if len(wanted):
            cache.recall(wanted)
        held = [
            *range(min(P, first)),
            *(P + b * P + i for b in wanted.tolist() for i in range(P)),
            *range(first, at + 1),
        ]
        q = torch.randn(H, D, generator=torch.Generator().manual_seed(at))
        assert torch.allclose(cache.attend(q, SOFTMAX), dense(q, k[:, held], v[:, held]), atol=1e-5)
    assert written == cache.num_blocks * HK * 2 * P * D * 4


def test_blocks_stay_on_the_device_while_there_is_room_and_as_long_as_they_are_wanted():
    k, v = tokens(60)
    cache = block_cache()
    cache.load(k[:, :24], v[:, :24])
    assert cache.resident.tolist() == [0, 1, 2]
    assert cache.recall(torch.arange(3)) == ([0] * HK, 0)
    for at in range(24, 60):
        cache.append(k[:, at], v[:, at])
    block_bytes = 2 * HK * P * D * 4
    assert cache.num_blocks == 12
    assert cache.recall(torch.tensor([1, 7])) == ([1] * HK, block_bytes)
    assert cache.resident.tolist() == [7, 1, 2]
    assert cache.recall(torch.tensor([2, 7, 9])) == ([1] * HK, block_bytes)
    assert cache.resident.tolist() == [7, 9, 2]
    assert cache.recall(torch.tensor([9])) == ([0] * HK, 0)


def test_the_most_attended_tokens_represent_a_block():
    k, v = tokens(40)
    cache = block_cache()
    cache.extend(k[:, :7], v[:, :7])
    cache.mass[:7] = torch.tensor([0, 0, 0, 0, 0.5, 2.0, 1.0])
    for at in range(7, 16):
        cache.append(k[:, at], v[:, at])
    assert cache.num_blocks == 1
    assert torch.allclose(cache.block_keys[0], k[:, [5, 6]].mean(1))
    assert cache.mass[8:].abs().max() == 0  # no query came since


def test_a_short_context_needs_no_blocks():
    cache = block_cache(capacity=9)
    assert cache.pool.footprint() == Footprint()
    assert cache.keys.numel() == cache.slots.numel() == 0
    k, v = tokens(9)
    cache.load(k, v)
    q = torch.randn(H, D)
    assert torch.allclose(cache.attend(q, SOFTMAX), dense(q, k, v), atol=1e-5)
    assert EMPTY not in cache.resident.tolist()


@pytest.mark.parametrize("family", ["llama", "glm4"])  # glm4 turns half of its dimensions
@pytest.mark.parametrize("scaled", [False, True])
def test_capped_keys_stand_at_position_zero_and_queries_at_the_end_of_the_window(family, scaled):
    config = tiny_config(family)
    if scaled:  # yarn puts a factor on every rotation
        config.rope_parameters |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    layout = BlockLayout(BUDGET, slots=3, chunk=7, representatives=2, positions="capped")
    with installed(tiny_model(family, config=config), [80]) as rope:
        rotary = rope.rotary(80)[0]
        assert (rotary.attention_scaling != 1) == scaled
        cache = BlockCache(LayerGeometry(0, H, HK, 16, None, True), 80, layout, rotary, TIERS)
        plain_k, v = torch.randn(2, HK, 50, 16, generator=torch.Generator().manual_seed(3)).unbind()
        plain_q = torch.randn(H, 50, 16, generator=torch.Generator().manual_seed(4))
        k, q = (rotary.rotate(x, torch.arange(50)) for x in (plain_k, plain_q))
        cache.load(k, v)
        cache.recall(torch.tensor([1, 4, 6]))
        out = cache.attend(q[:, 49], Softmax(0.25))
        far = [*range(P), *(P + block * P + i for block in (1, 4, 6) for i in range(P))]
        near = range(44, 50)
        far_k = rotary.rotate(plain_k[:, far], torch.zeros(len(far), dtype=torch.long))
        far_q = rotary.rotate(plain_q[:, 49:], torch.tensor([2 * P - 1]))[:, 0]
        scores = [
            torch.einsum("hgd,hnd->hgn", x.view(HK, -1, 16), keys) * 0.25
            for x, keys in ((far_q, far_k), (q[:, 49], k[:, near]))
        ]
        expected = torch.einsum("hgn,hnd->hgd", torch.cat(scores, -1).softmax(-1), v[:, [*far, *near]])
    assert torch.allclose(out, expected.reshape(H, 16), atol=1e-5)


@pytest.mark.parametrize("windowed", [SlidingCache, ChunkCache])
@pytest.mark.parametrize("window", [None, 1, 5, 13, 100])
@pytest.mark.parametrize("reach", [1, 4, 9, 60])
def test_windows_of_plain_layers_are_their_tokens_one_after_another(window, reach, windowed):
    k, v = tokens(51)
    q = torch.randn(H, 51, D, generator=torch.Generator().manual_seed(9))

    def make():
        return DenseCache(HK, D, 51, TIERS) if window is None else windowed(HK, D, window, TIERS)

    whole, single = make(), make()
    for start in range(0, 45, reach):
        part = slice(start, min(start + reach, 45))
        out = whole.attend_window(q[:, part], k[:, part], v[:, part], SOFTMAX)
        for row, at in enumerate(range(part.start, part.stop)):
            single.append(k[:, at], v[:, at])
            assert torch.allclose(out[:, row], single.attend(q[:, at], SOFTMAX), atol=1e-5)
    for at in range(45, 51):  # and the tokens generated after them
        for cache in (whole, single):
            cache.append(k[:, at], v[:, at])
        assert torch.allclose(whole.attend(q[:, at], SOFTMAX), single.attend(q[:, at], SOFTMAX), atol=1e-5)
    assert whole.length == single.length == 51
