"""Shards of a batch on the machines of a Ray cluster (the extra kvcli[ray]).

Ray only places workers and restarts them when they or their nodes die. A worker runs a shard as `--shard` does, into a
file of its own, and a restarted worker continues from that file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from kvcli.batch.jobs import Inputs, read_jobs
from kvcli.batch.merge import merge, shard_files, state
from kvcli.batch.order import Shard
from kvcli.batch.run import BatchRequest, run
from kvcli.batch.source import RowSource
from kvcli.batch.stop import Stop
from kvcli.batch.tally import Tally
from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.models.loading import ModelSpec
from kvcli.telemetry.observer import Observer, Progress

_RESTARTS = 20  # of a worker, before there must be a cause other than bad luck
_LOOK = 1.0  # seconds between two looks at the workers
_LEAVE = 30.0  # seconds that workers get beyond the grace to report on their rows


@dataclass(frozen=True)
class Cluster:
    """The cluster (`address`; None starts one on this machine), the number of workers and the GPUs of each.

    None means one worker per GPU, or one without GPUs; and one GPU each, or none without GPUs.
    """

    address: str | None = None
    workers: int | None = None
    gpus_per_worker: float | None = None


class ShardWorker:
    """Runs one shard; an actor of Ray with two threads, one of which listens."""

    def __init__(self, spec: ModelSpec, request: BatchRequest, grace: float):
        self.spec, self.request, self.stop = spec, request, Stop(grace, listening=True)

    def run(self) -> dict[str, Any] | None:
        """Run the shard to its end; return None, or an error as plain data."""
        try:
            run(self.spec, self.request, Observer(), Tally(), self.stop)
        except KvcliError as error:
            return {"what": error.what, "hint": error.hint, "exit_code": int(error.exit_code)}
        return None

    def ask(self, number: int) -> None:
        """Ask it to end, because of a signal."""
        self.stop.ask(number)


def run_on_ray(
    spec: ModelSpec, request: BatchRequest, cluster: Cluster, observer: Observer, tally: Tally, stop: Stop
) -> None:
    """Run a batch by several workers, and join their files when all have ended.

    Raises:
        KvcliError: as for `kvcli.batch.run.run`; Ray is not installed, has too few GPUs, or the files are those of
            another number of workers (usage).
    """
    assert request.output is not None
    with RowSource(request.source) as source:
        total = len(read_jobs(Inputs(source, request.sampling, request.template, request.question)))
    output = request.output.absolute()
    request = replace(request, source=str(Path(request.source).absolute()), output=output)
    if spec.name is not None and Path(spec.name).exists():
        spec = replace(spec, name=str(Path(spec.name).absolute()))
    observer.stage("ray")
    with _connected(cluster) as (ray, workers, gpus):
        if others := {shard.count for shard in shard_files(output)} - {workers}:
            what = f"{output} was started with {min(others)} workers, not {workers}"
            raise usage_error(what, f"give --workers {min(others)}, or remove those files")
        actor = ray.remote(
            max_restarts=_RESTARTS, max_task_retries=_RESTARTS, max_concurrency=2, num_cpus=1, num_gpus=gpus
        )
        shards = [replace(request, shard=Shard(number, workers)) for number in range(1, workers + 1)]
        placed = [actor(ShardWorker).remote(spec, shard, stop.grace) for shard in shards]
        observer.stage_done()
        with stop.listening():
            errors = list(_watch(ray, placed, output, total, tally, stop))
    if errors:
        raise errors[0]
    if not stop.asked:
        tally.reported = tally.progress().model_copy(update=_joined(merge(request.source, output)))
    tally.tell(last=True)


def _watch(ray: Any, placed: list[Any], output: Path, total: int, tally: Tally, stop: Stop) -> Iterator[KvcliError]:
    """Wait for the workers, pass on a request to end, and count by their files; yield their errors."""
    running, asked = [worker.run.remote() for worker in placed], 0.0
    while running and not (asked and time.monotonic() > asked + stop.grace + _LEAVE):
        ended, running = ray.wait(running, timeout=_LOOK)
        for each in ended:
            try:
                error = ray.get(each)
            except ray.exceptions.RayError as lost:
                what = f"a worker died {_RESTARTS} times: {str(lost).splitlines()[0]}"
                yield KvcliError(what, "a row may need too much memory; find it with --engine local")
            else:
                if error is not None:
                    yield KvcliError(error["what"], error["hint"], ExitCode(error["exit_code"]))
        if stop.asked and not asked:
            asked = time.monotonic()
            for worker in placed:
                worker.ask.remote(stop.signal)
        if output.exists() or shard_files(output):
            found, _ = state(output, shards_first=True)
            seconds = time.monotonic() - tally.started
            rate = {"seconds": seconds, "output_tokens_per_second": found.output_tokens / seconds}
            tally.reported = found.model_copy(update={"total": total, **rate})
            tally.tell()


def _joined(found: Progress) -> dict[str, int]:
    """Return the counts of the joined file, which replace the workers' last reports."""
    return {"total": found.total, "earlier": 0, "earlier_failed": found.earlier_failed, "failed": 0, "in_flight": 0} | {
        "done": found.total - found.earlier_failed
    }


@contextmanager
def _connected(cluster: Cluster) -> Iterator[tuple[Any, int, float]]:
    """Run Ray within this context; yields it with the number of workers and the GPUs of each."""
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise usage_error("--engine ray needs ray", "pip install 'kvcli[ray]'") from None
    quiet = {"log_to_driver": False, "logging_level": "error"}
    options = {"address": cluster.address} if cluster.address else {"num_cpus": cluster.workers, "address": "local"}
    try:
        ray.init(include_dashboard=False if not cluster.address else None, **quiet, **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        what = f"--engine ray: {' '.join(str(error).split())[:300]}"
        raise KvcliError(what, "check ray status, or leave --address out to start a cluster here") from None
    try:
        there = ray.cluster_resources().get("GPU", 0)
        gpus = cluster.gpus_per_worker if cluster.gpus_per_worker is not None else min(there, 1)
        workers = cluster.workers or (int(there // gpus) if gpus else 1)
        if workers * gpus > there or not workers:
            raise usage_error(
                f"{workers} workers need {gpus:g} GPUs each, but the cluster has {there:g}",
                "use fewer workers, or add machines",
            )
        yield ray, workers, gpus
    finally:
        ray.shutdown()
