"""Whether a calibrated profile fits the model that it is used with."""

from kvcli.errors import usage_error
from kvcli.inputs.profiles import Profile
from kvcli.models.loading import Checkpoint, fingerprint


def profile_mismatch(profile: Profile, checkpoint: Checkpoint) -> str | None:
    """Say in a sentence that `profile` was calibrated on another model than `checkpoint`; None where it was not."""
    made_for = profile.provenance.get("model_hash")
    if made_for is None or made_for == fingerprint(checkpoint):
        return None
    return (
        f"profile {profile.name} was calibrated for {profile.provenance.get('model', 'another model')} ({made_for}), "
        f"not for {checkpoint.name}, where its loss is unknown"
    )


def refuse_mismatch(profile: Profile, checkpoint: Checkpoint) -> None:
    """Raise KvcliError (usage) where `profile` was calibrated on another model.

    For what measures quality: a figure would count against a profile that never promised it. Text may be wanted all
    the same, so a generation says what `profile_mismatch` says and goes on.
    """
    if (elsewhere := profile_mismatch(profile, checkpoint)) is not None:
        hint = "calibrate it for this model, or take [provenance] out of the file to measure it all the same"
        raise usage_error(elsewhere, hint)
