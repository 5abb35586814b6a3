"""What work does with tensors, watched while it runs: how much memory it takes at its peak, and what it reads."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made inside and live at the same time: `most` of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: int = 0
        self.most: int = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is gone; views share one."""
        storage = tensor.untyped_storage()
        identity, size = storage._cdata, storage.nbytes()
        if identity not in self._known:
            self._known.add(identity)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, identity, size)

    def _gone(self, identity: int, size: int) -> None:
        self._known.remove(identity)
        self.now -= size


class UseOf(TorchFunctionMode):
    """Watches whether one of some tensors is read by any torch function called inside."""

    def __init__(self, tensors: list[Any]):
        super().__init__()
        self.tensors = tensors
        self.found: bool = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = args[1:] if function is Tensor.copy_ else args
        given = tree_leaves((read, kwargs))
        self.found = self.found or any(each is tensor for each in given for tensor in self.tensors)
        return function(*args, **(kwargs or {}))
