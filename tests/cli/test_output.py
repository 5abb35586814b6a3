import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcli.cli.output import OutputWriter, check_outputs, files_read, write_file
from kvcli.errors import ExitCode, KvcliError


def refused(outputs, reads=()):
    """The usage error of outputs that have to be refused."""
    with pytest.raises(KvcliError) as raised:
        check_outputs(outputs, reads)
    assert raised.value.exit_code == ExitCode.USAGE
    assert raised.value.hint
    return raised.value


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("before")
    path.chmod(0o640)
    write_file(path, "grün\n")
    assert path.read_bytes() == "grün\n".encode()
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.txt"]


def test_a_new_file_has_the_usual_mode(tmp_path):
    mask = os.umask(0o027)
    try:
        write_file(tmp_path / "out.txt", "x")
    finally:
        os.umask(mask)
    assert (tmp_path / "out.txt").stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.txt").write_text("before")
    (tmp_path / "link.txt").symlink_to("real.txt")
    write_file(tmp_path / "link.txt", "after")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "after"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "out.txt"
    path.write_text("before")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(KvcliError) as raised:
        write_file(path, "after")
    assert "No space left on device" in raised.value.what
    assert str(path) in raised.value.what
    assert raised.value.exit_code == ExitCode.RUNTIME
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.txt"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_file(path, "words\n")
    assert os.read(reader, 100) == b"words\n"
    os.close(reader)
    assert path.is_fifo()


def test_bad_output_paths_are_refused_before_the_work(tmp_path):
    for path, words in ((tmp_path, "is a directory"), (tmp_path / "no" / "out.txt", "no directory")):
        assert words in refused({"--html": path}).what
        assert str(path) in refused({"--html": path}).what
    assert "File name too long" in refused({"--html": tmp_path / ("x" * 300)}).what
    assert "needs a file" in refused({"--trace": Path("-")}).what
    check_outputs({"--html": tmp_path / "out.txt"})


def test_a_link_into_a_missing_directory_is_refused_before_the_work(tmp_path):
    (tmp_path / "link.txt").symlink_to(tmp_path / "none" / "real.txt")
    assert "no directory" in refused({"-o": tmp_path / "link.txt"}).what


@pytest.mark.parametrize("kind", ["same", "relative", "symbolic", "hard"])
def test_an_output_that_is_read_is_refused_by_any_name(tmp_path, monkeypatch, kind):
    document, other = tmp_path / "document.txt", tmp_path / "other.txt"
    document.write_text("precious")
    monkeypatch.chdir(tmp_path)
    if kind == "symbolic":
        other.symlink_to(document)
    elif kind == "hard":
        other.hardlink_to(document)
    names = {"same": document, "relative": Path("../") / tmp_path.name / "document.txt"}
    error = refused({"-o": tmp_path / "new.txt", "--trace": names.get(kind, other)}, ["none.txt", str(document)])
    assert error.what.startswith("--trace ")
    assert f"would overwrite {document}" in error.what


def test_standard_input_is_read_as_well(tmp_path):
    document = tmp_path / "document.txt"
    document.write_text("precious")
    code = "from pathlib import Path; from kvcli.cli.output import check_outputs\n"
    code += f"check_outputs({{'-o': Path({str(document)!r})}}, ['-'])"
    with document.open() as stdin:
        result = subprocess.run([sys.executable, "-c", code], stdin=stdin, capture_output=True, text=True, check=False)
    assert "would overwrite -, which this run reads" in result.stderr


def test_two_names_of_one_file_are_the_same_output(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").hardlink_to(tmp_path / "a.txt")
    assert "name the same file" in refused({"-o": tmp_path / "a.txt", "--trace": tmp_path / "b.txt"}).what
    assert "name the same file" in refused({"-o": tmp_path / "c.txt", "--trace": tmp_path / "." / "c.txt"}).what


def test_what_a_run_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "notes.md"):
        (tmp_path / "model" / name).write_text("{}")
    Path("mine.toml").write_text('method = "freekv"\n[settings]\nheads = "heads.safetensors"\n')
    found = files_read(
        documents=["a.txt", "-"], profiles=[None, "mine.toml"], settings=["skew=skew.safetensors"], model="model"
    )
    names = {str(name) for name in found}
    assert {"a.txt", "-", "mine.toml", "heads.safetensors", "skew.safetensors", "model/model.safetensors"} <= names
    assert "model/notes.md" not in names
    (tmp_path / "bad.toml").write_text("[" * 5000)
    assert "bad.toml" in files_read(profiles=["bad.toml"])
    assert any(str(name).endswith("demo/model.safetensors") for name in files_read())
    assert any(str(name).endswith("freekv.toml") for name in files_read(profiles=["freekv"]))


def test_a_writable_file_in_a_directory_that_is_not_is_written_in_place(tmp_path, monkeypatch):
    def deny(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", deny)
    (tmp_path / "out.txt").write_text("before")
    write_file(tmp_path / "out.txt", "after")
    assert (tmp_path / "out.txt").read_text() == "after"


def test_a_file_name_that_is_not_utf8_costs_no_text(tmp_path):
    write_file(tmp_path / "out.txt", "==> \udcff.txt <==\n")
    assert (tmp_path / "out.txt").read_text() == "==> ?.txt <==\n"


def test_every_output_that_can_be_written_is_written_and_every_other_named(tmp_path, capsys):
    writer = OutputWriter()
    writer.result(tmp_path / "none" / "a.txt", "text\n")
    writer.file(tmp_path / "none" / "b.html", "page")
    assert writer.file(tmp_path / "c.json", "{}")
    with pytest.raises(KvcliError) as raised:
        writer.finish()
    out, err = capsys.readouterr()
    assert out == "text\n"
    assert "a.txt: cannot be written" in err
    assert "b.html: cannot be written" in raised.value.what
    assert (tmp_path / "c.json").read_text() == "{}"
