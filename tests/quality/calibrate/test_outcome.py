"""What is said of a calibration: as a list, and on its page."""

import json
import re
from dataclasses import replace

import pytest

from kvcli.inputs.profiles import resolve_profile
from kvcli.quality.calibrate.html import page
from kvcli.quality.calibrate.outcome import Calibration
from kvcli.quality.calibrate.sweep import Point, choose
from kvcli.quality.calibrate.targets import SWEEPS

PROVENANCE = {
    "model": "demo", "method": "freekv", "passages": 2, "prompt_tokens": 90, "steps": 12, "max_loss": 0.01,
}  # fmt: skip


def point(tau, added, base, bytes_exposed):
    return Point(
        settings={"tau": tau},
        loss=base + added,
        loss_bound=base + 1.5 * added,
        added=added,
        added_bound=1.5 * added,
        agreement=0.9,
        mass=0.95,
        recall=0.9,
        error=0.1,
        attended=40.0,
        heads_corrected=0.5,
        bytes_exposed=bytes_exposed,
        bytes_to_device=10.0,
        device_kv_bytes=10.0,
    )


def calibration(base=0.0, max_loss=0.01, settings=None):
    sweep = SWEEPS["tau"]
    points = [point(0.0, 0.03, base, 0), point(0.8, 0.004, base, 2048), point(1.0, 0.0, base, 4096)]
    if settings:
        points = [replace(each, settings=each.settings | settings) for each in points]
    chosen = choose(points, sweep.cost, max_loss, sweep.relative)
    profiles = [resolve_profile(method="freekv")] * 3
    return Calibration(sweep, points, profiles, chosen, {}, PROVENANCE | {"max_loss": max_loss}, True)


def test_the_list_says_both_losses_and_when_the_limit_is_not_that_of_full_attention():
    far, near = dict(calibration(base=0.37).summary()), dict(calibration(base=0.0).summary())
    assert far["chosen"] == "tau 0.8"
    assert far["from full attention"] == "0.374 nats, at most 0.376"
    assert far["added to tau 1.0"] == "0.004 nats, at most 0.006"
    assert "the other settings alone cost 0.37 nats" in far["note"]
    assert "note" not in near
    assert far["recall that attention waits for"] == "2.00 KiB, of 0 B to 4.00 KiB over the values tried"


def test_without_a_choice_the_list_says_why():
    rows = dict(calibration(max_loss=-1.0).summary())
    assert rows["chosen"] == "nothing"
    assert "none adds at most -1 nats" in rows["because"]


def test_json_and_profile_hold_both_losses():
    found = calibration(base=0.37)
    assert json.loads(found.to_json())["points"][1]["loss_bound"] == pytest.approx(0.376)
    assert "loss_bound = 0.376" in found.to_toml()


@pytest.mark.parametrize("settings", [None, {"budget": 64}])
@pytest.mark.parametrize("max_loss", [0.01, 0.0])
def test_the_page_shows_losses_over_orders_of_magnitude_with_their_limit(settings, max_loss):
    text = page(calibration(max_loss=max_loss, settings=settings))
    losses = json.loads(re.findall(r'lite\+json">(.*?)</script>', text)[0])
    curve, limit = losses["layer"][0], losses["layer"][-1]
    scale = curve["encoding"]["y"]["scale"]
    assert scale["type"] == "log"
    assert all(scale["domain"][0] < row["figure"] < scale["domain"][1] for row in curve["data"]["values"])
    assert limit["mark"]["type"] == "rule"
    assert [row["figure"] for row in limit["data"]["values"]] == [max_loss] * (max_loss > 0)
    assert text.index("from full attention") < text.index("vega-lite")
