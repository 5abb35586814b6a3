"""Reports in words and numbers for a person; the console and the HTML page lay them out."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, fields
from typing import Any

from kvcli.sizes import format_bytes
from kvcli.telemetry.observer import Progress
from kvcli.telemetry.report import Cache, DraftCounts, Report, Sequence, Step

_NAME = 18
GAP = 2  # characters between the columns of a table
_BETWEEN = " · "  # the parts of a value
_LEAST, _TEXT = 8, 24  # characters of a column whose cells are wrapped, and of a text


@dataclass(frozen=True)
class Table:
    """A small table: column heads and rows. The first `keys` columns say which row it is.

    The other columns are numbers, except those whose heads are `texts`, which may have several lines.
    """

    columns: tuple[str, ...]
    rows: Many[tuple[str, ...]]
    keys: int = 1
    texts: tuple[str, ...] = ()

    def only(self, columns: Many[int]) -> Table:
        """Keep the columns of these numbers, all keys among them."""
        head, *rows = (tuple(cells[i] for i in columns) for cells in (self.columns, *self.rows))
        return Table(head, rows, self.keys, self.texts)

    def widths(self, width: int) -> list[int]:
        """Return the characters that each column takes where `width` are there; longer cells are wrapped.

        Where the table is wider, its first column takes a third at most, a text may take less than it has, and every
        column takes at most what the keys leave.
        """
        wanted = [max(map(_breadth, cells)) for cells in zip(self.columns, *self.rows, strict=True)]
        if sum(each + GAP for each in wanted) - GAP <= width:
            return wanted
        wanted[0] = min(wanted[0], max(_NAME, width // 3))
        wanted = [min(each, _TEXT) if self.is_text(i) else each for i, each in enumerate(wanted)]
        left = width - sum(each + GAP for each in wanted[: self.keys])
        return [each if i < self.keys else min(each, max(left, _LEAST)) for i, each in enumerate(wanted)]

    def is_text(self, column: int) -> bool:
        """Tell whether a column beside the keys is a text."""
        return column >= self.keys and self.columns[column] in self.texts


@dataclass(frozen=True)
class HeatMap:
    """A number for every row and column, or None; `down` and `across` say what those are.

    The numbers range from 0 to `most`. `notes`, if any, explain single numbers in an HTML page.
    """

    title: str
    down: str
    across: str
    rows: Many[str]
    columns: Many[str]
    values: Many[Many[float | None]]
    most: float = 100.0
    notes: Many[Many[str]] | None = None


@dataclass(frozen=True)
class TimelineRow(Step):
    """The decode steps from `step` to `last`: the sums of their counts, and the mean step time in `ms`."""

    last: int = 0


def duration(ms: float | None) -> str:
    """Format a time with three significant digits: "812 us", "23.1 ms", "1.24 s", "3 min 20 s", "22 h 5 min"."""
    if ms is None:
        return "-"
    if ms < 1:
        return f"{1000 * ms:.0f} us"
    if ms < 1000:
        return _digits(ms, "ms") if ms < 999.5 else "1.00 s"
    if ms < 99_950:
        return _digits(ms / 1000, "s")
    minutes, seconds = divmod(round(ms / 1000), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: "1 run", "5 runs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rate(part: int, whole: int) -> str:
    """Format a count, its total and the share: "12 / 340 (3.5 %)"; a total of 0 has no share."""
    return f"{part:,} / {whole:,}" + (f" ({100 * part / whole:.1f} %)" if whole else "")


def percent(share: float | None) -> str:
    """Format a share in per cent: "3.5 %", "-" for None."""
    return "-" if share is None else f"{100 * share:.1f} %"


def size_text(count: float | None) -> str:
    """Format a number of bytes: "1.5 MiB", "-" for None."""
    return "-" if count is None else format_bytes(count)


def per_second(tokens: int, ms: float) -> str:
    """Format a throughput: "3,154 tokens/s", "-" if no time passed."""
    return _speed(1000 * tokens / ms if ms else None)


def _breadth(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def without_empty_columns(table: Table) -> Table:
    """Drop the columns that are empty or zero in every row."""
    nothing = {"", "-", "0", "0 / 0", "0 B"}
    keep = [i for i in range(len(table.columns)) if i < table.keys or not all(row[i] in nothing for row in table.rows)]
    return table.only(keep)


def folded(table: Table, width: int) -> list[Table]:
    """Split a table wider than `width` characters by its columns; every part begins with the keys."""
    return [table.only(part) for part in divided(table.widths(width), width, table.keys)]


def divided(widths: Many[int], width: int, keys: int = 1, gap: int = GAP) -> list[list[int]]:
    """Divide columns into parts of `width` characters at most, with a gap between two; all begin with the keys."""
    parts = [[*range(keys)]]
    for column in range(keys, len(widths)):
        if len(parts[-1]) > keys and sum(widths[i] + gap for i in parts[-1]) + widths[column] > width:
            parts.append([*range(keys)])
        parts[-1].append(column)
    return parts


def broken(value: str, width: int) -> list[str]:
    """Break a value of several parts that is longer than `width` characters between them, into as few lines as do."""
    *parts, last = value.split(_BETWEEN)
    lines = [""]
    for part in [*(part + _BETWEEN.rstrip() for part in parts), last]:
        longer = f"{lines[-1]} {part}".lstrip()
        if len(longer) > width and lines[-1]:
            lines.append(part)
        else:
            lines[-1] = longer
    return lines


def heading(report: Report) -> str:
    """Summarise a run in one line: model, method, and the settings that were chosen."""
    model = report.model.get("name") or report.model.get("source") or "model"
    profile = report.profile
    parts = [str(model), str(profile.get("method", ""))]
    if profile.get("name") not in (None, profile.get("method")):
        parts.append(f"profile {profile['name']}")
    settings = profile.get("settings", {})
    shared = isinstance(settings.get("budget"), str)  # each prompt has its own sizes, see `sequence_rows`
    sizes = ("budget",) if shared else ("budget", "sink", "window")
    parts += [f"{key} {_tokens(settings[key])}" for key in sizes if key in settings]
    tau = settings.get("tau")
    parts += [f"tau {'by layer' if isinstance(tau, list) else f'{tau:g}'}"] if tau is not None else []
    held = settings.get("kv_dtype", "auto")
    where = "host KV" if report.memory.host_kv_bytes or report.memory.disk_kv_bytes else "KV"
    parts += [f"{where} in {held}"] if held != "auto" else []
    return " · ".join(parts)


def sequence_rows(report: Report, sequence: Sequence) -> list[tuple[str, str]]:
    """List label and value of everything that applies to one sequence."""
    timing, correction, cache = sequence.timing, sequence.correction, sequence.cache
    steps, drafts = len(timing.decode_ms), sequence.drafts
    rows = [
        ("prompt", f"{sequence.prompt_tokens:,} tokens"),
        *([("prefill", _prefill(sequence))] if timing.prefill_ms or not sequence.kv.shared_tokens else []),
        ("first token", _first_token(sequence)),
        ("output", f"{sequence.output_tokens:,} tokens, {ending(sequence)}"),
    ]
    if steps and drafts is not None:  # the steps after a pass only look its tokens up
        taken = duration(sum(timing.decode_ms) / drafts.passes)
        rows.append(("decode", f"{_speed(timing.tokens_per_s)} · {taken} a pass, with its drafts"))
    elif steps:
        percentiles = " · ".join(f"p{q} {duration(getattr(timing, f'p{q}_ms'))}" for q in (50, 90, 99))
        rows.append(("decode", f"{_speed(timing.tokens_per_s)} · step {percentiles}"))
    if timing.compile_ms:
        rows.append(
            ("compiled", f"loops for this processor, {duration(timing.compile_ms)}, once; not part of the steps")
        )
    if correction.layer_steps_checked:
        heads = rate(correction.heads_corrected, correction.heads_checked)
        layers = rate(correction.layer_steps_corrected, correction.layer_steps_checked)
        rows.append(("corrected", f"KV heads {heads} · layers {layers}"))
    if correction.first_retrievals:
        rows.append(("first retrieval", f"{correction.first_retrievals:,} KV heads, not counted as corrections"))
    if cache.pages_requested:
        recalls = cache.misses or cache.bytes_to_device
        value = rate(cache.hits, cache.pages_requested) if recalls else f"{cache.pages_requested:,}, all on the device"
        rows.append(("page hits" if recalls else "pages read", value))
    if cache.bytes_to_device:
        rows.append(("to device", _moved(cache.bytes_to_device, steps, drafts)))
    if cache.host_hits or cache.disk_reads:
        rows.append(("host hits", rate(cache.host_hits, cache.host_hits + cache.disk_reads)))
    if cache.bytes_to_disk:
        rows.append(("from disk", _from_disk(cache, steps)))
        rows.append(("to disk", f"{format_bytes(cache.bytes_to_disk)} · waited {duration(cache.prefill_disk_wait_ms)}"))
    if cache.bytes_to_host:
        prefill = f"prefill {format_bytes(cache.prefill_bytes_to_host)} · decode "
        rows.append(("to host", prefill + _moved(cache.bytes_to_host - cache.prefill_bytes_to_host, steps, drafts)))
    for key, value in sequence.method.items():
        if isinstance(value, int | float | str):  # longer data is for the JSON
            rows.append((key.replace("_", " "), f"{value:,.4g}" if isinstance(value, float) else f"{value}"))
    if drafts is not None:
        each = f"{(drafts.accepted + drafts.passes) / drafts.passes:.2f} tokens per pass of full attention"
        rows.append(("drafts accepted", f"{rate(drafts.accepted, drafts.drafted)} · {each}"))
    rows += fidelity_rows(sequence.fidelity)
    asked, budget = report.profile.get("settings", {}).get("budget"), sequence.budget
    if budget is not None and asked != budget:
        parts = [f"{budget:,} tokens, {asked} of the prompt"]
        sizes = {"sink": sequence.sink, "window": sequence.window}
        parts += [f"{name} {size:,}" for name, size in sizes.items() if size is not None]
        rows.append(("budget", " · ".join(parts)))
    if budget is not None and not cache.pages_requested and sequence.prompt_tokens + sequence.output_tokens <= budget:
        rows.append(("selection", f"none: the context fits into the budget of {budget:,} tokens"))
    return rows


def fidelity_rows(fidelity: dict[str, Any]) -> list[tuple[str, str]]:
    """List what an audit found; nothing if none was asked for."""
    if not fidelity:
        return []
    steps = fidelity["steps_audited"]
    spaced = "" if fidelity["every"] == 1 else f", one in {fidelity['every']:,},"
    rows = [("audit", f"{counted(steps, 'step')}{spaced} compared with full attention")]
    if fidelity["mass"] is not None:
        found = f"top {fidelity['top']} tokens found {fidelity['recall']:.1%}"
        rows.append(("attention", f"mass {fidelity['mass']:.2%} · {found} · output off by {fidelity['error']:.2%}"))
    divergence = f"KL {fidelity['kl']:.2g} nats, most {fidelity['kl_max']:.2g}"
    agreeing = rate(round(fidelity["agreement"] * steps), steps)
    return [*rows, ("next token", f"{divergence} · same likeliest {agreeing}")]


def _from_disk(cache: Cache, steps: int) -> str:
    """Format the bytes read from disk, in all and per step, and how long steps waited for them."""
    waited = f" · waited {duration(cache.disk_wait_ms / steps)} per step" if steps else ""
    return _moved(cache.bytes_from_disk, steps) + waited


def _first_token(sequence: Sequence) -> str:
    """Format the time to the first token from the prefill's start, and from the command's if that is known."""
    timing = sequence.timing
    waited = timing.ttft_from_start_ms
    return duration(timing.ttft_ms) + ("" if waited is None else f" · {duration(waited)} from the command's start")


def _prefill(sequence: Sequence) -> str:
    """Format the time of reading a prompt, and the speed for the tokens whose KV was not there yet."""
    ms = sequence.timing.prefill_ms
    return f"{duration(ms)} · {per_second(sequence.kv.read_tokens, ms)}"


def memory_rows(report: Report) -> list[tuple[str, str]]:
    """Report where the KV was, which weights were streamed, and the peak memory."""
    memory = report.memory
    cache = [f"{format_bytes(memory.device_kv_bytes)} on the device"]
    if memory.host_kv_bytes:
        cache.append(f"{format_bytes(memory.host_kv_bytes)} on the host")
    if memory.disk_kv_bytes:
        cache.append(f"{format_bytes(memory.disk_kv_bytes)} on the disk")
    if memory.host_pinned_bytes:
        cache.append(f"{format_bytes(memory.host_pinned_bytes)} of it pinned")
    rows = [("KV cache", " · ".join(cache))]
    if (found := report.streamed_weights) is not None:
        waited = f" · waited {duration(found.decode_wait_ms / found.steps)} per step" if found.steps else ""
        prefill = f"prefill {format_bytes(found.prefill_bytes)} · decode "
        rows.append(("streamed weights", prefill + _moved(found.decode_bytes, found.steps) + waited))
        if found.experts_asked:
            rows.append(("experts cached", rate(found.experts_cached, found.experts_asked)))
    peaks = [("device", memory.device_peak_bytes), ("process", memory.process_peak_bytes)]
    peak = " · ".join(f"{name} {format_bytes(size)}" for name, size in peaks if size)
    return rows + ([("peak memory", peak)] if peak else [])


def origin_rows(report: Report) -> list[tuple[str, str]]:
    """Report what was read, shared and loaded of all prompts, and what was saved.

    Returns nothing if every prompt was read and nothing saved.
    """
    origins = [sequence.kv for sequence in report.sequences]
    loaded, shared = (sum(getattr(kv, name) for kv in origins) for name in ("disk_tokens", "shared_tokens"))
    rows = []
    if loaded or shared:
        parts = [f"{sum(kv.read_tokens for kv in origins if kv.read_tokens):,} tokens read"]
        if shared:
            held = sum(kv.shared_bytes for kv in origins)
            parts.append(f"{shared:,} shared" + (f" ({format_bytes(held)} of host memory)" if held else ""))
        if loaded:
            size, ms = sum(kv.disk_bytes for kv in origins), sum(kv.disk_ms for kv in origins)
            parts.append(f"{loaded:,} from disk ({_in_time(size, ms)})")
        rows.append(("prompts", " · ".join(parts)))
    for each in report.saved:
        if each.error is None:
            what = f"{each.tokens:,} tokens of {each.source}, {_in_time(each.bytes, each.write_ms)}"
            rows.append(("saved", f"{what}, during the prefill"))
    return rows


def placement_rows(report: Report) -> list[tuple[str, str]]:
    """Report which layers lay on which device, if there were several."""
    pieces = report.model.get("placement", ())
    said = [f"{piece['device']} {_layers(*piece['layers'])}" for piece in pieces]
    return [("layers", " · ".join(said))] if said else []


def _layers(first: int, last: int) -> str:
    return "none" if last < first else f"{first}" if last == first else f"{first}-{last}"


def _in_time(size: int, ms: float) -> str:
    rate = f", {format_bytes(1000 * size / ms)}/s" if ms else ""
    return f"{format_bytes(size)} in {duration(ms)}{rate}"


def batch_tables(report: Report, titles: Many[str]) -> list[Table]:
    """Make tables of several sequences, one per row: times, and then what was selected and moved, if anything."""
    times: list[tuple[str, ...]] = []
    moves: list[tuple[str, ...]] = []
    for label, sequence in zip(titles, report.sequences, strict=True):
        name = _short(label)
        timing, cache = sequence.timing, sequence.cache
        if not sequence.output_tokens:  # it failed, or was interrupted before its turn came
            times.append((name, "-", "-", "-", "-", "-", sequence.finish_reason, "-", "-", "-"))
            continue
        times.append(
            (
                name,
                f"{sequence.prompt_tokens:,}",
                duration(timing.prefill_ms) if timing.prefill_ms else "-",
                duration(timing.ttft_ms),
                duration(timing.ttft_from_start_ms),
                f"{sequence.output_tokens:,}",
                sequence.finish_reason,
                _speed(timing.tokens_per_s).removesuffix(" tokens/s"),
                duration(timing.p50_ms if sequence.drafts is None else None),
                duration(timing.p99_ms if sequence.drafts is None else None),
            )
        )
        if cache.pages_requested or cache.bytes_to_device or cache.bytes_to_host:
            moves.append(_moves(name, [sequence]))
    columns = ("", "prompt", "prefill", "first token", "from start", "output", "end", "tok/s", "p50", "p99")
    tables = [Table(columns, times)]
    if len(moves) > 1:
        moves.append(_moves("all", report.sequences))
    if moves:
        tables.append(Table(("", "KV heads corrected", "page hits", "to device", "to host"), moves))
    audits = [(label, sequence.fidelity) for label, sequence in zip(titles, report.sequences, strict=True)]
    if any(fidelity for _, fidelity in audits):
        heads = ("audit", "steps", "mass", "top found", "output off", "KL, nats", "same token")
        tables.append(Table(heads, [_audit(_short(label), fidelity) for label, fidelity in audits if fidelity]))
    return [without_empty_columns(table) for table in tables]


def layer_table(sequence: Sequence) -> Table:
    """Make a table of what each layer requested and moved, for the layers that did."""
    rows = [
        (
            f"{layer.layer}",
            rate(layer.heads_corrected, layer.heads_checked),
            rate(layer.hits, layer.pages_requested),
            f"{layer.misses:,}",
            format_bytes(layer.bytes_to_device),
        )
        for layer in sequence.cache.layers
        if layer.pages_requested or layer.bytes_to_device
    ]
    table = Table(("layer", "KV heads corrected", "page hits", "misses", "to device"), rows)
    return without_empty_columns(table)


def timeline_rows(steps: Many[Step], most: int) -> list[TimelineRow]:
    """Make at most `most` rows: one per step if they fit, equal ranges of steps otherwise."""
    width = max(1, -(-len(steps) // most))
    return [_merge(steps[start : start + width]) for start in range(0, len(steps), width)]


def ending(sequence: Sequence) -> str:
    """Say in words why a sequence ended."""
    words = {"eos": "the end-of-text token", "stop": "--stop", "length": "--max-tokens"}
    word = words.get(sequence.finish_reason)
    return sequence.finish_reason if word is None else f"ended by {word}"


def settings_line(profile: dict[str, Any]) -> str:
    """Format every setting of a profile with its value, and the hash."""
    settings = ", ".join(f"{key}={value}" for key, value in profile.get("settings", {}).items())
    return f"{settings} (hash {profile.get('hash', '-')})"


def _tokens(number: int | str) -> str:
    """Format a number of tokens, or the share that was asked for."""
    return number if isinstance(number, str) else f"{number:,}"


def _merge(steps: Many[Step]) -> TimelineRow:
    total = {field.name: sum(getattr(step, field.name) for step in steps) for field in fields(Step)}
    return TimelineRow(**total | {"step": steps[0].step, "ms": total["ms"] / len(steps)}, last=steps[-1].step)


def _short(label: str) -> str:
    """Shorten a name to fit into a table; paths differ at their end."""
    return label if len(label) <= _NAME else "…" + label[1 - _NAME :]


def _audit(name: str, fidelity: dict[str, Any]) -> tuple[str, ...]:
    parts = ("-" if fidelity[key] is None else f"{fidelity[key]:.1%}" for key in ("mass", "recall", "error"))
    return name, f"{fidelity['steps_audited']:,}", *parts, f"{fidelity['kl']:.2g}", f"{fidelity['agreement']:.1%}"


def _moves(name: str, sequences: Many[Sequence]) -> tuple[str, ...]:
    return (
        name,
        rate(sum(s.correction.heads_corrected for s in sequences), sum(s.correction.heads_checked for s in sequences)),
        rate(sum(s.cache.hits for s in sequences), sum(s.cache.pages_requested for s in sequences)),
        format_bytes(sum(s.cache.bytes_to_device for s in sequences)),
        format_bytes(sum(s.cache.bytes_to_host for s in sequences)),
    )


def _digits(value: float, unit: str) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def _moved(size: int, steps: int, drafts: DraftCounts | None = None) -> str:
    count, each = (steps, "step") if drafts is None else (drafts.passes, "pass")
    return format_bytes(size) + (f" · {format_bytes(size / count)} per {each}" if count else "")


def _speed(tokens_per_s: float | None) -> str:
    if tokens_per_s is None:
        return "-"
    return f"{tokens_per_s:,.0f} tokens/s" if tokens_per_s >= 99.95 else _digits(tokens_per_s, "tokens/s")


def progress_rows(found: Progress) -> Iterator[tuple[str, str]]:
    """Yield label and value of each line; empty ones are left out."""
    earlier = f", {found.earlier:,} of them from before" if found.earlier else ""
    yield "rows", f"{found.ended:,} of {found.total:,} have a result{earlier}"
    if failed := found.failed + found.earlier_failed:
        yield "failed", f"{failed:,}; redo them with --retry-errors"
    if found.in_flight:
        yield "in flight", f"{found.in_flight:,}"
    if found.prompt_tokens:
        shared = f" and {found.shared_tokens:,} shared" if found.shared_tokens else ""
        yield "prompts", f"{found.prompt_tokens:,} tokens read{shared}"
    if found.output_tokens:
        rows = f", {found.output_tokens / found.steps:.1f} rows per step" if found.steps else ""
        speed = f", {found.output_tokens_per_second:,.1f} per second" if found.output_tokens_per_second else ""
        yield "output", f"{found.output_tokens:,} tokens{speed}{rows}"
    if found.weight_bytes:
        waited = f", waited {duration(1000 * found.weight_wait_seconds)}"
        yield "streamed weights", f"{format_bytes(found.weight_bytes)}{waited}"
    if found.experts_asked:
        yield "experts cached", rate(found.experts_cached, found.experts_asked)
    if found.seconds and found.output_tokens:
        yield "time", f"{duration(1000 * found.seconds)}, {shares(found)}"
    if found.left_seconds and found.in_flight:
        yield "left", f"about {duration(1000 * found.left_seconds)}"


def checked_rows(found: Progress) -> Iterator[tuple[str, str]]:
    """Yield label and value of the outcome of a check, in which nothing was run."""
    good = found.total - found.failed
    yield "rows", f"{found.total:,} checked, {'all' if good == found.total else f'{good:,}'} can be run"
    if found.failed:
        yield "refused", f"{found.failed:,}"


def shares(found: Progress) -> str:
    """Say how the time was divided."""
    whole = found.seconds or 1.0
    return f"prefill {found.prefill_seconds / whole:.0%}, decode {found.decode_seconds / whole:.0%}"
