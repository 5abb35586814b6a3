"""What the README generates from the code is what the code says."""

from pathlib import Path

from kvcli.cli.methods import markdown_table
from kvcli.methods import method_names
from kvcli.methods.card import read_card

README = Path(__file__).parents[1] / "README.md"


def test_the_table_of_methods_is_up_to_date():
    begin, end = "<!-- methods -->\n", "<!-- /methods -->\n"
    _, _, rest = README.read_text().partition(begin)
    table, marker, _ = rest.partition(end)
    assert marker == end
    wanted = markdown_table({name: read_card(name) for name in method_names()})
    assert table == wanted, f"put what `kvcli methods --markdown` prints between {begin.strip()} and {end.strip()}"
