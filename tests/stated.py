"""Methods that state their steps, with settings small enough for short prompts to outgrow them."""

import pytest
import torch
from engine import new_method

from kvcli.kernels.softmax import Softmax
from kvcli.methods import get_method, method_names
from kvcli.methods.card import GRAPH, gpu_step_of, read_card
from kvcli.models.geometry import LayerGeometry

H, HK, D = 4, 2, 16

SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8, "dense_layers": 1, "chunk": 4, "rank": 12, "local": 1}
SMALL |= {"outliers": 2, "group": 8, "retrieval": 0.75}
STATED = [name for name in method_names() if read_card(name).gpu_step == GRAPH]


def settings(name, **changed):
    fields = get_method(name).Config.model_fields
    return {key: value for key, value in SMALL.items() if key in fields} | changed


def variants(served=GRAPH, **changed):
    """Every method as it is, and with each of its switches and words turned, of those that are served so."""
    for name in method_names():
        fields = get_method(name).Config.model_fields
        switches = [{key: not field.default} for key, field in fields.items() if isinstance(field.default, bool)]
        for switch in [{}, *switches, *([{"positions": "cache"}] if name == "streaming" else [])]:
            wanted = settings(name, **switch, **{key: value for key, value in changed.items() if key in fields})
            if gpu_step_of(get_method(name), get_method(name).Config(**wanted)) == served:
                yield pytest.param(name, wanted if changed else switch, id="-".join([name, *switch]))


def prefilled(name, wanted, length, num_layers):
    """A method of layers that have read a prompt, on the CPU, with room for nine tokens more."""
    layers = [LayerGeometry(index, H, HK, D, None, True) for index in range(num_layers)]
    method = new_method(name, wanted, layers, length + 9, prompt_tokens=length)
    generator, softmax = torch.Generator().manual_seed(0), Softmax(D**-0.5)
    for layer in range(num_layers):
        k, v = torch.randn(2, HK, length, D, generator=generator)
        q = torch.randn(H, length, D, generator=generator)
        method.observe(layer, q, k, softmax)
        for part in method.repeated:
            method.observe_repeated(layer, part, q[:, part], k, softmax)
        method.prefill(layer, k, v, q[:, length - min(length, method.query_rows) :], softmax)
    return method
