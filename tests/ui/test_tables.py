"""Every table of every command as it looks, from data that do not change: at three widths, and in a file.

`PYTHONPATH=tests python tests/ui/test_tables.py` writes what they look like now.
"""

import io
import os
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from reports import case, dense_sequence, profile_of, report_of, retrieving_sequence
from rich.console import Console

from kvcli.bench.report import notes as profile_notes
from kvcli.bench.report import tables as profile_tables
from kvcli.capacity.need import Need
from kvcli.capacity.planning import tables as plans
from kvcli.capacity.planning.estimate import Times
from kvcli.capacity.planning.plan import CapacityPlan
from kvcli.capacity.roofline import MachineRates, Rate, Work
from kvcli.capacity.workspace import Workspace
from kvcli.cli.kv import table_of_entries
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.variants import Variant
from kvcli.memory.tiers import Footprint
from kvcli.methods.card import Card
from kvcli.quality.calibrate.outcome import Calibration
from kvcli.quality.calibrate.sweep import ChosenPoint, Point
from kvcli.quality.calibrate.targets import SWEEPS
from kvcli.quality.eval import layout
from kvcli.quality.eval.table import CellScore, Closeness, Estimate, EvaluationTable, VariantCost
from kvcli.telemetry.observer import Progress
from kvcli.telemetry.report import DraftCounts
from kvcli.ui import console as shown
from kvcli.ui.summary import Table

GOLDEN = Path(__file__).with_name("tables.txt")
WIDTHS = (60, 80, 120)
MIB, GIB = 2**20, 2**30


def methods():
    cards = {
        "duoattention": Card(
            "everything in some heads", "arXiv 2410.10819", True, False, True, "O(s·L + W)", "piecewise"
        ),
        "expected_attention": Card(
            "what one cut by the attention expected of later queries of the whole text kept",
            *("arXiv 2510.00636", False, False, False, "O(k + g)", "graph"),
        ),
        "shadowkv": Card("chunks", "arXiv 2410.21465", False, True, True, "O(B + L·r/w + L/p + g)", "graph"),
    }
    return shown.render(shown.MethodList(cards, {"shadowkv": ["shadowkv", "shadowkv-plus"]}))


def method():
    from kvcli.cli.methods import describe

    return shown.render(shown.method_page(describe("quest")))


def paper():
    rows = [
        ("full", "full", "-", "tables 1 and 2"),
        (
            "freekv",
            "freekv",
            "budget 2048, sink 512, window 512, page_size 32, tau 0.8, dense_layers 1",
            "table 2, section 5.1",
        ),
    ]
    table = Table(("name", "method", "settings", "where"), rows, texts=("method", "settings", "where"))
    return shown.render_tables([("A paper (arXiv 2505.13109): --profile paper-freekv runs all of them", table)])


RATES = MachineRates(*(Rate.given(rate * 1e9) for rate in (40, 12, 11, 10, 900)))


def planned(label, context, host, **changes):
    work = {"attention": (Work(read=3 * MIB, operations=10**9), 0.012), "recall": (Work(to_device=MIB), 0.0001)}
    need = Need(500 * MIB, Footprint(40 * MIB, host), Workspace({"hidden states": 64 * MIB, "rotary tables": MIB}), 0)
    plan = CapacityPlan(
        label=label,
        profile=resolve_profile("full"),
        context=context,
        batch=1,
        max_tokens=256,
        need=need,
        needed={"device": 900 * MIB, "host": host},
        free={"device": 24 * GIB, "host": 64 * GIB},
        longest=1_048_576,
        bound=False,
        times=Times(12.5, 0.0123, 0.0119, work, 32, tried=4, tried_length=8192),
        disk=host,
    )
    return replace(plan, **changes)


LONG = "shadowkv, budget 1024, int8 KV, int4 weights, disk"


def plan():
    found = [
        planned("full", 8192, GIB),
        planned("freekv", 131_072, 80 * GIB, fits_with=("--dtype bfloat16", "--weights int4")),
    ]
    return shown.render_tables(plans.tables("llama-3.1-8b, float32", found), notes=plans.notes(found, RATES, True))


def plan_of_one():
    found = [planned("freekv", 8192, GIB)]
    return shown.render_tables(plans.tables("llama-3.1-8b, float32", found), notes=plans.notes(found, RATES, True))


def advice():
    found = [planned("quest", 131_072, GIB), planned(LONG, 131_072, GIB)]
    command = [(LONG, "kvcli generate -m llama-3.1-8b DOCUMENT --method shadowkv --budget 1024 --kv-dtype int8")]
    return shown.render_tables(plans.tables("llama-3.1-8b, float32", found), notes=command)


def profile():
    failed = replace(case("quest"), step_ms=None, error="out of memory: 3.00 GiB more are needed for 64 sequences")
    report = profile_of(
        case(), case("freekv, no speculation", ms=1.0, offloaded=True, hidden=0.25), failed, kv="made up"
    )
    return shown.render_tables(profile_tables(report), notes=profile_notes(report))


COST = VariantCost(512.0, 0.0625, 3.0 * MIB, 80.0 * MIB, 4096.0, 12.5, 100, 50, 5, 1000, 20)
FULL, FREEKV = Variant("full", None, resolve_profile("full")), Variant("freekv", 512, resolve_profile("freekv"))


def scored(variant, task, value, depth=None, metric="recall", length=8192, **more):
    found = CellScore(
        variant.label,
        task,
        length,
        depth,
        metric,
        Estimate(value, 2.25, 20, max(0, value - 4), min(100, value + 4)),
        {},
        COST,
    )
    return replace(found, **more)


def evaluated(*results):
    return EvaluationTable({}, {}, "", [FULL, FREEKV], results, True)


def evaluation():
    tasks = ("niah_single", "niah_multikey", "niah_multivalue", "vt", "cwe", "fwe")
    passes = {1: Estimate(50, 5, 20), 8: Estimate(87.5, 4, 20)}
    found = evaluated(*(scored(each, task, 98.75, pass_at=passes) for each in (FULL, FREEKV) for task in tasks))
    return shown.render_tables(layout.tables(found))


def needle_grid():
    lengths = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
    found = evaluated(
        *(
            scored(each, "needle_grid", min(100, 1_000_000 * (1 + depth) / length), depth, length=length)
            for each in (FULL, FREEKV)
            for depth in (0.0, 0.5, 1.0)
            for length in lengths
        )
    )
    return shown.render_heat_maps(layout.heat_maps(found))


def fidelity():
    same = Estimate(96.5, 2.25, 8, tokens=504)
    close = Closeness(Estimate(0.0312, 0.0042, 8, tokens=504), Estimate(0.0021, 0.0009, 8, tokens=504))
    return shown.render_tables(
        layout.tables(evaluated(scored(FREEKV, "fidelity:book.txt", 0, metric="fidelity", closeness=close, score=same)))
    )


def printed(show, *arguments):
    """Render what goes to stderr: for a terminal if there is one, else for a file of that many columns."""
    text = io.StringIO()
    show(*arguments, console=Console(file=text, width=int(os.environ["COLUMNS"]), highlight=False))
    return text.getvalue()


BUSY = retrieving_sequence("a/very/long/path/to/some/book/chapter-one.txt", steps=2000)
BUSY = replace(
    BUSY,
    correction=replace(BUSY.correction, heads_checked=340_000, heads_corrected=12_000, layer_steps_checked=170_000),
    fidelity={
        **{"steps_audited": 5, "every": 2, "mass": 0.91, "top": 64, "recall": 0.875, "error": 0.125},
        **{"kl": 0.0123, "kl_max": 0.25, "agreement": 0.8},
    },
)


def statistics():
    return printed(shown.print_statistics, report_of(BUSY), ["notes.txt"], False)


def statistics_with_everything():
    return printed(shown.print_statistics, report_of(BUSY), ["notes.txt"], True)


def statistics_of_several():
    sequences = [BUSY, retrieving_sequence("short.txt"), dense_sequence("dense.txt")]
    return printed(shown.print_statistics, report_of(*sequences), [each.source for each in sequences], False)


def statistics_of_drafts():
    drafted = replace(retrieving_sequence(steps=40), drafts=DraftCounts(10, 40, 30))
    return printed(shown.print_statistics, report_of(drafted), ["notes.txt"], False)


def timeline():
    return printed(shown.print_timeline, report_of(retrieving_sequence(steps=9)), ["notes.txt"])


def long_timeline():
    return printed(shown.print_timeline, report_of(retrieving_sequence(steps=41)), ["notes.txt"])


DONE = Progress(total=2000, earlier=1997, earlier_failed=3, output_tokens=70_000)
RUNNING = Progress(
    **{"total": 2000, "earlier": 400, "done": 500, "failed": 2, "in_flight": 16, "prompt_tokens": 70_000},
    **{"shared_tokens": 9000, "output_tokens": 5000, "seconds": 50, "prefill_seconds": 10, "decode_seconds": 35},
    **{"steps": 500, "left_seconds": 90, "output_tokens_per_second": 100},
)


def batch():
    return "\n".join(printed(shown.print_batch_summary, each) for each in (RUNNING, DONE))


def checked_batch():
    found = Progress(total=12, failed=2), Progress(total=12)
    return "\n".join(printed(shown.print_batch_summary, each, True) for each in found)


def batch_status():
    return "\n".join(map(shown.render_batch, (RUNNING, DONE)))


def kv_list():
    rows = [
        {
            "name": f"{at}c5f0e2a9b71{at}0",
            "tokens": 131_072,
            "prompt_tokens": 131_072,
            "bytes": 16 * GIB,
            "used": 40_000,
        }
        | {"source": source}
        for at, source in enumerate(
            ["book.txt", "reports/2026/a-very-long-name-of-a-document-that-nobody-can-remember.txt"]
        )
    ]
    return shown.render_tables([("/store: 2 entries, 32.0 GiB", table_of_entries(rows, 100_000))])


def doctor():
    return shown.render(
        shown.findings(
            [
                ("versions", "ok", "Python 3.12.3, kvcli 0.1.0, torch 2.11.0, transformers 5.1.0, triton 3.6.0", ""),
                ("device", "note", "CPU only: this torch has no CUDA", "a GPU needs a torch built for CUDA"),
                ("keep a state", "broken", "a captured graph gives wrong results", "update the driver"),
            ]
        )
    )


def calibration():
    points = [
        Point(
            {"tau": tau}, loss, loss + 0.01, loss, loss + 0.01, 0.97, 0.95, 0.9, 0.05, 512, part, 4096, 65_536, 3 * MIB
        )
        for tau, loss, part in ((0.7, 0.21, 0.05), (0.8, 0.1, 0.1), (0.9, 0.04, 0.3))
    ]
    found = {"method": "freekv", "model": "demo", "passages": 4, "prompt_tokens": 4096, "steps": 128, "max_loss": 0.2}
    similarity = {"similarity": [{"layer": layer, "heads": [0.91, 0.87, 0.93, 0.9]} for layer in range(2)]}
    profiles = [resolve_profile("freekv") for _ in points]
    whole = Calibration(
        SWEEPS["tau"], points, profiles, ChosenPoint(points[1], "the cheapest"), similarity, found, True
    )
    return shown.render_tables(whole.tables(), notes=whole.summary())


SHOWN = [
    *(methods, method, paper, plan, plan_of_one, advice, profile, evaluation, needle_grid, fidelity),
    *(statistics, statistics_with_everything, statistics_of_several, statistics_of_drafts, timeline, long_timeline),
    *(batch, checked_batch, batch_status, kv_list, doctor, calibration),
]
PLAIN = (batch_status,)  # a line for each, however wide the terminal


@contextmanager
def terminal(width, is_one=True):
    """Make the process think that it writes to a terminal of `width` columns, or to a file."""
    wanted = {"COLUMNS": f"{width}", "FORCE_COLOR": "1" if is_one else None, "TERM": "xterm", "TTY_COMPATIBLE": None}
    before = {name: os.environ.get(name) for name in wanted}
    _set(wanted)
    try:
        yield
    finally:
        _set(before)


def _set(variables):
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def looks():
    """Return how every table looks, by its name and the place where it is written."""
    found = {}
    for show in SHOWN:
        for width in WIDTHS:
            with terminal(width):
                found[f"{show.__name__}, {width} columns"] = plain(show())
        with terminal(80, False):
            found[f"{show.__name__}, a file"] = show()
    return found


def plain(text):
    return "".join(f"{line.rstrip()}\n" for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())


def kept():
    parts = re.split(r"^==> (.*) <==\n", GOLDEN.read_text(), flags=re.MULTILINE)[1:]
    return {name: text for names, text in zip(parts[::2], parts[1::2], strict=True) for name in names.split("; ")}


@pytest.fixture(scope="module")
def now():
    return looks()


@pytest.mark.parametrize("show", SHOWN, ids=lambda show: show.__name__)
def test_a_table_looks_as_it_did(now, show):
    mine = {name: text for name, text in now.items() if name.startswith(f"{show.__name__},")}
    assert len(mine) == len(WIDTHS) + 1
    for name, text in mine.items():
        assert text == kept()[name], name


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_its_terminal(now, width):
    for name, text in now.items():
        if name.endswith(f", {width} columns") and not any(name.startswith(each.__name__) for each in PLAIN):
            assert max(map(len, text.splitlines())) <= width, name
            assert "…" not in text.replace("…k/chapter-one.txt", ""), name


def test_lines_of_a_file_end_without_spaces(now):
    for name, text in now.items():
        if name.endswith(", a file"):
            assert not re.search(r" $", text, re.MULTILINE), name
            assert "\x1b" not in text, name


def test_every_part_of_a_table_says_which_row_it_is(now):
    """Of a plan that are method, context and batch."""
    lines = now["plan, 60 columns"].splitlines()
    heads = [line for line in lines if line.startswith("method ")]
    assert len(heads) > 1
    assert all(re.match(r"method +context +batch ", line) for line in heads)
    assert sum(line.startswith("freekv  131,072") for line in lines) == len(heads)


if __name__ == "__main__":
    alike = {}
    for found, text in looks().items():
        alike.setdefault(text, []).append(found)
    GOLDEN.write_text("".join(f"==> {'; '.join(names)} <==\n{text}" for text, names in alike.items()))
