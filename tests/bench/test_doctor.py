import pytest
import torch

from kvcli.bench import doctor
from kvcli.bench.doctor import Check, CheckState, examine, usable
from kvcli.capacity import cgroup, roofline
from kvcli.cli.app import app
from kvcli.cli.guard import run
from kvcli.errors import KvcliError
from kvcli.telemetry.observer import Observer


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(roofline, "_BUFFER_BYTES", {"cpu": 1 << 20, "cuda": 1 << 20})
    monkeypatch.setattr(roofline, "_MATMUL_SIZE", {"cpu": 64, "cuda": 64})


def found(name):
    return next(check for check in examine() if check.name == name)


def test_here_everything_that_is_needed_is_there():
    checks = list(examine())
    assert usable(checks)
    assert [check.name for check in checks] == list(doctor._CHECKS)
    for check in checks:
        assert check.found
        assert bool(check.fix) == (check.state is not CheckState.OK), check


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(monkeypatch):
    def fails():
        raise RuntimeError("no such driver\nand more")

    def knows():
        raise KvcliError("the model is gone", "install it again")

    monkeypatch.setattr(
        doctor, "_CHECKS", {"triton": fails, "demo model": knows, "rest": lambda: (CheckState.OK, "fine")}
    )
    broken, gone, rest = examine()
    assert broken == Check("triton", CheckState.BROKEN, "RuntimeError: no such driver", doctor._FIXES["triton"])
    assert gone == Check("demo model", CheckState.BROKEN, "the model is gone", "install it again")
    assert rest.state is CheckState.OK
    assert not usable([rest, gone])


@pytest.mark.parametrize(("state", "code"), [(CheckState.OK, 0), (CheckState.NOTE, 0), (CheckState.BROKEN, 1)])
def test_the_exit_code_says_whether_it_can_be_used(monkeypatch, capsys, state, code):
    monkeypatch.setattr(doctor, "_CHECKS", {"disk": lambda: (state, "what there is", "what to do")})
    assert run(app, ["doctor"]) == code
    out = capsys.readouterr().out
    for word in (state.value, "disk", "what there is", "what to do"):
        assert word in out


def test_a_requirement_that_is_missing_or_too_old_is_named(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["torch>=99", "nonesuch>=1", 'absent; extra == "dev"'])
    check = found("requirements")
    assert check.state is CheckState.BROKEN
    assert "nonesuch is missing" in check.found
    assert f"torch {doctor.metadata.version('torch')} is not >=99" in check.found
    assert "absent" not in check.found


def test_more_threads_than_cores_are_a_note(monkeypatch):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    check = found("threads")
    assert check.state is CheckState.NOTE
    assert check.fix == "set OMP_NUM_THREADS=1"


@pytest.mark.parametrize(("count", "state"), [(1, CheckState.OK), (2, CheckState.NOTE)])
def test_of_several_gpus_it_says_that_one_is_used(monkeypatch, count, state):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    check = found("device")
    assert check.state is state
    assert ("a run uses cuda:0, or all if its weights do not fit" in check.found) == (count == 2)


@pytest.mark.parametrize("sees", [True, False])
def test_a_device_that_does_not_see_host_memory_at_its_address_is_broken(monkeypatch, sees):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(doctor, "reads_host_addresses", lambda asked: sees and asked == device)
    check = found("pinned memory")
    assert check.state is (CheckState.OK if sees else CheckState.BROKEN)
    assert sees or ("at the host's address" in check.found and check.fix)


def test_a_full_disk_is_a_note(monkeypatch):
    usage = doctor.shutil.disk_usage("/")._replace(free=1 << 30)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    check = found("disk")
    assert check.state is CheckState.NOTE
    assert "1.00 GiB free" in check.found


def test_the_traceback_of_a_check_is_for_debug(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_CHECKS", {"triton": lambda: 1 / 0})
    (check,) = examine()
    assert (check.state, capsys.readouterr().err) == (CheckState.BROKEN, "")
    list(examine(debug=True))
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_limits_of_a_container_are_read(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert "may use 1.00 GiB" in found("memory").found
    assert found("threads").fix == "set OMP_NUM_THREADS=1"  # half a core
    for file in tmp_path.iterdir():
        file.write_text("max\n")
    assert "may take" not in found("memory").found


def test_warming_says_what_it_compiled_and_where_it_is_kept(monkeypatch):
    monkeypatch.setattr(doctor, "own_method_names", lambda: ["full", "razor"])  # the second looks for heads first
    monkeypatch.setattr(doctor, "_WARM_TOKENS", 64)
    monkeypatch.setattr(doctor, "PACKINGS", dict(list(doctor.PACKINGS.items())[:1]))
    check = doctor.warm(Observer())
    assert (check.name, check.state) == ("loops", CheckState.OK)
    assert "kernels" in check.found
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    assert doctor.warm(Observer()).state is CheckState.NOTE
