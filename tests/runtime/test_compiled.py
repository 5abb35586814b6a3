import pytest
import torch
from engine import run
from families import FAMILIES, VOCAB, tiny_model
from torch import nn

from kvcli.conformance.crossed import some
from kvcli.errors import KvcliError
from kvcli.runtime.compiled import CompiledStepper, cpp_compiler

SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8}


def prompt(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


ALONE = ([prompt(60)],)
BATCHES = (*ALONE, [prompt(60), prompt(75, 1)])


def texts(model, backend=None, batches=BATCHES):
    step = None if backend is None else lambda hook, rope, _: CompiledStepper(hook, rope, backend)
    return [each.token_ids for batch in batches for each in run(model, "freekv", SMALL, batch, 8, step=step)]


@pytest.mark.parametrize("family", some(FAMILIES, ("llama", "gemma2", "gpt_oss", "qwen3_moe")))
def test_same_texts_and_the_model_is_left_as_it_was(monkeypatch, family):
    """The compiler's front end alone: what it sees of every family, and where it has to stop."""
    batches = BATCHES if family == "llama" else ALONE
    model = tiny_model(family)
    expected = texts(model, batches=batches)
    compiled = []
    original = CompiledStepper.step

    def watched(self, batch):
        compiled.append(all(layer._compiled_call_impl is not None for layer in model.get_decoder().layers))
        return original(self, batch)

    monkeypatch.setattr(CompiledStepper, "step", watched)
    assert texts(model, "eager", batches) == expected
    assert compiled == [True] * len(batches) * 7
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules() if type(module) is nn.Linear)


@pytest.mark.skipif(cpp_compiler() is None, reason="needs a C++ compiler")
def test_what_the_compiler_makes_of_it_gives_the_same_texts():
    """On one text and two layers: every further shape is compiled anew, which takes long."""
    model = tiny_model("llama", layers=2)
    assert texts(model, "inductor", ALONE) == texts(model, batches=ALONE)


def test_one_compilation_serves_all_layers():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model = tiny_model("llama")
    texts(model, backend)
    assert len(model.get_decoder().layers) > 1
    assert len(graphs) == len(set(graphs)) <= 2 * 6


def test_what_cannot_be_compiled_is_told():
    def backend(_graph, _inputs):
        raise ValueError("no such instruction\nand much more")

    with pytest.raises(KvcliError, match=r"cannot be compiled.*no such instruction$") as caught:
        texts(tiny_model("llama"), backend)
    assert "blocking" in caught.value.hint


def test_the_compiler_is_looked_for_where_torch_looks(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert cpp_compiler() is None
    (tmp_path / "own").write_text("#!/bin/sh\n")
    (tmp_path / "own").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "own"))
    assert cpp_compiler() == str(tmp_path / "own")
