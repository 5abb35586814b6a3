"""What a method that reads prompts by windows offers besides `Method` (see `Method.prefill_window`)."""

from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from kvcli.kernels.softmax import Softmax
from kvcli.store.cache import LayerCache

CacheT = TypeVar("CacheT", bound=LayerCache, contravariant=True)


@runtime_checkable
class AttendsWindows(Protocol[CacheT]):
    """Attends with several tokens of a prompt at once."""

    def retrieve_window(self, layer: int, cache: CacheT, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Do what `Method.attend_window` says in a layer of `Method.new_cache`."""
