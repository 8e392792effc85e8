"""Tensors of a checkpoint as torch tensors, lazily."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from w4pack.convert.errors import Refused
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.provider import CheckpointProvider

TENSORS = {
    "a.2": torch.tensor([[1.5, -2.0], [0.25, 3.0], [7.0, 8.0]], dtype=torch.bfloat16),
    "a.10": torch.tensor([1, -2, 3], dtype=torch.int64),
    "b": torch.zeros((0, 4), dtype=torch.float16),
    "c": torch.tensor(1.5, dtype=torch.float32),
}


@pytest.fixture
def provider(tmp_path: Path) -> CheckpointProvider:
    safetensors.torch.save_file(TENSORS, tmp_path / "model.safetensors")
    return CheckpointProvider(open_checkpoint(LocalStore(tmp_path)))


def test_names_come_in_natural_order_and_values_whole(provider: CheckpointProvider) -> None:
    assert list(provider.names()) == ["a.2", "a.10", "b", "c"]
    for name, wanted in TENSORS.items():
        got = provider.get(name)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(got, wanted)
        assert provider.info(name).shape == tuple(wanted.shape)


def test_a_dtype_on_request_and_a_tensor_of_ones_own(provider: CheckpointProvider) -> None:
    got = provider.get("a.2", torch.float64)
    assert got.dtype == torch.float64
    assert got.tolist() == [[1.5, -2.0], [0.25, 3.0], [7.0, 8.0]]
    got.zero_()
    assert torch.equal(provider.get("a.2"), TENSORS["a.2"])


def test_rows_are_read_alone(provider: CheckpointProvider) -> None:
    before = provider.checkpoint.store.bytes_read
    assert torch.equal(provider.rows("a.2", 1, 2), TENSORS["a.2"][1:2])
    assert provider.checkpoint.store.bytes_read - before == 4
    with pytest.raises(IndexError, match="rows 1 to 4"):
        provider.rows("a.2", 1, 4)


def test_what_is_not_there_and_what_torch_cannot_hold(provider: CheckpointProvider) -> None:
    with pytest.raises(KeyError):
        provider.get("d")
    name = "c"
    provider.checkpoint.tensors[name] = provider.info(name)._replace(dtype="F8_E8M0")  # type: ignore[index]
    with pytest.raises(Refused) as caught:
        provider.get(name)
    assert (caught.value.code, caught.value.found) == ("dtype", "F8_E8M0")
