"""How the steps of a run can go on a machine; found out before the weights are read."""

from kvcli.capacity.memory import planned_method
from kvcli.errors import usage_error
from kvcli.inputs.profiles import Profile
from kvcli.models.loading import Checkpoint
from kvcli.runtime.compiled import cpp_compiler
from kvcli.runtime.engine import Pipeline


def choose(
    wanted: str, profile: Profile, checkpoint: Checkpoint, watching: str | None = None, kept: bool = False
) -> Pipeline:
    """Choose how steps run, `wanted` being a pipeline or "auto".

    `watching` is the option that looks into their phases, where one does; `kept` ones are taken down by --checkpoint.

    Raises:
        KvcliError: what is wanted cannot do what else is (usage).
    """
    if kept and watching == "--audit":
        raise usage_error("--audit compares with a second KV, which --checkpoint does not keep", "leave one out")
    obstacle = _obstacle(wanted, profile, checkpoint, watching, kept)
    if wanted == "auto":
        return "overlapped" if obstacle is None and checkpoint.device.type == "cuda" else "blocking"
    if wanted != "blocking" and obstacle is not None:
        hint = "leave --pipeline out, or take --pipeline blocking"
        raise usage_error(f"--pipeline {wanted}: {obstacle}", hint)
    return wanted  # type: ignore[return-value]


def _obstacle(wanted: str, profile: Profile, checkpoint: Checkpoint, watching: str | None, kept: bool) -> str | None:
    """Say why steps can be nothing but blocking, if so."""
    if watching is not None:
        return f"{watching} looks into the phases of a step"
    compiled_here = wanted == "compiled" and checkpoint.device.type == "cpu"
    if kept and not compiled_here:
        return "--checkpoint keeps what blocking steps leave behind"
    method = planned_method(profile, checkpoint.geometry, 1, checkpoint.dtype)
    if wanted == "compiled" and method.wants_next_query:
        return f"method {profile.method!r} listens between the layers"
    if compiled_here:
        return None if cpp_compiler() else "there is no C++ compiler here: neither $CXX nor g++ is one"
    if method.step_plan is None and (wanted == "compiled" or method.wants_next_query):
        return f"method {profile.method!r} with these settings is served by the blocking pipeline alone"
    return None
