"""Join the files of shards into one, and read the state of a batch from its files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvcli.batch.jobs import Inputs, Job, read_jobs
from kvcli.batch.order import Shard
from kvcli.batch.results import is_written, read_results, shown
from kvcli.batch.source import RowSource
from kvcli.batch.tally import read_state
from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.options import Sampling, Template
from kvcli.telemetry.observer import Progress


class _Place(NamedTuple):
    """The place of a result, and the hash of its row."""

    path: Path
    start: int
    size: int
    row: str
    failed: bool


def merge(source: str, output: Path) -> Progress:
    """Write the results of all shards of `output` into it, in the order of the rows.

    Raises:
        KvcliError: there are no files of shards, some are missing, being written, of several models or profiles or with
            a duplicate result (usage); rows have no result.
    """
    shards = shard_files(output)
    if not shards:
        what = f"no shard files next to {output}, such as {Shard(1, 4).of(output).name}"
        raise usage_error(what, "name the OUT of the shards")
    places = _places([shards[shard] for shard in sorted(shards)])
    with RowSource(source) as rows:
        jobs = read_jobs(Inputs(rows, Sampling(), Template()))
    _check_whole(jobs, places, output, shards)
    _write([places[job.custom_id] for job in jobs], output)
    return Progress(total=len(jobs), earlier=len(jobs), earlier_failed=sum(place.failed for place in places.values()))


def state(output: Path, shards_first: bool = False) -> tuple[Progress, bool]:
    """Return the state of a batch, and whether a run writes to it; the states of shards are added up.

    Shards are read if there is no `output`, or if `shards_first`.

    Raises:
        KvcliError: there is neither the file nor one of its shards (usage), or it holds something else.
    """
    shards = list(shard_files(output).values()) if shards_first or not output.exists() else []
    paths = shards or [output] * output.exists()
    if not paths:
        raise usage_error(f"{output}: no such file, and no shard files", "name the file given to -o")
    found, running = Progress(total=0), False
    for path in paths:
        mine, its_running = _state(path)
        running |= its_running
        sums = {name: getattr(found, name) + getattr(mine, name) for name in _SUMMED}
        means = {name: getattr(found, name) + getattr(mine, name) / len(paths) for name in _AVERAGED}
        latest = {name: max(getattr(found, name), getattr(mine, name)) for name in ("seconds", "time")}
        left = [each.left_seconds for each in (found, mine) if each.left_seconds is not None]
        found = Progress(**sums, **means, **latest, left_seconds=max(left, default=None))
    return found, running


_AVERAGED = ("prefill_seconds", "decode_seconds")
_SUMMED = [name for name in Progress.model_fields if name not in (*_AVERAGED, "seconds", "time", "left_seconds")]


def shard_files(output: Path) -> dict[Shard, Path]:
    """Find the files of shards next to `output`.

    Raises:
        KvcliError: there are several partitions (usage).
    """
    name = re.compile(rf"{re.escape(output.stem)}\.(\d+)-of-(\d+){re.escape(output.suffix)}")
    matches = {path: name.fullmatch(path.name) for path in output.resolve().parent.glob("*")}
    found = {Shard(int(match[1]), int(match[2])): path for path, match in matches.items() if match}
    if len(counts := {shard.count for shard in found}) > 1:
        what = f"{output} has files of {' and of '.join(map(str, sorted(counts)))} shards"
        raise usage_error(what, "remove those of the earlier run")
    return dict(sorted(found.items()))


def _state(path: Path) -> tuple[Progress, bool]:
    """Return the state of one file: from its lines, and from the last report of its run."""
    failed = total = tokens = 0
    for _, result in read_results(path):
        total, failed, tokens = total + 1, failed + result.failed, tokens + result.output_tokens
    said, running = read_state(path), is_written(path)
    if said is None:
        return Progress(total=total, earlier=total, earlier_failed=failed, output_tokens=tokens), running
    known = {"earlier": 0, "earlier_failed": 0, "done": total - failed, "failed": failed}
    return said.model_copy(update={**known, "in_flight": said.in_flight if running else 0}), running


def _places(paths: list[Path]) -> dict[str, _Place]:
    """Find every result in its file."""
    found: dict[str, _Place] = {}
    kinds: dict[tuple[str, str], Path] = {}
    for path in paths:
        if is_written(path):
            raise usage_error(f"{path}: a run is writing to it", "wait until it has ended")
        start = 0
        for line, result in read_results(path):
            place = _Place(path, start, len(line), result.kvcli.key.row, result.failed)
            if (first := found.setdefault(result.custom_id, place)) is not place:
                what = f"row {result.custom_id!r} has a result in {first.path} and in {path}"
                raise usage_error(what, "rerun the shards with the same IN")
            kinds.setdefault((result.kvcli.key.model, result.kvcli.key.profile), path)
            start += len(line)
    if len(kinds) > 1:
        what = f"the shards used different models or profiles: {', '.join(path.name for path in kinds.values())}"
        raise usage_error(what, "rerun those that differ with --overwrite")
    return found


def _check_whole(jobs: list[Job], places: Mapping[str, _Place], output: Path, shards: Mapping[Shard, Path]) -> None:
    """Refuse results that are not exactly those of the rows."""
    rows = {job.custom_id: job for job in jobs}
    if strangers := [name for name, place in places.items() if name not in rows or rows[name].digest != place.row]:
        what = f"the shards have results for {len(strangers):,} rows that are not in IN: {shown(strangers)}"
        raise usage_error(what, "name the IN of the shards")
    if missing := [name for name in rows if name not in places]:
        count = next(iter(shards)).count
        absent = [number for number in range(1, count + 1) if Shard(number, count) not in shards]
        where = f"; no file for shard {', '.join(map(str, absent))} of {count}" if absent else ""
        what = f"{len(missing):,} of {len(rows):,} rows have no result: {shown(missing)}{where}"
        raise KvcliError(what, f"rerun the shards until all have finished; {output} was not written")


def _write(places: list[_Place], output: Path) -> None:
    """Copy results into a file that replaces `output` when it is complete."""
    if output.exists():
        for _ in read_results(output):
            break  # it is a file of results, or this has raised
    beside = output.with_name(f".{output.name}.kvcli")
    files = {path: path.open("rb") for path in {place.path for place in places}}
    try:
        with beside.open("wb") as whole:
            for place in places:
                files[place.path].seek(place.start)
                whole.write(files[place.path].read(place.size))
            whole.flush()
            os.fsync(whole.fileno())
        beside.replace(output)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise KvcliError(f"{output}: cannot be written: {error.strerror}", "free some space") from None
    finally:
        for file in files.values():
            file.close()
