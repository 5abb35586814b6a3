"""The limits of a container: those of its control group (version 2), if there are any."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def memory_limit() -> int | None:
    """Return the bytes that all processes of the group may hold together."""
    limit = _read("memory.max")
    return int(limit) if limit.isdecimal() else None


def memory_free() -> int | None:
    """Return the bytes left of the limit. Cached files do not count: the system evicts them first."""
    limit, held = memory_limit(), _read("memory.current")
    if limit is None or not held.isdecimal():
        return limit
    cached = dict(line.split() for line in _read("memory.stat").splitlines()).get("inactive_file", "0")
    return max(0, limit - int(held) + int(cached))


def cpu_quota() -> float | None:
    """Return the quota of CPU time, in cores."""
    quota, _, period = _read("cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _read(name: str) -> str:
    try:
        return (ROOT / name).read_text().strip()
    except OSError:
        return ""
