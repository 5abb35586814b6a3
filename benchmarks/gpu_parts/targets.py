"""What is wanted of the device path, and whether what was measured meets it.

A figure stands on rows of the parts (`gpu.py` keeps them). Of two cases that were timed in turn the ratio is taken
round by round, and its median counts. What was not measured is not judged, nor is what was measured on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from gpu_parts.frame import Row
from kvcli.methods import method_names
from kvcli.methods.card import GRAPH, PIECEWISE, read_card


class Contender(NamedTuple):
    """What stands beside freekv: a method with settings that are not its own; `offloads`: its KV lies in host memory.

    Names are those of `kernel_counts.py`. All is read from the files of the methods, which are not run for it.
    """

    name: str
    method: str
    settings: dict[str, Any]
    offloads: bool


# Settings that change what a step does: where KV lies, what is stored of an answer, where positions are counted from.
OTHERWISE = [
    *(Contender(f"{name}-offload", name, {"offload": True}, True) for name in ("fier", "loki", "quest", "twilight")),
    Contender("shadowkv-plus", "shadowkv", {"plus": True}, True),
    Contender("streaming-positions", "streaming", {"positions": "cache"}, False),
]


def served(by: str) -> list[Contender]:
    """List the methods whose steps are so served, of models that select nothing by themselves."""
    cards = {name: read_card(name) for name in method_names() if name not in ("freekv", "native")}
    return [Contender(name, name, {}, card.offloads) for name, card in cards.items() if card.gpu_step == by]


BY_GRAPH = sorted([*served(GRAPH), *OTHERWISE])
IN_PIECES = served(PIECEWISE)
OFFLOADING = [each for each in BY_GRAPH if each.offloads]


Results = Mapping[str, Any]
"""Of each part its state, its error and its rows."""

GIB = 1 << 30


@dataclass(frozen=True)
class Figure:
    """A measured figure with its spread over the rounds, where it has one; None: `missing` says why there is none."""

    measured: float | None
    least: float | None = None
    most: float | None = None
    missing: str | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Summarise the rounds."""
        return cls(median(values), min(values), max(values))


class Missing(Exception):  # noqa: N818 - said in the table
    """What a figure stands on was not measured; the message says why."""


@dataclass(frozen=True)
class Target:
    """A figure, the bound that is wanted for it, and on which side it has to lie; without a bound it is only told."""

    what: str
    figure: Callable[[Results], Figure]
    bound: float | None
    at_most: bool = True
    unit: str = "x"

    def judged(self, results: Results, judge: bool) -> Row:
        """Work the figure out: one row of the table, `met` being None where nothing is judged."""
        try:
            figure = self.figure(results)
        except Missing as reason:
            figure = Figure(None, missing=str(reason))
        met = None
        if judge and figure.measured is not None and self.bound is not None:
            met = figure.measured <= self.bound if self.at_most else figure.measured >= self.bound
        wanted = None if self.bound is None else f"{'<=' if self.at_most else '>='} {self.bound:g}"
        return {"what": self.what, "wanted": wanted, "unit": self.unit, **asdict(figure), "met": met}


def row(results: Results, part: str, **wanted: Any) -> Row:
    """Find the first row of a part that has these values; raises Missing where there is none."""
    found = results.get(part, {"state": "not run", "error": "not asked for", "rows": []})
    for each in found["rows"]:
        if all(each.get(key) == value for key, value in wanted.items()):
            return each  # type: ignore[no-any-return]
    raise Missing(f"{part}: {found['error'] or 'it found nothing of the kind'}")


def ratio(part: str, above: str, below: str) -> Callable[[Results], Figure]:
    """Step time of one case over another's, round by round."""

    def figure(results: Results) -> Figure:
        one, other = (row(results, part, case=name)["rounds_ms"] for name in (above, below))
        return Figure.of([x / y for x, y in zip(one, other, strict=True)])

    return figure


def worst(figures: Sequence[Callable[[Results], Figure]]) -> Callable[[Results], Figure]:
    """Take the largest of several."""
    return lambda results: max((figure(results) for figure in figures), key=lambda figure: figure.measured or 0.0)


def over_floor(part: str, case: str) -> Callable[[Results], Figure]:
    """Step time of a case over the least that its bytes allow."""

    def figure(results: Results) -> Figure:
        found = row(results, part, case=case)
        if found["floor_ms"] is None:
            raise Missing("rates: the rate of a device copy was not measured")
        return Figure.of([taken / found["floor_ms"] for taken in found["rounds_ms"]])

    return figure


def slower(peer: str, part: str = "peers") -> Callable[[Results], Figure]:
    """Median step of a peer over freekv's, both with the host in every step."""

    def figure(results: Results) -> Figure:
        taken = row(results, part, case=peer)["step_ms"]["median"]
        own = row(results, "peers", case="freekv 30%")["looped_ms"]
        return Figure(*(taken / own[key] for key in ("median", "max", "min")))

    return figure


def recall(results: Results) -> Figure:
    """Rate of the recall kernel over that of plain copies, in per cent."""
    found = row(results, "rates", layout="hnd", missing=1.0, default=True)["of_plain"]
    return Figure(*(100 * found[key] for key in ("median", "min", "max")))


def more_at_once(results: Results) -> Figure:
    """Tokens a second of the large batch over those of one sequence."""
    one, many = (row(results, "batch", case=name) for name in ("batch 1", "batch many"))
    pairs = zip(one["rounds_ms"], many["rounds_ms"], strict=True)
    return Figure.of([many["batch"] * x / y for x, y in pairs])


def beside_freekv(part: str, method: str) -> Callable[[Results], Figure]:
    """Step time of a method over freekv's, round by round."""

    def figure(results: Results) -> Figure:
        found = row(results, part, case=method)
        if "failed" in found:
            raise Missing(f"{part}: {found['failed']}")
        return Figure.of([x / y for x, y in zip(found["rounds_ms"], found["freekv_ms"], strict=True)])

    return figure


def shadowkv_throughput(results: Results) -> Figure:
    """Tokens a second of ShadowKV over those of full attention, each at its largest batch."""
    rates = []
    for name in ("shadowkv", "full"):
        found = row(results, "throughput", case=name)
        rates.append([1000 * found["batch"] / taken for taken in found["rounds_ms"]])
    return Figure.of([x / y for x, y in zip(*rates, strict=False)])


def reading(results: Results) -> Figure:
    """Time of kvcli's prefill over transformers' in the last round that both have, with the spread over all.

    In the first one libraries plan for shapes that they have not met.
    """
    row(results, "reading", case="transformers")
    times: dict[str, list[float]] = {"kvcli": [], "transformers": []}
    for each in results["reading"]["rows"]:
        times[each["case"]].append(each["seconds"])
    ratios = [x / y for x, y in zip(times["kvcli"], times["transformers"], strict=False)]
    return Figure(ratios[-1], min(ratios), max(ratios))


def reading_memory(results: Results) -> Figure:
    """Device memory of kvcli's prefill above weights and hidden states, in GiB."""
    above = row(results, "reading", case="kvcli")["above_bytes"]
    if above is None:
        raise Missing("reading: a CPU's allocator keeps no peak")
    return Figure(above / GIB)


TARGETS = (
    Target("freekv, no head corrected, against streaming", ratio("speed", "freekv 0%", "streaming"), 1.05),
    Target(
        "freekv, 10 and 30 % of heads corrected, against streaming",
        worst([ratio("speed", f"freekv {part}", "streaming") for part in ("10%", "30%")]),
        1.10,
    ),
    Target("freekv, all heads corrected, against streaming", ratio("speed", "freekv 100%", "streaming"), 1.25),
    Target("freekv against the floor, short context", over_floor("speed", "freekv 30%"), 1.3),
    Target("freekv against the floor, middle context", over_floor("peers", "freekv 30%"), 1.3),
    Target("long context against short, first layer dense", ratio("length", "long, 1 dense", "short, 1 dense"), 1.6),
    Target("long context against short, no dense layer", ratio("length", "long, 0 dense", "short, 0 dense"), 1.35),
    Target("transformers, resident, against freekv", slower("transformers"), 4.0, at_most=False),
    Target(
        "transformers, static and compiled, against freekv", slower("transformers static, compiled", "static"), None
    ),
    Target("transformers, offloaded, against freekv", slower("transformers offloaded"), 60.0, at_most=False),
    Target(
        "blocking recall, page by page, NHD, against freekv",
        ratio("batch", "page by page, nhd", "overlapped"),
        5.0,
        at_most=False,
    ),
    Target(
        "blocking recall, page by page, HND, against freekv", ratio("batch", "page by page, hnd", "overlapped"), None
    ),
    Target("recall against plain copies", recall, 85.0, at_most=False, unit="%"),
    Target("prefill against transformers", reading, 1.05),
    Target("prefill, device memory above weights and hidden states", reading_memory, 1.5, unit="GiB"),
    Target("tokens a second, large batch against one sequence", more_at_once, 5.0, at_most=False),
    Target("tokens a second, shadowkv against full, largest batches", shadowkv_throughput, 3.04, at_most=False),
    Target("the same, the goal", shadowkv_throughput, 5.0, at_most=False),
    *(
        Target(f"{each.name} against freekv, middle context", beside_freekv("methods_middle", each.name), 1.5)
        for each in BY_GRAPH
    ),
    *(
        Target(
            f"{each.name} against freekv, a batch at the middle context",
            beside_freekv("methods_large", each.name),
            None,
        )
        for each in OFFLOADING
    ),
    *(
        Target(
            f"{each.name}, in pieces, against freekv, short context", beside_freekv("methods_pieces", each.name), None
        )
        for each in IN_PIECES
    ),
)


def judged(results: Results, judge: bool = True) -> list[Row]:
    """Give the whole table."""
    return [target.judged(results, judge) for target in TARGETS]


COMPARED = {
    "kernels": "agrees",
    "agreement": "agrees",
    "texts": "agrees",
    "rates": "arrives",
    "packed": "agrees",
}
"""Parts that compare with a reference, and where their rows say whether the two agree."""


def wrong(results: Results) -> list[str]:
    """Name what does not agree with its reference: a line for each part where there is something."""
    lines = []
    for part, agrees in COMPARED.items():
        names = [each["case"] for each in results.get(part, {"rows": []})["rows"] if not each.get(agrees, True)]
        if names:
            lines.append(f"{part}: {', '.join(names)} {'differs' if len(names) == 1 else 'differ'} from the reference")
    return lines


def show(results: Mapping[str, Any], targets: Sequence[Row]) -> None:
    """Print what is wanted beside what was measured, what is right, and how each part ended."""
    print("\ntargets")
    for target in targets:
        print("  " + target_line(target))
    for part in ("kernels", "agreement", "texts"):
        rows = results.get(part, {"rows": []})["rows"]
        on_cpu = (
            " (on a CPU, where references stand in for kernels)" if rows and rows[0].get("ran") != "kernels" else ""
        )
        if rows:
            print(f"{part}: {sum(row['agrees'] for row in rows)} of {len(rows)} agree{on_cpu}")
    print("parts")
    for name, part in results.items():
        seconds = f", {part['seconds']:.0f} s" if "seconds" in part else ""
        error = f": {part['error']}" if part["error"] else ""
        print(f"  {name:<14} {part['state']}{seconds}{error}")


def target_line(target: Row) -> str:
    """One line: figure with its spread, what is wanted, and whether it is met."""
    if target["measured"] is None:
        return f"{target['what']:<62} not measured ({target['missing']})"
    figure = f"{target['measured']:.2f} {target['unit']}"
    spread = "" if target["least"] is None else f" ({target['least']:.2f} to {target['most']:.2f})"
    verdict = {True: ": met", False: ": NOT met", None: ""}[target["met"]]
    wanted = "" if target["wanted"] is None else f"wanted {target['wanted']}{verdict}"
    return f"{target['what']:<62} {figure:>10}{spread:<20} {wanted}".rstrip()
