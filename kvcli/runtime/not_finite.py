"""Find the origin of NaN or infinity in a model's logits."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from kvcli.errors import KvcliError
from kvcli.inputs.profiles import reference_profile
from kvcli.models.auto import layers_of
from kvcli.runtime.engine import Engine

_TOKENS = 256  # at the prompt's end, which are read again


def check_finite(engine: Engine, logits: Tensor, ids: Sequence[int]) -> None:
    """Check the logits [..., vocab] that follow the tokens of a prompt.

    Raises:
        KvcliError: a row holds NaN or nothing but infinity; the message names the weight or layer it comes from.
    """
    if not bool(logits.max(-1).values.isfinite().all()):
        what = f"NaN or infinity in the model's logits: {describe_origin(engine, ids)}"
        raise KvcliError(what, "check the weights, or try --dtype float32")


def describe_origin(engine: Engine, ids: Sequence[int]) -> str:
    """Name the first weight, or else the first layer, that is not finite, by reading a prompt's last tokens again."""
    module = engine.model.module
    for name, weight in module.named_parameters():
        if not _finite(weight):
            return f"the weights of {name} hold it"
    ids = list(ids)[-_TOKENS:]
    broken: list[int] = []
    hooks = [layer.register_forward_hook(_listen(index, broken)) for index, layer in enumerate(layers_of(module))]
    try:
        engine.rope.cover(len(ids) + 1)
        engine.prefill(ids, [engine.method(reference_profile(), engine.context(len(ids), 1))])
    finally:
        for hook in hooks:
            hook.remove()
    if broken:
        return f"it first shows after layer {min(broken)}; try another --dtype for its range"
    return f"it does not show in the last {len(ids):,} tokens of the prompt alone; try another --dtype for its range"


def _listen(layer: int, broken: list[int]) -> Any:
    def hear(_: nn.Module, __: Any, output: Any) -> None:
        if not _finite(output[0] if isinstance(output, tuple) else output):
            broken.append(layer)

    return hear


def _finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(values.float().isfinite().all())
