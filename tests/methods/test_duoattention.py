"""DuoAttention against a slow re-derivation in float64, sharing no code with it."""

import pytest
import torch
from driver import HK, Stream, layers
from engine import new_method
from oracle import attention, same
from safetensors.torch import save_file

from kvcli.errors import KvcliError
from kvcli.methods import get_method
from kvcli.models.geometry import LayerGeometry
from kvcli.runtime.retrieval_heads import HeadScores

SINK, WINDOW = 3, 13
SETTINGS = {"sink": SINK, "window": WINDOW, "dense_layers": 1}


@pytest.fixture
def gates_file(tmp_path):
    def write(*rows):
        save_file({"gates": torch.tensor(rows)}, tmp_path / "gates.safetensors")
        return str(tmp_path / "gates.safetensors")

    return write


@pytest.mark.parametrize(("gates", "keep"), [((0.2, 0.7), (False, True)), ((0.5, 0.5), (True, False))])
@pytest.mark.parametrize("prompt", [1, 75])
def test_every_step_matches_the_oracle(prompt, gates, keep, gates_file):
    stream = Stream(prompt, steps=40, seed=prompt)
    for step, method, out in stream.run("duoattention", {**SETTINGS, "gates": gates_file([1.0, 1.0], [*gates])}):
        length = prompt + step + 1
        near = [t for t in range(length) if t < SINK or t >= length - WINDOW]
        tokens = [range(length) if kept else near for kept in keep]
        assert same(out, attention(stream, stream.q[step], tokens)), f"output of step {step}"
        assert method.attended(1).tolist() == [[t in own for t in range(length)] for own in tokens]
    assert method.statistics() == {"retrieval_heads": [[1, head] for head in range(HK) if keep[head]]}


def test_the_part_is_counted_over_layers_that_are_split():
    geometry = [LayerGeometry(i, 4, HK, 8, 8 if i == 1 else None, True) for i in range(4)]
    scores = torch.tensor([[0.9, 0.9], [-torch.inf, -torch.inf], [0.1, 0.2], [0.4, 0.3]])
    known = {"head_scores": HeadScores(echo=1 - scores, induction=scores)}
    method = new_method("duoattention", {**SETTINGS, "retrieval": 0.3}, geometry, 100, prepared=known)
    assert method.statistics()["retrieval_heads"] == [[3, 0], [3, 1]]  # 0.3 of 4, rounded up, by induction
    planned = new_method("duoattention", {**SETTINGS, "retrieval": 0.3}, geometry, 100)
    assert planned.footprint().host == 0
    none = new_method("duoattention", {**SETTINGS, "retrieval": 0.0}, geometry, 100, prepared=known)
    assert none.statistics()["retrieval_heads"] == []


def test_a_file_needs_no_probe_and_has_to_be_of_this_model(gates_file):
    method = get_method("duoattention")
    assert method.needs(method.Config()) == ("head_scores",)
    assert method.needs(method.Config(gates="some.safetensors")) == ()
    with pytest.raises(KvcliError, match=r"gates has shape \[3, 2\], not \[2, 2\]"):
        new_method("duoattention", {"gates": gates_file([1.0, 0.0], [1.0, 0.0], [1.0, 0.0])}, layers(), 50)
