"""What lies between the attention of two layers, compiled: norms, rotation, projections, MLP.

The model's own code launches some 40 small kernels a layer for it; torch.compile fuses them into a few. Attention stays
as it is: the compiler stops at its door. Compiling takes a while at the first step, less where torch's cache knows the
model. This is for a GPU; what a CPU wants beside it is in `kvcli.runtime.compiled`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from kvcli.compat import compiled
from kvcli.models.layers import decoder_of
from kvcli.runtime.attention_hook import uncompiled

BATCH_SIZES = 64
"""For so many a layer is compiled anew; torch's own limit is met soon, and it then goes on uncompiled."""


@contextmanager
def compiled_layers(
    model: PreTrainedModel, backend: str = "inductor", besides: Sequence[nn.Module] = ()
) -> Iterator[None]:
    """Compile the decoder layers of a model, and other parts, for one token a sequence; leaves them as they were."""
    parts: list[nn.Module] = [*decoder_of(model).layers, *besides]  # type: ignore[misc]
    with uncompiled(), compiled(parts, backend, recompile_limit=BATCH_SIZES):
        yield
