"""Which pipelines can serve a method on a machine; found out before the weights are read."""

from kvcli.capacity.memory import planned_method
from kvcli.inputs.profiles import Profile
from kvcli.models.loading import Checkpoint
from kvcli.runtime.compiled import cpp_compiler


def obstacle(profile: Profile, pipeline: str, checkpoint: Checkpoint) -> str | None:
    """Say why the steps of a method can be nothing but blocking, if so; `pipeline` is what was asked for."""
    method = planned_method(profile, checkpoint.geometry, 1, checkpoint.dtype)
    if pipeline == "compiled" and checkpoint.device.type == "cpu":
        if method.wants_next_query:
            return f"method {profile.method!r} listens between the layers"
        return None if cpp_compiler() else "there is no C++ compiler here: neither $CXX nor g++ is one"
    if method.step_plan is None:
        return f"method {profile.method!r} with these settings is served by the blocking pipeline alone"
    return None
