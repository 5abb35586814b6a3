"""Hidden states that lie in host memory and pass through the device by chunks, on a CPU that is told to do so."""

import pytest
import torch
from engine import in_memory, new_method, profile_of
from families import FAMILIES, VOCAB, tiny_model
from stated import settings
from streams import Late

from kvcli.errors import KvcliError
from kvcli.methods import get_method, method_names
from kvcli.models.geometry import geometry_of
from kvcli.runtime import engine as engine_module
from kvcli.runtime import prefill as prefill_module
from kvcli.runtime.attention_hook import attached
from kvcli.runtime.engine import engine
from kvcli.runtime.layer_major import StreamedHiddenStates, embedded_part, streamed
from kvcli.runtime.prefill import Branches, prefill_branches
from kvcli.runtime.sampling import Sampling


@pytest.fixture
def streaming(monkeypatch):
    """Hidden states are streamed from here on, unless a layer reads in one piece."""
    resumes = lambda geometry, *_: all(state.resumes for state in geometry.states)  # noqa: E731
    return lambda: monkeypatch.setattr(prefill_module, "streamed", resumes)


def prompt(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def read(model, branches, chunk):
    layers = geometry_of(model.config, model.dtype).layers
    methods = [new_method("full", {}, layers, len(branches.common) + len(rest)) for rest in branches.rests]
    with attached(model) as hook:
        return prefill_branches(hook, branches, methods, layers, lambda _: None, chunk), methods


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_come_out(family, streaming):
    model, branches = tiny_model(family), Branches((), [prompt(51)])
    expected, (held,) = read(model, branches, 20)
    streaming()
    logits, (method,) = read(model, branches, 20)
    assert torch.equal(logits, expected)
    for cache, wanted in zip(method.caches, held.caches, strict=True):
        assert torch.equal(cache.k, wanted.k)
        assert torch.equal(cache.v, wanted.v)


def test_prompts_that_begin_alike(streaming):
    model, branches = tiny_model("llama"), Branches(prompt(37), [prompt(5, 1), prompt(9, 2), prompt(1, 3)])
    expected, _ = read(model, branches, 8)
    streaming()
    assert torch.equal(read(model, branches, 8)[0], expected)


def test_an_interrupt_in_a_chunk_lets_go_of_everything(streaming, monkeypatch):
    streaming()
    model, made = tiny_model("llama"), []
    monkeypatch.setattr(
        prefill_module, "StreamedHiddenStates", lambda *args: made.append(StreamedHiddenStates(*args)) or made[-1]
    )
    layers, done = geometry_of(model.config, model.dtype).layers, []

    def interrupt(tokens):
        done.append(tokens)
        if len(done) == 6:  # in the second layer
            raise KeyboardInterrupt

    with attached(model) as hook, pytest.raises(KeyboardInterrupt):
        prefill_branches(hook, Branches((), [prompt(30)]), [new_method("full", {}, layers, 30)], layers, interrupt, 8)
    assert not any("forward" in vars(layer) for layer in model.model.layers)
    (states,) = made
    assert not states._host
    assert not states._arriving
    assert not states._leaving


def test_memory_that_cannot_be_had_is_said_in_a_line(streaming, monkeypatch):
    def refuse(*_, **__):
        raise KvcliError("the system does not pin that much", "use a shorter context")

    streaming()
    monkeypatch.setattr("kvcli.runtime.layer_major.Tiers.on_host_async", refuse)
    with pytest.raises(KvcliError, match="does not pin"):
        read(tiny_model("llama"), Branches((), [prompt(30)]), 8)


def test_a_part_comes_while_the_one_before_is_computed():
    """Each part is asked for one part ahead, across layers too, but never before it was written."""
    parts = [slice(0, 3), slice(3, 6), slice(6, 7)]
    states = StreamedHiddenStates(
        parts, lambda part: torch.zeros(1, part.stop - part.start, 2), [torch.device("cpu")] * 4
    )
    for layer in range(4):
        for at, part in enumerate(parts):
            hidden = states.read(part)
            assert (hidden == layer).all()
            assert len(states._arriving) == (layer > 0)
            assert not states._arriving or states._arriving[0][0] == (at + 1) % 3
            states.write(part, hidden + 1)


def went_through(streams):
    """Hidden states of some parts after layers that add to them, each part by its own number."""
    parts = [slice(0, 3), slice(3, 6), slice(6, 7)]
    start = torch.arange(14.0).view(1, 7, 2)
    states = StreamedHiddenStates(parts, lambda part: start[:, part].clone(), [torch.device("cpu")] * 4, streams)
    out = []
    for layer in range(4):
        for part in parts:
            made = states.read(part) * 2 + part.start
            if layer == 3:
                out.append(made)
            else:
                states.write(part, made)
    states.close()
    return torch.cat(out, 1)


def test_copies_as_late_as_their_points_allow_change_nothing():
    expected = went_through(None)
    late = [Late(seed) for seed in range(20)]
    assert all(torch.equal(went_through(streams), expected) for streams in late)
    assert sum(streams.late for streams in late) > 0


def test_what_the_first_layer_is_given():
    model, ids = tiny_model("gemma2"), torch.tensor([prompt(9)])
    seen = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.inference_mode():
        model(input_ids=ids)
    with torch.inference_mode(), attached(model) as hook:
        found = embedded_part(hook, ids, torch.arange(9)[None], slice(0, 9))
    handle.remove()
    assert torch.equal(found, seen[0])
    assert "forward" not in vars(model.model.layers[0])


def test_only_long_prompts_on_a_gpu_are_streamed():
    geometry = geometry_of(tiny_model("llama").config, torch.float32)
    tokens = (1 << 30) // (4 * geometry.hidden_size)
    assert [streamed(geometry, tokens + more, 4, torch.device("cuda")) for more in (-1, 0)] == [False, True]
    assert not streamed(geometry, 100 * tokens, 4, torch.device("cpu"))


LONG = [3 + 7 * at % 90 for at in range(127)]
WAITING = {
    "arkvale",
    "fier",
    "freekv",
    "infinigen",
    "loki",
    "magicpig",
    "offload",
    "pariskv",
    "quest",
    "retroinfer",
    "shadowkv",
    "twilight",
    "vattention",
    "yakv",
}


# razor and duoattention try a model's heads, for which this one has no tokenizer.
@pytest.mark.parametrize("name", [name for name in method_names() if name not in ("razor", "duoattention")])
def test_a_method_whose_layers_wait_says_the_same(name, monkeypatch):
    """Streamed, lent and parked on the CPU as beside a GPU; beside the reference that an audit brings."""
    wanted = {**settings(name), **({"offload": True} if "offload" in get_method(name).Config.model_fields else {})}
    if name == "offload":
        wanted["kv_dtype"] = "int8"  # so that layers are brought on a CPU, too
    model, said = tiny_model("llama"), []
    for stream in (False, True):
        for module in (prefill_module, engine_module):
            monkeypatch.setattr(module, "streamed", lambda *_, stream=stream: stream)
        with engine(in_memory(model), [len(LONG) + 6]) as ready:
            profiles = [profile_of(name, wanted), profile_of("full", {})]
            # Beside what reads by windows, too.
            methods = [ready.method(each, ready.context(len(LONG), 6), True) for each in profiles]
            waiting = [x for each in methods[0].waiting for x in each.waiting() if x.numel()]
            if stream and methods[0].prefill_window is None:
                assert all(x.untyped_storage().nbytes() == 0 for x in waiting)
                assert waiting or name not in WAITING
            logits = ready.prefill(LONG, methods, chunk=50)
            assert methods[0].context.parking is None
            sequence = ready.sequence(methods[0], Sampling(max_tokens=6, ignore_eos=True))
            sequence.accept(logits[0])
            for _ in ready.decode([sequence]):
                pass
        said.append((sequence.token_ids, [x.clone() for x in logits], sequence.counters.prefill_bytes_to_host))
    assert said[0][0] == said[1][0]
    assert said[0][2] == said[1][2]
    assert all(torch.equal(a, b) for a, b in zip(said[0][1], said[1][1], strict=True))
