"""The output's weight files in the making: preallocated, written at planned offsets, hashed, synced."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.files import samples
from w4pack.convert.files.shards import Shard
from w4pack.convert.jobs.writing import reading_back, step, unread, write_all, writing
from w4pack.convert.planning.plan import OutTensor, Plan

HASH_CHUNK = 1 << 20  # bytes read back at a time for hashing: hashed while they are in the L2 cache


class OutFiles:
    """Open shards of one plan below ``folder``. Writes at disjoint offsets may come from several threads."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.tensors = {t.name: t for t in plan.tensors}
        self._needed = plan.output_bytes
        self._fds: dict[str, int] = {}
        try:
            for shard in plan.shards():
                self._open(shard)
        except BaseException:
            self.close()
            raise

    def _open(self, shard: Shard) -> None:
        path = self.folder / shard.name
        with writing(path, self._needed):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._fds[shard.name] = fd
            self._allocate(fd, shard.size)
            step()
            write_all(fd, memoryview(shard.header), 0)

    def _allocate(self, fd: int, size: int) -> None:
        """Reserve the blocks now, so that a full disk shows before hours of work."""
        if os.fstat(fd).st_size > size:
            os.ftruncate(fd, size)
        if size:
            os.posix_fallocate(fd, 0, size)

    def __enter__(self) -> "OutFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def write(self, tensor: OutTensor, offset: int, data: NDArray[Any]) -> None:
        """Write contiguous bytes of a tensor from ``offset`` (bytes within the tensor) on."""
        if offset < 0 or offset + data.nbytes > tensor.nbytes:
            raise ValueError(
                f"a write past the end of {tensor.name}: {offset} + {data.nbytes} of {tensor.nbytes} bytes"
            )
        with writing(self.folder / tensor.shard, self._needed):
            step()
            raw = np.ascontiguousarray(data).data.cast("B")
            write_all(self._fds[tensor.shard], raw, tensor.offset + offset)

    def write_rect(self, tensor: OutTensor, row: int, col: int, block: NDArray[Any]) -> None:
        """Write a rectangle of a 2-D tensor whose first element is (row, col)."""
        height, width = tensor.shape
        size = block.dtype.itemsize
        if row + block.shape[0] > height or col + block.shape[1] > width:
            raise ValueError(
                f"a write past the edge of {tensor.name}: {block.shape} at {row}, {col} of {tensor.shape}"
            )
        if block.shape[1] == width:
            self.write(tensor, row * width * size, block)
            return
        block = np.ascontiguousarray(block)
        fd, start = self._fds[tensor.shard], tensor.offset + (row * width + col) * size
        with writing(self.folder / tensor.shard, self._needed):
            step()
            for i in range(block.shape[0]):
                write_all(fd, block[i].data.cast("B"), start + i * width * size)

    def digest(self, tensor: OutTensor) -> str:
        """Return the sha256 of a tensor's bytes as they are in the file. Raises OutputError."""
        with reading_back(self.folder / tensor.shard):
            return digest_range(self._fds[tensor.shard], tensor.offset, tensor.nbytes)

    def sample(self, tensor: OutTensor) -> str:
        """Return the digest of a tensor's sample as it is in the file. Raises OutputError."""
        with reading_back(self.folder / tensor.shard):
            fd = self._fds[tensor.shard]
            return samples.digest(lambda at, length: os.pread(fd, length, at), tensor.offset, tensor.nbytes)

    def read(self, tensor: OutTensor) -> NDArray[np.uint8]:
        """Return a tensor's bytes as they are in the file. Raises OutputError, also for a file cut short."""
        data = np.empty(tensor.nbytes, np.uint8)
        path, at = self.folder / tensor.shard, 0
        while at < tensor.nbytes:
            with reading_back(path):
                got = os.preadv(self._fds[tensor.shard], [data[at:].data], tensor.offset + at)
            if got == 0:
                raise unread(path, f"it ends {tensor.nbytes - at:,} bytes before {tensor.name} does")
            at += got
        return data

    def sync(self, shards: Iterable[str]) -> None:
        """Bring the data of the named shards to the disk."""
        for name in shards:
            with writing(self.folder / name):
                step()
                os.fdatasync(self._fds[name])


def digest_range(fd: int, offset: int, nbytes: int) -> str:
    """Return the sha256 of ``nbytes`` bytes of an open file; a short file gives another one, no error."""
    sha = hashlib.sha256()
    buffer = bytearray(min(HASH_CHUNK, nbytes))
    view = memoryview(buffer)
    while nbytes:
        got = os.preadv(fd, [view[: min(len(buffer), nbytes)]], offset)
        if got == 0:
            break
        sha.update(view[:got])
        offset, nbytes = offset + got, nbytes - got
    return sha.hexdigest()
