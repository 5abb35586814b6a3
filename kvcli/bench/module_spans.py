"""Spans of the model's own layers, for a run that is taken apart.

Clocks inside a step cost time, so they are there in that run alone. `projections` are the parts of the attention
modules (linear layers, norms of queries and keys) and the head, `mlp` is what else a decoder layer is made of, its
norms included. Rotary arithmetic and residual additions are no modules and stay with the host's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvcli.models.geometry import attention_modules, decoder_of
from kvcli.telemetry.timeline import Timeline


@contextmanager
def module_spans(model: PreTrainedModel, timeline: Timeline) -> Iterator[None]:
    """Time the modules of `model` on `timeline`, by phase; leaves the model as it was."""
    before: list[tuple[nn.Module, Callable[..., Any] | None]] = []
    try:
        for phase, name, layer, module in _modules(model):
            before.append((module, module.__dict__.get("forward")))
            module.forward = _timed(module.forward, timeline, phase, {"module": name, "layer": layer})
        yield
    finally:
        for module, forward in reversed(before):
            if forward is None:
                del module.forward  # back to the method of the class
            else:
                module.forward = forward


def _modules(model: PreTrainedModel) -> Iterator[tuple[str, str, int, nn.Module]]:
    """Phase, name, layer and module of everything that is timed; none of them lies within another."""
    attention = set(attention_modules(model))
    layers: list[nn.Module] = list(decoder_of(model).layers)  # type: ignore[arg-type]
    for index, layer in enumerate(layers):
        for phase, name, module in _parts(layer, attention):
            yield phase, name, index, module
    yield "projections", "head", len(layers), model.get_output_embeddings()  # type: ignore[no-untyped-call]


def _parts(module: nn.Module, attention: set[nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    for name, child in module.named_children():
        if child in attention:
            yield from (("projections", part, each) for part, each in child.named_children())
        elif attention.isdisjoint(child.modules()):
            yield "mlp", name, child
        else:
            yield from _parts(child, attention)


def _timed(forward: Callable[..., Any], timeline: Timeline, phase: str, details: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with timeline.span(phase, **details):
            return forward(*args, **kwargs)

    return run
