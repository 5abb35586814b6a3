"""Choose how the steps of a run go on a machine, before the weights are read."""

from collections.abc import Sequence

from kvcli.errors import usage_error
from kvcli.inputs.profiles import Profile
from kvcli.methods import get_method
from kvcli.methods.card import BLOCKING, gpu_step_of
from kvcli.models.loading import Checkpoint
from kvcli.runtime.pipeline import Pipeline

_IN_PHASES = {
    "--lossless": "takes steps back",
    "--audit": "looks into the phases of a step",
    "--trace": "looks into the phases of a step",
    "--kv-disk": "has pages in files, which no CUDA graph reads",
}
"""Options that make steps blocking, and why; a disk does so only on a GPU."""


def choose(
    wanted: str, profile: Profile, checkpoint: Checkpoint, watching: Sequence[str] = (), kept: bool = False
) -> Pipeline:
    """Choose how steps run, `wanted` being a pipeline or "auto".

    `watching` are those options of `_IN_PHASES` that were given; --checkpoint records steps that are `kept`.

    Raises:
        KvcliError: options contradict each other (usage).
    """
    if {"--audit", "--lossless"} <= {*watching}:
        raise usage_error("--lossless writes the text of full attention, which --audit compares with", "leave one out")
    second = next((option for option in watching if option not in ("--trace", "--kv-disk")), None)
    if kept and second is not None:
        what = f"{second} runs full attention in addition, which --checkpoint does not save"
        raise usage_error(what, "leave one out")
    obstacle = _obstacle(profile, checkpoint, watching[0] if watching else None, kept)
    if wanted == "auto":
        return "overlapped" if obstacle is None and checkpoint.device.type == "cuda" else "blocking"
    if wanted != "blocking" and obstacle is not None:
        hint = "leave --pipeline out, or use --pipeline blocking"
        raise usage_error(f"--pipeline {wanted}: {obstacle}", hint)
    return wanted  # type: ignore[return-value]


def _obstacle(profile: Profile, checkpoint: Checkpoint, watching: str | None, kept: bool) -> str | None:
    """Return the reason why steps can only be blocking, if there is one."""
    if watching is not None:
        return f"{watching} {_IN_PHASES[watching]}"
    if any(layer.selects is not None and layer.selects.alone for layer in checkpoint.geometry.layers):
        return "modules that look at numbers to select are served by the blocking pipeline alone"
    if checkpoint.geometry.selects is not None and checkpoint.placement is not None:
        return "layers that select by themselves on several devices are served by the blocking pipeline alone"
    if checkpoint.geometry.by_itself:
        return "modules that attend by themselves are served by the blocking pipeline alone"
    form = checkpoint.geometry.form
    if checkpoint.device.type == "cuda" and form is not None and not (form.captured or form.widened):
        return f"a CUDA graph cannot hold the products with {form.name} weights"
    if checkpoint.geometry.streaming is not None:
        return "no CUDA graph waits for the weights of --weights-on"
    if kept:
        return "--checkpoint needs blocking steps"
    if gpu_step_of(get_method(profile.method), profile.settings) == BLOCKING:
        return f"method {profile.method!r} with these settings is served by the blocking pipeline alone"
    return None
