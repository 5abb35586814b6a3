"""Methods that state their steps, with settings small enough for short prompts to outgrow them."""

import pytest
from engine import new_method

from kvcli.methods import get_method, method_names
from kvcli.methods.card import read_card
from kvcli.models.geometry import LayerGeometry

SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8, "dense_layers": 1, "chunk": 4, "rank": 12, "local": 1}
SMALL |= {"outliers": 2, "group": 8}
STATED = [name for name in method_names() if read_card(name).gpu_step == "graph"]


def settings(name, **changed):
    fields = get_method(name).Config.model_fields
    return {key: value for key, value in SMALL.items() if key in fields} | changed


def variants(**changed):
    """Every method as it is, and with each of its switches and words turned, as far as its step is stated then."""
    layers = [LayerGeometry(index, 4, 2, 8, None, True) for index in range(2)]
    for name in STATED:
        fields = get_method(name).Config.model_fields
        switches = [{key: not field.default} for key, field in fields.items() if isinstance(field.default, bool)]
        for switch in [{}, *switches, *([{"positions": "cache"}] if "positions" in fields else [])]:
            wanted = settings(name, **switch, **{key: value for key, value in changed.items() if key in fields})
            if new_method(name, wanted, layers, 200).step_plan is not None:
                yield pytest.param(name, wanted if changed else switch, id="-".join([name, *switch]))
