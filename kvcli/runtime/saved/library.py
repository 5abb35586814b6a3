"""The directories that a run loads its prompts' KV from and saves it to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.encoding import EncodedPrompt, encode
from kvcli.inputs.options import KVOptions, Template
from kvcli.inputs.prompts import Prompt
from kvcli.kv.cache import Tiers
from kvcli.models.loading import Checkpoint, fingerprint, tokenizer_fingerprint
from kvcli.runtime.saved.files import TEMPORARY, remove
from kvcli.runtime.saved.manifest import MANIFEST, PAGE, Identity, Manifest, PromptRead, page_hashes, read_manifest
from kvcli.runtime.saved.reader import KVDamagedError, SavedKV, Segment
from kvcli.runtime.saved.writer import KVWriter, Saving, check_target

# A store of saved KV, looked up by the beginning of a prompt and limited in size by least recent use.


@dataclass(frozen=True)
class Stored:
    """A directory in the store: the hashes in its name, its bytes on disk, and the time of its last use."""

    folder: Path
    parent: str
    first: str
    last: str
    size: int
    used: float


class KVStore:
    """The directories in `folder`, which is created if missing; `limit` is the most bytes, None for any.

    Raises:
        KvcliError: `folder` cannot be used (usage).
    """

    def __init__(self, folder: Path, limit: int | None = None):
        self.folder, self.limit = folder, limit
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "permission denied")
        except OSError as error:
            hint = "name a directory that you can write to"
            raise usage_error(f"--kv-cache {folder}: cannot be used: {error.strerror}", hint) from None

    def entries(self) -> list[Stored]:
        """List all complete entries, least recently used first; among equals, those that continue others first."""
        found = [entry for path in self.folder.iterdir() if (entry := _stored(path)) is not None]
        depth = {entry.last: len(list(self._ancestors(entry, found))) for entry in found}
        return sorted(found, key=lambda entry: (entry.used, -depth[entry.last]))

    def find(self, root: str, ids: Sequence[int]) -> list[Segment]:
        """Find the longest chain of directories that holds a prompt's first pages, and mark it as used."""
        hashes, way, before = page_hashes(root, ids), list[Segment](), root
        names: dict[tuple[str, str], list[Path]] = {}
        for path in self.folder.iterdir():
            if len(parts := path.name.split("-")) == 3 and not path.name.startswith("."):
                names.setdefault((parts[0], parts[1]), []).append(path)
        while hashes:
            found = [segment for path in names.get((before, hashes[0]), ()) if (segment := _common(path, hashes))]
            if not found:
                break
            way.append(max(found, key=lambda segment: segment.pages))
            before, hashes = hashes[way[-1].pages - 1], hashes[way[-1].pages :]
        for segment in way:
            with suppress(OSError):
                os.utime(segment.folder / MANIFEST)
        return way

    def target(self, manifest: Manifest) -> Path:
        """Return the directory for a run of pages."""
        return self.folder / manifest.name

    def room_for(self, size: int) -> bool:
        """Make room for `size` more bytes by removing the least recently used; False if the limit is smaller."""
        if self.limit is None:
            return True
        if size > self.limit:
            return False
        self.prune(self.limit - size)
        return True

    def prune(self, limit: int) -> list[Stored]:
        """Remove the least recently used entries until `limit` bytes are left; return what was removed.

        Entries that another process is reading stay.
        """
        entries, removed = self.entries(), []
        held = sum(entry.size for entry in entries)
        for entry in entries:
            if held <= limit:
                break
            if remove(entry.folder):
                held -= entry.size
                removed.append(entry)
        return removed

    def find_named(self, name: str) -> Stored:
        """Find a directory by the beginning of the hash of its last page, as `kvcli kv list` shows it.

        Raises:
            KvcliError: no name or several names begin so (usage).
        """
        found = [entry for entry in self.entries() if name and entry.last.startswith(name)]
        if len(found) != 1:
            what = f"{len(found)} entries begin with {name!r}" if found else f"no entry is called {name!r}"
            raise usage_error(f"{self.folder}: {what}", "name one from kvcli kv list")
        return found[0]

    def _ancestors(self, entry: Stored, entries: Sequence[Stored]) -> Iterator[Stored]:
        """Yield the entries that an entry continues, nearest first."""
        by_last = {other.last: other for other in entries}
        while (parent := by_last.get(entry.parent)) is not None:
            yield parent
            entry = parent


def _stored(path: Path) -> Stored | None:
    parts = path.name.split("-")
    if path.name.startswith(TEMPORARY) or len(parts) != 3:
        return None
    parent, first, last = parts
    with suppress(OSError):
        used = (path / MANIFEST).stat().st_mtime
        return Stored(path, parent, first, last, sum(file.stat().st_size for file in path.iterdir()), used)
    return None


def _common(path: Path, hashes: Sequence[str]) -> Segment | None:
    """Return the pages of a directory that have these hashes; None if it has none, is damaged or gone."""
    with suppress(KvcliError):
        manifest = read_manifest(path)
        count = manifest.same_pages(hashes)
        return Segment(path, manifest, count) if count else None
    return None


_DATED = (
    "the chat template writes today's date before the document; where it has a variable for the date, "
    "--chat-template-kwargs keeps that the same"
)


class KVLibrary:
    """Finds and saves the KV of prompts of one model, read in one way (`MethodConfig.prefill`).

    Raises:
        KvcliError: a directory cannot be used, or holds KV of another model (usage); it is damaged (runtime).
    """

    def __init__(
        self,
        options: KVOptions,
        checkpoint: Checkpoint,
        template: Template,
        sources: Sequence[str],
        notice: Callable[[str], None],
        reading: str = "exact",
    ):
        self.options, self.checkpoint, self.template, self.notice = options, checkpoint, template, notice
        self.reading = reading
        self.store = None if options.cache is None else KVStore(options.cache, options.cache_bytes)
        self.used: Manifest | None = None
        self._dated = False  # whether the user was told of a date
        self.targets = {} if options.save is None else _targets(options.save.absolute(), sources)
        for target in self.targets.values():
            check_target(target)
        if options.use is not None:
            self.used = read_manifest(options.use)
            self._refuse_other(options.use, self.used, self.identity(self.used.model.rope))

    def identity(self, rope: str) -> Identity:
        """Return the fingerprints of the model, with `rope` as that of its rotary positions."""
        weights, tokenizer, name = self._fingerprints
        dtype = str(self.checkpoint.dtype).removeprefix("torch.")
        return Identity(model=name, weights=weights, tokenizer=tokenizer, rope=rope, dtype=dtype)

    def find(self, ids: Sequence[int], rope: str, tiers: Tiers) -> SavedKV | None:
        """Open the KV saved for the beginning of a prompt.

        Raises:
            KvcliError: the KV that the run was told to use is another model's or has nothing in common with the prompt
                (usage), or is damaged (runtime).
        """
        identity = self.identity(rope)
        root = identity.root_of(self.reading)
        if self.used is not None and self.options.use is not None:
            self._refuse_other(self.options.use, self.used, identity)
            pages = self.used.same_pages(page_hashes(root, ids))
            dated = pages < len(self.used.pages) and self._within_dated_head(PAGE * pages)
            if not pages:
                what = f"{self.options.use}: the prompt does not begin like the saved {self.used.asked.source}"
                hint = "give the same document, --system and template options, or leave --kv out"
                raise usage_error(what, f"{_DATED}; {hint}" if dated else hint)
            if dated and not self._dated:
                self._dated = True
                of = f"{PAGE * pages:,} of {len(self.used.tokens):,} saved tokens"
                self.notice(f"{self.options.use}: only {of} are the prompt's, the rest is read: {_DATED}")
            return SavedKV([Segment(self.options.use, self.used, pages)], tiers, self._stateful)
        if self.store is None:
            return None
        while way := self.store.find(root, ids):
            try:
                return SavedKV(way, tiers, self._stateful)
            except KVDamagedError as error:
                if not self.forget(error):
                    return None
        return None

    def _within_dated_head(self, tokens: int) -> bool:
        """Tell whether so many tokens end in what a chat template that knows today's date puts around a document."""
        tokenizer, template = self.checkpoint.tokenizer, self.template
        if template.raw or "strftime_now" not in str(tokenizer.chat_template):
            return False
        return tokens <= len(encode(Prompt("head", "x"), template, tokenizer))

    def forget(self, error: KVDamagedError) -> bool:
        """Remove damaged KV from the cache, so that the prompt is read instead; False if another process holds it.

        Raises:
            KvcliError: the run was told to use it.
        """
        if self.store is None or error.folder.parent != self.store.folder:
            raise error
        self.notice(f"{error.what}: removing it and prefilling the document")
        return remove(error.folder)

    def writers(self, prompt: EncodedPrompt, ids: Sequence[int], rope: str, found: SavedKV | None) -> list[KVWriter]:
        """Begin to save a prompt's KV; `ids` are its tokens, `found` is the KV that exists already."""
        identity, writers = self.identity(rope), []
        root, asked = identity.root_of(self.reading), self._asked(prompt)
        how = self.checkpoint.geometry.states, self.reading
        saving = Saving(ids, identity, asked, 0, root, *how)
        if (folder := self.targets.get(prompt.source)) is not None and saving.pages:
            writers.append(KVWriter(saving, folder.parent, lambda _: folder))
        elif folder is not None:
            self.notice(f"{prompt.source}: not saved: the prompt has less than {PAGE} tokens")
        if (store := self.store) is not None:
            there = 0 if found is None else found.length // PAGE
            parent = root if not there else page_hashes(root, ids)[there - 1]
            saving = Saving(ids, identity, asked, there, parent, *how)
            if saving.pages > 0:
                if store.room_for(saving.pages * self._page_bytes + saving.nbytes):
                    writers.append(KVWriter(saving, store.folder, store.target, cached=True))
                else:
                    self.notice(f"{prompt.source}: not saved: its KV is larger than --kv-cache-size")
        return writers

    @property
    def _stateful(self) -> bool:
        return bool(self.checkpoint.geometry.states)

    @property
    def _page_bytes(self) -> int:
        layers, itemsize = self.checkpoint.geometry.layers, self.checkpoint.dtype.itemsize
        return sum(PAGE * layer.token_size * itemsize for layer in layers)

    @cached_property
    def _fingerprints(self) -> tuple[str, str, str]:
        checkpoint, name = self.checkpoint, self.checkpoint.spec.name
        local = name is not None and Path(name).expanduser().exists()
        place = str(Path(str(name)).expanduser().resolve()) if local else checkpoint.name
        return fingerprint(checkpoint), tokenizer_fingerprint(checkpoint.tokenizer), place

    def _asked(self, prompt: EncodedPrompt) -> PromptRead:
        text = prompt.prompt
        return PromptRead(
            source=prompt.source,
            text="" if text is None else text.text,
            question="" if text is None else text.question,
            question_first="no" if text is None else text.question_first,
            system=self.template.system,
            raw=self.template.raw,
            chat_template_kwargs=self.template.kwargs,
        )

    def _refuse_other(self, folder: Path, manifest: Manifest, mine: Identity) -> None:
        """Refuse KV of another model, tokenizer, dtype or other positions."""
        theirs, hint = manifest.model, "save the document again with this model"
        if theirs.weights != mine.weights or not manifest.fits(self.checkpoint.geometry):
            raise usage_error(f"{folder}: saved with {theirs.model} ({theirs.weights}), not with {mine.model}", hint)
        if theirs.dtype != mine.dtype:
            raise usage_error(f"{folder}: saved in {theirs.dtype}, not in {mine.dtype}", f"give --dtype {theirs.dtype}")
        if theirs.tokenizer != mine.tokenizer:
            raise usage_error(f"{folder}: the tokenizer of {mine.model} has changed since it was saved", hint)
        if theirs.rope != mine.rope:
            what = f"{folder}: saved with other rotary positions than a prompt and output of this length need"
            raise usage_error(what, "save it with an output of this length, or leave --kv out")
        if manifest.reading != self.reading:
            what = f"{folder}: saved with prefill {manifest.reading}, not {self.reading}"
            raise usage_error(what, f"give --set prefill={manifest.reading}, or leave --kv out")
        if manifest.first_page:
            raise usage_error(f"{folder}: not a whole document", hint)


def _targets(save: Path, sources: Sequence[str]) -> dict[str, Path]:
    """Map each document to its directory: a single one to `save` itself, several to `save`/NAME."""
    sources = list(dict.fromkeys(sources))
    if len(sources) == 1:
        return {sources[0]: save}
    targets = {source: save / Path(source).name for source in sources}
    if len(set(targets.values())) < len(sources):
        raise usage_error("--save-kv: two documents have the same name", "save them one by one")
    return targets
