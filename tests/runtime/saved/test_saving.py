"""Directories of saved KV: written and read back, and what is wrong with one said in a line."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from saving import ASKED, IDENTITY, LAYERS, layer_kv, names_in, save

from kvcli.errors import ExitCode, KvcliError
from kvcli.kv.cache import Tiers
from kvcli.runtime.saved import writer as writing
from kvcli.runtime.saved.files import NewFolder, clear, locked, remove
from kvcli.runtime.saved.manifest import MANIFEST, PAGE, page_hashes, read_manifest
from kvcli.runtime.saved.reader import KVDamagedError, SavedKV, Segment
from kvcli.runtime.saved.writer import KVWriter, Saving, check_target

TIERS = Tiers.for_device(torch.device("cpu"), torch.float32)
IDS = list(range(5, 5 + 3 * PAGE + 7))


@pytest.fixture
def folder(tmp_path):
    save(IDS, tmp_path, lambda _: tmp_path / "notes")
    return tmp_path / "notes"


def load(segments, tokens):
    """Keys and values of all layers, as a prefill gets them."""
    with SavedKV(segments, TIERS) as saved:
        found = []
        for layer in range(LAYERS):
            kv = torch.empty(2, 2, tokens, 8)
            saved.fill(layer, kv)
            found.append(kv)
    return found


def test_whole_pages_come_back(folder):
    manifest = read_manifest(folder)
    assert manifest.tokens == IDS[: 3 * PAGE]
    assert (manifest.asked, manifest.reading, len(manifest.pages)) == (ASKED, "exact", 3)
    assert sorted(path.name for path in folder.iterdir()) == [
        *(f"layer-000{i}.safetensors" for i in range(3)),
        MANIFEST,
    ]
    assert names_in(folder.parent) == ["notes"]
    for pages in (1, 3):
        found = load([Segment(folder, manifest, pages)], pages * PAGE)
        for layer, kv in enumerate(found):
            assert torch.equal(kv, torch.stack(layer_kv(layer, len(IDS)))[:, :, : pages * PAGE])


def test_directories_that_continue_each_other(folder, tmp_path):
    first = read_manifest(folder)
    longer = [*IDS[: 2 * PAGE], *range(900, 900 + 3 * PAGE)]
    save(longer, tmp_path, lambda _: tmp_path / "more", 2, first.pages[1])
    more = read_manifest(tmp_path / "more")
    assert (more.first_page, more.tokens) == (2, longer[2 * PAGE :])
    found = load([Segment(folder, first, 2), Segment(tmp_path / "more", more, 3)], 4 * PAGE)
    for layer, kv in enumerate(found):
        assert torch.equal(kv, torch.stack(layer_kv(layer, 5 * PAGE))[:, :, : 4 * PAGE])


def test_hashes_tell_prompts_models_and_places_apart():
    hashes = page_hashes(IDENTITY.root, IDS)
    assert len(hashes) == 3
    assert page_hashes(IDENTITY.root, [*IDS[:40], 1, *IDS[41:]])[0] == hashes[0]
    assert page_hashes(IDENTITY.root, [*IDS[:40], 1, *IDS[41:]])[1:] != hashes[1:]
    for field in ("weights", "tokenizer", "rope", "dtype"):
        other = IDENTITY.model_copy(update={field: "other"})
        assert not set(page_hashes(other.root, IDS)) & set(hashes)
    assert IDENTITY.model_copy(update={"model": "elsewhere/tiny"}).root == IDENTITY.root


def spoil(folder, change):
    path = folder / MANIFEST
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data, separators=(",", ":")))


@pytest.mark.parametrize(
    ("change", "message", "code"),
    [
        (lambda data: data.update(format=99), "format 99, which is newer", ExitCode.USAGE),
        (lambda data: data["pages"].__setitem__(1, "00" * 16), "checksum is wrong", ExitCode.RUNTIME),
        (lambda data: data["asked"].update(text="other"), "checksum is wrong", ExitCode.RUNTIME),
        (lambda data: data.pop("tokens"), "no field 'tokens'", ExitCode.RUNTIME),
        (lambda data: data.update(surprise=1), "surprise", ExitCode.RUNTIME),
        (lambda data: data["layers"][0].update(file="../../etc/passwd"), "file", ExitCode.RUNTIME),
    ],
)
def test_a_manifest_that_is_not_as_it_was(change, message, code, folder):
    spoil(folder, change)
    with pytest.raises(KvcliError, match=message) as caught:
        read_manifest(folder)
    assert caught.value.exit_code == code


def test_a_page_hash_that_does_not_belong_to_its_tokens(folder):
    manifest = read_manifest(folder)
    wrong = manifest.model_copy(update={"pages": [*manifest.pages[:2], "00" * 16]})
    (folder / MANIFEST).write_text(wrong.sealed())
    with pytest.raises(KvcliError, match="a page hash is wrong") as caught:
        read_manifest(folder)
    assert caught.value.exit_code == ExitCode.RUNTIME


def test_a_manifest_from_before_a_field_came_is_whole(folder):
    expected, path = read_manifest(folder), folder / MANIFEST
    data = json.loads(path.read_text())
    del data["reading"], data["layers"][0]["parts"], data["checksum"]
    body = json.dumps(data, separators=(",", ":"))
    path.write_text(f'{body[:-1]},"checksum":"{xxhash.xxh3_64_hexdigest(body.encode())}"}}')
    assert read_manifest(folder).model_copy(update={"checksum": expected.checksum}) == expected


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"format": 1e999}', b"[" * 100_000])
def test_a_manifest_that_is_none(content, folder):
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(KvcliError, match="is damaged") as caught:
        read_manifest(folder)
    assert "\n" not in caught.value.what


def test_no_such_directory_and_one_without_a_manifest(tmp_path):
    for path, message in ((tmp_path / "none", "no such directory"), (tmp_path, "holds no saved KV")):
        with pytest.raises(KvcliError, match=message) as caught:
            read_manifest(path)
        assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("harm", ["missing", "torn", "flipped"])
def test_a_file_that_is_not_as_it_was(harm, folder):
    path = folder / "layer-0002.safetensors"
    if harm == "missing":
        path.unlink()
    elif harm == "torn":
        os.truncate(path, path.stat().st_size - 1)
    else:
        data = bytearray(path.read_bytes())
        data[5000] ^= 16
        path.write_bytes(data)
    with pytest.raises(KVDamagedError, match="layer-0002") as caught:
        load([Segment(folder, read_manifest(folder), 3)], 3 * PAGE)
    assert caught.value.folder == folder
    assert "nothing of it was used" in caught.value.what


def test_what_is_read_is_not_removed_and_what_is_not_goes_as_a_whole(folder):
    manifest = read_manifest(folder)
    with SavedKV([Segment(folder, manifest, 1)], TIERS):
        assert not remove(folder)
        assert read_manifest(folder) == manifest
    assert remove(folder)
    assert names_in(folder.parent) == []
    assert not remove(folder)


def test_only_new_or_empty_directories_are_saved_to(folder, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty")
    check_target(tmp_path / "new" / "one")
    for path, message in (
        (folder, "saved KV already"),
        (tmp_path, "something else"),
        (tmp_path / "file", "not a directory"),
    ):
        with pytest.raises(KvcliError, match=message) as caught:
            check_target(path)
        assert caught.value.exit_code == ExitCode.USAGE


def test_a_disk_that_is_full_half_way_leaves_nothing(tmp_path, monkeypatch):
    written = []

    def full(path, pages):
        if len(written) == 1:
            raise OSError(28, "No space left on device")
        written.append(path)
        return real(path, pages)

    real = writing.write_layer
    monkeypatch.setattr(writing, "write_layer", full)
    with pytest.raises(KvcliError, match=r"notes.txt was not saved: No space left") as caught:
        save(IDS, tmp_path, lambda _: tmp_path / "notes")
    assert caught.value.exit_code == ExitCode.RUNTIME
    assert names_in(tmp_path) == []


def test_two_that_save_the_same_and_two_that_do_not(folder, tmp_path):
    inode = (folder / MANIFEST).stat().st_ino
    assert save(IDS, tmp_path, lambda _: folder).path == folder  # as if the other had been faster
    assert (folder / MANIFEST).stat().st_ino == inode
    with pytest.raises(KvcliError, match="holds something else now"):
        save([9, *IDS], tmp_path, lambda _: folder)
    assert names_in(tmp_path) == ["notes"]


def test_what_was_given_up_or_left_behind_is_cleared(tmp_path):
    writer = KVWriter(Saving(IDS, IDENTITY, ASKED, 0, IDENTITY.root), tmp_path, lambda _: tmp_path / "notes")
    writer.abandon()
    assert names_in(tmp_path) == []
    alive = NewFolder(tmp_path)
    dead = Path(shutil.copytree(alive.path, tmp_path / ".kvcli-dead"))
    (tmp_path / ".kvcli-file").touch()  # of a file that is being written
    with locked(tmp_path):
        clear(tmp_path)
    assert alive.path.exists()
    assert not dead.exists()
    assert (tmp_path / ".kvcli-file").exists()
    assert alive.commit(tmp_path / "name")
