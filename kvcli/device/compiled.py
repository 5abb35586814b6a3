"""What lies between the attention of two layers, compiled: norms, rotation, projections, MLP.

The model's own code launches some 40 small kernels a layer for it; torch.compile fuses them into a few. Attention stays
as it is: the compiler stops at the pipeline's door. Compiling takes a while at the first step, less where torch's cache
knows the model. For a GPU: on a CPU the linear layers run through oneDNN, which the compiler knows in another form.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from kvcli.attention import Handler


@contextmanager
def compiled_layers(model: PreTrainedModel, backend: str = "inductor") -> Iterator[None]:
    """Compile the decoder layers of a model for one token a sequence; leaves them as they were."""
    layers = list(model.get_decoder().layers)  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.compile(dynamic=False, backend=backend)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def opaque(handler: Handler) -> Handler:
    """Hide a handler from the compiler."""
    hidden: Handler = torch.compiler.disable(handler)  # type: ignore[no-untyped-call]
    return hidden
