"""`benchmarks/peers_cpu.py`: the files that it makes, its arithmetic, and a run on a tiny model."""

import json
import struct
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import peers_cpu  # noqa: E402
from peers_parts import files, programs  # noqa: E402
from peers_parts.blocks import blocks  # noqa: E402

from kvcli.models.gguf import config_of  # noqa: E402


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return gguf_files.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", gguf_files.tiny("llama"))


@pytest.mark.parametrize("kind", files.FORMATS)
def test_made_up_matrices_are_of_the_deviation_asked_for(kind):
    packed = blocks(kind, (64, 1024), 0.02, np.random.default_rng(0))
    numbers = quants.dequantize(packed, GGMLQuantizationType[kind])
    assert numbers.shape == (64, 1024)
    assert numbers.std() == pytest.approx(0.02, rel=0.05)
    assert abs(numbers.mean()) < 0.002


def test_a_copy_differs_in_the_length_of_its_context(tiny, tmp_path):
    copy = tmp_path / "copy.gguf"
    files.write_copy(copy, tiny)
    before, after = (gguf.GGUFReader(path) for path in (tiny, copy))
    changed = {
        name
        for name, field in before.fields.items()
        if not name.startswith("GGUF.") and field.contents() != after.fields[name].contents()
    }
    assert changed == {"llama.context_length"}
    assert config_of(copy).max_position_embeddings == files.CONTEXT
    for one, other in zip(before.tensors, after.tensors, strict=True):
        assert (one.name, one.tensor_type) == (other.name, other.tensor_type)
        assert (one.data == other.data).all()


def slot(ids, prefix, streams, ids_of_cell, between, rows, last):
    """A slot's file with two layers: tokens, positions, and keys and values [tokens] with what stands between them."""
    words = [*prefix, *ids]
    cell = struct.pack(f"<{1 + len(ids_of_cell)}I", len(ids_of_cell), *ids_of_cell)
    cells = b"".join(struct.pack("<I", at) + cell for at in range(len(ids)))
    tensors = 4 * (between + struct.pack("<iQ", 1, len(rows) // len(ids)) + rows)
    begin = struct.pack(f"<III{len(words)}i", 1, 4, len(words), *words)
    return begin + streams + struct.pack("<I", len(ids)) + cells + tensors + last


@pytest.mark.parametrize(
    ("prefix", "streams", "ids_of_cell", "last"),
    [
        pytest.param(lambda count: [-1, 1, count], struct.pack("<I", 1), [0], b"", id="llama.cpp"),
        pytest.param(lambda _: [], b"", [], struct.pack("<I", 0), id="ik_llama.cpp"),
    ],
)
def test_a_slot_is_stretched_to_more_tokens(tmp_path, prefix, streams, ids_of_cell, last):
    ids, width, between = list(range(100, 700)), 8, struct.pack("<II", 0, 2)
    begin, how = ids[: programs.LEAST], (streams, ids_of_cell, between)
    short = slot(begin, prefix(len(begin)), *how, b"\0" * 2 * width * len(begin), last)
    (tmp_path / "short").write_bytes(short)
    programs.stretch(programs.Job("", "", ids, True, 1, 1, width, str(tmp_path)), "f16")
    drawn = 3 * programs.made_up_rows("f16", width)
    long = slot(ids, prefix(len(ids)), *how, drawn[: 2 * width * len(ids)], last)
    assert (tmp_path / "long").read_bytes() == long


def test_a_slot_of_another_layout_is_refused(tmp_path):
    (tmp_path / "short").write_bytes(bytes(4000))
    with pytest.raises(ValueError, match="not known"):
        programs.stretch(programs.Job("", "", list(range(100)), True, 1, 1, 8, str(tmp_path)), "f16")


class Sizes:
    name = "tiny"

    def step_bytes(self, program, depth):
        return 1000, depth


def found(prefill_s, step_s, kv_bytes=None):
    return {"prefill_s": prefill_s, "step_s": step_s, "kv_bytes": kv_bytes, "peak_bytes": 7, "counted": {}}


def test_ratios_are_taken_within_rounds_and_a_failure_leaves_the_others():
    asked = Namespace(
        programs=["llama.cpp-f16", "transformers", "kvcli-full", "kvcli-freekv"], steps=4, longest=0, longest_kvcli=100
    )
    rounds = [
        {
            "llama.cpp-f16": found(None, 0.2),
            "transformers": found(None, 0.4),
            "kvcli-full": found(None, 0.1),
            "kvcli-freekv": found(2.0, 0.05, kv_bytes=10),
        },
        {
            "llama.cpp-f16": found(None, 0.4),
            "transformers": peers_cpu.ProgramError("it died"),
            "kvcli-full": found(None, 0.1),
            "kvcli-freekv": found(1.0, 0.05, kv_bytes=10),
        },
    ]
    prefill, *rows = peers_cpu.rows_of(Sizes(), 100, rounds, asked)
    assert (prefill["program"], prefill["test"]) == ("kvcli-freekv", "pp100")
    assert prefill["tokens_per_second"] == {"median": 75.0, "min": 50.0, "max": 100.0}
    assert "over_llama_cpp" not in prefill
    assert {row["test"] for row in rows} == {"tg4 @ d100"}
    base, died, full, freekv = rows
    assert base["over_llama_cpp"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert died["error"] == "it died"
    assert died["over_llama_cpp"]["median"] == pytest.approx(0.5)
    assert full["over_llama_cpp"] == pytest.approx({"median": 3.0, "min": 2.0, "max": 4.0})
    assert freekv["over_full"]["median"] == pytest.approx(2.0)
    assert (full["context"], freekv["context"]) == ("made up", "read")
    assert full["kv_bytes"] == 100 + programs.WARMUP + 2
    assert freekv["gb_per_second"]["median"] == pytest.approx(1010 / 0.05 / 1e9)


@pytest.mark.exhaustive
def test_every_program_runs_and_one_that_fails_is_a_line(warm, tiny, tmp_path):
    if find_spec("xllamacpp") is None:
        pytest.skip("no xllamacpp")
    output = tmp_path / "peers.json"
    asked = ["--depths", "40", "80", "--longest", "40", "--steps", "3", "--threads", "1", "--rounds", "1"]
    asked += ["--models", tiny, "--methods", "freekv,nonsense", "-o", output]
    done = warm(*asked, program=BENCHMARKS / "peers_cpu.py", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    rows = {(row["test"], row["program"]): row for row in results["rows"]}
    assert {test for test, _ in rows} == {"pp40", "tg3 @ d40", "tg3 @ d80"}
    names = {program for _, program in rows}
    assert names >= {"llama.cpp-f16", "llama.cpp-q8_0", "transformers", "kvcli-freekv", "kvcli-nonsense"}
    for (test, program), row in rows.items():
        if program == "kvcli-nonsense":
            assert "unknown method" in row["error"]
            assert "\n" not in row["error"]
            continue
        assert "error" not in row, row["error"]
        assert row["tokens_per_second"]["min"] > 0
        assert row["over_llama_cpp"]["median"] > 0
        if test.startswith("tg"):
            assert row["context"] == ("made up" if test == "tg3 @ d80" else "read")
            assert row["peak_bytes"]["min"] > row["weight_bytes"] > 0
    assert set(results["programs"]) == names - {"kvcli-nonsense"}
    (kept,) = (tmp_path / "kvcli" / "peers").iterdir()
    assert kept.suffix == ".gguf"
