"""The command line, one module per command."""

import atexit
import gc
import os
import sys
import time

from kvcli.cli.process import end_at_once
from kvcli.ui import starting


def main() -> None:
    """Run the command line of this process and exit with its code."""
    started = time.perf_counter()
    starting.say(sys.argv[1:])
    # Importing torch and transformers creates half a million objects that stay. At Python's own thresholds the garbage
    # collector looks through all of them again and again, which takes a sixth of the start.
    gc.set_threshold(10_000, 20, 100)
    ended: list[int] = []
    # Functions registered first run last: everything that the libraries register has run by then.
    atexit.register(_leave, ended)
    with end_at_once():
        from kvcli.cli.app import app
        from kvcli.cli.guard import run

    ended.append(run(app, sys.argv[1:], started))
    starting.erase()
    sys.exit(ended[0])


def _leave(ended: list[int]) -> None:
    """End without tearing down the interpreter, which takes a second or more once torch is loaded."""
    if ended and "torch" in sys.modules:
        sys.stderr.flush()
        os._exit(ended[0])
