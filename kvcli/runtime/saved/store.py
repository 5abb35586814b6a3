"""A directory of saved KV that is looked up by how a prompt begins, and kept to a size by least recent use.

Each directory in it holds a run of pages, those that a prompt had more than what was there: it continues the directory
whose page its manifest names as `parent`. Its name is that page's hash, and those of its own first and last one, so
that nothing but the directories on a prompt's way is opened. A directory's time is that of its last use; those that it
continues are never older.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvcli.errors import KvcliError, usage_error
from kvcli.runtime.saved.folders import TEMPORARY, remove
from kvcli.runtime.saved.manifest import MANIFEST, Manifest, page_hashes, read_manifest
from kvcli.runtime.saved.reader import Segment


@dataclass(frozen=True)
class Stored:
    """A directory in the store: its name's hashes, its bytes on the disk, and when it was last used."""

    folder: Path
    parent: str
    first: str
    last: str
    size: int
    used: float


class KVStore:
    """The directories in `folder`, which is made where it is missing; `limit` is the most bytes, None for any.

    Raises:
        KvcliError: `folder` cannot be used (usage).
    """

    def __init__(self, folder: Path, limit: int | None = None):
        self.folder, self.limit = folder, limit
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "permission denied")
        except OSError as error:
            hint = "name a directory that you can write to"
            raise usage_error(f"--kv-cache {folder}: cannot be used: {error.strerror}", hint) from None

    def entries(self) -> list[Stored]:
        """Everything that is there and whole, least recently used first; of equals, what continues others first."""
        found = [entry for path in self.folder.iterdir() if (entry := _stored(path)) is not None]
        depth = {entry.last: len(list(self._ancestors(entry, found))) for entry in found}
        return sorted(found, key=lambda entry: (entry.used, -depth[entry.last]))

    def find(self, root: str, ids: Sequence[int]) -> list[Segment]:
        """The longest way through the directories that a prompt begins with, in whole pages; it counts as used."""
        hashes, way, before = page_hashes(root, ids), list[Segment](), root
        names: dict[tuple[str, str], list[Path]] = {}
        for path in self.folder.iterdir():
            if len(parts := path.name.split("-")) == 3 and not path.name.startswith("."):
                names.setdefault((parts[0], parts[1]), []).append(path)
        while hashes:
            found = [segment for path in names.get((before, hashes[0]), ()) if (segment := _common(path, hashes))]
            if not found:
                break
            way.append(max(found, key=lambda segment: segment.pages))
            before, hashes = hashes[way[-1].pages - 1], hashes[way[-1].pages :]
        for segment in way:
            with suppress(OSError):
                os.utime(segment.folder / MANIFEST)
        return way

    def target(self, manifest: Manifest) -> Path:
        """Where a run of pages belongs."""
        return self.folder / manifest.name

    def room_for(self, size: int) -> bool:
        """Make room for `size` more bytes by removing what was not used for longest; False where the limit is less."""
        if self.limit is None:
            return True
        if size > self.limit:
            return False
        self.prune(self.limit - size)
        return True

    def prune(self, limit: int) -> list[Stored]:
        """Remove what was not used for longest until `limit` bytes are left; returns what was removed.

        What another process is reading stays.
        """
        entries, removed = self.entries(), []
        held = sum(entry.size for entry in entries)
        for entry in entries:
            if held <= limit:
                break
            if remove(entry.folder):
                held -= entry.size
                removed.append(entry)
        return removed

    def find_named(self, name: str) -> Stored:
        """Find a directory by the beginning of the hash of its last page, as `kvcli kv list` shows it.

        Raises:
            KvcliError: none is called so, or several are (usage).
        """
        found = [entry for entry in self.entries() if name and entry.last.startswith(name)]
        if len(found) != 1:
            what = f"{len(found)} entries begin with {name!r}" if found else f"no entry is called {name!r}"
            raise usage_error(f"{self.folder}: {what}", "kvcli kv list shows their names")
        return found[0]

    def _ancestors(self, entry: Stored, entries: Sequence[Stored]) -> Iterator[Stored]:
        """Those that an entry continues at their end."""
        by_last = {other.last: other for other in entries}
        while (parent := by_last.get(entry.parent)) is not None:
            yield parent
            entry = parent


def _stored(path: Path) -> Stored | None:
    parts = path.name.split("-")
    if path.name.startswith(TEMPORARY) or len(parts) != 3:
        return None
    parent, first, last = parts
    with suppress(OSError):
        used = (path / MANIFEST).stat().st_mtime
        return Stored(path, parent, first, last, sum(file.stat().st_size for file in path.iterdir()), used)
    return None


def _common(path: Path, hashes: Sequence[str]) -> Segment | None:
    """What a directory has of the pages with these hashes; None where it is damaged or gone."""
    with suppress(KvcliError):
        manifest = read_manifest(path)
        count = manifest.same_pages(hashes)
        return Segment(path, manifest, count) if count else None
    return None
