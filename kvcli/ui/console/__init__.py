"""Everything shown to a person: progress, statistics, timelines, lists, errors. The only importer of rich."""

from kvcli.ui.console.heat import HeatMap, render_heat_maps
from kvcli.ui.console.lists import findings, method_list, method_page, render, render_tables
from kvcli.ui.console.messages import print_error, print_note, stderr_console
from kvcli.ui.console.progress import RunConsole, TextSink
from kvcli.ui.console.run import print_statistics, print_timeline

__all__ = [
    "HeatMap",
    "RunConsole",
    "TextSink",
    "findings",
    "method_list",
    "method_page",
    "print_error",
    "print_note",
    "print_statistics",
    "print_timeline",
    "render",
    "render_heat_maps",
    "render_tables",
    "stderr_console",
]
