import json
import math

import pytest
from reports import dense_sequence, report_of, retrieving_sequence

from kvcli.telemetry.report import SCHEMA_VERSION, Timing, environment, percentile


def test_the_json_has_the_names_of_the_contract():
    body = json.loads(report_of(retrieving_sequence()).to_json())
    assert next(iter(body)) == "schema_version"
    assert body["schema_version"] == SCHEMA_VERSION
    assert {"environment", "model", "profile", "sequences", "memory"} <= body.keys()
    assert "hash" in body["profile"]
    sequence = body["sequences"][0]
    assert {"source", "text", "token_ids", "finish_reason", "prompt_tokens", "output_tokens"} <= sequence.keys()
    times = {
        "prefill_ms",
        "ttft_ms",
        "decode_ms",
        "p50_ms",
        "p90_ms",
        "p99_ms",
        "tokens_per_s",
        "compile_ms",
        "ttft_from_start_ms",
    }
    assert times <= sequence["timing"].keys()
    corrections = {"heads_checked", "heads_corrected", "layer_steps_checked", "layer_steps_corrected"}
    assert corrections | {"first_retrievals"} <= sequence["correction"].keys()
    moves = {"pages_requested", "hits", "misses", "bytes_to_device", "bytes_to_host", "layers"}
    assert moves <= sequence["cache"].keys()
    assert {"device_peak_bytes", "host_pinned_bytes"} <= body["memory"].keys()


def test_text_of_any_script_stays_readable():
    assert "grün.txt" in report_of(dense_sequence("grün.txt")).to_json()


def test_timing_summarises_decode_steps_only():
    timing = Timing.of(100.0, 120.0, [10.0, 30.0, 20.0])
    assert (timing.p50_ms, timing.tokens_per_s) == (20.0, 50.0)
    assert timing.p90_ms == pytest.approx(28.0)
    assert timing.decode_ms == [10.0, 30.0, 20.0]


def test_timing_without_decode_has_no_percentiles():
    timing = Timing.of(100.0, 120.0, [])
    assert timing.p50_ms is timing.p90_ms is timing.p99_ms is timing.tokens_per_s is None


@pytest.mark.parametrize(("q", "value"), [(0, 1.0), (50, 3.0), (75, 4.0), (90, 4.6), (100, 5.0)])
def test_percentiles_interpolate(q, value):
    assert math.isclose(percentile([5.0, 3.0, 1.0, 4.0, 2.0], q), value)


def test_the_environment_names_what_a_result_depends_on():
    assert {"kvcli", "torch", "transformers", "triton", "python", "platform"} <= environment().keys()
