"""A model's layers by loops for a few rows: the same logits, prompts by the model's own code, nothing left behind."""

from contextlib import nullcontext

import pytest
import torch
from engine import new_method
from families import FAMILIES, VOCAB, WINDOW, tiny_config, tiny_model
from gguf import GGMLQuantizationType, quants
from torch.nn import functional

from kvcli.kernels import _numba, chain, packed_linear
from kvcli.kernels.packed_linear import PACKINGS, PackedWeight
from kvcli.kernels.softmax import Softmax
from kvcli.kv import dense
from kvcli.methods.contract import Method
from kvcli.runtime import cpu_layers as layers
from kvcli.runtime.attention_hook import attached
from kvcli.runtime.cpu_layers import cpu_layers
from kvcli.runtime.decode import BlockingPipeline
from kvcli.runtime.linear import cpu_linears
from kvcli.runtime.next_query import predicting
from kvcli.telemetry.timeline import Timeline

pytestmark = pytest.mark.skipif(_numba.numba is None, reason="numba is not there")

TOKENS = torch.randint(3, VOCAB, (2, 3), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", 1)


def logits(model, tokens=TOKENS):
    with torch.inference_mode():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_and_modules_come_back(family):
    model = tiny_model(family)
    expected = logits(model)
    with cpu_layers(model):
        changed = [module for module in model.modules() if "forward" in vars(module)]
        found = logits(model)
    assert changed
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(model), expected)
    assert not any("forward" in vars(module) for module in changed)


def attend(layer, q, k, v, softmax):
    """Causal attention among the tokens that come together."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax.scale)
    return out.transpose(1, 2)


def run(hook, tokens=TOKENS):
    positions = torch.arange(3, 3 + tokens.shape[1]).expand(len(tokens), -1)
    with torch.inference_mode():
        return hook.run(attend, tokens, positions, keep=slice(None))


def launches(depth, hooked, monkeypatch):
    launched, loop = [], chain._run
    model = tiny_model("llama", layers=depth)
    with attached(model) if hooked else nullcontext() as hook, cpu_layers(model), monkeypatch.context() as patch:
        if hooked:
            run(hook, TOKENS[:1, :1])  # the first step tries layers out
        patch.setattr(chain, "_run", lambda *arguments: launched.append(loop) or loop(*arguments))
        if hooked:
            run(hook, TOKENS[:1, :1])
        else:
            logits(model, TOKENS[:1, :1])
    return len(launched)


@pytest.mark.parametrize(("hooked", "of_a_layer"), [(True, 1), (False, 4)])
def test_launches_of_a_layer(hooked, of_a_layer, monkeypatch):
    """From one attention to the next; or queries, keys and values; what attention gave; gate and up; down."""
    assert launches(3, hooked, monkeypatch) - launches(2, hooked, monkeypatch) == of_a_layer


WHOLE = ("llama", "qwen2", "qwen3", "mistral", "smollm3")
"""Without more, with biases, with norms of heads, and with layers that do not rotate."""


def whole_layers(monkeypatch):
    made, of = [], layers.WholeLayer.of.__func__
    monkeypatch.setattr(layers.WholeLayer, "of", lambda layer: made.append(of(layers.WholeLayer, layer)) or made[-1])
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_layers_give_the_same_logits(family, monkeypatch):
    model, made = tiny_model(family), whole_layers(monkeypatch)
    with attached(model) as hook:
        try:
            expected = run(hook)
        except Exception as error:  # layers that this handler does not serve
            pytest.skip(str(error))
        with cpu_layers(model):
            found = [run(hook) for _ in range(2)]
        assert torch.equal(run(hook), expected)
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)
    if family in WHOLE:
        assert made
        assert all(layer.own is not None for layer in made)


def test_who_listens_to_a_module_hears_it(monkeypatch):
    model, heard = tiny_model("llama"), []
    with attached(model) as hook, cpu_layers(model):
        run(hook)
        expected = run(hook)
        listening = model.model.layers[0].mlp.register_forward_hook(lambda *_: heard.append(1))
        torch.testing.assert_close(run(hook), expected, rtol=1e-4, atol=1e-5)
        listening.remove()
        assert torch.equal(run(hook), expected)
    assert heard == [1]


def told_ahead(hook):
    """Queries of layers 1 and 2, told a layer ahead in the second of two steps, and its logits."""
    told = []
    with predicting(hook, {1, 2}, lambda layer, q, _: told.append(q.clone())):
        run(hook, TOKENS[:1, :1])
        told.clear()
        found = run(hook, TOKENS[:1, :1])
    return torch.stack(told), found


def test_a_layer_ahead_is_told_from_within_the_loops(monkeypatch):
    model, made, launched, loop = tiny_model("llama", layers=3), whole_layers(monkeypatch), [], chain._run
    with attached(model) as hook:
        expected = told_ahead(hook)
        with cpu_layers(model), monkeypatch.context() as patch:
            patch.setattr(chain, "_run", lambda *arguments: launched.append(loop) or loop(*arguments))
            found = told_ahead(hook)
    assert all(layer.own is not None for layer in made)
    assert len(launched) >= 2 * len(made)  # to attention and from it
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", ["position", "gate", "input"])
def test_attention_that_does_more_is_left_to_its_own_code(what, monkeypatch):
    """It scales by the position where that is great, or changes what comes in or goes out."""
    model, made = tiny_model("llama"), whole_layers(monkeypatch)
    kind = type(model.model.layers[0].self_attn)
    forward = kind.forward

    def changed(self, hidden_states, position_embeddings=None, attention_mask=None, **given):
        if what == "position" and "position_ids" in given:
            scale = (1 + given["position_ids"] // 8192)[..., None]
            position_embeddings = tuple(x * scale for x in position_embeddings)
        more = 2 if what == "input" else 1
        out, weights = forward(self, more * hidden_states, position_embeddings, attention_mask, **given)
        return (2 * out if what == "gate" else out), weights

    monkeypatch.setattr(kind, "forward", changed)
    with attached(model) as hook:
        expected = run(hook)
        with cpu_layers(model):
            for _ in range(2):
                torch.testing.assert_close(run(hook), expected, rtol=1e-4, atol=1e-5)
    assert made
    assert all(layer.tried and layer.own is None for layer in made)


def test_prompts_go_through_the_models_own_code(monkeypatch):
    model, long = tiny_model("qwen2"), TOKENS.repeat(2, 20)  # whose projections have biases
    with cpu_linears(model):
        expected = logits(model, long)
    monkeypatch.setattr(layers, "MOST", long.numel())  # fewer than the numbers of any activation
    with cpu_layers(model):
        assert torch.equal(logits(model, long), expected)


def test_what_a_compiler_reads_is_the_models_own_code(monkeypatch):
    model = tiny_model("llama")
    expected = logits(model)
    with cpu_layers(model):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        monkeypatch.setattr(chain, "_run", None)
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)


def test_small_models_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", 1 << 40)
    model = tiny_model("llama")
    with cpu_layers(model):
        assert "forward" not in vars(model.model.layers[0].mlp)


@pytest.mark.parametrize("kinds", [("Q8_0",) * 4, ("Q8_0", "F16", "Q8_0", "Q8_0"), ("F16", "Q8_0", "F16", "BF16")])
def test_packed_weights_are_read_as_they_are(kinds, monkeypatch):
    """Whether or not queries, keys and values, or gate and up, have one format."""
    model = tiny_model("llama")
    formats = dict(zip(("q_proj", "v_proj", "gate_proj", "down_proj"), kinds, strict=True))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            packing = PACKINGS[formats.get(name.rpartition(".")[2], "Q8_0")]
            rows = quants.quantize(module.weight.detach().numpy(), GGMLQuantizationType[packing.name])
            packed = torch.from_numpy(rows.view("uint8").reshape(module.out_features, -1).copy())
            module.weight = torch.nn.Parameter(PackedWeight(packed, packing, torch.float32), requires_grad=False)
    expected = logits(model)
    with cpu_layers(model), monkeypatch.context() as patch:
        patch.setattr(packed_linear, "unpack_rows", None)
        found = logits(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


STEPS = 7


def steps(hook, monkeypatch, name="full", settings=None, count=STEPS, **known):
    """The logits of steps after a prompt of a token, the numbers of loops that they launched, and the method."""
    method = new_method(name, settings or {}, hook.geometry.layers, 1 + count, **known)
    for at, layer in enumerate(hook.geometry.layers):
        token = torch.ones(layer.num_kv_heads, 1, layer.head_dim)
        method.prefill(at, token, token, token[:, :0], Softmax(1.0))
    launched, loop, found = [0] * count, chain._run, []
    for at in range(count):

        def counted(*arguments, at=at):
            launched[at] += 1
            loop(*arguments)

        tokens, positions = TOKENS[:1, at % 3 :][:, :1], torch.tensor([[at + 1]])
        method.context.counters.next_step()
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(chain, "_run", counted)
            found.append(hook.run(BlockingPipeline([method]), tokens, positions))
    return torch.cat(found), launched, method


@pytest.mark.parametrize(
    ("family", "count"), [("llama", STEPS), ("qwen2", STEPS), ("qwen3", STEPS), ("mistral", WINDOW + STEPS)]
)
def test_a_step_with_full_attention_is_one_loop(family, count, monkeypatch):
    """And another one for the head; the first steps try layers out. A window's newest token takes the oldest's row."""
    model = tiny_model(family)
    with attached(model) as hook:
        expected, _, kept = steps(hook, monkeypatch, count=count)
        with cpu_layers(model):
            found, launched, held = steps(hook, monkeypatch, count=count)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for mine, its in zip(held.caches, kept.caches, strict=True):
        torch.testing.assert_close(mine.kv, its.kv, rtol=1e-4, atol=1e-5)
    assert launched[1:] == [2] * (count - 1)


@pytest.mark.parametrize("held", ["bfloat16", "int8", "k8v4"])
def test_a_step_with_narrow_kv_is_one_loop_unless_tokens_were_taken_back(held, monkeypatch):
    """It rounds and reads the same numbers as layer by layer; tokens are recent until six more have come."""
    monkeypatch.setattr(dense, "RECENT", 6)
    config = tiny_config("llama")
    config.head_dim = 64
    model, settings = tiny_model("llama", config=config), {"kv_dtype": held}
    with attached(model) as hook, cpu_layers(model):
        found, launched, method = steps(hook, monkeypatch, "full", settings, count=80)
        monkeypatch.setattr(Method, "in_chain", lambda *_: None)
        expected, one_by_one, kept = steps(hook, monkeypatch, "full", settings, count=80)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert launched[1:] == [2] * 79
    assert min(one_by_one) > 2
    for mine, its in zip(method.caches, kept.caches, strict=True):
        assert (mine.length, mine.recent.first, mine.recent.end) == (its.length, its.recent.first, its.recent.end)
        for some, others in zip(
            mine.format.read(mine.tiles, 81, mine.sizes), its.format.read(its.tiles, 81, its.sizes), strict=True
        ):
            torch.testing.assert_close(some, others, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.recent.kv, its.recent.kv, rtol=1e-5, atol=1e-5)
        mine.rewind(78)
        assert mine.tokens_in_chain() is None, "rows are not those of the newest tokens"
        mine.rewind(0)
        assert mine.tokens_in_chain().length == 1


def test_attention_with_many_queries_a_head_stays_out_of_the_loop(monkeypatch):
    config = tiny_config("llama")
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 9, 1, 16
    model = tiny_model("llama", config=config)
    with attached(model) as hook:
        expected, _, _ = steps(hook, monkeypatch)
        with cpu_layers(model):
            found, launched, _ = steps(hook, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert min(launched) > 2


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("streaming", {"budget": 6, "sink": 1}),
        ("streaming", {"budget": 4, "sink": 0}),
        ("snapkv", {"budget": 4, "window": 2}),
        ("refreekv", {}),
    ],
)
def test_a_step_that_reads_all_that_is_held_is_one_loop(name, settings, monkeypatch):
    """Also where the newest token takes the row of one that is dropped."""
    model = tiny_model("llama")
    with attached(model) as hook:
        expected, _, kept = steps(hook, monkeypatch, name, settings, count=16)
        with cpu_layers(model):
            found, launched, held = steps(hook, monkeypatch, name, settings, count=16)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert launched[1:] == [2] * 15
    assert held.context.counters.counts == kept.context.counters.counts
    for layer, (mine, its) in enumerate(zip(held.caches, kept.caches, strict=True)):
        assert mine.length == its.length
        assert torch.equal(held.attended(layer), kept.attended(layer))
        torch.testing.assert_close(mine.kv, its.kv, rtol=1e-4, atol=1e-5)


def test_sinks_that_move_keep_layers_apart(monkeypatch):
    model, settings = tiny_model("llama"), {"budget": 6, "sink": 1, "positions": "cache"}
    with attached(model) as hook:
        expected, _, _ = steps(hook, monkeypatch, "streaming", settings, count=16)
        with cpu_layers(model):
            found, launched, _ = steps(hook, monkeypatch, "streaming", settings, count=16)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert min(launched) > 2


TOKENS_OF_SIX = {"budget": 6, "sink": 1, "window": 2}
PAGES_OF_SIX = {"budget": 6, "sink": 2, "window": 2, "page_size": 2}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *[(name, PAGES_OF_SIX) for name in ("freekv", "arkvale", "quest", "twilight")],
        ("freekv", PAGES_OF_SIX | {"kv_dtype": "int8"}),
        ("tokenselect", TOKENS_OF_SIX),
        ("fier", TOKENS_OF_SIX | {"group": 2}),
        ("retroinfer", TOKENS_OF_SIX | {"cluster": 2, "update": 4}),
    ],
)
def test_while_six_tokens_are_all_read_a_step_is_one_loop(name, settings, monkeypatch):
    """The seventh makes the method choose, from the same tokens and with the same counts."""
    model = tiny_model("llama")
    with attached(model) as hook:
        expected, _, kept = steps(hook, monkeypatch, name, settings)
        with cpu_layers(model):
            found, launched, held = steps(hook, monkeypatch, name, settings)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert held.context.counters.counts == kept.context.counters.counts
    assert any(any(layer) for step in held.context.counters.counts for layer in step)
    assert launched[1:5] == [2] * 4
    assert launched[5] > 2


@pytest.mark.parametrize("tau", [0.0, 0.9, 1.0])
def test_a_step_of_freekv_is_one_loop_unless_the_window_moves(tau, monkeypatch):
    """Which pages it reads, what it counts and what it keeps for the next step is what phase after phase gives."""
    model, settings = tiny_model("llama"), {"budget": 16, "sink": 4, "window": 4, "page_size": 4, "tau": tau}
    with attached(model) as hook:
        expected, _, kept = steps(hook, monkeypatch, "freekv", settings, count=47)
        with cpu_layers(model):
            found, launched, held = steps(hook, monkeypatch, "freekv", settings, count=47)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert launched[1:] == [2 if at + 1 < 16 or (at + 1) % 4 else launched[15] for at in range(1, 47)]
    assert launched[15] > 2
    assert held.context.counters.counts == kept.context.counters.counts
    assert held.context.counters.heads == kept.context.counters.heads
    for layer, mine in held.retrieval.items():
        its = kept.retrieval[layer]
        assert torch.equal(mine.resident, its.resident)
        torch.testing.assert_close(mine.kv, its.kv, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            mine.summaries.of(mine.candidates), its.summaries.of(its.candidates), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(held.remembered[layer].query, kept.remembered[layer].query, rtol=1e-4, atol=1e-5)
        assert torch.equal(held.attended(layer), kept.attended(layer))


def test_layers_run_one_by_one_where_somebody_watches(monkeypatch):
    """Spans are wanted, attention is observed, or a layer is listened to; afterwards they run together again."""
    model, heard = tiny_model("llama"), []
    with attached(model) as hook, cpu_layers(model):
        expected, together, _ = steps(hook, monkeypatch)
        found, alone, _ = steps(hook, monkeypatch, attention_observer=lambda *_: heard.append(1))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert len(heard) == STEPS * len(hook.geometry.layers)
        timeline = Timeline(enabled=True)
        assert steps(hook, monkeypatch, timeline=timeline)[1] == alone
        assert len([span for span in timeline.spans if span.name == "attention"]) == STEPS * len(hook.geometry.layers)
        listening = model.model.layers[1].register_forward_hook(lambda *_: heard.append(1))
        assert steps(hook, monkeypatch)[1] == [n + 1 for n in alone]  # the layer before ends by itself
        listening.remove()
        assert steps(hook, monkeypatch)[1] == together[1:] + together[-1:] != alone
