"""Compile a run's loops before the run, by a few steps of a few layers on random KV.

Which loops a step uses, and for which kinds of numbers, depends on the method, the model and the context. Compiling
takes ten seconds or so, once on a machine. Without a rehearsal the answer would stop for them after its first word.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress

from kvcli import __version__
from kvcli.capacity.memory import available
from kvcli.capacity.planning.probe import few_layers, on_noise
from kvcli.inputs.profiles import Profile
from kvcli.kernels._numba import LEAST, kept_in
from kvcli.models.loading import Checkpoint
from kvcli.runtime.sampling import Sampling

_STEPS = Sampling(max_tokens=4, ignore_eos=True)


def rehearse(profile: Profile, checkpoint: Checkpoint, context: int, notice: Callable[[str], None]) -> None:
    """Compile the loops for sequences of `context` tokens, unless a run like it was rehearsed on this machine before.

    The note of that lies beside the loops. What does not fit into the free memory is compiled in the run itself.
    """
    geometry, directory, form = checkpoint.geometry, kept_in(), checkpoint.geometry.form
    if checkpoint.device.type != "cpu" or checkpoint.placement is not None or directory is None:
        return
    profile = profile.for_prompt(context)
    widest = max((layer.token_size for layer in geometry.layers), default=0)
    if max(context * widest, geometry.parts.counts.head) < LEAST or not (form is None or form.widened or form.made):
        return
    form_name = None if form is None else form.name
    run = __version__, checkpoint.config.to_json_string(), str(checkpoint.dtype), form_name, profile.hash
    like = json.dumps([*run, context.bit_length()])  # a loop serves from some number of tokens on
    note = directory / f"rehearsed-{hashlib.sha256(like.encode()).hexdigest()[:12]}"
    free = available(checkpoint.place)
    found = few_layers(checkpoint.config, geometry, checkpoint.dtype, profile, context, 1, free)
    if note.exists() or found is None:
        return
    config, length = found
    made = config, checkpoint.dtype, checkpoint.device, length, _STEPS
    with on_noise(profile, *made, form=form, notice=notice) as (ready, sequences, _):
        for _ in ready.decode(sequences):
            pass
    with suppress(OSError):
        note.touch()
