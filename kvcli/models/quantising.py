"""Models in memory whose linear layers are a library's: made so, told from plain ones, and made plain again."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcli.models.weight_form import LATENT_UP, WeightForm


def quantise(model: PreTrainedModel, form: WeightForm, dtype: torch.dtype) -> None:
    """Quantise a model in memory as it would be on loading; each weight as it was is freed before the next one."""
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
    """Make a plain linear layer without bias of one that a library multiplies by: its products with unit vectors."""
    device = next(linear.parameters()).device
    units = torch.eye(linear.in_features, dtype=dtype, device=device)
    with torch.inference_mode():
        weight = linear(units).T.contiguous()
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(weight.to(dtype).clone(), requires_grad=False)
    return plain


@torch.inference_mode()
def settle(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Bring weights into the order that products on a CPU want, before anything else needs memory.

    bitsandbytes does so for 4 bits at a layer's first product, and takes several bytes a weight for it.
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
    """Bring 16-bit weights into the dtype that was asked for, in place: transformers widens some forms to bfloat16."""
    for weight in model.parameters():
        if weight.dtype in (torch.bfloat16, torch.float16):
            weight.data = weight.data.to(dtype)
