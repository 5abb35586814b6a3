"""The documentation, held against the code: generated parts are current, and what is shown can be typed."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import typer
import typer.main
import yaml

from kvcli import __version__
from kvcli.cli import command as options
from kvcli.cli.app import app
from kvcli.inputs.variants import variants

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md", *ROOT.glob("docs/*.md")])


def load_generator():
    spec = importlib.util.spec_from_file_location("from_code", ROOT / "docs" / "from_code.py")
    module = sys.modules["from_code"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown_commands():
    """Every line of a shell block that runs kvcli, with the page it is on; what a pipe or `&&` puts before is left."""
    for page in PAGES:
        for language, block in re.findall(r"^ *```(\w*)\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE):
            if language not in ("", "sh", "console"):
                continue
            for line in block.replace("\\\n", " ").splitlines():
                for command in re.split(r"&&|(?<!\S)\|(?!\S)", line.partition(" # ")[0]):
                    if command.strip().startswith("kvcli "):
                        yield pytest.param(command.strip(), id=f"{page.name}: {command.strip()}")


def test_generated_parts_are_current():
    old = [path.name for path, text in load_generator().generated().items() if path.read_text() != text]
    assert not old, "run: python docs/from_code.py"


@cache
def commands():
    return typer.main.get_command(app)


@pytest.mark.parametrize("command", list(shown_commands()))
def test_every_command_shown_can_be_given(command):
    arguments = shlex.split(command)[1:]
    root = commands()
    if arguments[0].startswith("-"):  # an option of kvcli itself
        assert any(arguments[0] in parameter.opts for parameter in root.params)
        return
    name, *rest = arguments
    given = root.commands[name].make_context(name, rest, parent=typer.Context(root, info_name="kvcli")).params
    methods, profiles = (options.names(given.get(key), key) for key in ("method", "profile"))
    settings = options.assignments(given.get("set") or [])
    budgets = options.each(given.get("budget"), "--budget", options.token_budget)
    bundled = [profile for profile in profiles if not profile.endswith(".toml")]
    if name not in ("methods", "doctor") and len(bundled) == len(profiles):
        variants(methods or ([] if profiles else ["freekv"]), profiles, budgets, settings)


def test_the_version_to_cite_is_that_of_the_package():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_the_manual_page_renders_without_a_warning():
    if shutil.which("groff") is None:
        pytest.skip("there is no groff")
    page = ROOT / "docs" / "kvcli.1"
    result = subprocess.run(
        ["groff", "-man", "-Tutf8", "-wall", "-z", str(page)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere():
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = {name for entry in navigation for name in entry.values()}
    assert listed == {page.name for page in ROOT.glob("docs/*.md")}
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_walk_through_the_code_names_what_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {
        path.name for path in (ROOT / "kvcli").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - {"__init__.py", "__main__.py", "errors.py", "sizes.py"} <= set(
        re.findall(r"`kvcli/(\w[\w.]*)", text)
    )
    for step in re.split(r"\n(?=\d\. |\||\n)", text):
        names = re.findall(r"`([^`\n]+)`", step)
        paths = [ROOT / name for name in names if "/" in name or name.endswith(".toml")]
        assert [path for path in paths if not path.exists()] == []
        sources = [path.read_text() for path in paths if path.suffix == ".py"]
        for name in names if sources else []:
            parts = re.fullmatch(r"(\w+)(?:\.(\w+))?", name)
            if parts is None or name == "page_size":
                continue
            patterns = [rf"^ *(class|def) {part}\b" for part in parts.groups() if part]
            assert any(all(re.search(p, source, re.MULTILINE) for p in patterns) for source in sources), name


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_python_shown_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path/to/checkpoint").symlink_to(ROOT / "kvcli" / "models" / "demo")
    short = (ROOT / "examples" / "needle-4k.txt").read_text()[-6000:]  # the same question, fewer tokens before it
    (tmp_path / "examples").mkdir()
    for name in ("report.txt", "examples/needle-4k.txt"):
        (tmp_path / name).write_text(short)
    blocks = re.findall(r"^```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    exec("\n".join(blocks), {})


def test_help_texts_are_short_and_plain():
    parameters = [each for command in load_generator().read_commands() for each in command.parameters]
    assert len(parameters) > 100
    for each in parameters:
        assert len(each.help) <= 125 or "niah_single" in each.help, each.help  # --tasks lists them all
        assert each.help.endswith((".", "...")), each.help
        assert not re.search(r"\b(beside|anew|a second|what is)\b", each.help), each.help
