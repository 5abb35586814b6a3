"""Scoring as RULER does: the share of the expected strings that the answer contains, case ignored."""

from collections.abc import Iterable, Sequence


def recall(text: str, outputs: Sequence[str]) -> float:
    """Return the share (0..1) of `outputs` that occur in `text`.

    Raises:
        ValueError: `outputs` is empty.
    """
    if not outputs:
        raise ValueError("a row without outputs cannot be scored")
    lowered = text.lower()
    return sum(output.lower() in lowered for output in outputs) / len(outputs)


def string_match_all(texts: Iterable[str], outputs: Iterable[Sequence[str]]) -> float:
    """Return the mean recall over all rows in per cent, RULER's `string_match_all`."""
    recalls = [recall(text, expected) for text, expected in zip(texts, outputs, strict=True)]
    return 100.0 * sum(recalls) / len(recalls)
