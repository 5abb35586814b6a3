"""How a prompt is read: exactly, or each token attending to a part of those before it (arXiv 2407.02490)."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from kvcli.sizes import parse_count

PatternName = Literal["exact", "a-shape", "vertical-slash"]
SIZES = {"a-shape": (1024, 4096), "vertical-slash": (1000, 6096)}
"""First and newest tokens; columns and diagonals: what the paper takes for prompts of 128K tokens (section 4)."""


class PrefillPattern(NamedTuple):
    """A pattern of prefill attention and its two sizes; none of exact reading."""

    pattern: PatternName
    sizes: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, text: str) -> PrefillPattern:
        """Read "exact", "a-shape", "vertical-slash", or one of these two with sizes as in "a-shape:64,1K".

        Raises:
            ValueError: it is none of them.
        """
        name, colon, sizes = text.partition(":")
        if name not in get_args(PatternName) or (colon and name == "exact"):
            raise ValueError(f"{text!r} is not exact, a-shape or vertical-slash, with sizes as in a-shape:64,1K")
        if not colon:
            return cls(name, SIZES.get(name, (0, 0)))  # type: ignore[arg-type]
        first, comma, second = sizes.partition(",")
        try:
            found = parse_count(first), parse_count(second)
        except ValueError:
            found = (0, 0)
        if not comma or min(found) < 1:
            raise ValueError(f"{text!r} has no two sizes of 1 or more behind {name}, as in {name}:64,1K")
        return cls(name, found)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Write it with its sizes."""
        return self.pattern if self.pattern == "exact" else f"{self.pattern}:{self.sizes[0]},{self.sizes[1]}"
