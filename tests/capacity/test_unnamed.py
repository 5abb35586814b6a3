from dataclasses import replace

import pytest

from kvcli.capacity import unnamed
from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.loading import ModelSpec, open_checkpoint


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(ModelSpec(None))


def chosen(checkpoint, *capacities, samples=1, check=lambda: None):
    profile, why = unnamed.choose(resolve_profile(), checkpoint, capacities, samples, check)
    assert profile.method in why or "full attention" in why
    return profile.method


def test_short_contexts_are_read_whole_and_long_ones_are_not(checkpoint):
    assert chosen(checkpoint, 8192) == "full"
    assert chosen(checkpoint, 8193, 100) == "retroinfer"
    assert chosen(checkpoint, 100_000) == "retroinfer"


def test_beneath_large_weights_a_long_context_is_cheap(checkpoint):
    kv = unnamed._bytes(resolve_profile("full"), checkpoint, 20_000)
    large = replace(checkpoint, geometry=replace(checkpoint.geometry, weight_bytes=2 * kv))
    assert chosen(large, 20_000) == "full"
    assert chosen(large, 20_000, samples=2) == "retroinfer"


def test_a_budget_that_is_a_share_grows_with_the_context(checkpoint):
    share = resolve_profile(method="freekv", overrides={"budget": "10%"})
    assert not unnamed.is_cheap(share, checkpoint, [20_000], 1)
    half = resolve_profile(method="freekv", overrides={"budget": "50%"})
    assert unnamed.is_cheap(half, checkpoint, [20_000], 1)


def test_what_does_not_fit_is_retrieved(checkpoint):
    def full():
        raise KvcliError("too large", "", ExitCode.WILL_NOT_FIT)

    def wrong():
        raise usage_error("wrong", "")

    assert chosen(checkpoint, 100, check=full) == "retroinfer"
    with pytest.raises(KvcliError, match="wrong"):
        chosen(checkpoint, 100, check=wrong)
