"""What the README and CONTRIBUTING say of the code, held against the code."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from engine import run
from families import VOCAB, tiny_model

import kvcli.methods
from kvcli.methods import register
from kvcli.methods.card import STATED
from kvcli.runtime.gpu.recorder import SerialStreams
from kvcli.runtime.gpu.stepper import SlotStepper

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readme_stays_short():
    assert len(README.encode()) <= 9216


def test_needs_come_before_the_list_of_methods():
    assert README.index("| need | method |") < README.index("<!-- methods -->")


def test_every_command_under_use_has_a_comment():
    _, _, use = README.partition("\n## Use\n")
    (block,) = re.findall(r"```sh\n(.*?)```", use, re.DOTALL)
    lines = block.splitlines()
    assert [line for above, line in zip(["", *lines], lines, strict=False) if "#" not in line + above[:1]] == []


def test_the_two_commands_stand_as_continuous_integration_runs_them():
    script = (ROOT / ".ci" / "run").read_text().replace("--quiet ", "")
    for command in (
        "pip install -e . && kvcli generate --method freekv examples/needle-8k.txt",
        "pip install -e '.[test]' && pytest",
    ):
        assert f"```sh\n{command}\n```" in README
        assert command in script


@pytest.fixture
def guide(tmp_path):
    """The method of CONTRIBUTING in a package of its own, installed beside kvcli as the guide says; its directory."""
    _, _, text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a method")
    package, metadata = tmp_path / "your_package", tmp_path / "your_package-1.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").touch()
    (package / "centre.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    points = tomllib.loads(re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1])["project"]["entry-points"]
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: your-package\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points["kvcli.methods"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[kvcli.methods]", *lines]))
    return tmp_path


def test_a_method_of_another_package_is_added_by_the_guide_alone(guide, warm):
    (guide / "command.py").write_text(
        "from kvcli.cli import main; main()"
    )  # which have the guide's package on the path
    (guide / "suite.py").write_text("import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))")

    def run(*arguments, program="command.py"):
        done = warm(*arguments, program=guide / program, cwd=guide)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "pages by a point between their keys' bounds" in run("methods")
    assert "tilt" in run("methods", "centre")
    document = (ROOT / "examples" / "needle-4k.txt").read_text()[-9000:]  # the end of it, with the question
    (guide / "document.txt").write_text(document)
    budget = ("--budget", "256", "--set", "sink=32", "--set", "window=32", "--json", "--max-tokens", "4")
    (sequence,) = json.loads(run("generate", "document.txt", "--method", "centre", *budget))["sequences"]
    assert sequence["cache"]["pages_requested"] > 0
    suite = ("-n", "0", "-p", "no:cacheprovider", "--strict-markers", "--pyargs", "kvcli.conformance")
    assert "passed" in run(*suite, "-k", "centre and llama and not one_kv_head", program="suite.py")


def test_the_method_of_the_guide_states_all_that_a_method_states():
    _, _, guide = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a method")
    names = {}
    exec(re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1], names)
    method = names["Centre"]
    assert not method.__abstractmethods__
    assert vars(method).keys() >= set(STATED)


def test_the_method_of_the_guide_runs_over_slots_as_it_does_phase_by_phase(monkeypatch):
    _, _, guide = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a method")
    names = {}
    exec(re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1], names)
    wanted = {"budget": 32, "sink": 4, "window": 8, "page_size": 4, "dense_layers": 0}
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (91, 41, 7)]
    monkeypatch.setattr(kvcli.methods, "_registered", {})
    register(names["Centre"])
    model = tiny_model("llama")
    expected = run(model, "centre", wanted, prompts, 12)
    steps = lambda hook, rope, sequences: SlotStepper(hook, sequences, rope, streams=SerialStreams())  # noqa: E731
    found = run(model, "centre", wanted, prompts, 12, step=steps)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [each.report().cache.pages_requested for each in found] == [
        each.report().cache.pages_requested for each in expected
    ]
