"""A recorder that does on a CPU what CUDA graphs do."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Replayed(TorchDispatchMode):
    """Notes operations with the tensors they read and made; does them again into the same tensors."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def record(self, rehearse, work, leave=None):
        rehearse()
        self.pieces.append([])
        with self:
            work()

    def cut(self):
        self.pieces.append([])

    def go_to(self, device):
        return device

    def bring(self, given, device):
        return given.clone()  # noted, too: made anew by a replay

    def replay(self, piece):
        for func, args, kwargs, made in self.pieces[piece]:
            for old, new in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view or _copied(out, (args, kwargs)):
            self.pieces[-1].append((func, args, kwargs or {}, _tensors(out)))
        return out


def _tensors(out):
    return [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]


def _copied(out, given):
    """Whether what may be a view of an argument is none, as where `Tensor.to` changes the dtype."""
    there = {x.untyped_storage().data_ptr() for x in _tensors(given)}
    return any(x.untyped_storage().data_ptr() not in there for x in _tensors(out))
