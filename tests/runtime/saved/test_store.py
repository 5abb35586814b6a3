import os

import pytest
from saving import IDENTITY, names_in, save

from kvcli.errors import ExitCode, KvcliError
from kvcli.kv.cache import Tiers
from kvcli.runtime.saved.library import KVStore
from kvcli.runtime.saved.manifest import MANIFEST, PAGE, read_manifest
from kvcli.runtime.saved.reader import SavedKV, Segment

DOCUMENT = list(range(4 * PAGE))
FIRST, SECOND = [*DOCUMENT, *range(1000, 1040)], [*DOCUMENT, *range(2000, 2100)]


def keep(store, ids, used=None):
    """Save what is not there of a prompt; the time it was used, by which it is forgotten."""
    way = store.find(IDENTITY.root, ids)
    there = sum(segment.pages for segment in way)
    parent = way[-1].manifest.pages[way[-1].pages - 1] if way else IDENTITY.root
    path = save(ids, store.folder, store.target, there, parent).path
    if used is not None:
        os.utime(path / MANIFEST, (used, used))
    return path


@pytest.fixture
def store(tmp_path):
    return KVStore(tmp_path / "store")


def test_what_a_prompt_begins_with_is_found_and_what_it_adds_kept(store):
    assert store.find(IDENTITY.root, FIRST) == []
    first = keep(store, FIRST)
    assert [(s.folder, s.pages) for s in store.find(IDENTITY.root, FIRST)] == [(first, 5)]
    second = keep(store, SECOND)
    assert read_manifest(second).tokens == SECOND[4 * PAGE : 7 * PAGE]
    assert [(s.folder, s.pages) for s in store.find(IDENTITY.root, SECOND)] == [(first, 4), (second, 3)]
    third = keep(store, [*SECOND[: 6 * PAGE], *range(50)])
    assert [(s.folder, s.pages) for s in store.find(IDENTITY.root, [*SECOND[: 6 * PAGE], *range(50)])] == [
        (first, 4),
        (second, 2),
        (third, 1),
    ]
    assert store.find(IDENTITY.root, [7, *FIRST]) == []
    assert store.find(IDENTITY.model_copy(update={"weights": "other"}).root, FIRST) == []


def test_what_was_not_used_for_longest_goes_first_and_what_continues_it_before_it(store):
    document = keep(store, FIRST, 100)
    question = keep(store, SECOND, 100)
    other = keep(store, [5, *FIRST], 50)
    assert [entry.folder for entry in store.entries()] == [other, question, document]
    sizes = {entry.folder: entry.size for entry in store.entries()}
    assert [entry.folder for entry in store.prune(sizes[document] + sizes[question])] == [other]
    assert [entry.folder for entry in store.prune(sizes[document])] == [question]
    keep(store, [5, *FIRST], 200)
    store.find(IDENTITY.root, FIRST)  # now the newest
    assert [entry.folder for entry in store.prune(0)][-1] == document
    assert names_in(store.folder) == []


def test_a_limit_is_kept_and_what_is_larger_is_not_taken(store, tmp_path):
    first = keep(store, FIRST, 100)
    size = store.entries()[0].size
    bounded = KVStore(store.folder, int(1.5 * size))
    assert bounded.room_for(size // 4)
    assert first.exists()
    with SavedKV([Segment(first, read_manifest(first), 1)], Tiers.for_device(*_cpu())):
        assert bounded.room_for(size)  # what is read stays
        assert first.exists()
    assert bounded.room_for(size)
    assert not first.exists()
    assert not bounded.room_for(2 * size)


def test_what_is_damaged_is_not_found(store):
    path = keep(store, FIRST)
    (path / MANIFEST).write_text("{}")
    assert store.find(IDENTITY.root, FIRST) == []
    (path / MANIFEST).unlink()
    assert store.find(IDENTITY.root, FIRST) == store.entries() == []


def test_entries_are_named_by_the_beginning_of_their_hash(store):
    path = keep(store, FIRST)
    entry = store.entries()[0]
    assert store.find_named(entry.last[:8]).folder == path
    for name in ("", "zz"):
        with pytest.raises(KvcliError, match="no entry") as caught:
            store.find_named(name)
        assert caught.value.exit_code == ExitCode.USAGE


def test_a_store_that_cannot_be_one(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(KvcliError, match="--kv-cache") as caught:
            KVStore(path)
        assert caught.value.exit_code == ExitCode.USAGE


def _cpu():
    import torch

    return torch.device("cpu"), torch.float32
