"""Where prompts' KV is taken from, and where it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
