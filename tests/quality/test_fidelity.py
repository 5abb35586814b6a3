"""Closeness to full attention against transformers' own cache and logits, in float64 and plain loops."""

import math

import pytest
import torch
from engine import WordlessTokenizer
from families import HEADS, KV_HEADS, LAYERS, VOCAB, tiny_model

from kvcli.inputs.profiles import resolve_profile
from kvcli.kernels.softmax import Softmax
from kvcli.methods import get_method
from kvcli.models.geometry import geometry_of
from kvcli.models.loading import Model
from kvcli.quality.fidelity import Fidelity, Passage, compare_attention, measure
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling, TeacherForcing

PROMPT, STEPS, G = 75, 9, HEADS // KV_HEADS
SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8, "dense_layers": 1}
FREEKV = resolve_profile(method="freekv", overrides={**SMALL, "tau": 0.0})


def loaded(family):
    module = tiny_model(family)
    geometry = geometry_of(module.config, module.dtype)
    return Model(module, WordlessTokenizer(), geometry, torch.device("cpu"), torch.float32, "tiny", "directory")


def passage(seed=0, prompt=PROMPT, steps=STEPS):
    ids = torch.randint(3, VOCAB, (prompt + steps,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Passage("made up", ids[:prompt], ids[prompt:])


class Seen:
    """What attention was asked, gave and looked at, in order."""

    def __init__(self):
        self.calls = []

    def __call__(self, method, layer, q, out, softmax):
        self.calls.append((layer, q.clone(), out.clone(), method.attended(layer), softmax))


def by_hand(q, out, k, v, attended, scale):
    """Mass, recall of the best 64 and error of one KV head: q, out [G][d], k, v [n][d], attended [n]."""
    n, d = len(k), len(k[0])
    mass, importance, true = 0.0, [0.0] * n, []
    for query in q:
        scores = [scale * sum(a * b for a, b in zip(query, key, strict=True)) for key in k]
        top = max(scores)
        total = sum(math.exp(score - top) for score in scores)
        weights = [math.exp(score - top) / total for score in scores]
        mass += sum(w for w, seen in zip(weights, attended, strict=True) if seen) / len(q)
        importance = [a + b for a, b in zip(importance, weights, strict=True)]
        true.append([sum(weights[j] * v[j][c] for j in range(n)) for c in range(d)])
    best = sorted(range(n), key=lambda j: -importance[j])[:64]
    off = sum((a - b) ** 2 for x, y in zip(out, true, strict=True) for a, b in zip(x, y, strict=True))
    error = math.sqrt(off / sum(a * a for row in true for a in row))
    return mass, sum(attended[j] for j in best) / len(best), error, sum(attended)


@torch.inference_mode()
def test_every_figure_is_that_of_a_slow_computation():
    model, text, seen = loaded("llama"), passage(), Seen()
    with engine(model, [text.capacity]) as ready:
        ((measured, _), reference) = measure(ready, text, [FREEKV, FREEKV], along={0: seen})
    fidelity = measured.fidelity
    exact = model.module(torch.tensor([text.prompt + text.continuation]), use_cache=True)
    sums, worst = {}, {}
    for call, (layer, q, out, attended, softmax) in enumerate(seen.calls):
        if layer == 0:
            continue  # dense: nothing was chosen
        length = PROMPT + call // LAYERS + 1
        kv = exact.past_key_values.layers[layer]
        assert attended.shape == (KV_HEADS, length)
        for head in range(KV_HEADS):
            group = slice(head * G, head * G + G)
            k, v = (each[0, head, :length].double().tolist() for each in (kv.keys, kv.values))
            figures = by_hand(
                q[group].double().tolist(), out[group].double().tolist(), k, v, attended[head].tolist(), softmax.scale
            )
            key = (layer, head)
            sums[key] = [a + b for a, b in zip(sums.get(key, [0] * 4), figures, strict=True)]
            before = worst.get(key, figures)
            worst[key] = [choose(*pair) for choose, *pair in zip((min, min, max, max), before, figures, strict=True)]
    assert set(fidelity.layers) == set(range(1, LAYERS))
    for (layer, head), total in sums.items():
        mean = fidelity.layers[layer].mean[:, head].tolist()
        assert mean == pytest.approx([value / STEPS for value in total], rel=1e-4, abs=1e-5)
        assert fidelity.layers[layer].worst[:, head].tolist() == pytest.approx(worst[layer, head], rel=1e-4, abs=1e-5)
    assert 0.1 < fidelity.attention()["mass"] < 0.99, "a selection that covers nothing or everything tests little"
    assert reference.caches[0].length == text.capacity


@torch.inference_mode()
def test_divergence_and_agreement_are_those_of_the_two_distributions():
    model, text = loaded("llama"), passage(1)
    with engine(model, [text.capacity]) as ready:
        ((measured,), _) = measure(ready, text, [FREEKV])
    ids = torch.tensor([text.prompt + text.continuation])
    expected = model.module(ids, use_cache=False).logits[0, PROMPT:].double()
    with engine(model, [text.capacity]) as ready:
        context = ready.context(PROMPT, STEPS)
        method = ready.method(FREEKV, context)
        ready.prefill(text.prompt, [method])
        fed, (first, *others) = Sampling(max_tokens=STEPS + 1, ignore_eos=True), text.continuation
        sequence = ready.sequence(method, fed, sampler=TeacherForcing([*others, 0]), first_token=first)
        for step, _ in enumerate(ready.decode([sequence])):
            logits = sequence.logits.double()
            p, q = expected[step].softmax(-1).tolist(), logits.softmax(-1).tolist()
            kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            assert measured.fidelity.steps[step].kl == pytest.approx(kl, rel=1e-3, abs=1e-7)
            assert measured.fidelity.steps[step].agrees == (p.index(max(p)) == q.index(max(q)))
    assert measured.fidelity.kl == pytest.approx(sum(s.kl for s in measured.fidelity.steps) / STEPS)
    assert measured.fidelity.kl > 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("name", ["full", "freekv", "infllm"])
def test_a_method_that_has_room_for_all_is_full_attention(family, name):
    model, text = loaded(family), passage(2, steps=4)
    profile = resolve_profile(method=name, overrides=get_method(name).exact)
    with engine(model, [text.capacity]) as ready:
        ((measured,), _) = measure(ready, text, [profile])
    found = measured.fidelity.summary()
    assert found["kl"] == pytest.approx(0, abs=1e-8)
    assert found["agreement"] == 1
    assert found["mass"] == pytest.approx(1, abs=1e-6)
    assert found["recall"] == 1
    assert found["error"] == pytest.approx(0, abs=1e-5)


def test_methods_measured_together_are_each_what_they_are_alone():
    model, text = loaded("llama"), passage(3)
    profiles = [FREEKV, resolve_profile(method="freekv", overrides={**SMALL, "tau": 1.0})]
    with engine(model, [text.capacity]) as ready:
        together, _ = measure(ready, text, profiles)
        alone = [measure(ready, text, [profile])[0][0] for profile in profiles]
    for one, other in zip(together, alone, strict=True):
        assert one.fidelity.kl == pytest.approx(other.fidelity.kl, rel=1e-3)
        assert one.fidelity.attention() == pytest.approx(other.fidelity.attention(), rel=1e-4)
        assert one.method.context.counters.correction() == other.method.context.counters.correction()
    assert together[0].fidelity.attention()["mass"] < together[1].fidelity.attention()["mass"]


def test_a_softmax_with_a_logit_of_its_own_keeps_its_share_out_of_the_mass():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, generator=generator) for shape in ((4, 8), (2, 11, 8), (2, 11, 8)))
    sinks = torch.tensor([3.0, -1.0, 0.5, 2.0])
    scores = torch.einsum("hgd,hnd->hgn", q.view(2, 2, 8).double(), k.double()) * 0.3
    weights = torch.cat((scores, sinks.double().view(2, 2, 1)), -1).softmax(-1)[..., :-1]
    out = torch.einsum("hgn,hnd->hgd", weights, v.double()).reshape(4, 8)
    everything = torch.ones(2, 11, dtype=torch.bool)
    mass, recall, error, attended = compare_attention(q, out.float(), k, v, everything, Softmax(0.3, None, sinks))
    assert mass.tolist() == pytest.approx([1, 1])
    assert recall.tolist() == [1, 1]
    assert attended.tolist() == [11, 11]
    assert error.tolist() == pytest.approx([0, 0], abs=1e-6)


def test_sums_of_sequences_are_those_of_one_long_one():
    first, second, both = Fidelity(), Fidelity(), Fidelity()
    for part, values in ((first, (0.25, 0.5)), (second, (0.75,))):
        for value in values:
            for each in (part, both):
                each.note_layer(3, torch.full((4, 2), value))
                each.note_step(0, torch.tensor([0.0, 1.0]), torch.tensor([0.0, value]))
    first.add(second)
    assert first.summary() == both.summary()
    assert first.attention() == {"mass": 0.5, "recall": 0.5, "error": 0.5, "attended": 0.5}
    assert first.layers[3].worst.tolist() == [[0.25] * 2, [0.25] * 2, [0.75] * 2, [0.75] * 2]
    assert Fidelity().summary() == {}
