"""Parse and format sizes as people write them: 32K tokens, 24GiB."""

import re
from collections.abc import Iterator
from fractions import Fraction

_NUMBER = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)
_COUNT = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_BYTES = {
    "": 1,
    "b": 1,
    **{f"{prefix}{suffix}": 2 ** (10 * (i + 1)) for i, prefix in enumerate("kmgt") for suffix in ("", "ib")},
    **{f"{prefix}b": 1000 ** (i + 1) for i, prefix in enumerate("kmgt")},
}


_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")
_UNLIMITED = 1 << 40


class Share(int):
    """A share of a prompt's tokens, written 20%; without a prompt it counts as more tokens than any prompt has."""

    part: Fraction

    def __new__(cls, text: str) -> "Share":
        """Parse "20%" or "1.56%". Raises ValueError with the text in it."""
        match = _SHARE.fullmatch(text.strip())
        if match is None or not 0 < Fraction(match[1]) <= 100:
            raise ValueError(f"{text!r} is not a share such as 20%, above 0% and 100% at most")
        share = super().__new__(cls, _UNLIMITED)
        share.part = Fraction(match[1]) / 100
        return share

    def of(self, tokens: int) -> int:
        """Return the share of a prompt of `tokens`, in tokens rounded down."""
        return int(self.part * tokens)

    def __eq__(self, other: object) -> bool:
        """Tell whether the other is the same share; a share equals no number."""
        return isinstance(other, Share) and self.part == other.part

    def __ne__(self, other: object) -> bool:
        """Tell whether the other is not the same share."""
        return not self == other

    def __hash__(self) -> int:
        """Hash the share."""
        return hash(self.part)

    def __str__(self) -> str:
        """Format the share as it is parsed."""
        return f"{float(100 * self.part):g}%"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        """Format the share as it is parsed, whatever `spec` says."""
        return str(self)

    def __reduce__(self) -> tuple[type["Share"], tuple[str]]:
        """Pickle and copy the share by its text."""
        return Share, (str(self),)


def parse_count_or_share(text: str) -> int:
    """Parse tokens from "512" or "32K", or a share of the prompt from "20%". Raises ValueError with the text in it."""
    return Share(text) if text.strip().endswith("%") else parse_count(text)


def parse_count(text: str) -> int:
    """Parse tokens from "512", "32K" or "1M"; K is 1024 as in model names. Raises ValueError with the text in it."""
    return _parse(text, _COUNT, "a number of tokens such as 512, 32K or 1M")


def parse_bytes(text: str) -> int:
    """Parse bytes from "24GiB", "24G" (both binary) or "24GB" (decimal). Raises ValueError with the text in it."""
    return _parse(text, _BYTES, "a size such as 512MiB or 24GiB")


def format_bytes(size: float) -> str:
    """Format bytes with three significant digits and a binary unit: "16.0 KiB", "1.25 GiB"; whole bytes below 1 KiB."""
    if abs(size) < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        # 999.5 and more would round to four digits; the next unit reads better from 1000 on.
        if abs(size) < 999.5 or unit == "TiB":
            break
    digits = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:.{digits}f} {unit}"


def format_age(seconds: float) -> str:
    """Format the time since an event in its largest whole unit: "just now", "5 min ago", "3 h ago", "12 days ago"."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if (count := int(seconds // size)) > 0:
            return f"{count:,} {'day' if unit == 'days' and count == 1 else unit} ago"
    return "just now"


def _parse(text: str, units: dict[str, int], wanted: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is not {wanted}")
    value = float(match[1].replace("_", "")) * units[match[2].lower()]
    if "." not in match[1]:
        return int(match[1].replace("_", "")) * units[match[2].lower()]
    if not value.is_integer():
        raise ValueError(f"{text!r} is not {wanted}: it comes to {value:g}")
    return int(value)


def slices(stop: int, at_most: int) -> Iterator[slice]:
    """Cut range(stop) into consecutive slices of at most `at_most` (>= 1)."""
    return (slice(start, min(start + at_most, stop)) for start in range(0, stop, at_most))
