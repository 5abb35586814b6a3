"""Pools on a disk against those in host memory, and their cache against a list that is kept in order."""

import copy
import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcli.errors import ExitCode, KvcliError
from kvcli.memory.disk_blocks import DiskBlocks, LineCache, blocks_per_line
from kvcli.memory.disk_tier import DiskError, DiskTier, UnbufferedFile
from kvcli.memory.host_pool import DiskPagePool, HostPagePool, page_pool
from kvcli.memory.tiers import Tiers

HOST = Tiers.for_device(torch.device("cpu"), torch.float32)
META = Tiers.for_device(torch.device("meta"), torch.float32)
HK, PAGES = 2, 60
SHAPES = {"whole sectors": (32, 16), "odd": (24, 5), "tokens": (8, 1)}
"""Head dimension and page size: a block is a line of its own, a padded one, or a small part of one."""


@pytest.fixture
def tier(tmp_path):
    with DiskTier(tmp_path, 0) as tier:
        yield tier
    assert list(tmp_path.iterdir()) == []


def lines_of(tier, lines, d, size, kv_dtype="auto", tensors=2):
    """Tiers whose share of host memory holds so many lines of a layer."""
    probe = DiskPagePool(HK, d, size, PAGES, replace(HOST, disk=tier.share(), kv_dtype=kv_dtype), tensors)
    sized = DiskTier(tier.folder, lines * probe.on_disk.line_bytes)
    vars(sized)["threads"] = tier.threads
    return replace(HOST, disk=sized.share(), kv_dtype=kv_dtype)


def tokens(count, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, HK, count, d, generator=generator)


def pages_of(kv, size):
    return [part.unflatten(1, (-1, size)) for part in kv]


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("slots", [5, 40])
def test_the_least_recently_asked_for_leave_the_cache(slots, kept):
    cache, rng = LineCache(slots, 100, 512, kept), np.random.default_rng(slots)
    order: dict[int, None] = {}  # those that may leave, the next one first
    stay: set[int] = set()
    for _ in range(200):
        most = slots - len(stay)
        lines = rng.choice(100, rng.integers(1, min(most, 9) + 1), replace=False)
        found = cache.find(lines)
        assert [line in order or line in stay for line in lines.tolist()] == (found >= 0).tolist()
        assert len({*found[found >= 0].tolist()}) == (found >= 0).sum()
        for line in lines[found >= 0].tolist():
            if line in order:
                order[line] = order.pop(line)
        missing = np.sort(lines[found < 0])
        # Lines of one call are equally old: which of them leaves is not said, so they are asked for one by one.
        for line in missing.tolist():
            if len(stay) == slots:
                break
            if len(order) + len(stay) == slots:
                order.pop(next(iter(order)))
            one = np.array([line])
            cache.place(one, cache.take(1))
            if line < kept:
                stay.add(line)
            else:
                order[line] = None
        for line in order:
            cache.find(np.array([line]))  # makes the order of all a strict one, without changing it
    assert len(order) + len(stay) == slots
    assert stay == set(range(kept))


@pytest.mark.parametrize(("block", "unit", "expected"), [(16384, 8, 1), (512, 8, 8), (512, 2, 8), (3000, 4, 1)])
def test_as_many_blocks_as_fill_a_sector_are_read_together(block, unit, expected):
    assert blocks_per_line(block, unit, 4096) == expected


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "k8v4", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lines", [8, 24])
def test_a_pool_on_the_disk_gives_what_one_in_host_memory_does(tier, shape, lines, kv_dtype):
    d, size = SHAPES[shape]
    if kv_dtype != "auto" and size & (size - 1):
        size = 4
    tiers = lines_of(tier, lines, d, size, kv_dtype)
    pool, host = DiskPagePool(HK, d, size, PAGES, tiers), HostPagePool(HK, d, size, PAGES, replace(tiers, disk=None))
    kv, rng, written = tokens(PAGES * size, d), np.random.default_rng(1), 0
    read = 0
    while written < PAGES:
        more = PAGES // 2 if written == 0 else 1
        some = pages_of(kv[:, :, written * size : (written + more) * size], size)
        assert pool.write(written, *some) == host.write(written, *some)
        written += more
        for announced in (False, True):
            count = int(rng.integers(1, 12))
            pages, heads = (torch.from_numpy(rng.integers(0, most, count)) for most in (written, HK))
            if announced:
                pool.announce(pages, heads)
            before = pool.on_disk.tally.hits + pool.on_disk.tally.misses
            assert torch.equal(pool.fetch(pages, heads), host.fetch(pages, heads))
            read += count
            assert pool.on_disk.tally.hits + pool.on_disk.tally.misses - before == (0 if announced else count)
    tally, blocks = pool.on_disk.tally, pool.on_disk
    assert tally.hits + tally.misses == read
    assert tally.misses == 0 or tally.read >= blocks.line_bytes
    assert tally.read <= tally.misses * blocks.line_bytes
    assert tally.written == blocks.written // blocks.per_line * blocks.line_bytes
    assert pool.footprint().host == blocks.slots * (blocks.line_bytes + 16) + 16 * blocks.lines + blocks.layout.used
    assert (
        pool.footprint()
        == DiskPagePool(HK, d, size, PAGES, replace(META, disk=tiers.disk, kv_dtype=kv_dtype)).footprint()
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_and_pools_that_share_refer_to_what_is_there(tier, shape):
    d, size = SHAPES[shape]
    tiers = lines_of(tier, 12, d, size)
    kv = tokens(PAGES * size, d)
    other = tokens(PAGES * size, d, seed=1)
    first, second = (DiskPagePool(HK, d, size, PAGES, tiers) for _ in range(2))
    assert second.share(first, 40)
    planned = second.footprint()
    for pool in (first, second):
        pool.write(0, *pages_of(kv[:, :, : 45 * size], size))
    assert second.on_disk.shared <= 40 * HK < second.on_disk.shared + second.on_disk.per_line
    assert second.footprint() == planned
    assert planned.disk < first.footprint().disk
    third = copy.deepcopy(second)
    pages, heads = torch.arange(45).repeat_interleave(HK), torch.arange(HK).repeat(45)
    for pool in (first, second, third):
        mine = kv if pool is not third else torch.cat((kv[:, :, : 45 * size], other[:, :, 45 * size :]), 2)
        pool.write(45, *pages_of(mine[:, :, 45 * size : 50 * size], size))
        expected = HostPagePool(HK, d, size, PAGES, HOST)
        expected.write(0, *pages_of(mine[:, :, : 50 * size], size))
        assert torch.equal(pool.fetch(pages + 5, heads), expected.fetch(pages + 5, heads))
        pool.announce(pages, heads)
        assert torch.equal(pool.fetch(pages, heads), expected.fetch(pages, heads))
    assert not second.share(HostPagePool(HK, d, size, PAGES, HOST), 10)
    assert not HostPagePool(HK, d, size, PAGES, HOST).share(first, 10)


@pytest.mark.parametrize("lines", [0, 7, 10**6])
def test_blocks_in_order_come_from_the_first_to_the_last(tier, lines):
    """A block of 96 bytes: 170 of them a line, the last line not full."""
    sized = DiskTier(tier.folder, lines * 16384)
    vars(sized)["threads"] = tier.threads
    rows = torch.randn(5000, 2, 3, 4)
    blocks = DiskBlocks(5000, (2, 3, 4), torch.float32, sized.share(), in_order=True)
    blocks.write(0, rows[:4000])
    for at in range(4000, 4100):
        blocks.write(at, rows[at : at + 1])
    fork = copy.deepcopy(blocks)
    fork.write(4100, rows[4100:4200])
    for each, first, stop in (
        (blocks, 0, 4100),
        (blocks, 17, 4001),
        (blocks, 4090, 4100),
        (fork, 0, 4200),
        (fork, 5, 6),
    ):
        found = [(at, part.clone()) for at, part in each.stream(first, stop)]
        assert torch.equal(torch.cat([part for _, part in found]), rows[first:stop])
        assert [at for at, _ in found] == [first + sum(len(part) for _, part in found[:n]) for n in range(len(found))]
    assert (blocks.tally.misses == 0) == (lines > 5000 // 170)


def test_what_fits_into_host_memory_lies_there(tier):
    d, size = 32, 16
    tiers = lines_of(tier, PAGES * HK, d, size)
    assert type(page_pool(HK, d, size, PAGES, tiers)) is HostPagePool
    assert type(page_pool(HK, d, size, PAGES, lines_of(tier, PAGES, d, size))) is DiskPagePool


def test_a_cache_without_room_for_what_a_step_needs_is_refused(tier):
    with pytest.raises(KvcliError, match="--host-memory") as caught:
        page_pool(HK, 32, 16, PAGES, lines_of(tier, 3, 32, 16), kept=1)
    assert caught.value.exit_code == ExitCode.WILL_NOT_FIT
    page_pool(HK, 32, 16, PAGES, lines_of(tier, 4, 32, 16), kept=1)


def filled(tier, lines=10):
    pool = DiskPagePool(HK, 32, 16, PAGES, lines_of(tier, lines, 32, 16))
    pool.write(0, *pages_of(tokens(PAGES * 16, 32), 16))
    return pool


EVERYTHING = (torch.arange(PAGES), torch.zeros(PAGES, dtype=torch.int64))


def test_a_truncated_file_is_an_error_and_so_is_one_that_was_changed(tier):
    pool = filled(tier)
    file, line_bytes = pool.on_disk._file.file, pool.on_disk.line_bytes
    os.ftruncate(file.fd, 50 * line_bytes)
    with pytest.raises(DiskError, match="it ends too early") as caught:
        pool.fetch(*EVERYTHING)
    assert caught.value.exit_code == ExitCode.RUNTIME
    os.ftruncate(file.fd, HK * PAGES * line_bytes)  # with zeros
    with pytest.raises(DiskError, match="a checksum is wrong"):
        pool.fetch(*EVERYTHING)


@pytest.mark.parametrize("announced", [False, True])
def test_a_block_that_cannot_be_read_is_an_error_and_nothing_of_it_is_used(tier, announced, monkeypatch):
    pool, bad = filled(tier), 77
    line_bytes, read = pool.on_disk.line_bytes, UnbufferedFile.read_scattered

    def failing(file, parts, offset):
        if offset <= bad * line_bytes < offset + sum(map(len, parts)):
            for part in parts:
                part[:] = 255
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        read(file, parts, offset)

    pages, heads = torch.arange(37, 41), torch.ones(4, dtype=torch.int64)  # page 38 of KV head 1 is block 77
    monkeypatch.setattr(UnbufferedFile, "read_scattered", failing)
    for _ in range(2):  # it is not taken to be there after the first time
        if announced:
            pool.announce(pages, heads)
        with pytest.raises(DiskError, match="Input/output error"):
            pool.fetch(pages, heads)
    monkeypatch.undo()
    expected = HostPagePool(HK, 32, 16, PAGES, HOST)
    expected.write(0, *pages_of(tokens(PAGES * 16, 32), 16))
    assert torch.equal(pool.fetch(pages, heads), expected.fetch(pages, heads))


def test_a_full_disk_says_so_before_anything_lies_on_it(tier, monkeypatch):
    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match="are free") as caught:
        filled(tier)
    assert caught.value.exit_code == ExitCode.WILL_NOT_FIT


def test_a_disk_that_takes_no_more_half_way_is_an_error(tier, monkeypatch):
    pool = DiskPagePool(HK, 32, 16, PAGES, lines_of(tier, 10, 32, 16))
    kv = tokens(PAGES * 16, 32)
    pool.write(0, *pages_of(kv[:, :, :160], 16))
    monkeypatch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(DiskError, match="writing KV failed: Input/output error"):
        pool.write(10, *pages_of(kv[:, :, 160:176], 16))
    monkeypatch.undo()
    pages, heads = torch.arange(10), torch.zeros(10, dtype=torch.int64)
    assert torch.equal(pool.fetch(pages, heads)[:, 0], kv[0, 0, :160].unflatten(0, (10, 16)))


def test_a_directory_that_is_missing_is_made(tmp_path):
    with DiskTier(tmp_path / "not" / "there", 1 << 20) as tier:
        tier.check(0)
    assert (tmp_path / "not" / "there").is_dir()


@pytest.mark.parametrize("kind", ["below a file", "file", "closed"])
def test_a_directory_that_takes_no_files_is_refused(tmp_path, kind):
    place = tmp_path / "there"
    if kind != "closed":
        place.write_text("")
    if kind == "below a file":
        place /= "below"
    if kind == "closed":
        place = Path("/proc/self")  # where root may not write either
    with pytest.raises(KvcliError, match="--kv-disk") as caught, DiskTier(place, 1 << 20) as tier:
        tier.check(0)
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_disk_without_room_for_all_is_refused_before_anything_is_made(tier):
    with pytest.raises(KvcliError, match="are free") as caught:
        tier.check(1 << 60)
    assert caught.value.exit_code == ExitCode.WILL_NOT_FIT
