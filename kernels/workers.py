"""Threads that carry chunks from files to a device.

Threads take chunks from one list; each reads with ``preadv`` into its own two buffers and copies by its own
mover. Neither needs the interpreter lock. An error in one thread stops the others.

The page cache gets no advice (``posix_fadvise``): from a cold file 8 threads of 8 MiB read as fast without it
as with SEQUENTIAL or RANDOM, and with none of them does the kernel fetch what lies between rows of a slice.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from w4pack.convert.errors import SourceError
from w4pack.convert.files.local import os_error
from w4pack.kernels.chunks import Chunk
from w4pack.kernels.movers import SLOTS, Mover

Files = Mapping[str, tuple[Path, int]]  # name -> path, size in bytes when its header was read


class WeightFile:
    """An open file of tensors. Open from before the first byte moves, so that it cannot vanish in between.

    size  in bytes; if it is given, a file of another size is refused
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path, self.size, self._fd = path, 0, -1
        self._expected = size

    def __enter__(self) -> "WeightFile":
        try:
            # O_NONBLOCK: a pipe of that name must not hang the caller
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self.size = os.fstat(self._fd).st_size
        except OSError as err:
            raise os_error(err, "cannot open a weight file", str(self.path)) from err
        if self._expected not in (None, self.size):
            self.__exit__()
            raise SourceError(
                "a weight file changed after its header was read",
                code="file-changed",
                where=str(self.path),
                expected=f"{self._expected:,} bytes",
                found=f"{self.size:,} bytes",
            )
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes."""
        data = bytearray(length)
        self.fill(memoryview(data), offset)
        return bytes(data)

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Read exactly ``len(buffer)`` bytes."""
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as err:
                where = f"{self.path}, byte {offset + done:,}"
                raise os_error(err, "cannot read a weight file", where) from err
            if not got:
                raise SourceError(
                    "a weight file ends too early",
                    code="file-too-short",
                    where=f"{self.path}, byte {offset + done:,}",
                    expected=f"{self.size:,} bytes",
                    found=f"{offset + done:,} bytes",
                )
            done += got


class Run:
    """Threads at work on one list of chunks."""

    def __init__(
        self, chunks: Sequence[Chunk], files: Mapping[str, WeightFile], movers: Sequence[Mover]
    ) -> None:
        self._chunks: Iterator[Chunk] = iter(chunks)
        self._files = files
        self._movers = movers
        self._lock = threading.Lock()
        self._stopped = False
        self._errors: list[BaseException] = []

    def go(self) -> None:
        """Do all chunks. Raises the first error of any thread, after all have ended."""
        threads = [threading.Thread(target=self._work, args=(mover,)) for mover in self._movers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # an interrupt: no thread may write to memory that is about to be freed
            self._stopped = True
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            try:
                raise error
            finally:
                del error  # no circle through the traceback: what was allocated goes with the error

    def _next(self) -> Chunk | None:
        with self._lock:
            return None if self._stopped else next(self._chunks, None)

    def _work(self, mover: Mover) -> None:
        try:
            mover.start()
            try:
                self._carry(mover)
            finally:
                mover.finish()
        except BaseException as err:  # raised again by `go`
            self._stopped = True
            self._errors.append(err)

    def _carry(self, mover: Mover) -> None:
        slot = 0
        while (chunk := self._next()) is not None:
            buffer = mover.buffer(slot)
            file = self._files[chunk.file]
            for read in chunk.reads:
                for row in range(read.rows):
                    at = read.at + row * read.nbytes
                    file.fill(buffer[at : at + read.nbytes], read.offset + row * read.pitch)
            mover.send(slot, chunk.copies)
            slot = (slot + 1) % SLOTS
