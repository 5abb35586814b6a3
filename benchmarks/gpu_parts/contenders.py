"""What stands beside freekv: read from the files of the methods, which are not run for it.

Names are those of `kernel_counts.py`. With some settings a method is another contender, where they change what a step
does: where KV lies, what is stored of an answer, or where positions are counted from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcli.methods import method_names
from kvcli.methods.card import GRAPH, PIECEWISE, read_card


class Contender(NamedTuple):
    """A method with settings that are not its own; `offloads`: its KV lies in host memory."""

    name: str
    method: str
    settings: dict[str, Any]
    offloads: bool


OTHERWISE = [
    Contender("fier-offload", "fier", {"offload": True}, True),
    Contender("shadowkv-plus", "shadowkv", {"plus": True}, True),
    Contender("streaming-positions", "streaming", {"positions": "cache"}, False),
]


def served(by: str) -> list[Contender]:
    """List the methods whose steps are so served."""
    cards = {name: read_card(name) for name in method_names() if name != "freekv"}
    return [Contender(name, name, {}, card.offloads) for name, card in cards.items() if card.gpu_step == by]


BY_GRAPH = sorted([*served(GRAPH), *OTHERWISE])
IN_PIECES = served(PIECEWISE)
OFFLOADING = [each for each in BY_GRAPH if each.offloads]
