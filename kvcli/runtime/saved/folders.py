"""Directories that are whole or not there, whatever other process works beside them and whenever the machine goes down.

A directory is made under a name of its own that begins with `TEMPORARY`, locked by the process that makes it, and takes
its name when it is whole. One is removed by taking its name away first. What a process that was killed has left is
known by its name and by a lock that no process holds, and is cleared away by the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".kvcli-"


@contextmanager
def locked(folder: Path, shared: bool = False, wait: bool = True) -> Iterator[int | None]:
    """Hold the lock of a directory and give its file descriptor; None where another holds it and we do not `wait`.

    Raises:
        OSError: there is no such directory.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield descriptor
    finally:
        os.close(descriptor)


class NewFolder:
    """A directory that is being made beside others in `parent`; locked until it has its name or is given up.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path):
        with locked(parent):
            clear(parent)
            self.path = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def commit(self, target: Path) -> bool:
        """Give it its name, once all that it holds is on the disk; False where the name is taken by a full directory.

        Raises:
            OSError: the name cannot be given.
        """
        os.fsync(self._descriptor)
        mask = os.umask(0)
        os.umask(mask)
        self.path.chmod(0o777 & ~mask)  # mkdtemp's is for its owner alone
        with locked(target.parent) as parent:
            try:
                self.path.rename(target)
            except OSError:
                if target.is_dir() and any(target.iterdir()):
                    self.abandon()
                    return False
                raise
            assert parent is not None
            os.fsync(parent)
        os.close(self._descriptor)
        return True

    def abandon(self) -> None:
        """Remove it and what it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._descriptor)


def clear(parent: Path) -> None:
    """Remove what processes that are gone have left in `parent`, whose lock is held."""
    for path in parent.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # a file, or one that another process cleared
            if path.is_dir() and not path.is_symlink():
                with locked(path, wait=False) as free:
                    if free is not None:
                        shutil.rmtree(path, ignore_errors=True)


def remove(folder: Path) -> bool:
    """Remove a directory as a whole; False where another process is reading it, or it is gone."""
    with suppress(FileNotFoundError), locked(folder, wait=False) as free:
        if free is None:
            return False
        with locked(folder.parent):
            gone = Path(tempfile.mktemp(prefix=TEMPORARY, dir=folder.parent))
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True
    return False
