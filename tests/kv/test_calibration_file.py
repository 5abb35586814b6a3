"""Calibration files: what is in them, and every way in which they can be wrong."""

import pytest
import torch
from safetensors.torch import save_file

from kvcli.errors import ExitCode, KvcliError
from kvcli.kv.calibration_file import CalibrationMatrices, read_tensor

SHAPES = {1: (2, 8, 8), 3: (2, 8, 8)}


@pytest.fixture
def file(tmp_path):
    tensors = {f"layer.{layer}": torch.randn(2, 8, 8) for layer in range(4)}
    save_file(tensors, tmp_path / "skew.safetensors")
    return tensors, str(tmp_path / "skew.safetensors")


def test_layers_are_read_by_their_number(file):
    tensors, path = file
    layers = CalibrationMatrices(path, SHAPES, "skew")
    for layer in SHAPES:
        assert torch.equal(layers[layer], tensors[f"layer.{layer}"])


def test_sixteen_bit_files_are_read_as_float32(tmp_path):
    save_file({"layer.0": torch.ones(1, 2, 2, dtype=torch.bfloat16)}, tmp_path / "a")
    assert CalibrationMatrices(str(tmp_path / "a"), {0: (1, 2, 2)}, "pca")[0].dtype == torch.float32


def test_a_tensor_alone_is_read_as_it_is(tmp_path):
    heads = torch.tensor([[True, False], [False, False]])
    save_file({"heads": heads}, tmp_path / "heads")
    assert torch.equal(read_tensor(str(tmp_path / "heads"), "heads", (2, 2), "heads"), heads)
    with pytest.raises(KvcliError, match=r"heads has shape \[2, 2\], not \[3, 2\]"):
        read_tensor(str(tmp_path / "heads"), "heads", (3, 2), "heads")
    with pytest.raises(KvcliError, match="no tensor other"):
        read_tensor(str(tmp_path / "heads"), "other", (2, 2), "heads")


def refusal(path, shapes=SHAPES):
    with pytest.raises(KvcliError) as refused:
        CalibrationMatrices(str(path), shapes, "skew")
    assert refused.value.exit_code == ExitCode.USAGE
    assert "kvcli calibrate skew" in refused.value.hint
    assert str(path) in refused.value.what
    return refused.value.what


def test_a_file_of_another_model_is_refused(file):
    assert "no tensor layer.7" in refusal(file[1], {7: (2, 8, 8)})
    assert "layer.1 has shape [2, 8, 8], not [4, 16, 16]" in refusal(file[1], {1: (4, 16, 16)})


def test_what_is_no_such_file_is_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "missing.safetensors")
    assert "directory" in refusal(tmp_path)
    (tmp_path / "empty").touch()
    assert "not a safetensors file" in refusal(tmp_path / "empty")
    (tmp_path / "text").write_text("layer.0 = 1\n" * 20)
    assert "not a safetensors file" in refusal(tmp_path / "text")
