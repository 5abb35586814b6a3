"""Decode steps on a CPU with what lies between the attention of two layers compiled: matrix products, norms, MLP.

One token reads every weight once. The loop that torch.compile makes of a product and a sum reads them at the rate of
memory, where the libraries that torch calls reach half of it for small matrices (`benchmarks/cpu_decode.py`). It takes
a C++ compiler, and some seconds at the first step.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from kvcli.compat import CompilationError
from kvcli.errors import KvcliError
from kvcli.models.rope import Rope
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.decode import BlockingStepper
from kvcli.runtime.gpu.compiled import compiled_layers
from kvcli.runtime.linear import fused_rows, is_packed
from kvcli.runtime.sequence import RunningSequence


def cpp_compiler() -> str | None:
    """Path of the compiler that torch.compile calls for a CPU, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


class CompiledStepper(BlockingStepper):
    """Steps by `BlockingPipeline`, compiled but for attention.

    Raises:
        KvcliError: at the first step, what the compiler cannot do.
    """

    def __init__(self, hook: Hook, rope: Rope, backend: str = "inductor"):
        super().__init__(hook, rope)
        model = hook.model
        head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        for linear in filter(is_packed, model.modules()):  # the compiler makes loops of plain weights
            weight: Any = linear.weight
            linear.weight = nn.Parameter(weight.unpack(), requires_grad=False)
        self.left = ExitStack()  # what is to be undone at the end
        self.left.enter_context(fused_rows(model))
        self.left.enter_context(compiled_layers(model, backend, [head]))

    @override
    def step(self, batch: Sequence[RunningSequence]) -> Sequence[tuple[Tensor, int | None]]:
        try:
            return super().step(batch)
        except CompilationError as error:
            reason = str(getattr(error, "inner_exception", error)).strip().splitlines()[0]
            raise KvcliError(f"the layers cannot be compiled: {reason}", "take --pipeline blocking") from error

    @override
    def finish(self) -> None:
        self.left.close()
