"""What stands beside freekv: read from the files of the methods, which are not run for it."""

from __future__ import annotations

from kvcli.methods import method_names
from kvcli.methods.card import GRAPH, read_card

SERVED = [name for name in method_names() if name != "freekv" and read_card(name).gpu_step == GRAPH]
