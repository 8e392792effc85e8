"""Moves of bytes from a file to the device, cut into chunks that fit a staging buffer.

A chunk is a short program: fill the buffer by these reads, then copy from it by these copies. Moves that
continue each other in the file and on the device are joined, so a run of whole tensors costs one read and one
copy a chunk however many tensors it holds.
"""

from typing import NamedTuple

CHUNK = 8 << 20  # bytes; on an H200 host 2 MiB takes 2.7 times as long, 32 MiB 1.2 times
GAP = 64 << 10  # bytes; copying them from the page cache costs about what one more call does
UNIT = 256  # bytes: a read that continues no other starts at such an offset of the buffer


class Move(NamedTuple):
    """Rows of a file that become rows of an arena; bytes, as in ``placement.Part``."""

    file: str
    offset: int
    pitch: int
    width: int
    rows: int
    arena: int
    to: int
    step: int


class Read(NamedTuple):
    """``rows`` pieces of ``nbytes``, ``pitch`` apart in the file, packed into the buffer from ``at`` on."""

    offset: int
    nbytes: int
    at: int
    pitch: int
    rows: int


class Copy(NamedTuple):
    """A rectangle of the buffer (``at``, ``pitch``) that goes to one of an arena (``to``, ``step``)."""

    at: int
    pitch: int
    width: int
    rows: int
    arena: int
    to: int
    step: int


class Chunk(NamedTuple):
    """What one buffer carries."""

    file: str
    reads: tuple[Read, ...]
    copies: tuple[Copy, ...]


class Cutter:
    """Takes moves in file order and cuts them into chunks of at most ``size`` bytes of buffer."""

    def __init__(self, size: int, gap: int) -> None:
        self._size, self._gap = size, gap
        self._chunks: list[Chunk] = []
        self._file = ""
        self._reads: list[Read] = []
        self._copies: list[Copy] = []
        self._used = 0

    def add(self, move: Move) -> None:
        """Take the next move."""
        if move.file != self._file:
            self._flush()
            self._file = move.file
        if move.rows == 1 or move.pitch == move.width == move.step:
            self._run(move.offset, move.width * move.rows, move.arena, move.to)
        elif move.width > self._size:
            for row in range(move.rows):
                self._run(move.offset + row * move.pitch, move.width, move.arena, move.to + row * move.step)
        else:
            self._rows(move)

    def close(self) -> tuple[Chunk, ...]:
        """Return all chunks."""
        self._flush()
        return tuple(self._chunks)

    def _flush(self) -> None:
        if self._reads:
            self._chunks.append(Chunk(self._file, tuple(self._reads), tuple(self._copies)))
        self._reads, self._copies, self._used = [], [], 0

    def _start(self, offset: int) -> int:
        """Return where in the buffer a read from ``offset`` of the file goes."""
        last = self._reads[-1] if self._reads else None
        if last is not None and last.offset + last.nbytes == offset:
            return self._used
        return -(-self._used // UNIT) * UNIT

    def _run(self, offset: int, nbytes: int, arena: int, to: int) -> None:
        """Add bytes that lie together on both sides, as many to a chunk as fit."""
        while nbytes:
            at = self._start(offset)
            part = min(nbytes, self._size - at)
            if part <= 0:
                self._flush()
                continue
            self._read(Read(offset, part, at, part, 1))
            self._copy(Copy(at, part, part, 1, arena, to, part))
            offset, nbytes, to = offset + part, nbytes - part, to + part

    def _rows(self, move: Move) -> None:
        """Add rows that are apart on either side. Short gaps are read along, long ones skipped."""
        skip = move.pitch - move.width > self._gap
        pitch = move.width if skip else move.pitch  # in the buffer
        done = 0
        while done < move.rows:
            offset = move.offset + done * move.pitch
            at = self._start(offset)
            rows = min(move.rows - done, max(0, self._size - at - move.width) // pitch + 1)
            if at + move.width > self._size:
                self._flush()
                continue
            if skip:
                self._read(Read(offset, move.width, at, move.pitch, rows))
            else:
                band = (rows - 1) * pitch + move.width
                self._read(Read(offset, band, at, band, 1))
            to = move.to + done * move.step
            self._copy(Copy(at, pitch, move.width, rows, move.arena, to, move.step))
            done += rows

    def _read(self, read: Read) -> None:
        last = self._reads[-1] if self._reads else None
        self._used = read.at + read.nbytes * read.rows
        joined = last is not None and read.rows == last.rows == 1
        if joined and last is not None and last.offset + last.nbytes == read.offset:
            nbytes = last.nbytes + read.nbytes
            self._reads[-1] = last._replace(nbytes=nbytes, pitch=nbytes)
        else:
            self._reads.append(read)

    def _copy(self, copy: Copy) -> None:
        last = self._copies[-1] if self._copies else None
        if last is not None and copy.rows == last.rows == 1 and _continues(last, copy):
            width = last.width + copy.width
            self._copies[-1] = last._replace(width=width, pitch=width, step=width)
        else:
            self._copies.append(copy)


def _continues(last: Copy, copy: Copy) -> bool:
    end = last.at + last.width, last.arena, last.to + last.width
    return (copy.at, copy.arena, copy.to) == end
