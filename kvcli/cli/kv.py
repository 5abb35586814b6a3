"""`kvcli kv`: look after a store of saved KV, and after single directories of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli.command import command
from kvcli.cli.output import write_stdout
from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.options import KVOptions, Output, Some, argument, group
from kvcli.sizes import format_age, format_bytes

if TYPE_CHECKING:
    from kvcli.runtime.saved.library import KVStore, Stored
    from kvcli.ui.summary import Table

kv = typer.Typer(help="Manage saved KV: list, show, check, rm, prune.", no_args_is_help=True)

Store = Annotated[KVOptions, Some("kv_cache", kv_cache={"help": "Directory of the store."})]
Debug = Annotated[Output, Some("debug")]
_SHOWN = 12  # digits of a name


@group
class Entries:
    """Entries of a store."""

    names: tuple[str, ...] = argument((), "NAME", "Names from kvcli kv list, or directories.")


@kv.command("list")
@command
def list_entries(store: Store, output: Annotated[Output, Some("json debug")]) -> None:
    """List the entries of a store, least recently used first."""
    found = _store(store)
    rows = [_row(entry) for entry in found.entries()]
    if output.as_json:
        write_stdout(json.dumps(rows) + "\n")
        return
    from kvcli.ui.console import render_tables

    held = format_bytes(sum(row["bytes"] for row in rows))
    heading = f"{found.folder}: {len(rows):,} {'entry' if len(rows) == 1 else 'entries'}, {held}"
    write_stdout(render_tables([(heading, table_of_entries(rows, time.time()))]))


def table_of_entries(rows: Sequence[dict[str, Any]], now: float) -> Table:
    """Tabulate entries, with the time since each was used last; `now` is in seconds since 1970."""
    from kvcli.ui.summary import Table

    cells = [
        (
            row["name"][:_SHOWN],
            f"{row['tokens']:,}",
            f"{row['prompt_tokens']:,}",
            format_bytes(row["bytes"]),
            format_age(now - row["used"]),
            row["source"],
        )
        for row in rows
    ]
    return Table(("name", "tokens", "of prompt", "size", "used", "document"), cells, texts=("document",))


@kv.command()
@command
def show(entries: Entries, store: Store, debug: Debug) -> None:  # noqa: ARG001
    """Show the model, document and sizes of entries, as JSON."""
    from kvcli.runtime.saved.manifest import read_manifest

    for folder in _folders(store, entries):
        manifest = read_manifest(folder)
        body = manifest.model_dump(exclude={"tokens", "pages", "layers", "checksum"})
        body["asked"]["text"] = f"{len(manifest.asked.text):,} characters"
        body |= {"tokens": len(manifest.tokens), "layers": len(manifest.layers), "directory": str(folder)}
        write_stdout(json.dumps(body, ensure_ascii=False, indent=2) + "\n")


@kv.command()
@command
def check(entries: Entries, store: Store, debug: Debug) -> None:  # noqa: ARG001
    """Verify the checksums of entries; without names, of the whole store.

    Exit codes: 0 all entries are intact, 1 some are damaged.
    """
    from kvcli.runtime.saved.reader import verify
    from kvcli.ui.console import print_error

    folders = _folders(store, entries) if entries.names else [entry.folder for entry in _store(store).entries()]
    broken = 0
    for folder in folders:
        try:
            verify(folder)
            write_stdout(f"{folder}: whole\n")
        except KvcliError as error:
            broken += 1
            print_error(error)
    if broken:
        raise typer.Exit(1)


@kv.command()
@command
def rm(entries: Entries, store: Store, debug: Debug) -> None:  # noqa: ARG001
    """Remove entries, except those that another process is reading."""
    from kvcli.runtime.saved.files import remove
    from kvcli.runtime.saved.manifest import MANIFEST

    for folder in _folders(store, entries):
        if not (folder / MANIFEST).exists():
            raise usage_error(f"{folder}: holds no saved KV", "name a directory written by --save-kv")
        if not remove(folder):
            raise KvcliError(f"{folder}: in use by another process", "try again when that process has ended")
        write_stdout(f"{folder}: removed\n")


@kv.command()
@command
def prune(
    store: Annotated[
        KVOptions,
        Some("kv_cache kv_cache_size", kv_cache={"help": "Directory of the store."}, kv_cache_size={"beside": None}),
    ],
    debug: Debug,  # noqa: ARG001
) -> None:
    """Remove the least recently used entries until the store fits --kv-cache-size."""
    if store.cache_bytes is None:
        raise usage_error("no size given", "give one, for example --kv-cache-size 100GiB")
    removed = _store(store).prune(store.cache_bytes)
    size = format_bytes(sum(entry.size for entry in removed))
    write_stdout(f"{len(removed)} removed, {size} freed\n")


def _store(options: KVOptions) -> KVStore:
    from kvcli.runtime.saved.library import KVStore

    cache = options.cache
    if cache is None:
        raise usage_error("no store given", "name it with --kv-cache, or set KVCLI_KV_CACHE")
    if not cache.is_dir():
        raise usage_error(f"--kv-cache {cache}: no such directory", "name the store's directory")
    return KVStore(cache)


def _folders(options: KVOptions, entries: Entries) -> list[Path]:
    """Return the directories of the named entries."""
    if not entries.names:
        raise usage_error("no entry given", "name one from kvcli kv list")
    return [Path(name) if Path(name).is_dir() else _store(options).find_named(name).folder for name in entries.names]


def _row(entry: Stored) -> dict[str, Any]:
    from kvcli.runtime.saved.manifest import PAGE, read_manifest

    row = {"name": entry.last, "tokens": 0, "prompt_tokens": 0, "bytes": entry.size, "used": entry.used}
    try:
        manifest = read_manifest(entry.folder)
    except KvcliError:
        return row | {"source": "damaged", "question": ""}
    row |= {"tokens": len(manifest.tokens), "prompt_tokens": PAGE * manifest.first_page + len(manifest.tokens)}
    return row | {"source": manifest.asked.source, "question": manifest.asked.question}
