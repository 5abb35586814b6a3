"""Every Triton kernel against its reference, driven by a list; under the interpreter where there is no GPU."""

import inspect
import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import interpreted  # noqa: F401 - makes kernels faster
import pytest
import torch
import triton_cases
from kernel_modules import kernel_modules, kernel_names
from triton_cases import CASES, LATENT, ODD, TOLERANCE, Draw, compare, misses_of, quantised_host_of, rows_of

from kvcli.conformance.crossed import some
from kvcli.kernels import _triton, group_pooling, page_scores, paged_attention, topk
from kvcli.kernels.page_table import MissList, SlotLayout
from kvcli.kernels.recall import Missing
from kvcli.kernels.softmax import Softmax

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def kernels_take_all(monkeypatch):
    monkeypatch.setattr(_triton, "on_cpu", True)


# Kernels round to float16 where they round to bfloat16: once for each function is enough. What takes many programs is a
# choice by numbers of fp32.
LAST = {case.kernel: case.name for case in CASES if "long" not in case.name}
FIRST = {case.kernel: case.name for case in reversed(CASES)}
CALLS = [
    pytest.param(
        *(case, dtype),
        id=f"{case.name}-{str(dtype)[6:]}",
        marks=[]
        if dtype == torch.float32 or case.name in (FIRST[case.kernel], LAST.get(case.kernel))
        else [pytest.mark.exhaustive],
    )
    for case in CASES
    for dtype in TOLERANCE
    if dtype == torch.float32 or "long" not in case.name
    if dtype != torch.float16 or case.name == LAST[case.kernel]
]


@pytest.mark.parametrize(("case", "dtype"), CALLS)
def test_kernel_does_what_its_reference_does(kernels_take_all, case, dtype):
    assert compare(case, dtype, DEVICE, ODD).problem == ""


BY_PARTS = {
    name: [case for case in CASES if case.kernel.__name__ == name or case.name.startswith(f"{name}-")]
    for name in ("paged_decode_attention", "token_scores_device", "correct_heads", "decode_attention")
}


@pytest.mark.parametrize(
    "case", some(chain(*BY_PARTS.values()), [cases[0] for cases in BY_PARTS.values()]), ids=lambda case: case.name
)
def test_latents_that_many_heads_share_are_read_part_by_part(kernels_take_all, case):
    assert compare(case, torch.float32, DEVICE, LATENT).problem == ""


@pytest.mark.parametrize("way", ["gather", "write"])
@pytest.mark.parametrize("held", ["tokens int8", "tokens k8v4", "tokens int4", "k8v4", "int4"])
def test_scales_that_channels_of_a_token_share_are_read_once(kernels_take_all, held, way):
    """Where heads are a power of two wide; elsewhere a token is read at a time."""
    (case,) = (case for case in CASES if case.name == f"{way}_quantised-{held}")
    assert compare(case, torch.float32, DEVICE, ODD._replace(d=128)).problem == ""


def test_every_function_with_a_kernel_has_a_case():
    paired = {
        name
        for module in kernel_modules()
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and hasattr(module, f"{name}_ref")
        if "launch(" in inspect.getsource(function)
    }
    assert paired <= {case.kernel.__name__ for case in CASES}
    assert len(paired) > 10


def compiled(cache, *words):
    """Run the program that compiles kernels: its lines."""
    program = Path(triton_cases.__file__).with_name("triton_compile.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    run = subprocess.run([sys.executable, program, *words], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize(
    ("dtypes", "others"),
    [
        pytest.param(("bfloat16",), (), id="once"),
        pytest.param(("bfloat16", "float32"), (80, 100), id="for-all", marks=pytest.mark.exhaustive),
    ],
)
def test_every_kernel_compiles_without_spilling(dtypes, others, tmp_path):
    """For one capability and dtype in every run, for all where all tests are asked for."""
    found = compiled(tmp_path, *dtypes, "90", *map(str, others))
    kernels = kernel_names()
    asked = {(line["capability"], line["dtype"]) for line in found}
    assert asked == {*((90, dtype) for dtype in dtypes), *((other, "bfloat16") for other in others)}
    assert {line["kernel"] for line in found if line["capability"] == 90} == kernels
    tied = {line["kernel"] for line in found if line["capability"] == 90 and line["tied"]}
    assert tied > {"_attend_kernel", "_rebuild_kernel", "_nucleus_kernel"}
    for capability in others:
        assert {line["kernel"] for line in found if line["capability"] == capability} == tied
    latents = [line for line in found if line["d"] == LATENT.d]
    over_latents = {"_attend_kernel", "_token_kernel", "_correct_kernel", "_nucleus_kernel"}
    assert {line["kernel"] for line in latents} >= over_latents
    assert max(line["shared"] for line in latents) <= 163 << 10, "an A100 has no more shared memory for a block"
    spilling = [line for line in found if line["spilt"]]
    assert not spilling, "registers are spilt to local memory"
    wide = {"_gather_kernel", "_filled_kernel", "_attend_kernel", "_score_kernel"}
    narrow = [line for line in found if line["kernel"] in wide and line["widest"] != 128]
    assert not narrow, "memory is not read 16 bytes at once"
    assert not by_numbers(found), "KV or factors are read number by number"


def by_numbers(found):
    """Find those of the kernels that stream 16-bit numbers which read some of them one by one."""
    streaming = {"_gather_kernel", "_bring_kernel", "_rebuild_kernel"}
    return [line for line in found if line["kernel"] in streaming and line["narrowest"] < 32]


@pytest.mark.exhaustive
def test_kernels_compile_at_both_ends_of_their_sizes(tmp_path):
    """Whatever the page, head or budget, none spills, and pages come from host memory 16 bytes at once."""
    found = compiled(tmp_path, "bfloat16", "90", "--ends")
    assert {line["layout"][0] for line in found} >= {1, 2, 4, 8, 16, 32, 64}
    assert {line["d"] for line in found} == {64, 128, 256}
    assert not [line for line in found if line["spilt"]], "registers are spilt to local memory"
    wide = {"_gather_kernel", "_gather_quantised_kernel", "_bring_kernel", "_attend_kernel", "_score_kernel"}
    assert not [line for line in found if line["kernel"] in wide and line["widest"] != 128]
    assert not by_numbers(found)
    assert max(line["shared"] for line in found) <= 163 << 10


def test_references_need_no_triton():
    imports = "".join(f"import {module.__name__}; " for module in kernel_modules())
    select = "print(kvcli.kernels.topk.topk_pages(torch.tensor([[1.0, 3.0, 2.0]]), 2).sort().values.tolist())"
    program = f"import sys; sys.modules['triton'] = None; import torch; {imports}{select}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "[[1, 2]]\n"), run.stderr


@pytest.mark.parametrize("case", [case for case in BY_PARTS["token_scores_device"] if "_s" in case.name])
def test_sums_of_many_blocks_are_merged_before_pooling(kernels_take_all, case, monkeypatch):
    monkeypatch.setattr(group_pooling, "MANY", 1)
    monkeypatch.setattr(group_pooling, "NORM_BLOCK", 2)
    assert compare(case, torch.float32, DEVICE, ODD).problem == ""


POOLED = {"page_scores_device-mean_s", "choose_pages-max_s first", "token_scores_device-mean_s together softcap sinks"}
MERGED = {"paged_decode_attention-append", "paged_decode_attention-softcap sinks"}
MISSING = {case.name for case in CASES if case.name.startswith("paged_decode_attention-missing")}


@pytest.mark.parametrize("case", [case for case in CASES if case.name in POOLED | MERGED], ids=lambda case: case.name)
def test_query_heads_and_what_is_pooled_of_them_come_in_several_turns(kernels_take_all, case, monkeypatch):
    monkeypatch.setattr(group_pooling, "POOL_HEADS", 2)
    monkeypatch.setattr(group_pooling, "POOL_SCORES", 8)
    monkeypatch.setattr(paged_attention, "MERGED", 2)
    monkeypatch.setattr(paged_attention, "MERGED_ELEMENTS", 1)
    assert compare(case, torch.float32, DEVICE, ODD).problem == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [case for case in CASES if case.name in MERGED | MISSING], ids=lambda case: case.name)
def test_a_program_of_attention_reads_several_blocks(kernels_take_all, case, dtype, monkeypatch):
    """And a list of missing pages a few entries at a time."""
    monkeypatch.setattr(paged_attention, "BLOCKS", {2: (512, 4), 4: (512, 8)})
    monkeypatch.setattr(paged_attention, "LISTED", 2)
    assert compare(case, dtype, DEVICE, ODD).problem == ""


@pytest.mark.parametrize("case", [case for case in CASES if case.kernel is topk.topk_pages_device])
def test_what_a_program_cannot_hold_is_read_again(kernels_take_all, case, monkeypatch):
    monkeypatch.setattr(topk, "BLOCK", 16 if "long" not in case.name else 8192)
    sizes = ODD if "long" not in case.name else ODD._replace(layout=ODD.layout._replace(selected=8000))
    assert compare(case, torch.float32, DEVICE, sizes).problem == ""


def test_attention_refuses_to_bring_what_it_cannot_read():
    draw = Draw(torch.float32, torch.device("cpu"))
    rows, host = rows_of(draw, ODD), quantised_host_of(draw, ODD, "int8")
    missing = Missing(host, misses_of(draw, ODD, ODD.layout.selected, ODD.pages))
    q = draw(ODD.b, ODD.hk * ODD.g, ODD.d)
    with pytest.raises(ValueError, match="quantised, wide or not in slots"):
        paged_attention.paged_decode_attention(q, rows, Softmax(1.0), torch.empty_like(q), missing=missing)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_a_choice_holds_every_candidate_that_its_block_has_room_for(kernels_take_all, window, first):
    """The last page of the sequence has no summary yet."""
    layout, generator = SlotLayout(4, 2, 3, window), torch.Generator().manual_seed(0)
    pages = layout.sink + 8 + max(0, window - 1)
    bounds = torch.randn(2, 1, 2, pages, 8, generator=generator).sort(0, descending=True).values
    q, lengths = torch.randn(1, 4, 8, generator=generator), torch.tensor([4 * pages + 1], dtype=torch.int32)
    found = []
    for choose in (page_scores.choose_pages, page_scores.choose_pages_ref):
        misses = MissList.empty(1, 2, 3, torch.device("cpu"))
        resident = torch.tensor([2, 5, pages - 1], dtype=torch.int32).expand(1, 2, 3).contiguous()
        selection = topk.Selection(torch.empty_like(resident), resident, misses, first)
        choose(q, bounds.movedim(0, 3).contiguous(), lengths, layout, 1.0, "max_qk", selection)
        found.append([selection.selected, resident, misses.counts])
    assert all(map(torch.equal, *found))
