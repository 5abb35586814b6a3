import torch
from engine import new_method

from kvcli.kernels.page_table import row_positions
from kvcli.kernels.softmax import Softmax
from kvcli.memory.tiers import Footprint
from kvcli.methods.step import BatchSlots
from kvcli.models.geometry import LayerGeometry

HK, D = 2, 8
LAYERS = [
    LayerGeometry(0, 4, HK, D, None, True),
    LayerGeometry(1, 4, HK, D, 5, True),
    LayerGeometry(2, 4, HK, D, None, True),
]
SMALL = {"budget": 24, "sink": 4, "window": 8, "page_size": 4}


def prefilled(length, capacity):
    """A method whose keys and values say which layer, head and token they are of."""
    method = new_method("freekv", SMALL, LAYERS, capacity)
    for layer in range(len(LAYERS)):
        k = torch.arange(length, dtype=torch.float32)[:, None].expand(length, D) + 1000 * layer
        k = torch.stack([k, k + 500])
        method.prefill(layer, k.contiguous(), -k, k[:, :0], Softmax(1.0))
    return method


def slots_of(caches, lengths):
    return BatchSlots.of(caches, [cache.as_slots() for cache in caches], lengths)


def test_every_row_holds_the_token_that_the_layout_says():
    lengths = [61, 22, 3]
    methods = [prefilled(length, length + 9) for length in lengths]
    before = sum((method.footprint() for method in methods), Footprint())
    tensor = torch.tensor(lengths, dtype=torch.int32)
    for layer in range(len(LAYERS)):
        slots = slots_of([method.caches[layer] for method in methods], tensor)
        slots.rows.check()
        positions = row_positions(tensor, slots.rows.layout, slots.rows.resident).expand(*slots.rows.k.shape[:3])
        for b in range(len(lengths)):
            for head in range(HK):
                held = positions[b, head] >= 0
                expected = positions[b, head][held].float() + 1000 * layer + 500 * head
                assert torch.equal(slots.rows.k[b, head, held], expected[:, None].expand(-1, D))
                assert torch.equal(slots.rows.v[b, head, held], -expected[:, None].expand(-1, D))
    after = sum((method.footprint() for method in methods), Footprint())
    assert after.host == before.host
    tables = 3 * HK * 3  # sequences, heads, selected pages: int64 before, int32 now
    assert before.device - after.device == tables * 4


def test_caches_are_views_of_the_batch():
    methods = [prefilled(61, 70), prefilled(40, 70)]
    slots = slots_of([method.caches[2] for method in methods], torch.tensor([61, 40], dtype=torch.int32))
    slots.rows.k[1, 0, 3] = 7.0
    assert float(methods[1].caches[2].kv[0, 0, 0, 3, 0]) == 7.0
    assert slots.host is not None
    assert slots.host.block(1, 0, 0).data_ptr() == methods[1].caches[2].pool.pieces[0][0, 0].data_ptr()


def test_a_single_sequence_is_not_copied():
    method = prefilled(61, 70)
    address = method.caches[0].kv.data_ptr()
    slots = slots_of([method.caches[0]], torch.tensor([61], dtype=torch.int32))
    assert slots.rows.k.data_ptr() == address
