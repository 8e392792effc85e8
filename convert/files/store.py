"""Where a checkpoint's bytes come from: a local folder or the Hub, behind one small interface.

Nothing above this module knows whether a read is a ``pread`` or an HTTP range request.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

CHUNK = 4 << 20  # bytes read at a time of a file or tensor that goes by whole: stays in L3


class Blob(Protocol):
    """One file that can be read at offsets."""

    name: str
    size: int

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``. Raises SourceError that names the file if that cannot be done."""
        ...


class Store(Protocol):
    """A read-only set of files with relative POSIX names (subfolders included)."""

    label: str  # what messages call it: the path as given, or ORG/NAME@revision
    bytes_read: int

    def files(self) -> Mapping[str, int]:
        """Names and sizes in bytes."""
        ...

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file whole. Raises SourceError if it is missing or larger than ``limit`` bytes."""
        ...

    def blob(self, name: str) -> Blob:
        """Open a file for reading at offsets. Raises SourceError if it is missing or unreadable."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...


def chunks(read_into: Callable[[int, memoryview], None], size: int) -> Iterator[tuple[int, bytearray]]:
    """Read ``size`` bytes by ``read_into(offset, buffer)``, a few MiB at a time. Yields (offset, data)."""
    for offset in range(0, size, CHUNK):
        data = bytearray(min(CHUNK, size - offset))
        read_into(offset, memoryview(data))
        yield offset, data


def digest(parts: Iterable[tuple[int, bytearray]]) -> str:
    """Return the sha256 of what ``chunks`` yields."""
    sha = hashlib.sha256()
    for _, data in parts:
        sha.update(data)
    return sha.hexdigest()
