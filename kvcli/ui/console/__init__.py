"""Everything shown to a person: progress, statistics, timelines, lists, errors. The only importer of rich."""

from kvcli.ui.console.batch import BatchDisplay, print_batch_summary, render_batch
from kvcli.ui.console.heat_map import HeatMap, render_heat_maps
from kvcli.ui.console.progress import RunConsole, TextSink
from kvcli.ui.console.results import findings, method_list, method_page, render, render_tables
from kvcli.ui.console.statistics import print_statistics, print_timeline
from kvcli.ui.console.terminal import print_error, print_note, stderr_console

__all__ = [
    "BatchDisplay",
    "HeatMap",
    "RunConsole",
    "TextSink",
    "findings",
    "method_list",
    "method_page",
    "print_batch_summary",
    "print_error",
    "print_note",
    "print_statistics",
    "print_timeline",
    "render",
    "render_batch",
    "render_heat_maps",
    "render_tables",
    "stderr_console",
]
