"""Kernels of replays to parts of a step."""

import pytest
import torch
from families import FAMILIES, tiny_model
from kernel_modules import kernel_names
from torch.utils._python_dispatch import TorchDispatchMode

from kvcli.bench import phases
from kvcli.bench.phases import Kernel, parts_of, phases_of, products_of, replays_of, spans_of
from kvcli.capacity.roofline import PHASES
from kvcli.runtime.attention_hook import attached
from kvcli.runtime.gpu.fused import fused_layers


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


def test_products_come_layer_by_layer_as_fused_steps_make_them():
    model = tiny_model("llama")
    depth = len(model.get_decoder().layers)
    layer = ["projections", "projections", "mlp", "mlp"]  # queries, keys and values; out; gate and up; down
    assert products_of(model) == layer * depth + ["projections"]
    ahead = ["projections", *layer] * (depth - 1) + layer + ["projections"]
    assert products_of(model, range(1, depth)) == ahead


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3_moe", "gpt_oss")])
def test_so_many_products_are_made_where_there_are_no_experts(family):
    model = tiny_model(family)
    with attached(model) as hook, fused_layers(model), Products() as products, torch.inference_mode():
        token = torch.tensor([[3]])
        hook.run(lambda layer, q, k, v, softmax: torch.empty_like(q.transpose(1, 2)), token, torch.zeros_like(token))
    assert products.count == len(products_of(model))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "linear")
        return func(*args, **(kwargs or {}))


def test_every_kernel_of_ours_has_a_phase():
    assert len(kernel_names()) > 30
    assert kernel_names() == {*phases._KERNEL_PHASES, *phases.BY_PLACE}
    assert set(phases._KERNEL_PHASES.values()) <= set(PHASES)


def test_the_head_and_the_choice_of_a_greedy_step():
    best = kernel(
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<bf16, at::native::MaxOps<bf16>>>", 50, 54
    )
    assert phases_of([*STEP[:-1], best], PRODUCTS)[-1] == "sampling"
