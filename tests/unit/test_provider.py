"""Tensors of a checkpoint as torch tensors, lazily."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from w4pack.convert.errors import Refused, SourceError
from w4pack.convert.files import local
from w4pack.convert.files.checkpoint import Checkpoint, open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.provider import CheckpointProvider
from w4pack.convert.files.twobuffers import TwoBuffers

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


# ---- long reads: in pieces, by threads, through two buffers ------------------------------------------


@pytest.fixture
def long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """A checkpoint with a tensor of 1003 bytes, read in pieces of 10 by four threads."""
    values = torch.randint(0, 256, (1003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    safetensors.torch.save_file({"w": values}, tmp_path / "model.safetensors")
    monkeypatch.setattr(local, "PIECE", 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    return open_checkpoint(LocalStore(tmp_path))


def stored(checkpoint: Checkpoint) -> torch.Tensor:
    root = Path(checkpoint.label)
    return safetensors.torch.load_file(root / "model.safetensors")["w"]


def test_threads_that_share_a_read_give_its_bytes(long: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = os.preadv, set()

    def watched(fd: int, buffers: Any, offset: int) -> int:
        seen.add(threading.get_ident())
        time.sleep(0.001)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    before = long.store.bytes_read
    assert torch.equal(CheckpointProvider(long).get("w"), stored(long))
    assert long.store.bytes_read - before == 1003
    assert 2 <= len(seen) <= 4


def test_a_short_file_is_told_as_one_thread_would(long: Checkpoint) -> None:
    data = long.tensors["w"].offset
    os.truncate(Path(long.label) / "model.safetensors", data + 505)
    with pytest.raises(SourceError) as caught:
        CheckpointProvider(long).get("w")
    assert (caught.value.code, caught.value.expected) == ("file-too-short", f"{data + 1003:,} bytes")
    assert caught.value.found == f"{data + 505:,} bytes"


@pytest.mark.parametrize("size", [1, 64, 501, 1003, 5000])
def test_two_buffers_hand_over_every_byte(long: Checkpoint, size: int) -> None:
    buffers, info = TwoBuffers(torch.device("cpu"), size), long.tensors["w"]
    for first, count in ((0, 1003), (7, 700), (1000, 3), (3, 0)):  # buffers are used again
        got = buffers.read(lambda at, part, first=first: long.read_into(info, first + at, part), count)
        assert torch.equal(got, stored(long)[first : first + count])


def test_a_read_that_fails_leaves_the_buffers_usable(long: Checkpoint) -> None:
    buffers, info = TwoBuffers(torch.device("cpu"), 100), long.tensors["w"]

    def failing(at: int, part: memoryview) -> None:
        if at >= 300:
            raise SourceError("cannot read a file of the source", code="unreadable", where="here")
        long.read_into(info, at, part)

    with pytest.raises(SourceError, match="cannot read"):
        buffers.read(failing, 1003)
    assert torch.equal(buffers.read(lambda at, part: long.read_into(info, at, part), 1003), stored(long))
