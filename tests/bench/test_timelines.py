"""Spans of a model's layers."""

from itertools import pairwise

import pytest
import torch
from families import FAMILIES, LAYERS, tiny_model
from torch import nn

from kvcli.bench.phases import module_spans
from kvcli.models.geometry import attention_modules
from kvcli.runtime.linear import cpu_linears
from kvcli.telemetry.timeline import Timeline


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_timed_once_and_the_output_is_the_same(family):
    model, timeline, ids = tiny_model(family), Timeline(enabled=True), torch.tensor([[3, 5, 7]])
    expected = model(ids).logits
    with module_spans(model, timeline):
        found = model(ids).logits
    assert torch.equal(found, expected)
    named = {(span.name, span.details["layer"]) for span in timeline.spans}
    wanted = {(phase, layer) for phase in ("projections", "mlp") for layer in range(LAYERS)}
    assert named == wanted | {("projections", LAYERS)}
    ordered = sorted(timeline.spans, key=lambda span: span.start)
    assert all(a.end <= b.start for a, b in pairwise(ordered))


def test_the_model_is_left_as_it_was_and_so_are_its_faster_layers():
    model = tiny_model("llama")
    with cpu_linears(model):
        before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
        with module_spans(model, Timeline(enabled=True)):
            pass
        assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == before
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_linear_layers_of_attention_are_projections():
    model, timeline = tiny_model("qwen3"), Timeline(enabled=True)
    with module_spans(model, timeline):
        model(torch.tensor([[3]]))
    inside = {name for name, _ in attention_modules(model)[0].named_children()}
    timed = {span.details["module"] for span in timeline.spans if span.name == "projections"}
    linear = {n for n, part in attention_modules(model)[0].named_children() if isinstance(part, nn.Linear)}
    assert linear < timed
    assert timed <= inside | {"head"}
