"""What each method reads of KV in host memory, compared with an independent quantisation, in each form of KV."""

import sys

import numpy
import pytest
import torch

import kvcli.kernels.block_attention as kernels
from kvcli.conformance.crossed import crossed
from kvcli.conformance.models import HEAD_DIM, tiny_model
from kvcli.conformance.runs import index_on_host, run
from kvcli.conformance.test_method import PROMPT, SMALL, prompt, settings
from kvcli.kernels import _numba, decode_attention, prefill_attention
from kvcli.kernels import decode_attention as attention
from kvcli.kv import dense as recent_tokens
from kvcli.methods import get_method, method_names
from kvcli.methods.config import HostKVConfig
from kvcli.methods.contract import Method

STEPS = 16
RECENT = 8
BITS = {"int8": (8, 8), "k8v4": (8, 4), "int4": (4, 4)}  # of keys and of values
HOLDING = [name for name in method_names() if issubclass(get_method(name).Config, HostKVConfig)]
HOLDING = [name for name in HOLDING if not get_method(name).takes_selection]  # these offload only what a model selects
EITHER = [name for name in method_names() if "offload" in get_method(name).Config.model_fields]


def counted_again(x, bits, tokens, channels):
    """Quantise and dequantise x [Hk, n, d] at `bits` bits, with one scale for `tokens` times `channels` numbers.

    Tokens that do not fill a group stay NaN: they have not been written.
    """
    whole = x.shape[1] // tokens * tokens
    groups = x[:, :whole].numpy().reshape(len(x), whole // tokens, tokens, -1, channels)
    low, high = (bound((2, 4), keepdims=True) for bound in (groups.min, groups.max))
    zero = low.astype(numpy.float16).astype(numpy.float32)
    scale = ((high - zero) / (2**bits - 1)).astype(numpy.float16).astype(numpy.float32)
    codes = numpy.clip(numpy.floor((groups - zero) / numpy.where(scale == 0, 1, scale) + 0.5), 0, 2**bits - 1)
    found = torch.full_like(x, float("nan"))
    found[:, :whole] = torch.from_numpy(zero + scale * codes).reshape(len(x), whole, -1)
    return found


def seen(k, mask):
    """Mark the keys [Hk, n, d] that a mask [.., Hk, G, n] lets any query head see."""
    return torch.ones(k.shape[:2], dtype=torch.bool) if mask is None else mask.any(-2).expand(k.shape[:2])


class Watch:
    """Intercepts the methods' entry points and matches every row that attention reads: as the model made it or as held.

    Values are always matched, keys only where the method reads them as the model rotated them. Rows that count more or
    less than once may stand for no token (`counted`); of these only what they read of tokens is checked.
    """

    def __init__(self, monkeypatch, held, page, with_keys):
        monkeypatch.setattr(_numba, "LEAST", 1)
        monkeypatch.setattr(prefill_attention, "FEW", 0)  # what prompts read is not watched, and has loops of its own
        self.bits, self.page, self.with_keys = BITS[held], page, with_keys
        self.kv, self.reads, self.counted, self.held, self.in_place = {}, [], [], 0, 0
        block_attention, attend = kernels.block_attention, Method.attend

        def watched(q, k, v, softmax, mask=None, **named):
            self.reads.append((k, v, seen(k, mask)))
            return block_attention(q, k, v, softmax, mask, **named)

        def watched_rows(sets, softmax):
            for each in sets:
                if each.k is None:
                    continue
                heads = torch.arange(len(each.k))[:, None]
                taken = (each.k, each.v) if each.rows is None else (each.k[heads, each.rows], each.v[heads, each.rows])
                if each.log_counts is None:
                    self.reads.append((*taken, seen(taken[0], None) if each.valid is None else each.valid))
                elif each.rows is None:
                    self.counted.append((*taken, seen(taken[0], None)))
                else:
                    self.reads.append((*taken, each.log_counts[:, 0] == 0))
            return attend_rows(sets, softmax)

        def watched_bytes(q, bytes_, form, sizes, k, v, softmax):
            numbers = torch.empty(len(bytes_) * len(k), 2, 1, form.d)
            form.dequantise(bytes_.flatten(0, 1), numbers, sizes)
            far = numbers.view(len(bytes_), len(k), 2, form.d).permute(2, 1, 0, 3)
            keys, values = (torch.cat(both, 1) for both in zip(far, (k, v), strict=True))
            self.reads.append((keys, values, seen(keys, None)))
            self.in_place += 1
            return attend_bytes(q, bytes_, form, sizes, k, v, softmax)

        attend_bytes = decode_attention.attend_quantised_cpu
        monkeypatch.setattr(decode_attention, "attend_quantised_cpu", watched_bytes)
        attend_rows = attention.attend
        monkeypatch.setattr(attention, "attend", watched_rows)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("block_attention") is block_attention:
                monkeypatch.setattr(module, "block_attention", watched)
        for name, keys in (("prefill", 2), ("attend_window", 3)):
            monkeypatch.setattr(Method, name, self.noting(getattr(Method, name), keys))
        monkeypatch.setattr(Method, "attend", lambda *given: self.attended(attend, *given))

    def noting(self, call, keys):
        def noted(method, layer, *given):
            self.note(layer, *given[keys - 2 : keys])
            return call(method, layer, *given)

        return noted

    def note(self, layer, k, v):
        before = self.kv.get(layer)
        self.kv[layer] = torch.stack((k, v)) if before is None else torch.cat((before, torch.stack((k, v))), 2)

    def attended(self, attend, method, layer, q, k, v, softmax):
        self.note(layer, k[:, None], v[:, None])
        self.reads.clear()
        self.counted.clear()
        out = attend(method, layer, q, k, v, softmax)
        keys, values = self.kv[layer]
        of_key, of_value = ((bits, HEAD_DIM * bits // 8) for bits in self.bits)
        held_k = counted_again(keys, of_key[0], *((self.page, 1) if self.page > 1 else (1, of_key[1])))
        held_v = counted_again(values, of_value[0], 1, of_value[1])
        own, from_host = (torch.zeros(keys.shape[:2], dtype=torch.bool) for _ in range(2))
        for at, (read_k, read_v, used) in enumerate((*self.reads, *self.counted)):
            found = ~used
            for tokens, true_k, true_v in ((own, keys, values), (from_host, held_k, held_v)):
                same = (read_v[:, :, None] == true_v[:, None]).all(-1)  # [Hk, rows, tokens]
                if self.with_keys:
                    same &= (read_k[:, :, None] == true_k[:, None]).all(-1)
                tokens |= (same & used[..., None]).any(1)
                found |= same.any(2)
            assert at >= len(self.reads) or found.all(), "a row is neither the model's nor what the host holds of it"
        mask = method.attended(layer)
        assert torch.equal(own | from_host, mask)
        if layer in method.retrieval:
            self.check(method, own, from_host, mask)
            self.held += int(from_host.sum())
        else:
            assert not from_host.any()
        return out

    def check(self, method, own, from_host, mask):
        """Selected tokens come from the host, except sink and window or the newest tokens, which the device has."""
        config, length = method.config, mask.shape[1]
        if not hasattr(config, "sink") or not hasattr(config, "window"):
            newest = mask.flip(1).cumsum(1).flip(1) <= RECENT
            assert hasattr(config, "chunk") or not own[~newest].any()  # ShadowKV keeps some chunks
            return
        page = self.page
        first, last = -(-config.sink // page) * page, (-(-length // page) - -(-max(1, config.window) // page)) * page
        assert own[:, :first].all()
        assert own[:, last:].all()
        if page > 1 and self.with_keys:
            assert torch.equal(from_host[:, first:last], mask[:, first:last])


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.mark.parametrize(("name", "held"), crossed(HOLDING, BITS))
def test_attention_reads_what_the_host_holds(llama, name, held, monkeypatch):
    method = get_method(name)
    wanted = settings(name, {**SMALL, **(method.true_kv or {}), "kv_dtype": held, "offload": True})
    with_keys = method.true_kv == {}
    page = wanted.get("page_size", wanted.get("chunk", 1))
    monkeypatch.setattr(recent_tokens, "RECENT", RECENT)
    watch = Watch(monkeypatch, held, page, with_keys)
    (sequence,) = run(llama, name, wanted, [prompt(8)], STEPS)
    assert watch.held > 0
    assert watch.in_place or name != "offload"
    (whole,) = run(llama, name, {**wanted, "kv_dtype": "auto"}, [prompt(8, PROMPT)], 1)
    less, all_of_it = (each.method.footprint().host - index_on_host(each.method) for each in (sequence, whole))
    assert less < (0.4 if held == "int4" else 0.5) * all_of_it


@pytest.mark.parametrize("name", EITHER)
def test_a_model_does_not_notice_where_the_kv_lies(name):
    """Prompts of 83, 40 and 1 tokens, each continued until it is longer than the budget."""
    model, ids = tiny_model("qwen3"), [prompt(length, length) for length in (83, 40, 1)]
    here, there = (run(model, name, settings(name, {**SMALL, "offload": to}), ids, 60) for to in (False, True))
    for one, other in zip(here, there, strict=True):
        assert one.token_ids == other.token_ids
        assert one.method.statistics() == other.method.statistics()
