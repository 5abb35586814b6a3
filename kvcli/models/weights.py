"""Forms of weights: how a model holds them, and quantising, recognising and unpacking linear layers in memory."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import accumulate
from math import ceil
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from typing_extensions import override

from kvcli.errors import usage_error
from kvcli.kernels.packed_linear import DEVICE_TILE, PACKINGS, TILE, PackedWeight, Packing


def quantise(model: PreTrainedModel, form: WeightForm, dtype: torch.dtype) -> None:
    """Quantise a model in memory as on loading; each original weight is freed before the next one is quantised."""
    if isinstance(form, PackedForm):
        for name, size in form.held(model).items():
            weight, packing = model.get_parameter(name), form.packing(name, dtype)
            assert packing is not None
            if packing.size == 1:
                packed = PackedWeight.of(weight.data, packing, dtype)
            else:  # any bits are valid levels; those of scales are made small numbers
                shape = len(weight), size // len(weight)
                drawn = torch.randint(0, 64, shape, dtype=torch.uint8, device=weight.device).bitwise_and_(0x3B)
                packed = PackedWeight(drawn, packing, dtype).laid_out(by_field=drawn.is_cuda)
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, nn.Parameter(packed, requires_grad=False))
        model.tie_weights()
        return
    chosen = {name.removesuffix(".weight") for name in form.held(model)}
    if form.name == "fp8":
        from torchao.quantization import quantize_

        how = form.arguments(dtype)["quantization_config"].get_apply_tensor_subclass()
        quantize_(model, how, filter_fn=lambda _, name: name in chosen)
        return
    for name in chosen:
        model.set_submodule(name, _of_bitsandbytes(model.get_submodule(name), form, dtype))


def _of_bitsandbytes(linear: nn.Module, form: WeightForm, dtype: torch.dtype) -> Any:
    import bitsandbytes.nn

    library: Any = bitsandbytes.nn
    assert isinstance(linear, nn.Linear)
    sizes, weight = (linear.in_features, linear.out_features, linear.bias is not None), linear.weight.data
    if form.name == "int8":
        made = library.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0, device="meta")
        held = library.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
    else:
        how = {"quant_type": "nf4", "compress_statistics": False}
        made = library.Linear4bit(*sizes, compute_dtype=dtype, device="meta", **how)
        held = library.Params4bit(weight.cpu(), requires_grad=False, module=made, **how)
    made.weight, made.bias = held.to(weight.device), linear.bias
    return made


def is_plain(linear: object) -> bool:
    """Tell whether a module is a linear layer whose weight is a tensor to multiply by, not one of a library's."""
    return type(linear) is nn.Linear and type(linear.weight) in (nn.Parameter, torch.Tensor)


def _made_plain(linear: Any, dtype: torch.dtype) -> nn.Linear:
    """Make a plain linear layer without bias from a library's, by its products with unit vectors."""
    device = next(linear.parameters()).device
    units = torch.eye(linear.in_features, dtype=dtype, device=device)
    with torch.inference_mode():
        weight = linear(units).T.contiguous()
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(weight.to(dtype).clone(), requires_grad=False)
    return plain


@torch.inference_mode()
def settle(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Reorder weights for products on a CPU, before anything else needs memory.

    bitsandbytes does so for 4 bits at a layer's first product, and needs several bytes per weight for it.
    """
    linears: list[Any] = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    for linear in linears:
        if linear.weight.device.type == "cpu":
            linear(torch.zeros(1, linear.in_features, dtype=dtype))


def have_plain_latents(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make the projections plain that attention to latents takes apart, in place."""
    for name, child in list(model.named_modules()):
        if name.endswith(LATENT_UP) and not is_plain(child):
            model.set_submodule(name, _made_plain(child, dtype))


def have_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert 16-bit weights to the requested dtype, in place: transformers widens some forms to bfloat16."""
    for weight in model.parameters():
        if weight.dtype in (torch.bfloat16, torch.float16):
            weight.data = weight.data.to(dtype)


LINE = 64
"""Bytes of a cache line."""


def room_for(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor | None]:
    """Allocate memory of these sizes in bytes for weights that stay on a CPU, adjacent and in huge pages.

    A step reads all of it, and the processor's TLB covers too few normal pages.
    """
    begins = list(accumulate((-(-size // LINE) * LINE for size in sizes), initial=0))
    if device.type != "cpu" or not sizes:
        return [None] * len(sizes)
    memory = mmap.mmap(-1, begins[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not every system has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return [whole[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]


# How a model holds its weights: as it computes with them, quantised in its files, or quantised on loading.

Weights = Literal["auto", "wide", "int8", "int4", "fp8"]
"""Forms of weights on loading; auto is that of the files, wide the dtype of the computation."""

_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "weights": ("bitsandbytes", "torchao", "compressed-tensors"),
    "gptq": ("gptqmodel", "optimum"),
    "kernels": ("kernels",),
}
"""Extras of kvcli, with the packages that they install."""

LATENT_UP = "kv_b_proj"
"""The projection of latents, which attention absorbs (`kvcli.models.latent`): a plain one once a model is loaded."""

WIDER = "pip install 'kvcli[kernels]' lets a GPU use fp8 (compute capability 8.9) and mxfp4 as stored"
"""The hint for weights that are widened."""

_WIDE = {"int4": (2, 4), "int8": (4, 4), "fp8": (2, 4)}
"""Bytes that a weight needs during a product in 16 and in 32 bits, on a CPU that multiplies none in its own form
(GPUs multiply int8).
"""

_WIDENED = {"fp8": (10, 8)}
"""Bytes that a weight needs there while it is made wide, before there is an output."""

_SCALED = {"int8": (14, 12)}
"""Additional bytes that a number of a product needs there when whole numbers are scaled, after the weight is freed."""

_FP8_COMPUTE = (8, 9)  # the least compute capability with products of FP8


@dataclass(frozen=True)
class WeightForm:
    """A form of quantised weights, called `name`; `stored` in the files or made on loading, by `packages`.

    A weight takes `bits`, and each `block` of weights of a row (None: the whole row) `scale_bits` more. `bits` is None
    if only the files know it. `linears` and `experts` say what is quantised: linear layers, and experts that are one
    tensor; except modules whose names end as `spared` says (None: those that transformers spares), and matrices whose
    sides are not multiples of `whole`. `widened` weights are in the model's dtype once they are read. `captured`: a
    CUDA graph can hold a product with them. `like` names the form of `ON_LOADING` with the same products, for stored
    weights.
    """

    name: str
    stored: bool
    packages: tuple[str, ...] = ()
    bits: float | None = None
    scale_bits: int = 0
    block: int | None = None
    linears: bool = True
    experts: bool = False
    spared: tuple[str, ...] | None = None
    whole: tuple[int, int] | None = None
    widened: bool = False
    captured: bool = False
    like: str | None = None

    @property
    def label(self) -> str:
        """The name in a report."""
        return f"{self.name}, widened" if self.widened else self.name

    @property
    def made(self) -> WeightForm | None:
        """The form, if there is one, that a model in memory can be brought into here to multiply as this one does."""
        form = self if not self.stored else None if self.like is None else ON_LOADING[self.like]
        return form if form is not None and all(map(installed, form.packages)) else None

    def nbytes(self, shape: torch.Size) -> int:
        """Return the bytes of a quantised weight [..., out, in]."""
        assert self.bits is not None
        rows, row = shape.numel() // shape[-1], shape[-1]
        return ceil(rows * (row * self.bits + ceil(row / (self.block or row)) * self.scale_bits) / 8)

    def beside(self, weights: int, numbers: int, device: torch.device, itemsize: int) -> int:
        """Return the bytes of a product besides its output of `numbers`, for a matrix of `weights`; by `ON_LOADING`."""
        name = self.like or self.name
        if self.widened or name not in _WIDE or (name == "int8" and device.type == "cuda"):
            return 0
        wide, widened, scaled = (each.get(name, (0, 0))[itemsize == 4] for each in (_WIDE, _WIDENED, _SCALED))
        return max(weights * wide, weights * widened - numbers * itemsize, numbers * scaled)

    def held(self, model: PreTrainedModel) -> dict[str, int]:
        """Return the bytes of the quantised weights of a model on the meta device, by the parameters' names."""
        if self.bits is None or self.widened:
            return {}
        chosen = _quantises(model, self.spared)
        return {
            f"{module}.{name}": self.nbytes(weight.shape)
            for module, name, weight in _candidates(model, self)
            if chosen(module) and not module.endswith(LATENT_UP) and not self._uneven(weight)
        }

    def _uneven(self, weight: torch.Tensor) -> bool:
        return self.whole is not None and any(n % side for n, side in zip(weight.shape[-2:], self.whole, strict=True))

    def require(self) -> None:
        """Raise KvcliError (usage) if a package that reads or makes this form is not installed."""
        missing = [name for name in self.packages if not installed(name)]
        if missing:
            what = "are stored as" if self.stored else "as"
            extra = next(extra for extra, names in _EXTRAS.items() if missing[0] in names)
            raise usage_error(
                f"weights {what} {self.name} need {' and '.join(missing)}, which is not installed",
                f"pip install 'kvcli[{extra}]'",
            )

    def arguments(self, dtype: torch.dtype, spared: Sequence[str] = ()) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` that make this form on loading; empty if the files have it.

        `spared` are the names of all linear layers that are not quantised.
        """
        if self.stored:
            return {}
        from transformers import BitsAndBytesConfig, TorchAoConfig

        bitsandbytes: Any = BitsAndBytesConfig
        if self.name == "int8":
            return {"quantization_config": bitsandbytes(load_in_8bit=True, llm_int8_skip_modules=[*spared])}
        if self.name == "int4":
            how = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, "llm_int8_skip_modules": [*spared]}
            return {"quantization_config": bitsandbytes(load_in_4bit=True, **how)}
        from torchao.quantization import Float8WeightOnlyConfig

        rows = Float8WeightOnlyConfig(set_inductor_config=False)
        return {"quantization_config": TorchAoConfig(rows, modules_to_not_convert=[*spared])}


@dataclass(frozen=True)
class PackedForm(WeightForm):
    """Weights in the blocks of a GGUF file, of several formats: `tensors` has the format of each weight by name."""

    tensors: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, tensors: Mapping[str, str], widened: bool = False) -> PackedForm:
        """Make the form of these tensors, named after the format that most of them have."""
        most = Counter(tensors.values()).most_common(1)
        name = f"GGUF {most[0][0]}" if most else "GGUF"
        chosen = any(".experts." in each for each in tensors)  # which a step has to ask for, on the host
        return cls(name, True, bits=8, widened=widened, captured=not chosen, tensors=tensors)

    def packing(self, name: str, dtype: torch.dtype) -> Packing | None:
        """Return how a weight is held in a model that computes in `dtype`; None: in that dtype."""
        packing = PACKINGS.get(self.tensors.get(name, ""))
        if packing is None or self.widened or (packing.size == 1 and dtype.itemsize <= packing.nbytes):
            return None
        return packing

    @property
    @override
    def made(self) -> WeightForm | None:
        return self

    @override
    def held(self, model: PreTrainedModel) -> dict[str, int]:
        found = ((name, weight, self.packing(name, weight.dtype)) for name, weight in model.named_parameters())
        return {
            name: weight.shape[:-1].numel() * how.row_bytes(weight.shape[-1])
            for name, weight, how in found
            if how is not None and weight.dim() > 1  # no bias
            if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear | nn.Embedding) or weight.dim() == 3
        }

    @override
    def beside(self, weights: int, numbers: int, device: torch.device, itemsize: int) -> int:
        if self.widened:
            return 0
        if device.type == "cuda":  # kernels round while they unpack
            return min(weights, DEVICE_TILE) * itemsize
        return min(weights, TILE) * (4 if itemsize == 4 else 4 + itemsize)


@dataclass(frozen=True)
class HalfForm(PackedForm):
    """16-bit weights in the files of a directory, which stay so on a CPU that computes in fp32."""

    @property
    @override
    def label(self) -> str:
        return "auto"

    @override
    def packing(self, name: str, dtype: torch.dtype) -> Packing | None:
        return None if name.endswith(f"{LATENT_UP}.weight") else super().packing(name, dtype)

    @override
    def held(self, model: PreTrainedModel) -> dict[str, int]:
        """Return nothing for a model whose weights have other names in the files: transformers reads those."""
        return super().held(model) if self.reads(model) else {}

    def reads(self, model: PreTrainedModel) -> bool:
        """Tell whether the files hold every weight of a model under its name there."""
        return all(name in self.tensors for name, _ in model.named_parameters())


ON_LOADING: Mapping[str, WeightForm] = {
    "int8": WeightForm("int8", False, ("bitsandbytes",), 8, 32),
    "int4": WeightForm("int4", False, ("bitsandbytes",), 4, 32, 64, whole=(32, 64), captured=True),
    "fp8": WeightForm("fp8", False, ("torchao",), 8, 32, captured=True),
}


def form_of(config: PreTrainedConfig, weights: str, device: torch.device, here: bool = True) -> WeightForm | None:
    """Return the form in which a model of this config holds its weights on a device; None: as it computes with them.

    `here` says that the device is this machine's.

    Raises:
        KvcliError: `weights` asks for another form than the files have, or for an unknown one (usage).
    """
    stored = getattr(config, "quantization_config", None)
    if isinstance(stored, dict) and stored.get("quant_method") == "gguf" and weights in ("auto", "wide"):
        return PackedForm.of(stored.get("tensors", {}), weights == "wide")
    if stored is None:
        if weights in ("auto", "wide"):
            return None
        if weights not in ON_LOADING:
            raise usage_error(f"unknown form of weights {weights!r}", f"use auto, wide, {', '.join(ON_LOADING)}")
        return ON_LOADING[weights]
    form = _stored(stored if isinstance(stored, dict) else stored.to_dict(), device, here)
    if weights != "auto":
        raise usage_error(
            f"the weights are stored as {form.name}, so --weights {weights} has no effect", "leave it out"
        )
    return form


def installed(package: str) -> bool:
    """Tell whether a package is installed."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _stored(how: Mapping[str, Any], device: torch.device, here: bool) -> WeightForm:
    """Parse the quantization_config of a config.json."""
    method = str(how.get("quant_method", "bitsandbytes")).removeprefix("bitsandbytes_").lower()
    if method == "gguf":
        return PackedForm.of(how.get("tensors", {}))
    form = WeightForm(method, True)
    group = how.get("group_size")
    if how.get("load_in_4bit") or method == "4bit":
        double = how.get("bnb_4bit_use_double_quant")
        form = replace(ON_LOADING["int4"], name="bitsandbytes 4 bits", like="int4", whole=None)
        form = replace(form, scale_bits=8 if double else 32)
    elif how.get("load_in_8bit") or method in ("8bit", "bitsandbytes"):
        captured = not how.get("llm_int8_threshold", 6.0)  # the host looks for the channels of large inputs
        form = replace(ON_LOADING["int8"], name="bitsandbytes 8 bits", like="int8", captured=captured)
    elif method in ("gptq", "awq"):
        width, length = int(how.get("bits", 4)), None if group in (None, -1) else int(str(group))
        packages = _EXTRAS["gptq"] if method == "gptq" else ("gptqmodel",)
        form = WeightForm(method, True, packages, width, 16 + width, length)
    elif method == "compressed-tensors":
        form = replace(form, packages=("compressed-tensors",), widened=True)
    elif method == "torchao":
        kind = str(how.get("quant_type"))
        known = 4 if "Int4" in kind else 8 if "Int8" in kind or "Float8" in kind else None
        like = "fp8" if "Float8WeightOnly" in kind else None
        form = WeightForm(method, True, ("torchao",), known, 32, 128 if known == 4 else None, captured=True, like=like)
    elif method in ("fp8", "mxfp4"):
        widened = not _has_kernels(method, device, here)
        bits, scale_bits, block = (8, 32, None) if method == "fp8" else (4, 8, 32)
        held: dict[str, Any] = {"linears": method == "fp8", "experts": True, "widened": widened}
        like = "fp8" if method == "fp8" else None
        form = WeightForm(method, True, (), bits, scale_bits, block, like=like, **held)
    spared = how.get("llm_int8_skip_modules") or how.get("modules_to_not_convert")
    return replace(form, stored=True, spared=tuple(spared) if spared else None)


def _has_kernels(method: str, device: torch.device, here: bool) -> bool:
    """Tell whether a device has products for a form whose kernels transformers takes from another package."""
    if device.type != "cuda" or not here:
        return device.type == "cuda"
    able = method == "mxfp4" or torch.cuda.get_device_capability(device) >= _FP8_COMPUTE
    return able and installed("kernels")


def _quantises(model: PreTrainedModel, spared: Sequence[str] | None) -> Callable[[str], bool]:
    """Make a test by name of whether transformers quantises a module; `spared` are names in its quantised config.

    If a config names none, the head, modules tied to it and those that must be in 32 bits are spared.
    """
    # The imports of this module say on stderr what they cannot load.
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    wide: Any = model._keep_in_fp32_modules
    names = HfQuantizer.get_modules_to_not_convert(model, None if spared is None else list(spared), wide)
    return lambda name: bool(should_convert_module(name, names))


def _candidates(model: PreTrainedModel, form: WeightForm) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield modules by name, with the name of a weight in each that a form may hold, and the weight."""
    for name, module in model.named_modules():
        if form.linears and isinstance(module, nn.Linear):
            yield name, "weight", module.weight
        if form.experts and name.endswith(".experts"):
            weights = module.named_parameters(recurse=False)
            yield from ((name, own, weight) for own, weight in weights if weight.dim() == 3)
