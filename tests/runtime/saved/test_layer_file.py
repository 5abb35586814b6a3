import os

import pytest
import torch
from safetensors import safe_open

from kvcli.memory.disk_tier import ALIGNMENT, DamagedError, UnbufferedFile
from kvcli.memory.pinned import host_memory
from kvcli.runtime.saved import files as layer_file
from kvcli.runtime.saved.files import check_layer, read_pages, write_layer


def pages(count, dtype=torch.float32, heads=2, d=8):
    drawn = torch.randn(count, heads, 2, 32, d, generator=torch.Generator().manual_seed(count)).to(dtype)
    return host_memory(drawn.shape, dtype).copy_(drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 64, 65, 200])
def test_what_is_written_is_read_and_is_a_safetensors_file(count, dtype, tmp_path):
    path, written = tmp_path / "layer.safetensors", pages(count, dtype)
    checksums = write_layer(path, written)
    assert len(checksums) == -(-count // 64)
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("kv"), written)
    for wanted in {1, count - 1, count} - {0}:
        with UnbufferedFile(path) as file:
            check_layer(file, written.shape, dtype)
            found = host_memory((wanted, *written.shape[1:]), dtype)
            read = read_pages(file, found, 0, checksums)
        assert torch.equal(found, written[:wanted])
        assert read == written[: min(count, -(-wanted // 64) * 64)].nbytes


@pytest.mark.parametrize("direct", [True, False])
def test_pages_that_are_no_multiple_of_the_alignment(direct, tmp_path, monkeypatch):
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 1 << 40, raising=False)  # as a file system without it refuses

        def refuse(path, flags, *args, **named):
            if flags & (1 << 40):
                raise OSError(22, "Invalid argument")
            return real(path, flags, *args, **named)

        real = os.open
        monkeypatch.setattr(layer_file.os, "open", refuse)
    path, written = tmp_path / "layer.safetensors", pages(67, heads=1, d=5)
    checksums = write_layer(path, written)
    with UnbufferedFile(path) as file:
        assert direct or file.direct is None
        found = host_memory(written.shape, written.dtype)
        read_pages(file, found, 0, checksums)
    assert torch.equal(found, written)
    assert path.stat().st_size == ALIGNMENT + written.nbytes


@pytest.mark.parametrize("at", [0, 9, ALIGNMENT, ALIGNMENT + 70_000, -1])
def test_a_flipped_byte_is_found(at, tmp_path):
    path, written = tmp_path / "layer.safetensors", pages(70)
    checksums = write_layer(path, written)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)

    def read(file):
        check_layer(file, written.shape, written.dtype)
        read_pages(file, host_memory(written.shape, written.dtype), 0, checksums)

    with UnbufferedFile(path) as file, pytest.raises(DamagedError):
        read(file)


@pytest.mark.parametrize("left", [0, 100, ALIGNMENT, ALIGNMENT + 5000])
def test_a_torn_file_is_found(left, tmp_path):
    path, written = tmp_path / "layer.safetensors", pages(70)
    write_layer(path, written)
    os.truncate(path, left)
    with UnbufferedFile(path) as file, pytest.raises(DamagedError, match="bytes long"):
        check_layer(file, written.shape, written.dtype)


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    path, written = tmp_path / "layer.safetensors", pages(70)
    checksums = write_layer(path, written)
    with UnbufferedFile(path) as file:
        found = host_memory(written.shape, written.dtype)
        os.truncate(path, ALIGNMENT + 66 * written[0].nbytes)
        with pytest.raises(DamagedError):
            read_pages(file, found, 0, checksums)
