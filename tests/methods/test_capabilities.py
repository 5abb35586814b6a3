"""What every method says of itself in `kvcli methods`, held against what it plans to allocate."""

import ast
import re
import subprocess
import sys

import pytest
import torch

from kvcli.methods import get_method, method_names
from kvcli.methods.card import MEMORY_SYMBOLS, STATED, Card, gpu_step_of, read_card, setting_names
from kvcli.methods.contract import SequenceContext
from kvcli.models.geometry import LayerGeometry, OwnSelection

HEADS, KV_HEADS, D, LAYERS = 8, 4, 32, 4
WIDTH = KV_HEADS * D
SHORT, LONG = 1 << 15, 1 << 17  # tokens, both far above every default budget
FACTOR = 3  # what O(...) may leave out
BUDGETED = [name for name in method_names() if "budget" in get_method(name).Config.model_fields]


def planned(name, capacity, prompt):
    """The method on the meta device with its default settings, but that no layer is dense."""
    method = get_method(name)
    # A model that selects by itself, for the method that is about these.
    own, width = (OwnSelection(2048, WIDTH, 1), D + D // 2) if name == "native" else (None, D)
    layers = [LayerGeometry(index, HEADS, KV_HEADS, width, None, True, selects=own) for index in range(LAYERS)]
    context = SequenceContext.of(LAYERS, torch.device("meta"), torch.bfloat16, capacity, prompt_tokens=prompt)
    fields = method.Config.model_fields
    return method(method.Config(**({"dense_layers": 0} if "dense_layers" in fields else {})), layers, context)


def device_tokens(name, capacity, prompt):
    """Tokens' worth of KV on the device, per layer."""
    return planned(name, capacity, prompt).footprint().device / (LAYERS * 2 * WIDTH * 2)


def stated_tokens(name, capacity, prompt):
    """The same by the formula that the method states."""
    config = get_method(name).Config()
    settings = {field: getattr(config, field) for field in type(config).model_fields}
    size = next(
        (settings[field] for field in ("page_size", "chunk", "group", "cluster", "min_event") if field in settings), 1
    )
    values = {"L": capacity, "g": capacity - prompt, "k": prompt, "B": settings.get("budget"), "p": size}
    values |= {"r": settings.get("rank"), "w": WIDTH, "W": settings.get("window")}
    values |= {"s": settings.get("sparsity", settings.get("retrieval")), "n": LAYERS}
    inside = get_method(name).device_memory.removeprefix("O(").removesuffix(")").replace("·", "*")
    return _value(ast.parse(inside, mode="eval").body, values)


def _value(node, values):
    match node:
        case ast.Name(id=letter):
            return values[letter]
        case ast.Constant(value=number):
            return number
        case ast.BinOp(left=left, op=op, right=right):
            left, right = _value(left, values), _value(right, values)
            return {ast.Add: left + right, ast.Mult: left * right, ast.Div: left / right}[type(op)]
    raise AssertionError(f"not a formula: {ast.dump(node)}")


@pytest.mark.parametrize("name", method_names())
def test_its_capabilities_are_stated(name):
    method = get_method(name)
    for capability in ("long_generation", "offloads", "group_consistent"):
        assert isinstance(getattr(method, capability), bool), capability
    assert re.fullmatch(r"O\(.+\)", method.device_memory)
    assert set(re.findall("[A-Za-z]", method.device_memory[2:-1])) <= MEMORY_SYMBOLS.keys()


@pytest.mark.parametrize("name", method_names())
def test_its_card_is_what_its_class_says_and_fits_a_terminal(name):
    method, card = get_method(name), read_card(name)
    gpu_step = gpu_step_of(method, method.Config())
    assert card == Card(**{field: getattr(method, field) for field in STATED}, gpu_step=gpu_step)
    assert len(card.title) <= 76
    assert len(card.device_memory) <= 22
    assert len(card.paper) <= 16


@pytest.mark.parametrize("name", method_names())
def test_it_offloads_if_its_plan_holds_kv_on_the_host(name):
    assert get_method(name).offloads == (planned(name, SHORT, SHORT - 1).footprint().host > 0)


@pytest.mark.parametrize("capacity", [SHORT, LONG])
@pytest.mark.parametrize("name", method_names())
def test_device_memory_is_what_it_states(name, capacity):
    splits = [capacity // 2, 64] if get_method(name).long_generation else [capacity // 2, capacity - 64]
    for prompt in splits:
        stated, held = stated_tokens(name, capacity, prompt), device_tokens(name, capacity, prompt)
        assert stated / FACTOR <= held <= stated * FACTOR, f"{held:,.0f} tokens held, {stated:,.0f} stated"


@pytest.mark.parametrize("name", method_names())
def test_with_long_generation_output_costs_no_more_than_prompt(name):
    if get_method(name).long_generation:
        prompt, output = (planned(name, LONG, length).footprint() for length in (LONG - 64, 64))
        assert output.device <= prompt.device
        assert output.host <= prompt.host
        assert "g" not in get_method(name).device_memory
    else:
        assert "g" in get_method(name).device_memory


@pytest.mark.parametrize("name", BUDGETED)
def test_with_long_generation_attention_is_bounded_whatever_the_output(name):
    config = get_method(name).Config()
    grows = config.beside_budget(100, 10_000) > config.beside_budget(100, 10)
    assert get_method(name).long_generation != grows


def test_cards_are_read_without_torch():
    code = "import sys; from kvcli.methods import method_names; from kvcli.methods.card import read_card; "
    code += "assert len([read_card(name) for name in method_names()]) > 10; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", method_names())
def test_the_names_of_the_settings_are_read_from_the_file(name):
    assert setting_names(name) == list(get_method(name).Config.model_fields)
