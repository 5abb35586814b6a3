"""How the steps of a run can go on a machine; found out before the weights are read."""

from collections.abc import Sequence

from kvcli.errors import usage_error
from kvcli.inputs.profiles import Profile
from kvcli.methods import get_method
from kvcli.methods.card import BLOCKING, PIECEWISE, gpu_step_of
from kvcli.models.loading import Checkpoint
from kvcli.models.weights import HalfForm, PackedForm
from kvcli.runtime.compiled import cpp_compiler
from kvcli.runtime.pipeline import Pipeline

_IN_PHASES = {
    "--lossless": "takes steps back",
    "--audit": "looks into the phases of a step",
    "--trace": "looks into the phases of a step",
    "--kv-disk": "has pages in files, which no CUDA graph reads",
}
"""Options for which steps are blocking, and why; a disk is one on a GPU alone."""


def choose(
    wanted: str, profile: Profile, checkpoint: Checkpoint, watching: Sequence[str] = (), kept: bool = False
) -> Pipeline:
    """Choose how steps run, `wanted` being a pipeline or "auto".

    `watching` are those options of `_IN_PHASES` that were given; `kept` steps are taken down by --checkpoint.

    Raises:
        KvcliError: what is wanted cannot do what else is (usage).
    """
    if {"--audit", "--lossless"} <= {*watching}:
        raise usage_error("--lossless writes the text of full attention, which --audit compares with", "leave one out")
    second = next((option for option in watching if option not in ("--trace", "--kv-disk")), None)
    if kept and second is not None:
        what = f"{second} has full attention beside the method, which --checkpoint does not keep"
        raise usage_error(what, "leave one out")
    obstacle = _obstacle(wanted, profile, checkpoint, watching[0] if watching else None, kept)
    if wanted == "auto":
        return "overlapped" if obstacle is None and checkpoint.device.type == "cuda" else "blocking"
    if wanted != "blocking" and obstacle is not None:
        hint = "leave --pipeline out, or take --pipeline blocking"
        raise usage_error(f"--pipeline {wanted}: {obstacle}", hint)
    return wanted  # type: ignore[return-value]


def _obstacle(wanted: str, profile: Profile, checkpoint: Checkpoint, watching: str | None, kept: bool) -> str | None:
    """Say why steps can be nothing but blocking, if so."""
    if watching is not None:
        return f"{watching} {_IN_PHASES[watching]}"
    compiled_here = wanted == "compiled" and checkpoint.device.type == "cpu"
    form = checkpoint.geometry.form
    if checkpoint.device.type == "cuda" and form is not None and not (form.captured or form.widened):
        return f"a CUDA graph cannot hold the products with {form.name} weights"
    if compiled_here and isinstance(form, PackedForm) and not (form.widened or isinstance(form, HalfForm)):
        return "weights that stay packed are multiplied by loops of their own (--weights wide unpacks them)"
    if checkpoint.placement is not None and wanted == "compiled":
        return "layers that lie on several devices are not compiled"
    if kept and not compiled_here:
        return "--checkpoint keeps what blocking steps leave behind"
    method = get_method(profile.method)
    if wanted == "compiled" and method.wants_next_query:
        return f"method {profile.method!r} listens between the layers"
    if compiled_here:
        return None if cpp_compiler() else "there is no C++ compiler here: neither $CXX nor g++ is one"
    served = gpu_step_of(method, profile.settings)
    if served == BLOCKING or (served == PIECEWISE and wanted == "compiled"):
        return f"method {profile.method!r} with these settings is served by the blocking pipeline alone"
    return None
