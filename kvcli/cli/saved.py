"""Options about KV on a disk that several commands have, and the command `kvcli prefill`, which only saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli import options
from kvcli.cli.asked import ChatTemplateKwargs, Raw, System, hush_libraries
from kvcli.cli.entries import template_of
from kvcli.cli.options import METHOD, Panel, at_least, require_text
from kvcli.cli.output import write_result
from kvcli.cli.reads import check_files
from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from kvcli.inputs.kv_options import KVOptions

SAVED = Panel("Saved KV", env=True)


def size(text: object) -> int:
    """Read a size of the disk."""
    return parse_bytes(str(text))


SaveKV = Annotated[
    Path | None,
    SAVED.option("--save-kv", "DIR", "Keep the KV of what is read in a new directory, for --kv.", env=False),
]
KVCache = Annotated[
    Path | None,
    SAVED.option("--kv-cache", "DIR", "Use what this store has of a prompt's beginning, and keep the rest there."),
]
KVCacheSize = Annotated[
    int | None,
    SAVED.option(
        "--kv-cache-size",
        "SIZE",
        "Keep the store to a size as in 200GiB: what was not used for longest goes.",
        size,
        show_default="any size",
    ),
]


KVDisk = Annotated[
    Path | None,
    METHOD.option(
        "--kv-disk", "DIR", "KV that host memory is not to hold lies in files there, which end with the run.", env=False
    ),
]
HostMemory = Annotated[
    int | None,
    METHOD.option(
        "--host-memory",
        "SIZE",
        "Host memory for KV beside --kv-disk, as in 32GiB: all sequences together.",
        at_least(1, parse_bytes),
        env=False,
        show_default="half of what is free",
    ),
]


def kv_options(use: Path | None, save: Path | None, cache: Path | None, cache_size: int | None) -> KVOptions:
    """Put the options together.

    Raises:
        KvcliError: two of them contradict each other (usage).
    """
    from kvcli.inputs.kv_options import KVOptions

    if cache is None and cache_size is not None:
        raise usage_error("--kv-cache-size has no store", "name one with --kv-cache")
    return KVOptions(use, save, cache, cache_size)


def prefill(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Text documents; - is standard input.", show_default=False)
    ],
    save: SaveKV = None,
    cache: KVCache = None,
    cache_size: KVCacheSize = None,
    system: System = None,
    raw: Raw = False,
    chat_template_kwargs: ChatTemplateKwargs = None,
    model: options.Model = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    weights: options.Weights = "auto",
    load_format: options.LoadFormat = "auto",
    offline: options.Offline = False,
    tokenizer: options.Tokenizer = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the guard around every command
) -> None:
    """Read documents and keep their KV, to ask about them later.

    kvcli prefill report.txt --save-kv report.kv
    kvcli generate --kv report.kv -p "Who signed it?"

    Of several documents each gets a directory of its name in DIR. What is kept can be
    opened under every method that reads prompts exactly, with any budget.
    """
    from kvcli.inputs.prompts import Prompt, read_prompts

    check_files({"-o": output}, model=model, load_format=load_format, documents=files)
    require_text({"--system": [system], "--chat-template-kwargs": [chat_template_kwargs]})
    if save is None and cache is None:
        raise usage_error("nothing says where to keep the KV", "name a directory with --save-kv or --kv-cache")
    kv = kv_options(None, save, cache, cache_size)
    entries = read_prompts(files)
    hush_libraries(False)

    from kvcli.generate import generate
    from kvcli.inputs.profiles import resolve_profile
    from kvcli.inputs.sampling import Sampling
    from kvcli.models.loading import ModelSpec
    from kvcli.request import GenerationRequest
    from kvcli.ui.console import RunConsole, print_error

    prompts = [entry for entry in entries if isinstance(entry, Prompt)]
    failed = [entry.error for entry in entries if not isinstance(entry, Prompt)]
    for error in failed:
        print_error(error)
    if not prompts:
        raise typer.Exit(ExitCode.USAGE)
    request = GenerationRequest(  # streaming reads exactly, too, and holds next to nothing
        resolve_profile("streaming"),
        tuple(prompts),
        Sampling(max_tokens=1),
        template_of(system, raw, chat_template_kwargs, None, settled=True),
        kv=kv,
    )
    spec = ModelSpec(model, device, dtype, load_format, offline, weights, tokenizer)
    report = generate(spec, request, RunConsole(None, quiet, False))
    if as_json:
        body = {"saved": [vars(entry) for entry in report.saved], "sequences": [vars(s.kv) for s in report.sequences]}
        write_result(output, json.dumps(body) + "\n")
    else:
        write_result(output, "".join(f"{entry.path}\n" for entry in report.saved if entry.path))
    reasons = {sequence.finish_reason for sequence in report.sequences}
    if "interrupted" in reasons:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if (lost := next((entry.error for entry in report.saved if entry.error), None)) is not None:
        raise KvcliError(lost)
    for entry in report.saved if not quiet else ():
        typer.echo(f"{entry.source}: {entry.tokens:,} tokens, {format_bytes(entry.bytes)}", err=True)
    if failed or "error" in reasons:
        raise typer.Exit(ExitCode.PARTIAL)
