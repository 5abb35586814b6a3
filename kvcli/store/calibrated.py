"""Matrices that a calibration made for a model's layers, in a safetensors file: one tensor `layer.{index}` a layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvcli.errors import ExitCode, KvcliError


class CalibratedLayers:
    """The matrices of a file, read one layer at a time; only the file's header is read before."""

    def __init__(self, path: str, shapes: Mapping[int, tuple[int, ...]], kind: str):
        """Check that the file holds a tensor of the given shape for every layer asked for.

        `kind` is what the matrices are, as `kvcli calibrate` calls it.

        Raises:
            KvcliError: there is no such file, it is no safetensors file, or it belongs to another model (usage).
        """
        self.path, self.kind = path, kind
        try:
            Path(path).open("rb").close()  # whose error says what is wrong, where safetensors' does not
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                for layer, shape in shapes.items():
                    if name_of(layer) not in names:
                        raise self._refused(f"no tensor {name_of(layer)}")
                    found = tuple(file.get_slice(name_of(layer)).get_shape())
                    if found != shape:
                        raise self._refused(f"{name_of(layer)} has shape {list(found)}, not {list(shape)}")
        except OSError as error:
            raise self._refused(str(error.strerror)) from None
        except SafetensorError as error:
            raise self._refused(f"not a safetensors file ({error})") from None

    def __getitem__(self, layer: int) -> Tensor:
        """The matrices of one layer, in float32 in host memory."""
        with safe_open(self.path, framework="pt") as file:
            matrices: Tensor = file.get_tensor(name_of(layer))
        return matrices.to(torch.float32)

    def _refused(self, reason: str) -> KvcliError:
        return KvcliError(
            f"{self.kind} file {self.path}: {reason}",
            f"make one for this model with: kvcli calibrate {self.kind}; or leave the setting out",
            ExitCode.USAGE,
        )


def name_of(layer: int) -> str:
    """What a layer's matrices are called in the file."""
    return f"layer.{layer}"
