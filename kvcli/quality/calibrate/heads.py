"""RazorAttention's retrieval heads, by echo and induction score (arXiv 2407.15891, section 3.2).

They are found on random tokens that repeat (`kvcli.runtime.retrieval_heads`), as the method itself does without a file:
text plays no part.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.methods.razor import Razor
from kvcli.models.geometry import LayerGeometry
from kvcli.quality.calibrate.matrices import TensorFinder, layer_table
from kvcli.quality.fidelity import Passage
from kvcli.runtime.engine import Engine
from kvcli.runtime.not_finite import check_finite
from kvcli.runtime.retrieval_heads import HeadScores
from kvcli.ui.summary import Table


class Heads(TensorFinder):
    """One tensor, `heads`: bool [layers, KV heads]."""

    def __init__(self, profile: Profile, layers: Sequence[LayerGeometry]):
        super().__init__(profile, layers)
        self.kept = torch.zeros(len(layers), max(layer.num_kv_heads for layer in layers), dtype=torch.bool)
        self.scores: HeadScores | None = None

    def read(self, engine: Engine, passage: Passage, advance: Callable[[int], None]) -> None:
        """Let the method find its heads, once for all passages.

        Raises:
            KvcliError: NaN or infinity in the scores.
        """
        if self.scores is None:
            overrides = self.profile.settings.model_dump() | {"heads": ""}
            method = engine.method(resolve_profile("razor", overrides=overrides), engine.context(passage.capacity, 0))
            assert isinstance(method, Razor)
            for layer, keep in method.keep.items():
                self.kept[layer, : len(keep)] = keep
            self.scores = engine.prepared("head_scores")
            check_finite(engine, self.scores.echo[list(self.layers)], passage.prompt)
        advance(engine.depth * passage.capacity)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"heads": self.kept}

    @override
    def tables(self) -> list[tuple[str, Table]]:
        if self.scores is None:
            return []
        found = (self.scores.echo, self.scores.induction, self.kept)
        cells = (
            (
                layer,
                [
                    f"{float(echo):.3f} · {float(induction):.3f}{' kept' if keep else ''}"
                    for echo, induction, keep in zip(*(each[layer] for each in found), strict=True)
                ],
            )
            for layer in self.layers
        )
        columns = (f"KV head {head}" for head in range(self.kept.shape[1]))
        return [layer_table("Echo and induction score of every KV head", columns, cells)]
