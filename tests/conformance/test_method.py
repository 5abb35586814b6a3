"""Requirements for every method, driven by the listing: a method is tested because it exists."""

import itertools
import json
import sys

import pytest
import torch

import kvcli.kernels.block_attention as kernels
from kvcli.conformance.crossed import crossed
from kvcli.conformance.models import (
    EAGER,
    FAMILIES,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCAB,
    WINDOW,
    config_of,
    tiny_model,
)
from kvcli.conformance.runs import in_memory, run
from kvcli.inputs.profiles import profile_names, resolve_profile
from kvcli.kernels import _numba
from kvcli.kernels import decode_attention as attention
from kvcli.kernels.softmax import Softmax
from kvcli.memory.state import capture
from kvcli.methods import get_method, method_names, own_method_names
from kvcli.methods.contract import Method
from kvcli.runtime.checkpoint.restoring import Restoring
from kvcli.runtime.decode import BlockingStepper, decode
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.timeline import Timeline

PROMPT, STEPS = 75, 16  # two pages are filled while decoding, and another is begun
EXACT_PROMPT, EXACT_STEPS = 78, 12  # compared with transformers, over every family: two pages are filled
TWICE = 10  # steps of runs that are compared with each other; a page is filled
# Small enough that a context of 75 tokens outgrows it; each method takes the settings that it knows.
SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8, "dense_layers": 1, "prefill_window": 20}
SMALL |= {"chunk": 4, "rank": 12, "outliers": 2, "local": 1, "cluster": 4, "segment": 16, "update": 8}
AMPLE = {**SMALL, "budget": 4096}
BUDGETED = [name for name in method_names() if "budget" in get_method(name).Config.model_fields]


def settings(name, wanted):
    fields = get_method(name).Config.model_fields
    return {key: value for key, value in wanted.items() if key in fields}


def prompt(seed, length=PROMPT):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokens(model, name, wanted, prompts, steps=STEPS):
    return [sequence.token_ids for sequence in run(model, name, settings(name, wanted), prompts, steps)]


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def gemma2():
    return tiny_model("gemma2")


GROUPED = ("llama", "llama_one_kv_head")


@pytest.fixture(scope="module")
def grouped(request):
    """A model whose query heads share several KV heads, or all share one: as many each, so that loops are the same."""
    kv_heads = {"llama": KV_HEADS, "llama_one_kv_head": 1}[request.param]
    sizes = {"num_attention_heads": kv_heads * HEADS // KV_HEADS, "num_key_value_heads": kv_heads}
    return tiny_model("llama", config=config_of("LlamaConfig", **sizes))


@pytest.fixture(scope="module")
def family(request):
    """A family's model, a prompt, and transformers' greedy continuation of it."""
    model = tiny_model(request.param)
    assert (model.config._attn_implementation == "eager") == (request.param in EAGER)
    ids = prompt(1, EXACT_PROMPT)
    reference = model.generate(torch.tensor([ids]), max_new_tokens=EXACT_STEPS, do_sample=False, eos_token_id=None)
    return model, ids, reference[0, EXACT_PROMPT:].tolist()


@pytest.mark.parametrize(("family", "name"), crossed(list(FAMILIES), method_names(), turns=12), indirect=["family"])
def test_ample_budget_is_token_for_token_what_transformers_generates(family, name):
    model, ids, reference = family
    assert len(set(reference)) > EXACT_STEPS / 3, "a reference that repeats itself tests little"
    wanted = settings(name, {**AMPLE, **get_method(name).exact})
    (sequence,) = run(model, name, wanted, [ids], EXACT_STEPS, chunk=WINDOW + 6)
    assert sequence.token_ids == reference


@pytest.fixture(autouse=True)
def loops_serve(monkeypatch):
    """Hold methods to the results of the CPU loops as well, which leave models as small as these to torch."""
    monkeypatch.setattr(_numba, "LEAST", 1)


def on_block_attention(monkeypatch, note):
    """Call `note` with the keys, bool [Hk, n], that every attention kernel call reads."""
    block_attention, attend = kernels.block_attention, attention.attend

    def watched(q, k, v, softmax, mask=None, causal=False):
        by_head = mask is not None and mask.dim() == 3
        note(mask.any(1) if by_head else torch.ones(k.shape[:2], dtype=torch.bool))
        return block_attention(q, k, v, softmax, mask, causal)

    def watched_rows(sets, softmax):
        for each in sets:
            counts_once = each.k is not None and (each.rows is not None or each.log_counts is None)
            if not counts_once:  # keys that stand for several tokens or a part of one
                continue
            read = each.valid if each.log_counts is None else each.log_counts[:, 0] == 0  # once or not at all
            note(torch.ones(len(each.k), each.shape[2], dtype=torch.bool) if read is None else read)
        return attend(sets, softmax)

    monkeypatch.setattr(attention, "attend", watched_rows)
    monkeypatch.setattr(Method, "in_chain", lambda *_: None)  # a loop over all layers calls no kernel
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("block_attention") is block_attention:
            monkeypatch.setattr(module, "block_attention", watched)


@pytest.mark.parametrize(("name", "grouped"), crossed(BUDGETED, GROUPED), indirect=["grouped"])
def test_small_budget_is_respected_and_used(grouped, name, monkeypatch):
    seen, attend = [], Method.attend  # keys attended to by each call of `attend`

    def note(keys):
        if seen:
            seen[-1] += int(keys.sum(1).max())

    def begun(*arguments):
        seen.append(0)
        return attend(*arguments)

    on_block_attention(monkeypatch, note)
    monkeypatch.setattr(Method, "attend", begun)
    (sequence,) = run(grouped, name, settings(name, SMALL), [prompt(2)], STEPS)
    dense = sequence.method.config.leading_dense_layers
    assert dense < LAYERS
    by_layer = [seen[layer::LAYERS] for layer in range(LAYERS)]
    assert [attended[-1] for attended in by_layer[:dense]] == [PROMPT + STEPS - 1] * dense
    if sequence.method.budget_is_mean:
        by_layer[dense:] = [[sum(step) / len(step) for step in zip(*by_layer[dense:], strict=True)]]
    for attended in by_layer[dense:]:
        for step, count in enumerate(attended):
            assert count <= SMALL["budget"] + sequence.method.config.beside_budget(PROMPT, step + 1)
        least = 0 if sequence.method.budget_is_bound else SMALL["budget"] - SMALL["page_size"]
        assert min(attended) > least


class Watch:
    """Intercepts the methods' entry points: keeps a layer's true KV, and checks each output against the stated mask."""

    def __init__(self, monkeypatch, with_true_kv):
        self.kv, self.with_true_kv = {}, with_true_kv
        self.pairs = self.left_out = 0  # pairs of KV head and token: attended to in this call, left out in any call
        on_block_attention(monkeypatch, self.note_pairs)
        self.prefill, self.attend, self.attend_window = Method.prefill, Method.attend, Method.attend_window
        monkeypatch.setattr(Method, "prefill", lambda *given: self.prefilled(*given))
        monkeypatch.setattr(Method, "attend", lambda *given: self.attended(*given))
        monkeypatch.setattr(Method, "attend_window", lambda *given: self.windowed(*given))

    def note_pairs(self, keys):
        self.pairs += int(keys.sum())

    def note(self, layer, k, v):
        kv = torch.stack((k, v)).double()
        self.kv[layer] = torch.cat((self.kv[layer], kv), 2) if layer in self.kv else kv  # [2, Hk, n, d]

    def prefilled(self, method, layer, k, v, q, softmax):
        self.note(layer, k, v)
        return self.prefill(method, layer, k, v, q, softmax)

    def windowed(self, method, layer, q, k, v, softmax):
        self.note(layer, k, v)
        return self.attend_window(method, layer, q, k, v, softmax)

    def attended(self, method, layer, q, k, v, softmax):
        self.note(layer, k[:, None], v[:, None])
        self.pairs = 0
        out = self.attend(method, layer, q, k, v, softmax)
        mask, (k, v) = method.attended(layer), self.kv[layer]
        assert mask.shape == k.shape[:2]
        assert mask.dtype == torch.bool
        assert mask[:, -1].all(), "the current token sees itself"
        if self.with_true_kv:
            assert mask.sum() == self.pairs
            scores = torch.einsum("hgd,hnd->hgn", q.double().view(len(k), -1, HEAD_DIM), k) * softmax.scale
            weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
            expected = torch.einsum("hgn,hnd->hgd", weights, v).view_as(out)
            assert torch.allclose(out.double(), expected, rtol=1e-3, atol=1e-4)
        self.left_out += int((~mask).sum())
        return out


def variants():
    """Every method as it is and with each of its switches turned, on one of the models in turn; the rest on demand.

    A method with a budget is held to it on the other model.
    """
    turned = itertools.cycle(GROUPED)
    for place, name in enumerate([*BUDGETED, *(name for name in method_names() if name not in BUDGETED)]):
        fields = get_method(name).Config.model_fields.items()
        switches = {key: not field.default for key, field in fields if isinstance(field.default, bool)}
        cases = [({}, GROUPED[(place + 1) % 2]), *(({key: value}, next(turned)) for key, value in switches.items())]
        for (switch, turn), model in itertools.product(cases, GROUPED):
            marks = [] if model == turn else [pytest.mark.exhaustive]
            yield pytest.param(model, name, switch, id="-".join([model, name, *switch]), marks=marks)


@pytest.mark.parametrize(("grouped", "name", "switch"), list(variants()), indirect=["grouped"])
def test_attention_is_that_over_the_tokens_it_says_it_attended(grouped, name, switch, monkeypatch):
    true_kv = get_method(name).true_kv
    true = true_kv is not None and all(true_kv.get(key, value) == value for key, value in switch.items())
    watch = Watch(monkeypatch, true)
    wanted = {**settings(name, SMALL), **(true_kv or {}), **switch}
    (sequence,) = run(grouped, name, wanted, [prompt(8)], STEPS)
    assert watch.left_out > 0 or name not in BUDGETED
    what_heads_did_adds_up_to_what_their_layer_did(sequence, grouped.config.num_key_value_heads)


def what_heads_did_adds_up_to_what_their_layer_did(sequence, num_kv_heads):
    for layer in sequence.counters.cache().layers:
        for count in ("pages_requested", "misses", "heads_checked", "heads_corrected"):
            by_head = [] if layer.by_head is None else getattr(layer.by_head, count)
            assert sum(by_head) == getattr(layer, count)
            assert len(by_head) in (0, num_kv_heads)


@pytest.mark.parametrize("name", method_names())
def test_a_batch_of_different_lengths_is_the_runs_of_one(llama, name):
    """One outgrows the budget while it decodes, the other has before; and the same input gives the same tokens."""
    prompts = [prompt(5, 43), prompt(6, 90)]
    alone = [tokens(llama, name, SMALL, [ids], TWICE)[0] for ids in prompts]
    assert tokens(llama, name, SMALL, prompts, TWICE) == alone


@pytest.mark.parametrize("name", method_names())
def test_prompt_of_one_token_and_growth_past_the_budget(llama, name):
    (out,) = tokens(llama, name, {**SMALL, "budget": 24, "group": 8}, [[7]], steps=34)
    assert len(out) == 34


@pytest.mark.parametrize("name", method_names())
def test_fork_continues_like_the_original(llama, name):
    sequences = run(llama, name, settings(name, SMALL), [prompt(7)], 2)
    method = sequences[0].method
    fork = method.fork(method.context.counters, "fork")
    copied, original = fork.footprint(), method.footprint()
    assert copied.device == original.device
    assert copied.host + copied.shared == original.host  # what is written to host memory is not copied
    last = LAYERS - 1
    q = torch.randn(HEADS, HEAD_DIM)
    k, v = torch.randn(2, llama.config.num_key_value_heads, HEAD_DIM)
    softmax = Softmax(0.25)
    first = method.attend(last, q, k, v, softmax)
    assert torch.equal(first, fork.attend(last, q, k, v, softmax))
    method.attend(last, q, 2 * k, v, softmax)
    assert fork.caches[last].length == method.caches[last].length - 1


@pytest.mark.parametrize("name", method_names())
def test_a_branch_leaves_the_original_as_it_was(llama, name):
    """Whichever of both goes on attends as if the other had never been."""
    (sequence,) = run(llama, name, settings(name, SMALL), [prompt(7)], 2)
    method, counters, last = sequence.method, sequence.method.context.counters, LAYERS - 1
    heads = llama.config.num_key_value_heads

    def news(seed, count):
        torch.manual_seed(seed)
        return [(torch.randn(HEADS, HEAD_DIM), *torch.randn(2, heads, HEAD_DIM)) for _ in range(count)]

    def outputs(of, tokens):
        return torch.stack([of.attend(last, *token, Softmax(0.25)).clone() for token in tokens])

    rejected, accepted = news(1, 6), news(2, 8)  # each fills a page
    wanted = outputs(method.fork(counters, "alone"), accepted)
    drafts = method.branch()
    held = drafts.footprint().device + drafts.footprint().host
    assert held == method.footprint().device + method.footprint().host, "the footprint counts what is shared"
    outputs(drafts, rejected)
    assert torch.equal(outputs(method.branch(), accepted), wanted)  # one draft after another
    assert torch.equal(outputs(method, accepted), wanted)


@pytest.mark.parametrize("name", method_names())
def test_a_sequence_goes_on_from_its_state_as_if_nothing_had_happened(gemma2, name):
    ids, written, settled = prompt(9), {}, []
    with engine(in_memory(gemma2), [PROMPT + STEPS]) as ready:

        def fresh():
            config = get_method(name).Config(**settings(name, SMALL))
            method = get_method(name)(config, ready.layers, ready.context(PROMPT, STEPS))
            sequence = ready.sequence(method, Sampling(max_tokens=STEPS, temperature=0.8))
            sequence.eos = ()
            return sequence

        whole, stepper = fresh(), BlockingStepper(ready.hook, ready.rope)
        whole.accept(*ready.prefill(ids, [whole.method], chunk=WINDOW + 6))
        for step, _ in enumerate(decode(stepper, [whole], Timeline())):
            if step in (0, STEPS // 3, STEPS // 2):  # so that later states hold what was added to earlier ones
                state = capture([whole], written)
                settled += [part._replace(values=part.values.clone()) for part in state.added]
                changing = [part._replace(values=part.values.clone()) for part in state.changing]
                written, tree = state.settled, json.dumps(state.tree)
        resumed = fresh()
        restoring = Restoring([resumed], json.loads(tree), resumed.method.context.tiers)
        for part in (*settled, *changing):
            restoring.put(part)
        restoring.finish()
        assert resumed.token_ids == whole.token_ids[: STEPS // 2 + 2]
        for _ in decode(stepper, [resumed], Timeline()):
            pass
    first, second = whole.report(), resumed.report()
    assert second.token_ids == first.token_ids
    assert (second.cache, second.correction, second.method) == (first.cache, first.correction, first.method)
    assert resumed.method.footprint() == whole.method.footprint()


@pytest.mark.parametrize("name", method_names())
def test_says_what_it_is_and_has_a_profile_of_its_name(name):
    method = get_method(name)
    assert method.title
    assert method.paper
    assert method.__doc__
    assert name in profile_names() or name not in own_method_names()
    assert resolve_profile(method=name).method == name
    for key, field in method.Config.model_fields.items():
        assert field.description, f"{name}.{key} has no description"
