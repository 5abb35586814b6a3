"""What a container lets this process take: the limits of its control group (version 2), where it has any."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def memory_limit() -> int | None:
    """Bytes that all processes of the group may hold together."""
    limit = _read("memory.max")
    return int(limit) if limit.isdecimal() else None


def memory_free() -> int | None:
    """Bytes of the limit that are left. Cached files are not counted: the system lets go of them first."""
    limit, held = memory_limit(), _read("memory.current")
    if limit is None or not held.isdecimal():
        return limit
    cached = dict(line.split() for line in _read("memory.stat").splitlines()).get("inactive_file", "0")
    return max(0, limit - int(held) + int(cached))


def cpu_quota() -> float | None:
    """Cores' worth of time."""
    quota, _, period = _read("cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _read(name: str) -> str:
    try:
        return (ROOT / name).read_text().strip()
    except OSError:
        return ""
