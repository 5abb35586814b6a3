"""The next layer's query, predicted from the attention input of the layer before (InfiniGen, OSDI 2024).

A decoder layer adds little to its input, so the attention input of layer l, put through the query projection of layer
l+1, is close to the query that layer l+1 will have. A method that wants it (`Method.wants_next_query`) gets it before
layer l attends, in time to select and to fetch for layer l+1.

The projection is repeated here outside the model: the query's weights, its norm, its rotation. `check_next_queries`
compares the result with the queries that the model itself makes.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from kvcli.errors import ExitCode, KvcliError
from kvcli.kernels.softmax import Softmax
from kvcli.methods.contract import AnyMethod
from kvcli.models.rope import Rope
from kvcli.models.weights import is_plain
from kvcli.runtime.attention_hook import Hook


@contextmanager
def next_queries(hook: Hook, methods: Sequence[AnyMethod]) -> Iterator[None]:
    """Tell each method that wants them the queries of the next layers during a decode step of these sequences.

    Does nothing if no method wants them.
    """
    takers = [(row, method) for row, method in enumerate(methods) if method.wants_next_query]
    if not takers:
        yield
        return

    def tell(before: int, hidden: Tensor) -> None:  # hidden [b, 1, D]
        layer = before + 1
        wanting = [(row, method) for row, method in takers if layer in method.retrieval]
        if wanting:
            with hook.ahead(layer, hidden) as there:
                queries = _project(hook, layer, there)  # [b, H, d]
                for row, method in wanting:
                    method.take_next_query(layer, _rotated(method, layer, queries[row], method.caches[layer].length))

    with _listening(hook, tell):
        yield


@contextmanager
def predicting(hook: Hook, layers: Collection[int], tell: Callable[[int, Tensor, float], None]) -> Iterator[None]:
    """Within this context, `tell` these layers their unrotated queries [b, H, d] and scale, one layer ahead."""
    if not layers:
        yield
        return

    def hear(before: int, hidden: Tensor) -> None:  # hidden [b, 1, D]
        if before + 1 in layers:
            with hook.ahead(before + 1, hidden) as there:
                q = _project(hook, before + 1, there)
                tell(before + 1, q, getattr(hook.modules[before + 1], "scaling", q.shape[-1] ** -0.5))

    with _listening(hook, hear):
        yield


def project_query(attention: Any, x: Tensor) -> Tensor:
    """Return an attention module's query before its rotation, from attention inputs x [b, D] -> [b, H, d].

    Raises AttributeError for a module without a known query projection.
    """
    d: int = attention.head_dim
    if hasattr(attention, "q_proj"):
        q: Tensor = attention.q_proj(x)
    else:  # queries, keys and values in one projection, the queries first
        fused, rows = attention.qkv_proj, attention.config.num_attention_heads * d
        if is_plain(fused):
            q = functional.linear(x, fused.weight[:rows], None if fused.bias is None else fused.bias[:rows])
        else:
            q = fused(x)[:, :rows]
    heads = q.view(len(x), -1, d)
    if heads.shape[1] == 2 * attention.config.num_attention_heads:  # each head's query, then its gate
        heads = heads[:, ::2]
    norm = getattr(attention, "q_norm", getattr(attention, "q_layernorm", None))
    if norm is not None:  # of each head, or over all of them
        heads = norm(heads) if norm.weight.shape[-1] == d else norm(q).view_as(heads)
    return heads


def _project(hook: Hook, layer: int, hidden: Tensor) -> Tensor:
    """Return a layer's query before its rotation, from attention inputs [b, 1, D] of the new tokens -> [b, H, d]."""
    return hook.tempered(layer, project_query(hook.modules[layer], hidden[:, -1])[:, :, None])[:, :, 0]


@torch.inference_mode()
def check_next_queries(hook: Hook, rope: Rope, method: AnyMethod) -> None:
    """Run one token through the model, and compare the query made here in every layer that retrieves.

    Raises:
        KvcliError: they differ, or the attention has no known form (usage).
    """
    model, position = hook.model, method.context.capacity - 1
    made: dict[int, Tensor] = {}  # layer -> [H, d]

    def make(layer: int, hidden: Tensor) -> None:
        if layer in method.retrieval:
            try:
                query = _project(hook, layer, hidden)[0]
            except AttributeError as error:
                raise _refusal(model, f"the attention of layer {layer} has no known query projection") from error
            made[layer] = _rotated(method, layer, query, position)

    def compare(layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:  # noqa: ARG001
        if layer in made:
            captured = q[0, :, 0].float()
            error = float((made[layer].float() - captured).norm() / captured.norm())
            if not error < (1e-4 if q.dtype == torch.float32 else 2e-2):
                raise _refusal(model, f"the query of layer {layer} comes out {error:.1%} off")
        return torch.zeros_like(q.transpose(1, 2))

    rope.use([method.context.capacity])
    token = torch.tensor([[model.config.get_text_config(decoder=True).vocab_size // 2]], device=model.device)
    with _listening(hook, make):
        hook.run(compare, token, token.new_tensor([[position]]))


@contextmanager
def _listening(hook: Hook, hear: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Pass each layer's attention input [b, n, D] to `hear` before that layer attends, within this context.

    What runs a layer without calling its attention module tells `hook.heard` itself.
    """

    def before(layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if hook.heard is not None:
            hook.heard(layer, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    handles = [
        module.register_forward_pre_hook(partial(before, layer), with_kwargs=True)
        for layer, module in enumerate(hook.modules)
    ]
    hook.heard = hear
    try:
        yield
    finally:
        hook.heard = None
        for handle in handles:
            handle.remove()


def _rotated(method: AnyMethod, layer: int, q: Tensor, position: int) -> Tensor:
    """Rotate q [H, d] to a position; a layer without rotary positions leaves it as it is."""
    rotary = method.context.rotary[layer]
    return q if rotary is None else rotary.rotate(q[:, None], torch.tensor([position], device=q.device))[:, 0]


def _refusal(model: PreTrainedModel, reason: str) -> KvcliError:
    return KvcliError(
        f"queries of model type {model.config.model_type!r} cannot be made a layer ahead: {reason}",
        "use a method that selects with the layer's own query, such as freekv or arkvale",
        ExitCode.USAGE,
    )
