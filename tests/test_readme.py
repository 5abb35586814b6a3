"""What the README says of the code, held against the code."""

import re
from pathlib import Path
from textwrap import dedent

from kvcli.cli.methods import markdown_table
from kvcli.methods import method_names, quest
from kvcli.methods.base import Method
from kvcli.methods.card import Card, read_card

README = Path(__file__).parents[1] / "README.md"


def test_the_table_of_methods_is_up_to_date():
    begin, end = "<!-- methods -->\n", "<!-- /methods -->\n"
    _, _, rest = README.read_text().partition(begin)
    table, marker, _ = rest.partition(end)
    assert marker == end
    wanted = markdown_table({name: read_card(name) for name in method_names()})
    assert table == wanted, f"put what `kvcli methods --markdown` prints between {begin.strip()} and {end.strip()}"


def test_the_method_to_fill_in_has_all_that_a_method_states():
    _, _, guide = README.read_text().partition("### Add a method")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    names = dict(vars(quest))  # the guide's advice is to copy that file
    exec(dedent("   " + code.lstrip()), names)
    method = names["Name"]
    assert issubclass(method, Method)
    assert not method.__abstractmethods__
    assert vars(method).keys() >= Card.__dataclass_fields__.keys()
    assert method.Config().threshold == 0.1
