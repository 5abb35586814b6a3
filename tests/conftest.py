"""Set before torch is imported: on models this small a second thread costs more than it brings.

Where there is no GPU, Triton kernels are tested under their interpreter, which has to be said before they are imported.

Signals are tested in commands that inherit what this process does with them; a shell's background jobs ignore Ctrl-C,
and what `nohup` starts ignores the end of its terminal.

What is imported stays: garbage is not looked for in it, neither while it is imported nor after every few tests. Tests
of streams collect garbage after every layer, which takes half a second where a worker has run a thousand tests before.
"""

import gc
import os
import shutil
import signal
from functools import partial

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.set_threshold(10_000, 20, 100)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _without_what_is_left():
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # libraries report what is never collected as leaks


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Runs a command like `kvcli` does, without waiting for torch each time."""
    from command import warm_commands

    with warm_commands(tmp_path_factory.mktemp("warm")) as run:
        yield run


@pytest.fixture
def short_probe(monkeypatch):
    """Lets retrieval heads be looked for on a hundred random tokens that repeat, not on as many as the paper takes."""
    from kvcli.runtime.retrieval_heads import RepeatedTokens

    monkeypatch.setattr(RepeatedTokens, "of", partial(RepeatedTokens.of, period=100))
