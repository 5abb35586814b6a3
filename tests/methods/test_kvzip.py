"""KVzip against a slow re-derivation from the paper, in float64, and against transformers' own attention weights."""

from dataclasses import replace

import pytest
import torch
from driver import HK, SOFTMAX, H, Stream, layers
from engine import WordlessTokenizer, in_memory, new_method
from eviction_oracle import G, Oracle, best, row
from families import KV_HEADS, LAYERS, VOCAB, tiny_model
from rope_models import model_of

from kvcli.errors import KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.methods import get_method
from kvcli.runtime.engine import engine
from kvcli.runtime.prefill import Branches

PROMPT, DOCUMENT, STEPS = 75, 66, 3
SETTINGS = {"budget": 24, "sink": 3, "window": 5, "chunk": 30}


def kept(worth, prompt, document, budget, sink, window, **_):
    """Sink, what is worth most, and the last tokens; `worth` is that of the document's tokens from the sink on."""
    last = prompt - max(window, min(prompt - document, budget // 2))
    candidates = {at: worth.get(at, 0.0) for at in range(sink, last)}
    return [*range(sink), *best(candidates, budget - sink - (prompt - last)), *range(last, prompt)]


@pytest.mark.parametrize(
    ("document", "changed"),
    [(DOCUMENT, {}), (PROMPT, {"window": 0}), (DOCUMENT, {"sink": 0, "chunk": 100}), (50, {"chunk": 7})],
    ids=str,
)
def test_every_step_matches_the_oracle(document, changed):
    settings = {**SETTINGS, **changed}
    stream, oracle = Stream(PROMPT, STEPS, seed=document), None
    oracle, sink = Oracle(stream), settings["sink"]
    known = {"prompt_tokens": PROMPT, "document_tokens": document}
    method = new_method("kvzip", settings, layers(), PROMPT + STEPS, **known)
    parts = [(at, min(at + settings["chunk"], document)) for at in range(sink, document, settings["chunk"])]
    assert [(part.start, part.stop) for part in method.repeated] == parts
    worth = [{} for _ in range(HK)]
    for number, part in enumerate(method.repeated):
        asked = 2 + part.stop - part.start  # a request of two tokens
        again = Stream(asked, 1, seed=100 + number)
        keys = torch.cat((stream.k[:, :document], again.k[:, :asked]), 1)
        for start in range(0, asked, 9):
            stop = min(start + 9, asked)
            method.observe_repeated(1, part, again.prompt_q[:, start:stop], keys[:, : document + stop], SOFTMAX)
        for head in range(H):
            mine, own = oracle.k[head // G], again.k[head // G].double().tolist()
            for i, query in enumerate(again.prompt_q[head].double().tolist()):
                weights = row(query, [*mine[:sink], *mine[part], *own[: i + 1]])
                for at in range(part.start, part.stop):
                    given = weights[sink + at - part.start]
                    worth[head // G][at] = max(worth[head // G].get(at, 0.0), given)
    k, v = (x[:, :PROMPT].clone() for x in (stream.k, stream.v))
    method.prefill(1, k, v, stream.prompt_q[:, :0], SOFTMAX)
    held = [kept(worth[head], PROMPT, document, **settings) for head in range(HK)]
    for step in range(STEPS):
        now = PROMPT + step
        out = method.attend(1, stream.q[step], stream.k[:, now], stream.v[:, now], SOFTMAX)
        oracle.check(step, method, out, [[*mine, *range(PROMPT, now + 1)] for mine in held])
    assert held[0] != held[1], "KV heads choose for themselves"
    assert not method.scores, "what the cut needed is gone"


class Asks(WordlessTokenizer):
    """Spells a request by the lengths of its words."""

    def __call__(self, text, **_):
        return {"input_ids": [3 + len(word) for word in text.split()]}


def random_tokens(length, seed):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


IDS, TEMPLATE = random_tokens(DOCUMENT, 1), random_tokens(3, 2)
QUESTIONS = [random_tokens(6, 3), random_tokens(9, 4)]


def read(model, questions, chunk=11, **settings):
    """Read the document with questions on it, together -> a method each, in room that repetitions go beyond."""
    prompts = [[*IDS, *question, *TEMPLATE] for question in questions]
    with engine(replace(in_memory(model), tokenizer=Asks()), [PROMPT + 9]) as ready:
        methods = [
            get_method("kvzip")(
                get_method("kvzip").Config(**{**SETTINGS, **settings}),
                ready.layers,
                ready.context(len(ids), PROMPT + 9 - len(ids), question),
            )
            for ids, question in zip(prompts, questions, strict=True)
        ]
        branches = Branches.of(prompts, DOCUMENT if len(prompts) > 1 else 0)
        extra = ready.repeated_tokens(branches, [[method] for method in methods])
        done = []
        ready.prefill_branches(branches, [[method] for method in methods], done.append, chunk)
        assert sum(done) == ready.depth * (len(branches.tokens) + extra)
    return methods


def of_transformers(ids):
    """Attention weights [layer][H, n, n] of transformers' model."""
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    out = model(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False)
    return [weights[0].double() for weights in out.attentions]


def test_scores_are_what_the_model_looks_at_when_it_repeats():
    """Weights over some keys are those over all keys, normed anew."""
    worth = [[{} for _ in range(KV_HEADS)] for _ in range(LAYERS)]
    requests = [[9, 6, 11, 11], [9, 6, 11, 10, 11, 7]]  # "Repeat the previous context:" and "... starting with"
    for start in range(3, DOCUMENT, 30):
        part = range(start, min(start + 30, DOCUMENT))
        request = requests[0] if start == 3 else [*requests[1], *IDS[start - 8 : start], 4]
        weights = of_transformers([*IDS, *request, *TEMPLATE, *IDS[part.start : part.stop]])
        for layer, of_layer in enumerate(weights):
            columns = [*range(3), *part, *range(DOCUMENT, of_layer.shape[2])]
            some = of_layer[:, DOCUMENT:, columns]
            some = (some / some.sum(2, keepdim=True)).unflatten(0, (KV_HEADS, -1)).amax((1, 2))  # [Hk, columns]
            for head in range(KV_HEADS):
                worth[layer][head] |= {at: float(some[head, 3 + at - part.start]) for at in part}
    (method,) = read(tiny_model("llama"), QUESTIONS[:1])
    for layer in range(LAYERS):
        positions = method.retrieval[layer].positions[:, :24].tolist()
        assert positions == [kept(worth[layer][head], PROMPT, DOCUMENT, **SETTINGS) for head in range(KV_HEADS)]
    asked = len(requests[0]) + 2 * (len(requests[1]) + 9) + 3 * len(TEMPLATE) + DOCUMENT - 3
    assert method.statistics() == {"kept_tokens": [24] * LAYERS, "repeated_tokens": asked}


@pytest.mark.parametrize("family", ["gemma2", "qwen3_next"])
def test_questions_on_a_document_keep_the_same_of_it(family):
    """Of a document that is repeated once for all of them; a question's tokens stay beside that."""
    model = tiny_model(family)
    together = read(model, QUESTIONS, budget=40)
    alone = [read(model, [question], budget=40)[0] for question in QUESTIONS]
    for one, other in zip(together, alone, strict=True):
        for layer, cache in one.retrieval.items():
            assert torch.equal(cache.positions[:, :40], other.retrieval[layer].positions[:, :40])
            assert (cache.positions[:, :40] >= DOCUMENT).sum() == len(cache.positions) * (cache.length - DOCUMENT)
    assert together[0].repeated_tokens == together[1].repeated_tokens == alone[0].repeated_tokens > DOCUMENT


def test_a_prompt_within_the_budget_is_not_repeated():
    (method,) = read(tiny_model("llama"), QUESTIONS[:1], budget=PROMPT)
    assert method.statistics() == {"kept_tokens": [PROMPT] * LAYERS, "repeated_tokens": 0}


def test_positions_that_would_be_others_are_refused():
    with pytest.raises(KvcliError, match="the repeated document needs 114 positions"):
        read(model_of("dynamic"), QUESTIONS[:1])


@pytest.mark.parametrize("wrong", [{"budget": 36, "sink": 4, "window": 32}, {"chunk": 0}, {"sink": -1}])
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(KvcliError):
        resolve_profile(method="kvzip", overrides=wrong)
