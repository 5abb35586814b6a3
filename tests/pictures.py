"""What a picture for a paper shows."""

import re
from html import unescape


def texts_of(svg):
    """Return the texts of a picture, in order; it has to be as wide as a column."""
    assert 234 < float(re.search(r'<svg[^>]* width="([\d.]+)pt"', svg)[1]) < 243
    return [unescape(re.sub("<[^>]+>", "", text)) for text in re.findall(r"<text[^>]*>(.*?)</text>", svg)]
