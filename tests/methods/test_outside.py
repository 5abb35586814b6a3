"""A method of another package: registered, or offered by an entry point."""

import subprocess
import sys

import pytest
from engine import run
from families import tiny_model

import kvcli.methods as methods
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.methods import get_method, method_names, register
from kvcli.methods.card import read_card
from kvcli.methods.full import Full


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(methods, "_registered", {})


def test_a_registered_method_is_listed_and_runs():
    @register
    class Mine(Full):
        """Full attention by another name."""

        title = "mine"

    assert "mine" in method_names()
    assert get_method("mine") is Mine
    assert read_card("mine").title == "mine"
    assert resolve_profile(method="mine").description == "mine"
    ours, theirs = (run(tiny_model("llama"), name, {}, [[5, 6, 7]], 4)[0].token_ids for name in ("mine", "full"))
    assert ours == theirs


def test_a_name_that_is_taken_is_refused_but_for_the_class_itself():
    class Quest(Full):
        """Another Quest."""

    with pytest.raises(KvcliError, match="method 'quest' already exists") as error:
        register(Quest)
    assert error.value.exit_code == ExitCode.USAGE
    assert register(Quest, name="other") is Quest
    assert register(Quest, name="other") is Quest
    with pytest.raises(KvcliError, match="'other' already"):
        register(type("Else", (Full,), {}), name="other")


def test_what_is_no_method_is_refused():
    with pytest.raises(KvcliError, match="not a subclass"):
        register(dict)
    with pytest.raises(KvcliError, match="does not state Config, title"):
        register(type("Bare", (methods.get_method("full").__mro__[1],), {}))


def offer(site, points, module=""):
    info = site / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvcli.methods]\n{points}\n")
    (site / "other.py").write_text(module)


def refused(site, *arguments):
    code = f"import sys; sys.path.append({str(site)!r}); from kvcli.cli import main; sys.argv[0] = 'kvcli'; main()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("points", "module", "words"),
    [
        ("broken = other:Gone", "", "method 'broken' of package other cannot be imported: AttributeError"),
        ("broken = other:Gone", "1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("broken = other:thing", "thing = 3", "method 'broken' is not a subclass"),
        ("quest = other:Gone", "", "method 'quest' already exists: package other has another"),
    ],
)
def test_a_broken_entry_point_is_one_line(tmp_path, points, module, words):
    offer(tmp_path, points, module)
    assert words in " ".join(refused(tmp_path, "methods").split())
