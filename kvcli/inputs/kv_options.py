"""Where prompts' KV is taken from, where it is kept, and where it lies while a run needs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcli.errors import usage_error
from kvcli.sizes import parse_bytes


@dataclass(frozen=True)
class KVOptions:
    """`use` is the directory of a document's KV, `save` where it is to be kept, `cache` a store of `cache_bytes`.

    Of several documents each is saved in a directory of its name in `save`.
    """

    use: Path | None = None
    save: Path | None = None
    cache: Path | None = None
    cache_bytes: int | None = None

    @property
    def any(self) -> bool:
        """Tell whether KV is to be taken from somewhere or kept."""
        return not (self.use is None and self.save is None and self.cache is None)


@dataclass(frozen=True)
class DiskOptions:
    """A directory for the KV of a run that host memory is not to hold, and the bytes of host memory that cache it.

    None stands for half of the host memory that is free.
    """

    folder: Path
    host_memory: int | None = None


def disk_options(folder: str | Path | None, host_memory: int | str | None) -> DiskOptions | None:
    """Read what --kv-disk and --host-memory were given.

    Raises:
        KvcliError: a size is none, or says the size of a cache of nothing (usage).
    """
    size = host_memory
    if isinstance(size, str):
        try:
            size = parse_bytes(size)
        except ValueError as error:
            raise usage_error(f"--host-memory: {error}", "for example --host-memory 32GiB") from None
    if size is not None and size < 1:
        raise usage_error(f"--host-memory is {size}", "give more, or leave it out")
    if folder is None:
        if size is not None:
            raise usage_error("--host-memory is for KV beside a disk", "name a directory with --kv-disk")
        return None
    return DiskOptions(Path(folder), size)
