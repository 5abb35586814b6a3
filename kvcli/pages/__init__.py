"""Reports as one self-contained HTML page: text, tables and charts, without a network.

    check_installed()                            # first thing: refuses where the extra is missing
    page = Page("kvcli profile", "llama-3.1-8b, dummy weights")
    page.section("Step time", "Median of five runs each.")
    page.chart(alt.Chart(alt.Data(values=rows)).mark_bar().encode(...), "What the picture shows, in a sentence.")
    page.table(summary.Table(columns, rows), "The same as figures.")
    page.facts([("device", "CPU"), ("threads", "2")])
    write_file(path, page.render())

Charts are Altair's, single or layered views (a concatenation cannot take the width of the window); leave width, fonts
and axis colours to the page, and take colours from `colour` or `PALETTE`, so that they follow light and dark. What a
chart shows should stand in a table, too: not everybody sees it.
"""

from kvcli.pages.page import PALETTE, Page, check_installed, colour

__all__ = ["PALETTE", "Page", "check_installed", "colour"]
