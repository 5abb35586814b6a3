"""What a method that reads prompts by windows offers besides `Method` (see `Method.prefill_window`)."""

from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from kvcli.kernels.softmax import Softmax
from kvcli.methods._disk import count_disk
from kvcli.store.cache import LayerCache

CacheT = TypeVar("CacheT", bound=LayerCache, contravariant=True)


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
