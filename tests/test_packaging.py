"""The package beside others called `kernels`, and what a wheel and a source distribution hold."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

import kvcli

ROOT = Path(__file__).parents[1]

STAND_IN = """
from unittest.mock import MagicMock

def __getattr__(name):
    return MagicMock()
"""

PROBE = """
import sys
from pathlib import Path

import transformers.integrations.hub_kernels
from transformers.utils.import_utils import is_kernels_available

from kvcli.kernels import topk

assert transformers.integrations.hub_kernels.is_kernels_available() is {installed}, sys.path
if {installed}:
    import kernels
    assert Path(kernels.__file__).parent == Path({directory!r}), kernels
files = [str(Path(m.__file__).resolve()) for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
ours = [file for file in files if file.startswith({kernels!r})]
assert any(file.endswith("topk.py") for file in ours), ours
assert len(ours) == len(set(ours)), sorted(ours)
"""


def run(
    command: list[str], source: str | None = None, path: Path | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ)
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(command, input=source, env=env, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def probe(directory: Path, installed: bool) -> str:
    return PROBE.format(installed=installed, directory=str(directory), kernels=str(ROOT / "kernels"))


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A directory for the path, with an installed package called `kernels` of a version that transformers takes."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels/__init__.py").write_text(STAND_IN)
    metadata = site / f"kernels-{KERNELS_MIN_VERSION}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    return site


def test_transformers_finds_an_installed_kernels_package_in_a_command_or_notebook(stand_in: Path) -> None:
    # Source from stdin, as from a cell: the first entry of the path is the working directory, as with -c.
    run([sys.executable, "-"], probe(stand_in / "kernels", True), path=stand_in)


@pytest.mark.exhaustive  # the two differ in nothing but the way that Python starts
def test_transformers_finds_an_installed_kernels_package_in_a_module(stand_in: Path, tmp_path: Path) -> None:
    test = tmp_path / "test_probe.py"
    lines = "".join(f"    {line}\n" for line in probe(stand_in / "kernels", True).splitlines())
    test.write_text(f"def test_probe():\n{lines}")
    done = run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(test)], path=stand_in
    )
    assert "1 passed" in done.stdout


def test_transformers_does_not_take_the_directory_for_a_package(tmp_path: Path) -> None:
    run([sys.executable, "-c", probe(tmp_path, False)])


def test_a_checkout_called_kvcli_is_not_taken_for_the_package_from_the_folder_above(tmp_path: Path) -> None:
    (tmp_path / "kvcli").symlink_to(ROOT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import kvcli; print(kvcli.__version__)"]  # a mere directory has none
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, f"{kvcli.__version__}\n"), ran.stderr


def test_directories_at_the_top_are_no_packages() -> None:
    assert [path.parent.name for path in ROOT.glob("*/__init__.py")] == ["kvcli"]


def members(archive: Path) -> dict[str, bytes]:
    """Files of a wheel or a source distribution, by name; each name stands there once."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = wheel.namelist()
            files = {name: wheel.read(name) for name in names}
    else:
        with tarfile.open(archive) as source:
            regular = [member for member in source.getmembers() if not member.isdir()]
            assert all(member.isreg() for member in regular)
            names = [member.name.partition("/")[2] for member in regular]
            files = {n: source.extractfile(m).read() for n, m in zip(names, regular, strict=True)}  # type: ignore[union-attr]
    assert max(Counter(names).values()) == 1
    return files


def build(tree: Path, kind: str) -> Path:
    """Call the build system as a front end does; `.ci/packages` has one do it."""
    out = tree.parent / f"{tree.name}-{kind}"
    out.mkdir()
    hook = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    run([sys.executable, "-c", hook, str(out)], cwd=tree)
    (built,) = out.iterdir()
    return built


def test_wheel_and_source_distribution_hold_every_file_once(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__")
    linked = ("kernels", "profiles", "tests/conformance")  # into the package
    for name in ("kvcli", *linked):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    (tree / "docs").mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "docs/kvcli.1"):
        shutil.copy(ROOT / name, tree / name)
    wheel, source = members(build(tree, "wheel")), build(tree, "sdist")

    expected = {path.relative_to(tree).as_posix() for path in (tree / "kvcli").rglob("*") if path.is_file()}
    for name in linked:
        files = [path for path in (tree / name).rglob("*") if path.suffix in (".py", ".toml")]
        expected |= {f"kvcli/{Path(name).name}/{path.relative_to(tree / name).as_posix()}" for path in files}
    assert {name for name in wheel if not re.match(r"[^/]+\.(dist-info|data)/", name)} == expected
    assert any(name.endswith(".data/data/share/man/man1/kvcli.1") for name in wheel)
    packed = members(source)
    assert {name for name in packed if name.startswith("kvcli/")} == expected
    assert not [name for name in packed if name.startswith(linked)]

    with tarfile.open(source) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.0 to 3.11.3 have none
        archive.extractall(tmp_path / "unpacked", **safely)
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = members(build(unpacked, "wheel"))
    assert again == wheel
