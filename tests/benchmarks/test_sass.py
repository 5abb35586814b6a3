"""What is counted in the machine code of a kernel, and what the committed counts say of the kernels of a step."""

import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import sass  # noqa: E402

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                             /* 0x00000a00ff017b82 */
                                                                                      /* 0x000fe20000000800 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;                   /* 0x0000000402047981 */
        /*0020*/              @!P0 LDG.E.U16 R8, desc[UR4][R2.64+0x10] ;              /* 0x0000000402047981 */
        /*0030*/                   HMMA.16816.F32.BF16 R4, R4, R8, R12 ;              /* 0x0000000402047981 */
        /*0040*/                   SHFL.BFLY PT, R5, R4, 0x10, 0x1f ;                 /* 0x0c201f0004057f89 */
        /*0050*/               @P1 BRA 0x30 ;                                         /* 0xfffffffc00f41947 */
        /*0060*/                   BRA.DIV UR6, 0xa0 ;                                /* 0xfffffffc00f41947 */
        /*0070*/                   HFMA2.MMA R9, -RZ, RZ, 0, 0 ;                      /* 0x00000000ff097435 */
        /*0080*/              @!P0 BRA 0x10 ;                                         /* 0xfffffffc00f41947 */
        /*0090*/                   EXIT ;                                             /* 0x000000000000794d */
        /*00a0*/                   SHFL.BFLY PT, R5, R4, 0x10, 0x1f ;                 /* 0x0c201f0004057f89 */
        /*00b0*/                   BRA 0x70 ;                                         /* 0xfffffffc00b47947 */
        /*00c0*/                   BRA 0xc0;                                          /* 0xfffffffc00fc7947 */
        /*00d0*/                   NOP;                                               /* 0x0000000000007918 */
"""


def test_instructions_are_counted_by_what_they_do():
    assert sass.counted(LISTING) == {
        "instructions": 13,
        "in_loops": 8,  # from the first load to the jump back to it; code of diverged threads is in no loop
        "shuffles": 2,
        "matrix": 1,
        "loads_128": 1,
        "loads_16": 1,
    }


def test_no_kernel_of_a_step_spills_or_streams_numbers_one_by_one():
    rows = json.loads((BENCHMARKS / "results/sass.json").read_text())["rows"]
    assert {method for row in rows for method in row["methods"]} == set(sass.METHODS)
    assert not [row for row in rows if row["spilt"]]
    kernels = ("attend_kernel", "score_kernel", "gather_kernel", "one_bit_kernel")
    streaming = [row for row in rows if row["kernel"] in kernels]
    assert len(streaming) > 3
    assert all(row["loads_128"] > 2 * row["loads_16"] for row in streaming)


def test_three_programs_that_score_pages_share_a_multiprocessor():
    rows = json.loads((BENCHMARKS / "results/sass.json").read_text())["rows"]
    (row,) = (row for row in rows if row["kernel"] == "score_kernel" and "freekv" in row["methods"])
    assert 3 * row["registers"] * 32 * row["warps"] <= 65_536
