"""The formula of the slots against a table kept by hand, and attention over them against attention over tokens."""

import pytest
import torch

from kvcli.kernels import _triton
from kvcli.kernels.append import NewToken, take_in_filled_page
from kvcli.kernels.norm_rope import Rotation
from kvcli.kernels.page_table import (
    MissList,
    PagedKV,
    SlotLayout,
    active,
    candidates,
    resolve_pages_device,
    row_positions,
    slot_of_page,
)
from kvcli.kernels.paged_attention import paged_decode_attention
from kvcli.kernels.recall import HostPages, gather_pages
from kvcli.kernels.softmax import Softmax
from kvcli.methods.shadowkv.kernels import StoredChunks, keep_leaving_chunk

LAYOUTS = [SlotLayout(4, 2, 3, 2), SlotLayout(2, 1, 1, 1), SlotLayout(1, 0, 0, 7), SlotLayout(8, 1, 0, 3)]
LAYOUTS += [SlotLayout(4, 2, 3, 2, early=True), SlotLayout(3, 5, 0, 3, early=True), SlotLayout(1, 1, 1, 2, early=True)]


def lengths_of(*lengths):
    return torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_hold_sinks_selection_and_window(layout):
    size, newest_in = layout.size, {}  # the token last put into each row
    for token in range(8 * layout.total * size):
        lengths = lengths_of(token + 1)
        slot = int(slot_of_page(lengths_of(token // size), layout))
        newest_in[slot * size + token % size] = token
        last_page = (token + layout.early) // size  # an empty one, where the oldest leaves early
        selected = list(range(layout.sink, layout.first))
        if active(lengths, layout):
            allowed = candidates(lengths, layout, last_page + 1)[0].nonzero()[:, 0].tolist()
            assert allowed == list(range(layout.sink, last_page + 1 - layout.window))
            selected = allowed[-layout.selected :] if layout.selected else []
        resident = torch.tensor(selected, dtype=torch.int32).view(1, 1, -1) if layout.selected else None
        positions = row_positions(lengths, layout, resident)[0, 0].tolist()
        pages = {*range(layout.sink), *range(max(0, last_page + 1 - layout.window), last_page + 1), *selected}
        expected = [t for t in range(token + 1) if t // size in pages]
        assert sorted(position for position in positions if position >= 0) == expected
        for row, position in enumerate(positions):
            if position >= 0 and not layout.sink <= row // size < layout.first:
                assert newest_in[row] == position


@pytest.mark.parametrize(("by_kernels", "steps"), [(False, 61), (True, 29)])
def test_decoding_over_slots_is_attention_over_the_tokens_they_hold(monkeypatch, by_kernels, steps):
    """Append, write out, recall and attend for many steps; KV per token kept beside it says what must come out."""
    monkeypatch.setattr(_triton, "on_cpu", by_kernels)
    torch.manual_seed(0)
    layout, hk, g, d = SlotLayout(4, 1, 2, 2), 2, 2, 8
    softmax = Softmax(d**-0.5)
    tokens = torch.randn(2, 1, hk, steps, d)
    kv = torch.full((1, 2, hk, layout.total * layout.size, d), float("nan"))
    resident = torch.arange(layout.sink, layout.first, dtype=torch.int32).repeat(1, hk, 1)
    host = HostPages.of([[torch.full((9, hk, 2, layout.size, d), float("nan")) for _ in range(2)]], "hnd", kv.device)
    misses = MissList.empty(1, hk, layout.selected, kv.device)
    recalled = 0
    for step in range(steps):
        rows = PagedKV(kv[:, 0], kv[:, 1], lengths_of(step + 1), layout, resident)
        if active(rows.lengths, layout):
            allowed = candidates(rows.lengths, layout, 18)[0].nonzero()[:, 0].int()
            picks = [allowed[torch.randperm(len(allowed))[: layout.selected]] for _ in range(hk)]
            resolve_pages_device(resident, torch.stack(picks)[None], misses)
            gather_pages(host, misses, rows)
            recalled += int(misses.counts.sum())
        q, out = torch.randn(1, hk * g, d), torch.empty(1, hk * g, d)
        paged_decode_attention(q, rows, softmax, out, NewToken(*tokens[:, :, :, step]))
        take_in_filled_page(rows, host=host)
        for head in range(hk):
            held = row_positions(rows.lengths, layout, resident)[0, head]
            held = held[held >= 0].sort().values
            k, v = tokens[:, 0, head, held].double()
            weights = (q[0, head * g : head * g + g].double() @ k.T * softmax.scale).softmax(-1)
            assert torch.allclose(out[0, head * g : head * g + g].double(), weights @ v, atol=1e-6)
    assert recalled > 10


def test_what_does_not_fit_is_refused():
    layout = SlotLayout(4, 1, 2, 2)
    kv = torch.zeros(1, 2, 20, 8)
    whole = {"k": kv, "v": kv, "lengths": lengths_of(5), "layout": layout, "resident": torch.zeros(1, 2, 2).int()}
    PagedKV(**whole).check()
    for part, message in [
        ({"k": kv[:, :, :16]}, "k has shape"),
        ({"v": kv.double()}, "v is torch.float64"),
        ({"v": kv.transpose(2, 3).contiguous().transpose(2, 3)}, "v has gaps"),
        ({"v": kv.repeat(1, 2, 1, 1)[:, ::2]}, "different strides"),
        ({"lengths": torch.tensor([5])}, "lengths is torch.int64"),
        ({"resident": None}, "what is resident"),
    ]:
        with pytest.raises(ValueError, match=message):
            PagedKV(**whole | part).check()
    rows, stored = (
        PagedKV(**whole),
        StoredChunks(torch.zeros(1, 3, 4, 5), torch.zeros(1, 2, 3, 8), *[lengths_of(0)] * 3),
    )
    with pytest.raises(ValueError, match="do not leave"):
        keep_leaving_chunk(rows, torch.zeros(1, 2, 5, 8), None, stored)
    gaps = torch.zeros(1, 6, 4, 5)[:, ::2]
    with pytest.raises(ValueError, match="not one behind the other"):
        keep_leaving_chunk(rows, torch.zeros(1, 2, 5, 8), None, stored._replace(a=gaps))
    pages = torch.zeros(3, 2, 2, 4, 8)
    with pytest.raises(ValueError, match="does not go with the first"):
        HostPages.of([[pages, pages.double()]], "hnd", kv.device)
    with pytest.raises(ValueError, match="16 does not divide"):
        HostPages.of([[torch.zeros(3 * 128 + 1)[1:].view(3, 2, 2, 4, 8)]], "hnd", kv.device)
    with pytest.raises(ValueError, match="do not fit"):
        HostPages.of([[pages]], "nhd", kv.device).check(PagedKV(**whole))


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize(
    ("counts", "per_piece"),
    [
        ([[2], [5, 5, 3]], 5),
        ([[5, 5, 3], [2]], 5),
        ([[2], [4]], 4),
        ([[0], [1, 1]], 1),
        ([[4, 6, 1], [9]], 2),  # pieces of several sizes, as of sequences that share pages
        ([[3, 2], [3, 7]], 3),
        ([[3, 2, 2], [3, 7]], 1),
    ],
)
def test_sequences_of_any_length_share_the_size_of_their_pieces(counts, per_piece, layout):
    b, hk, p, d = 2, 3, 4, 8
    block = (hk, 2, p, d) if layout == "hnd" else (2, p, hk, d)
    pieces = [[torch.randn(n, *block) for n in row] for row in counts]
    host = HostPages.of(pieces, layout, torch.device("cpu"))
    assert host.per_piece == per_piece
    assert host.block_shape == (hk, p, d)
    slots = SlotLayout(p, 0, 1, 1)
    for sequence in range(b):
        pages = torch.cat(pieces[sequence])  # one after another, however they are cut
        for page in range(len(pages)):
            rows = PagedKV(*torch.zeros(2, b, hk, 2 * p, d), lengths_of(1, 1), slots, torch.zeros(b, hk, 1).int())
            misses = MissList.empty(b, hk, 1, rows.k.device)
            misses.counts.zero_()
            misses.pages[sequence], misses.slots[sequence], misses.counts[sequence] = page, 0, 1
            gather_pages(host, misses, rows)
            blocks = pages[page] if layout == "hnd" else pages[page].permute(2, 0, 1, 3)  # [Hk, 2, p, d]
            assert torch.equal(rows.k[sequence, :, :p], blocks[:, 0])
            assert torch.equal(rows.v[sequence, :, :p], blocks[:, 1])


def test_a_rotation_that_mixes_columns_is_refused():
    with pytest.raises(ValueError, match="same column"):
        Rotation.of(*torch.ones(2, 5, 4), lambda x, cos, sin: x * cos + x.flip(-1) * sin.flip(-1), 4, 4)
