"""Batches that are killed again and again: whether anything is lost."""

import json
import os
import random
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil

from batch_parts.rows import ragged, run_rows, texts, with_bad
from kvcli.api import load
from kvcli.cli import main as command


def kills(folder: Path) -> dict:
    """Kill a batch again and again; what it comes to in the end."""
    rows, wanted_kills, drawn = with_bad(ragged(300, longest=150, words=60, seed=1)), 30, random.Random(2)
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(source), "-o", str(output), "--max-inflight", "2"]
    killed, lines = 0, []
    while killed < wanted_kills:
        process = start(folder, *arguments)
        time.sleep(drawn.uniform(0.6, 1.8))
        os.kill(process, signal.SIGKILL)
        if ended(process) >= 0:
            break  # it had ended before
        killed += 1
        lines.append(output.read_bytes().count(b"\n") if output.exists() else 0)
    code = ended(start(folder, *arguments))
    found, model = texts(output), load()
    good = [row for row in rows if not row.keys() & {"tools", "top_p"} and len(row["prompt"]) < 9000]
    alone = {
        row["custom_id"]: model.generate(row["prompt"], max_tokens=row["max_tokens"], ignore_eos=True).text
        for row in good
    }
    errors = sorted({text for name, text in found.items() if name not in alone})
    return {
        "rows": len(rows),
        "kills": killed,
        "lines_after_each": lines,
        "exit_code": code,
        "every row once": set(found) == {row["custom_id"] for row in rows},
        "errors": len(rows) - len(good),
        "codes": errors,
        "same texts": {name: found[name] for name in alone} == alone,
    }


def ray(folder: Path) -> dict | None:
    """Two workers, one of them killed twice."""
    if find_spec("ray") is None:
        return None
    rows = with_bad(ragged(100, longest=96, words=60, seed=3))
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, wanted = run_rows(rows, folder, method="freekv")
    output.unlink()
    begun = time.perf_counter()
    process = start(folder, str(source), "-o", str(output), "--engine", "ray", "--workers", "2")
    shard, killed, at = folder / "out.1-of-2.jsonl", [], 0
    while len(killed) < 2 and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)
        if not shard.exists() or shard.read_bytes().count(b"\n") < at + 4:
            continue
        for child in psutil.Process(process).children(recursive=True):
            writes = any(file.path == str(shard) for file in child.open_files())
            if writes and child.pid not in killed:
                at = shard.read_bytes().count(b"\n")
                child.kill()
                killed.append(child.pid)
    code = ended(process)
    found = texts(output)
    return {"rows": len(rows), "workers": 2, "kills": len(killed), "exit_code": code, "same results": found == wanted,
            "seconds": time.perf_counter() - begun}  # fmt: skip


def start(folder: Path, *arguments: str) -> int:
    """Start the command in a process that has its libraries loaded; gives its number."""
    if (process := os.fork()) == 0:
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        sys.argv = ["kvcli", "batch", *arguments]
        try:
            command()
        except SystemExit as end:
            os._exit(int(end.code or 0))  # nothing of the benchmark is to be tidied up here
        os._exit(70)
    return process


def ended(process: int) -> int:
    """Wait for a process; gives its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
