"""The engine without files and console; runs are those of the conformance suite."""

import torch

from kvcli.conformance.runs import SPARE, WordlessTokenizer, in_memory, run  # noqa: F401 - what tests take from here
from kvcli.inputs.profiles import Profile
from kvcli.methods import get_method
from kvcli.methods.contract import SequenceContext


def profile_of(name, settings) -> Profile:
    """A method's settings without the profile that ships."""
    return Profile(name, name, "", "", get_method(name).Config(**settings))


def new_method(name, settings, layers, capacity, dtype=torch.float32, rotary=None, device="cpu", **known):
    """Make a method object without a model; `known` goes into its `SequenceContext` besides."""
    context = SequenceContext.of(len(layers), torch.device(device), dtype, capacity, rotary, **known)
    return get_method(name)(get_method(name).Config(**settings), layers, context)
