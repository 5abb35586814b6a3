"""Does a calibrated value keep its promise? `python benchmarks/calibration.py` calibrates on the demo model.

tau and rank are chosen on built-in passages as `kvcli calibrate` does it, and the chosen value is then measured, beside
the one that the promise counts from, on passages that calibration has not seen, of the same length and of another.
A promise is kept if the loss added there stays within --max-loss.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import torch
from common import arguments, save

from kvcli.inputs.profiles import resolve_profile
from kvcli.models.loading import ModelSpec
from kvcli.quality.calibrate.outcome import Calibration
from kvcli.quality.calibrate.plan import CalibrationPlan
from kvcli.quality.calibrate.run import calibrate
from kvcli.quality.calibrate.sweep import Sweep
from kvcli.quality.calibrate.targets import SWEEPS
from kvcli.telemetry.observer import Observer

PROFILES = {
    "tau": resolve_profile(profile="freekv-demo"),
    "rank": resolve_profile("shadowkv", overrides={"budget": 512, "outliers": 8, "local": 8}),
}
HELD_OUT_SEED = 1000


def held_out(sweep: Sweep, plan: CalibrationPlan, found: Calibration, length: int) -> dict[str, Any]:
    """The chosen value and the one that its promise counts from, on other passages of `length` tokens."""
    assert found.choice.point is not None
    chosen, last = found.choice.point.settings, found.points[-1].settings
    values = {key: [json.dumps(chosen[key]), json.dumps(last[key])] for key in chosen if chosen[key] != last[key]}
    fixed = {key: value for key, value in chosen.items() if key not in values}
    profile = resolve_profile(plan.profile.method, overrides={**plan.profile.settings.model_dump(), **fixed})
    narrow = replace(sweep, grid=lambda *_: {key: [value] for key, value in fixed.items()})
    other = replace(plan, profile=profile, values=values, length=length, seed=HELD_OUT_SEED)
    measured = calibrate(narrow, other, Observer())
    point = next(point for point in measured.points if all(point.settings[key] == chosen[key] for key in chosen))
    return {
        "prompt_tokens": measured.provenance["prompt_tokens"],
        "passages": measured.provenance["passages"],
        "steps": measured.provenance["steps"],
        "seed": HELD_OUT_SEED,
        **asdict(point),
        "kept": point.added <= plan.max_loss,
    }


def main() -> None:
    """Parse the command line, calibrate, hold the choice against other text."""
    parser = arguments(__doc__, "calibration")
    parser.add_argument("--targets", default="tau,rank")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--held-out-lengths", default="2048,4096")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-loss", type=float, default=0.01)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    for target in options.targets.split(","):
        plan = CalibrationPlan(
            ModelSpec(),
            PROFILES[target],
            length=options.length,
            samples=options.samples,
            max_loss=options.max_loss,
        )
        found = calibrate(SWEEPS[target], plan, Observer())
        print(target, found.choice.reason, flush=True)
        results[target] = json.loads(found.to_json())
        if found.choice.point is not None:
            lengths = map(int, options.held_out_lengths.split(","))
            results[target]["held_out"] = [held_out(SWEEPS[target], plan, found, length) for length in lengths]
            for row in results[target]["held_out"]:
                print(target, row["settings"], f"added {row['added']:.4g} at {row['prompt_tokens']} tokens", flush=True)
    save(options.output, {"max_loss": options.max_loss, "targets": results})


if __name__ == "__main__":
    main()
