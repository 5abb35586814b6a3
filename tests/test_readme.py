"""What the README and CONTRIBUTING say of the code, held against the code."""

import re
from pathlib import Path

from kvcli.methods.base import Method
from kvcli.methods.card import Card

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readme_stays_short():
    assert len(README.encode()) <= 9000


def test_the_two_commands_stand_as_continuous_integration_runs_them():
    script = (ROOT / ".ci" / "run").read_text().replace("--quiet ", "")
    for command in (
        "pip install -e . && kvcli generate --method freekv examples/needle-8k.txt",
        "pip install -e '.[test]' && pytest",
    ):
        assert f"```sh\n{command}\n```" in README
        assert command in script


def test_the_method_of_the_guide_states_all_that_a_method_states():
    _, _, guide = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a method")
    names = {}
    exec(re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1], names)
    method = names["Centre"]
    assert issubclass(method, Method)
    assert not method.__abstractmethods__
    assert vars(method).keys() >= Card.__dataclass_fields__.keys()
    assert method.Config().sharpness == 1.0
