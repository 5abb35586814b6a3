"""A method that states its step says it once."""

import pytest

from kvcli.methods import get_method, own_method_names
from kvcli.methods.card import GRAPH, read_card
from kvcli.methods.contract import Method

OTHERWISE = {
    "streaming": "moves its sinks before it attends, for prompts that are read by windows as well",
    "offload": "has buffers beside its caches, and attends to bytes in their place on a CPU",
    "refreekv": "brings layers from host memory where settings put them there, which no plan states",
}


@pytest.mark.parametrize("name", own_method_names())
def test_no_method_states_a_step_and_carries_out_another(name):
    method = get_method(name)
    assert (method.step_plan is not Method.step_plan) == (read_card(name).gpu_step == GRAPH)
    if method.step_plan is not Method.step_plan and name not in OTHERWISE:
        assert method.retrieve is Method.retrieve
