"""A process that has the heavy libraries loaded and forks a child for every command: tests wait for torch only once.

Started by `command.py` with one end of a socket as file descriptor argv[1]. A request is a line of JSON: the
arguments, the working directory, environment variables, and files to serve as stdin, stdout and stderr. The answer
is the exit code. Nothing is computed here, so that no thread exists when a child is forked.
"""

import gc
import json
import os
import socket
import sys

import transformers

import kvcli.generate
import kvcli.ui.console  # noqa: F401
from kvcli.cli import main
from kvcli.inputs.profiles import resolve_profile


def child(request):
    """Become the command."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for descriptor, (path, flags) in enumerate(request["streams"]):
        os.dup2(os.open(path, flags), descriptor)
    sys.argv = ["kvcli", *request["arguments"]]
    main()


if __name__ == "__main__":
    resolve_profile()
    _ = transformers.LlamaForCausalLM, transformers.PreTrainedTokenizerFast  # loaded when first named
    gc.freeze()  # a child neither looks through it nor copies it
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rw") as lines:
        for line in lines:
            if (pid := os.fork()) == 0:
                child(json.loads(line))
            lines.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
            lines.flush()
