"""What a method that reads prompts by windows offers besides `Method` (see `Method.prefill_window`)."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import LayerCache
from kvcli.methods._disk import count_disk

CacheT = TypeVar("CacheT", bound=LayerCache, contravariant=True)


class PromptWindows:
    """The part of a method that a prompt passes through by windows, each through all layers before the next."""

    @property
    def prefill_window(self) -> int | None:
        """Tokens that the prompt is read by, each window through all layers by `attend_window`; None: see `prefill`."""
        return None

    @property
    def preview(self) -> Sequence[int]:
        """Token ids that the method wants to see, read alone, before the prompt is read by windows."""
        return ()

    def take_preview(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> None:
        """Take a layer's queries q [H, 1 + n, d], keys and values k, v [Hk, 1 + n, d] of the preview.

        The first is that of the prompt's first token, at position 0; of a long preview it is the last n tokens.
        """

    @property
    def wants_logits(self) -> bool:
        """Whether `take_logits` wants to see what the model expects behind every token of the prompt."""
        return type(self).take_logits is not PromptWindows.take_logits

    def take_logits(self, first: int, ids: Sequence[int], logits: Tensor) -> None:
        """Take a window that all layers have read: its tokens `ids` [n] from position `first` on, logits [n, vocab]."""


@runtime_checkable
class AttendsWindows(Protocol[CacheT]):
    """Attends with several tokens of a prompt at once."""

    def retrieve_window(self, layer: int, cache: CacheT, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Do what `Method.attend_window` says in a layer of `Method.new_cache`."""


def attend_window(method: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Do so in a layer of `Method.new_cache`, and count what was asked of a disk."""
    cache, context = method.retrieval[layer], method.context
    assert isinstance(method, AttendsWindows), f"{type(method).__name__} has no retrieve_window"
    out = method.retrieve_window(layer, cache, q, k, v, softmax)
    count_disk(context, layer, cache)
    return out
