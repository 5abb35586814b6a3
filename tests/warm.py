"""A process that has the heavy libraries loaded and forks a child for every command: tests wait for torch only once.

Started by `command.py` with one end of a socket as file descriptor argv[1]. A request is a message of JSON (arguments,
working directory, environment variables, a program to run in place of kvcli, a limit to the size of files) and four
file descriptors: stdin, stdout, stderr, and where to say how the child ended. The answer is the number of the child.
Nothing is computed here, so that no thread exists when a child is forked.
"""

import atexit
import gc
import json
import os
import resource
import runpy
import selectors
import socket
import sys
from functools import cache
from pathlib import Path

import numpy.ma  # noqa: F401 - numba asks for it when it sees an array
import transformers
import typer.main
from numba.core.registry import cpu_target
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import kvcli.batch.run
import kvcli.cli.app
import kvcli.generate
import kvcli.quality.eval.evaluate
import kvcli.ui.console
from kvcli.cli import main
from kvcli.inputs.profiles import resolve_profile
from kvcli.methods import get_method, own_method_names
from kvcli.methods.card import read_card, setting_names


def child(request, streams):
    """Become the command."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for descriptor, (stream, name) in enumerate(zip(streams, ("stdin", "stdout", "stderr"), strict=True)):
        os.dup2(stream, descriptor)
        errors = "backslashreplace" if name == "stderr" else "strict"
        file = open(descriptor, "w" if descriptor else "r", closefd=False, errors=errors)  # noqa: SIM115
        setattr(sys, name, file)
    sys.stderr.reconfigure(line_buffering=True)
    if (size := request["file_size"]) is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    if (program := request["program"]) is not None:
        sys.argv = [program, *request["arguments"]]
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
        sys.exit()
    sys.argv = ["kvcli", *request["arguments"]]
    main()


def serve(connection):
    """Fork as long as somebody asks for it."""
    waiting = selectors.DefaultSelector()
    waiting.register(connection, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is connection:
                message, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 4)
                if not message:
                    return
                *streams, ended = descriptors
                if (pid := os.fork()) == 0:
                    child(json.loads(message), streams)
                for stream in streams:
                    os.close(stream)
                connection.send(str(pid).encode())
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, ended))
            else:
                pid, ended = key.data
                os.write(ended, str(os.waitpid(pid, 0)[1]).encode())
                waiting.unregister(key.fileobj)
                os.close(ended)
                os.close(key.fileobj)


if __name__ == "__main__":
    typer.main.get_params_from_function = cache(typer.main.get_params_from_function)  # half of a short command's time
    typer.main.get_command(kvcli.cli.app.app)
    for name in own_method_names():
        read_card(name), setting_names(name), get_method(name)
    resolve_profile()
    _ = transformers.LlamaForCausalLM, transformers.PreTrainedTokenizerFast  # loaded when first named
    get_checkpoint_conversion_mapping("llama")  # a thousand patterns, compiled once a process
    for context in (cpu_target.typing_context, cpu_target.target_context):
        context.refresh()  # otherwise done for the first loop of every child
    gc.freeze()  # a child neither looks through it nor copies it
    atexit.register(gc.unfreeze)  # libraries report what is never collected as leaks
    with socket.socket(fileno=int(sys.argv[1])) as server:
        serve(server)
    os._exit(0)  # unloads no library; children do not come here, they end as a command does
