"""Weights that come to the device layer by layer: the same tokens as with all of them there."""

import pytest
import torch
from families import FAMILIES, VOCAB, tiny_checkpoint

from kvcli.inputs.profiles import resolve_profile
from kvcli.models.loading import ModelSpec, load_model
from kvcli.models.streamed import layout_of
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling

LAYERS = 4


def tokens(model, length=90, count=12, **settings):
    """What a model writes after a prompt drawn at random."""
    profile = resolve_profile(settings.pop("method", "full"), overrides=settings)
    prompt = torch.randint(6, VOCAB, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    sampling = Sampling(max_tokens=count, ignore_eos=True)
    with torch.inference_mode(), engine(model, [length + count]) as ready:
        method = ready.method(profile, ready.context(length, count))
        sequence = ready.sequence(method, sampling)
        sequence.accept(ready.prefill(prompt, [method])[0])
        for _ in ready.decode([sequence]):
            pass
    assert sequence.error is None
    return sequence.token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    path = tiny_checkpoint(family, tmp_path, layers=LAYERS)
    resident = load_model(ModelSpec(str(path), device="cpu"))
    streamed = load_model(ModelSpec(str(path), device="cpu", weights_on="disk"))
    assert layout_of(streamed.module) is not None
    assert tokens(streamed) == tokens(resident)
