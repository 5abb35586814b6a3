"""One calibration that ends in tensors, from its options to its result: load, read every passage."""

from __future__ import annotations

from kvcli.capacity import memory
from kvcli.inputs.profiles import reference_profile
from kvcli.models.loading import open_checkpoint
from kvcli.quality.calibrate.matrices import TensorCalibration, TensorTarget
from kvcli.quality.calibrate.plan import TEXT, CalibrationPlan, passages_of, provenance
from kvcli.quality.fidelity import Passage
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.observer import Observer


def find(search: TensorTarget, plan: CalibrationPlan, observer: Observer) -> TensorCalibration:
    """Read every passage by exact prefill and find the tensors of a target.

    Ctrl-C after a whole passage is no error: the result covers the passages until then and says so.

    Raises:
        KvcliError: the model or a text cannot be read, the method takes no such file (usage), a passage does not fit
            into memory (exit code 3).
    """
    search.check(plan.profile, plan.files)
    observer.stage("load")
    checkpoint = open_checkpoint(plan.model)
    passages = passages_of(plan, checkpoint) if search.reads_text else [Passage("the probe", [0], [0])]
    longest = max(passage.capacity for passage in passages)
    memory.check(reference_profile(), checkpoint, [longest], Sampling(max_tokens=1))
    model = checkpoint.load()
    source = search.source(plan.profile, model.geometry.layers)
    observer.stage("calibrate", len(model.geometry.layers) * sum(passage.capacity for passage in passages))
    done = 0
    try:
        for passage in passages:
            with engine(model, [passage.capacity], observer.notice) as ready:
                source.read(ready, passage, observer.advance)
            done += 1
    except KeyboardInterrupt:
        if not done:
            raise
    observer.stage_done()
    found = provenance(plan, checkpoint, passages[:done])
    if not search.reads_text:
        found = {key: value for key, value in found.items() if key not in TEXT}
    return TensorCalibration(search, plan.profile, source, found, done == len(passages))
