"""Where kernels are: operations that methods share, what one method alone has, and the step of a GPU."""

import importlib
import inspect
import pkgutil
import re
from functools import cache
from types import ModuleType

import kvcli.kernels
import kvcli.methods
import kvcli.runtime.gpu

KERNEL = re.compile(r"^def (_\w+_kernel)\(", re.MULTILINE)


@cache
def kernel_modules() -> tuple[ModuleType, ...]:
    """Import all modules that define Triton kernels."""
    found = []
    for package in (kvcli.kernels, kvcli.methods, kvcli.runtime.gpu):
        for _, name, is_package in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not is_package and KERNEL.search(inspect.getsource(module := importlib.import_module(name))):
                found.append(module)
    return tuple(found)


def kernel_names() -> set[str]:
    """Name all Triton kernels."""
    return {name for module in kernel_modules() for name in KERNEL.findall(inspect.getsource(module))}
