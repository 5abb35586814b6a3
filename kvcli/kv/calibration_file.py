"""Read the safetensors files that a calibration writes: one tensor `layer.{index}` per layer, or a single one."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvcli.errors import ExitCode, KvcliError


class CalibrationMatrices:
    """The matrices of a calibration file, read one layer at a time.

    Raises:
        KvcliError: the file does not hold a tensor of the given shape for each layer (usage).
    """

    def __init__(self, path: str, shapes: Mapping[int, tuple[int, ...]], kind: str):
        check_file(path, {tensor_name(layer): shape for layer, shape in shapes.items()}, kind)
        self.path = path

    def __getitem__(self, layer: int) -> Tensor:
        """Read the matrices of one layer to host memory, in float32."""
        with safe_open(self.path, framework="pt") as file:
            matrices: Tensor = file.get_tensor(tensor_name(layer))
        return matrices.to(torch.float32)


def read_tensor(path: str, name: str, shape: tuple[int, ...], kind: str) -> Tensor:
    """Read one tensor of a file to host memory.

    Raises:
        KvcliError: the file does not hold this tensor in this shape (usage).
    """
    check_file(path, {name: shape}, kind)
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def check_file(path: str, shapes: Mapping[str, tuple[int, ...]], kind: str) -> None:
    """Check by its header that a file holds these tensors; `kind` is the name of their kind in `kvcli calibrate`.

    Raises:
        KvcliError: the file is missing, is not a safetensors file, or belongs to another model (usage).
    """
    try:
        Path(path).open("rb").close()  # its error says what is wrong; safetensors' does not
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name, shape in shapes.items():
                if name not in names:
                    raise _refused(path, kind, f"no tensor {name}")
                found = tuple(file.get_slice(name).get_shape())
                if found != shape:
                    raise _refused(path, kind, f"{name} has shape {list(found)}, not {list(shape)}")
    except OSError as error:
        raise _refused(path, kind, str(error.strerror)) from None
    except SafetensorError as error:
        told = shorten(str(error), 160, placeholder=" ...")  # some quote file contents of any length
        raise _refused(path, kind, f"not a safetensors file ({told})") from None


def tensor_name(layer: int) -> str:
    """Name the tensor of a layer in the file."""
    return f"layer.{layer}"


def _refused(path: str, kind: str, reason: str) -> KvcliError:
    return KvcliError(
        f"{kind} file {path}: {reason}",
        f"make one for this model with: kvcli calibrate {kind}; or leave the setting out",
        ExitCode.USAGE,
    )
