"""Print the tables of `benchmarks/README.md` from the files in `benchmarks/results/`.

python benchmarks/tables.py
"""

import json
from typing import Any

from common import RESULTS, said

SIMILARITY = {"turning": "low similarity", "steady": "high similarity"}  # of queries between steps, as results name it

LONG = 5  # microseconds

UNITS = {"gb_per_second": 1, "peak_bytes": 1e9}  # of figures beside a speed


def milliseconds(time: float | None) -> str:
    """Write a time, where there is one."""
    return "" if time is None else f"{time:.1f}"


def rows_of(name: str) -> list[dict[str, Any]]:
    """Read the rows of a results file."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def case_of(row: dict[str, Any]) -> str:
    """Name the case of a row, with the query similarity between its steps."""
    shape, comma, queries = row["case"].partition(", ")
    return shape + comma + SIMILARITY.get(queries, queries)


def rate(row: dict[str, Any]) -> str:
    """Write tokens a second."""
    found = row["tokens_per_second"]
    return f"{found['median']:.1f} ({found['min']:.1f} to {found['max']:.1f})"


def figure(row: dict[str, Any], *way: str) -> str:
    """Write a figure of a row, where it has that one."""
    of: Any = row
    for key in way:
        of = of.get(key)
        if of is None:
            return ""
    return said(of)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{title}\n")
    for cells in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(cells)} |")


INDEXED = ("context", "method", "tokens on the device", "queries", "step, ms", "over full", "of it KV, ms")
INDEXED += ("MiB of index", "MiB on the device", "over plan", "hits", "MiB recalled a step", "over plan's most")


def indexed_row(row: dict[str, Any]) -> list[str]:
    """Write a row of `cpu_indexed.json` under `INDEXED`: the last cells are empty where everything is on the device."""
    run = [f"{row['context']:,}", f"`{row['method']}`"]
    taken = [f"{row['step_ms']['median']:.1f}", said(row["over_full"]), f"{row['kv_ms']['median']:.1f}"]
    taken.append(f"{row['index_bytes'] / 2**20:.1f}")
    held = [f"{row['device_bytes'] / 2**20:.1f}", f"{row['device_bytes_by_plan']:.2f}x"]
    if not row["slots"]:
        return [*run, "", "", *taken, *held, "", "", ""]
    most = row["recalled_by_plan"]
    recalled = [f"{row['recalled_a_step'] / 2**20:.2f}", "" if most is None else f"{most:.2f}x"]
    queries = SIMILARITY["steady" if row["steady"] else "turning"]
    return [*run, f"{row['slots']:,}", queries, *taken, *held, f"{row['hit_rate']:.0%}", *recalled]


def main() -> None:
    """Print all tables."""
    runs = {"full": "full", **SIMILARITY}
    decode = [[f"{row['context']:,}", *(said(row[f"{run}_speedup"]) for run in runs)] for row in rows_of("cpu_decode")]
    table("Decode step (`cpu_decode.json`): speedup over transformers", ["context", *runs.values()], decode)
    prefill = [
        [f"{row['context']:,}", said(row["seconds_ratio"]), said(row["bytes_ratio"])] for row in rows_of("cpu_prefill")
    ]
    table("Exact prefill (`cpu_prefill.json`): kvcli over transformers", ["context", "time", "memory"], prefill)
    windowed = [
        [row["method"], f"{row['from']:,} to {row['to']:,}", said(row["growth"])] for row in rows_of("windowed_prefill")
    ]
    table("Growth of prefill (`windowed_prefill.json`)", ["method", "tokens", "time"], windowed)
    linear = [
        [str(row["rows"]), *map(said, (row["speedup"], row["speedup_over_onednn"]))] for row in rows_of("cpu_linear")
    ]
    table("Linear layer (`cpu_linear.json`)", ["rows", "speedup over torch", "over oneDNN"], linear)
    plan = [
        [f"{row['shape']}, {row['method']}, {row['context']:,} x {row['batch']}"]
        + [said(row["planned_by_taken"][key]) for key in ("bytes", "step_ms")]
        for row in [*rows_of("plan_check"), *rows_of("plan_check_kinds"), *rows_of("plan_check_rungs")]
    ]
    table(
        "Plan over reality (`plan_check.json`, `plan_check_kinds.json`, `plan_check_rungs.json`)",
        ["run", "memory", "step"],
        plan,
    )
    if (RESULTS / "peers_cpu.json").exists():
        peers = [
            [row["model"], row["test"], row.get("context", "read"), f"`{row['program']}`", rate(row)]
            + [said(row[key]) if key in row else "" for key in ("over_llama_cpp", "over_full")]
            + [f"{row[key]['median'] / unit:.1f}" if key in row else "" for key, unit in UNITS.items()]
            for row in rows_of("peers_cpu")
            if "tokens_per_second" in row
        ]
        heads = [
            "model",
            "test",
            "context",
            "program",
            "t/s",
            "over llama.cpp f16",
            "over kvcli full",
            "GB/s",
            "peak GB",
        ]
        table("The same GGUF file in several programs, on a CPU (`peers_cpu.json`)", heads, peers)
    indexed = [indexed_row(row) for row in rows_of("cpu_indexed")]
    table("A model that selects by itself, on a CPU (`cpu_indexed.json`)", [*INDEXED], indexed)
    rows = rows_of("cpu_methods")
    contexts = sorted({row["context"] for row in rows})
    found = {(row["method"], row["context"]): row for row in rows}
    columns = {
        "over floor": ("here", "over_floor"),
        "over full": ("here", "over_full"),
        "before over now": ("speedup",),
    }
    steps = [
        [f"`{method}`", *(figure(found[method, context], *way) for context in contexts for way in columns.values())]
        for method in dict.fromkeys(row["method"] for row in rows)
    ]
    heads = [f"{context >> 10}K {name}" for context in contexts for name in columns]
    table("Steps of methods on a CPU (`cpu_methods.json`)", ["method", *heads], steps)
    disks = [
        [
            f"{case_of(row)}, {row['context']:,}",
            row["method"],
            said(row["step_by_step_without"]),
            f"{row['hit_rate']:.0%}",
            f"{row['bytes_from_disk_a_step'] / 2**20:.2f}",
            f"{row['read_by_missed']:.2f}x",
        ]
        for row in rows_of("kv_disk")
    ]
    heads = ["run", "method", "step over one without a disk", "host hits", "MiB read per step", "read over missed"]
    table("KV on a disk, a fifth of it cached in host memory (`kv_disk.json`)", heads, disks)
    rows = rows_of("kv_dtype")
    scores = {}
    for row in rows:
        less = f", less {row['less']:.1f} ± {row['less_stderr']:.1f}" if row.get("less") else ""
        scores[row["method"], row["task"], row["kv_dtype"]] = f"{row['value']:.1f} ± {row['stderr']:.1f}{less}"
    pairs = dict.fromkeys((row["method"], row["task"]) for row in rows)
    held = [[*pair, *(scores[*pair, dtype] for dtype in ("auto", "int8", "int4"))] for pair in pairs]
    table("Answers with quantised KV (`kv_dtype.json`)", ["method", "task", "fp32", "int8", "int4"], held)
    steps = [
        [row["method"], row["dtype"], said(row["int8_ratio"]), said(row["int4_ratio"])] for row in rows_of("kv_step")
    ]
    table(
        "Step with quantised KV over one with KV as computed, 16,384 tokens (`kv_step.json`)",
        ["method", "model", "int8", "int4"],
        steps,
    )
    rows = rows_of("gpu_predictions")
    taken = measured_steps()
    methods = {row["method"]: [each for each in rows if each["method"] == row["method"]] for row in rows}
    predicted = [
        [f"`{method}`"]
        + [
            milliseconds(time)
            for row in of_it
            for time in (row["floor_ms"], row["step_ms"], taken.get((method, row["context"])))
        ]
        for method, of_it in methods.items()
    ]
    heads = ("floor", "predicted", "measured")
    contexts = [f"{row['context'] >> 10}K, {what}" for row in methods["full"] for what in heads]
    title = "Step on an H200, ms (`gpu_predictions.json`, `gpu.json`, `gpu_methods.json`, `gpu_short.json`)"
    table(title, ["method", *contexts], predicted)
    layers = []
    for each in json.loads((RESULTS / "gpu_layers.json").read_text())["parts"]["layers"]["rows"]:
        own = [one for one in each["layer"] if one["kernel"].startswith("_") and one["us"] >= LONG]
        named = ", ".join(f"`{one['kernel'].strip('_')}` {one['us']:.0f}" for one in own)
        layers.append([each["case"], f"{each['context']:,}", f"{each['step_ms']['median']:.2f}", named])
    heads = ["method", "context", "step, ms", f"kernels of {LONG} us or more in a layer, us"]
    table("Kernels of a layer on an H200 (`gpu_layers.json`)", heads, layers)
    columns = ["ctas", "warps", "instructions", "in_loops", "shuffles", "matrix", "loads_128", "loads_16", "registers"]
    code = [
        [f"`{row['kernel']}`", ", ".join(row["methods"]), *(f"{row[name]:,}" for name in [*columns, "spilt"])]
        for row in rows_of("sass")
    ]
    heads = ["CTAs", "warps", "instructions", "in loops", "shuffles", "matrix", "128-bit loads", "16-bit loads"]
    heads = ["kernel", "methods", *heads, "registers", "bytes spilt"]
    table("Machine code of the kernels of a layer at 128K, compiled for sm_90 (`sass.json`)", heads, code)


def measured_steps() -> dict[tuple[str, int], float]:
    """Return the measured steps by method and context, of FreeKV with 30 % of the heads corrected."""
    files = ("gpu", "gpu_methods", "gpu_short")
    read = {name: json.loads((RESULTS / f"{name}.json").read_text())["parts"] for name in files}
    parts = (("gpu_methods", "methods_middle"), ("gpu_short", "methods_short"), ("gpu", "speed"), ("gpu", "peers"))
    rows = [row for file, part in parts for row in read[file][part]["rows"] if "step_ms" in row and "method" in row]
    kept = [row for row in rows if row["corrected"] in (None, 0.3)]
    names = [row["case"] if row["settings"] else row["method"] for row in kept]
    return {(name, row["context"]): row["step_ms"]["median"] for name, row in zip(names, kept, strict=True)}


if __name__ == "__main__":
    main()
