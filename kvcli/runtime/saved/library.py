"""Where a run takes its prompts' KV from, and keeps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from kvcli.errors import usage_error
from kvcli.inputs.encoding import EncodedPrompt, Template
from kvcli.inputs.kv_options import KVOptions
from kvcli.models.fingerprint import fingerprint, tokenizer_fingerprint
from kvcli.models.loading import Checkpoint
from kvcli.runtime.saved.folders import remove
from kvcli.runtime.saved.manifest import PAGE, Identity, Manifest, PromptRead, page_hashes, read_manifest
from kvcli.runtime.saved.reader import KVDamagedError, SavedKV, Segment
from kvcli.runtime.saved.store import KVStore
from kvcli.runtime.saved.writer import KVWriter, Saving, check_target
from kvcli.store.cache import Tiers


class KVLibrary:
    """Finds and keeps the KV of prompts of one model, read in one way (`MethodConfig.prefill`).

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
        self.targets = {} if options.save is None else _targets(options.save.absolute(), sources)
        for target in self.targets.values():
            check_target(target)
        if options.use is not None:
            self.used = read_manifest(options.use)
            self._refuse_other(options.use, self.used, self.identity(self.used.model.rope))

    def identity(self, rope: str) -> Identity:
        """Fingerprints of the model, whose rotary positions have the fingerprint `rope`."""
        weights, tokenizer, name = self._fingerprints
        dtype = str(self.checkpoint.dtype).removeprefix("torch.")
        return Identity(model=name, weights=weights, tokenizer=tokenizer, rope=rope, dtype=dtype)

    def find(self, ids: Sequence[int], rope: str, tiers: Tiers) -> SavedKV | None:
        """Open what was saved of the beginning of a prompt.

        Raises:
            KvcliError: what the run was told to use is another model's, has nothing in common with the prompt (usage),
                or is damaged (runtime).
        """
        identity = self.identity(rope)
        root = identity.root_of(self.reading)
        if self.used is not None and self.options.use is not None:
            self._refuse_other(self.options.use, self.used, identity)
            pages = self.used.same_pages(page_hashes(root, ids))
            if not pages:
                what = f"{self.options.use}: the prompt does not begin as what was saved of {self.used.asked.source}"
                hint = "give the same document, --system and template options, or leave --kv out"
                raise usage_error(what, hint)
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

    def forget(self, error: KVDamagedError) -> bool:
        """Remove something damaged from the cache, so that the prompt is read; False where it is not to be removed.

        Raises:
            KvcliError: the run was told to use it.
        """
        if self.store is None or error.folder.parent != self.store.folder:
            raise error
        self.notice(f"{error.what}: it is removed, and the document read")
        return remove(error.folder)

    def writers(self, prompt: EncodedPrompt, ids: Sequence[int], rope: str, found: SavedKV | None) -> list[KVWriter]:
        """Begin to save a prompt's KV where it is to be kept; `ids` are the tokens, `found` what was there of them."""
        identity, writers = self.identity(rope), []
        root, asked = identity.root_of(self.reading), self._asked(prompt)
        how = self.checkpoint.geometry.states, self.reading
        saving = Saving(ids, identity, asked, 0, root, *how)
        if (folder := self.targets.get(prompt.source)) is not None and saving.pages:
            writers.append(KVWriter(saving, folder.parent, lambda _: folder))
        elif folder is not None:
            self.notice(f"{prompt.source}: nothing is saved of a prompt of less than {PAGE} tokens")
        if (store := self.store) is not None:
            there = 0 if found is None else found.length // PAGE
            parent = root if not there else page_hashes(root, ids)[there - 1]
            saving = Saving(ids, identity, asked, there, parent, *how)
            if saving.pages > 0:
                if store.room_for(saving.pages * self._page_bytes + saving.nbytes):
                    writers.append(KVWriter(saving, store.folder, store.target, cached=True))
                else:
                    self.notice(f"{prompt.source}: its KV is larger than --kv-cache-size, and not kept")
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
        checkpoint = self.checkpoint
        return fingerprint(checkpoint), tokenizer_fingerprint(checkpoint.tokenizer), checkpoint.name

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
            raise usage_error(f"{folder}: saved in {theirs.dtype}, not in {mine.dtype}", f"--dtype {theirs.dtype}")
        if theirs.tokenizer != mine.tokenizer:
            raise usage_error(f"{folder}: the tokenizer of {mine.model} has changed since it was saved", hint)
        if theirs.rope != mine.rope:
            what = f"{folder}: saved with other rotary positions than a prompt and output of this length have"
            raise usage_error(what, "save it with an output as long, or read the document")
        if manifest.reading != self.reading:
            what = f"{folder}: saved of a document that was read with prefill {manifest.reading}, not {self.reading}"
            raise usage_error(what, f"--set prefill={manifest.reading}, or read the document")
        if manifest.first_page:
            raise usage_error(f"{folder}: not a whole document", hint)


def _targets(save: Path, sources: Sequence[str]) -> dict[str, Path]:
    """Where each document is saved: one in the directory itself, each of several in one of its name there."""
    sources = list(dict.fromkeys(sources))
    if len(sources) == 1:
        return {sources[0]: save}
    targets = {source: save / Path(source).name for source in sources}
    if len(set(targets.values())) < len(sources):
        raise usage_error("--save-kv: two documents have the same name", "save them one by one")
    return targets
