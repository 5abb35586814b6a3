"""Scoring as RULER does: the share of the expected strings that the answer contains, case ignored."""

from collections.abc import Sequence


def recall(text: str, outputs: Sequence[str]) -> float:
    """Return the share (0..1) of `outputs` that occur in `text`.

    Raises:
        ValueError: `outputs` is empty.
    """
    if not outputs:
        raise ValueError("a row without outputs cannot be scored")
    lowered = text.lower()
    return sum(output.lower() in lowered for output in outputs) / len(outputs)
