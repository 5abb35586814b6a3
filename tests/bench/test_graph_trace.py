"""Kernels of replays to parts of a step."""

import pytest
from families import tiny_model

from kvcli.bench.graph_trace import Kernel, parts_of, phases_of, products_of, replays_of, spans_of


def kernel(name, start, end, stream=7):
    return Kernel(name, stream, start, end)


STEP = [
    kernel("elementwise_kernel", 0, 2),
    kernel("sm90_xmma_gemm_bf16", 2, 10),  # q, k and v in one
    kernel("_correct_kernel", 10, 11),
    kernel("_score_kernel_0d1d", 11, 13, 8),
    kernel("_attend_kernel", 11, 20),
    kernel("_attend_kernel", 20, 22),
    kernel("cublasSplitKReduce_kernel", 22, 23),
    kernel("_gather_kernel", 22, 60, 8),
    kernel("gemv2T_kernel", 23, 30),  # o
    kernel("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", 32, 42),  # of the MLP
    kernel("nvjet_hsh_gemm", 42, 50),  # the head
    kernel("reduce_kernel<ArgMaxOps>", 50, 54),
]
PRODUCTS = ["projections", "projections", "mlp", "projections"]


def test_phases_by_name_and_by_place():
    assert phases_of(STEP, PRODUCTS) == [
        "mlp",
        "projections",
        "correction",
        "score",
        "attention",
        "attention",
        "projections",
        "recall",
        "projections",
        "mlp",
        "projections",
        "sampling",
    ]


def test_another_number_of_products_is_the_mlps():
    assert phases_of(STEP, PRODUCTS[:-1])[1] == "mlp"


def test_what_runs_beside_is_hidden_and_what_runs_alone_is_exposed():
    later = [kernel("elementwise_kernel", 70, 72)]
    parts, last = parts_of([STEP, later], PRODUCTS)
    assert parts.exposed == {
        "mlp": 12,
        "projections": 24,
        "correction": 1,
        "attention": 11,
        "sampling": 4,
        "recall": 8,  # from 54, two of them between 30 and 32
        "host": 10,
    }
    assert parts.hidden == {"score": 2, "recall": 30}
    assert sum(parts.exposed.values()) == pytest.approx(70)
    assert last.exposed == {"mlp": 2}


def test_replays_are_told_apart_by_their_launch():
    def event(name, start, correlation, category="kernel"):
        return {"cat": category, "name": name, "ts": start, "dur": 1, "args": {"stream": 7, "correlation": correlation}}

    trace = [event("k", 100 + i, 2) for i in range(20)] + [event("k", i, 1) for i in range(20)]
    alone = [event("fill", 50, 3), event("Memcpy DtoH", 51, 4, "gpu_memcpy")]
    host = [{"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 3, "args": {"correlation": 1}}]
    replays = replays_of(trace + alone + host)
    assert [(len(step), step[0].start, step[-1].end) for step in replays] == [(20, 0, 20), (20, 100, 120)]


def test_spans_have_a_lane_for_every_stream():
    *spans, step = spans_of([STEP], PRODUCTS)
    assert (step.name, step.start, step.end) == ("step", 0, 60)
    assert {(span.lane, span.track) for span in spans} == {(7, "stream 7"), (8, "stream 8")}
    assert [span.name for span in spans] == phases_of(STEP, PRODUCTS)


def test_products_come_layer_by_layer():
    model = tiny_model("llama")
    layer = ["projections"] * 4 + ["mlp"] * 3
    assert products_of(model) == layer * len(model.get_decoder().layers) + ["projections"]
