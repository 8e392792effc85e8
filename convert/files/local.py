"""A checkpoint folder on this machine.

Reads are ``preadv`` at offsets, so one open file serves any number of threads. Nothing is ever opened for
writing. Links are followed only where they stay in the folder, or lead into the ``blobs`` of the Hub cache
that the folder is a snapshot of; everything else that a folder of a stranger may hold (links to other places,
pipes, devices) is refused or skipped before it is opened.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import TracebackType

from w4pack.convert.errors import SourceError

PIECE = 8 << 20  # bytes: a read of several of these is divided among threads
READERS = 8  # threads at most: more of them wait for memory
UNVISITED = (".git", ".cache")  # version control, and what the Hub client keeps beside its downloads


def os_error(err: OSError, what: str, where: str) -> SourceError:
    """Translate an error of the operating system; its own words are kept in ``found``."""
    return SourceError(what, code="unreadable", where=where, found=err.strerror or str(err))


class LocalBlob:
    """One open file. Threads may read from it at the same time."""

    def __init__(self, store: "LocalStore", name: str, path: str) -> None:
        self.name = name
        self._store = store
        try:
            # O_NONBLOCK: if the entry was swapped for a pipe after it was listed, opening must not hang
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as err:
            raise os_error(err, "cannot open a file of the source", store.path_of(name)) from err
        self.size = os.fstat(self._fd).st_size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``. Raises SourceError if the file ends first or cannot be read.

        A long read is shared by threads where there are cores for them: copying out of the page cache, and
        touching new memory for the first time, take longer than many disks.
        """
        view = memoryview(buffer).cast("B")
        end = offset + len(view)
        starts = range(0, len(view), PIECE)
        threads = min(len(os.sched_getaffinity(0)), READERS, len(starts))
        if threads < 2:
            self._fill(offset, view, end)
        else:
            with ThreadPoolExecutor(threads) as pool:
                reads = [pool.submit(self._fill, offset + at, view[at : at + PIECE], end) for at in starts]
                for read in reads:  # of several errors, that of the first piece
                    read.result()
        self._store.count(len(view))

    def _fill(self, offset: int, view: memoryview, end: int) -> None:
        """Fill a piece of a read that goes up to byte ``end`` of the file."""
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as err:
                where = self._store.path_of(self.name)
                raise os_error(err, "cannot read a file of the source", where) from err
            if got == 0:
                raise SourceError(
                    "a file of the source ends too early",
                    code="file-too-short",
                    where=self._store.path_of(self.name),
                    expected=f"{end:,} bytes",
                    found=f"{offset + done:,} bytes",
                )
            done += got

    def close(self) -> None:
        """Close the file. Reads after this fail."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalStore:
    """A folder as a ``Store``. Raises SourceError if it does not exist or is not a folder.

    ``skipped`` lists entries that are no files (name, reason) once ``files()`` has run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.label = os.fspath(folder)
        self.bytes_read = 0
        self.skipped: list[tuple[str, str]] = []
        self._lock = Lock()
        self._blobs: dict[str, LocalBlob] = {}
        self._files: dict[str, int] | None = None
        self._real: dict[str, str] = {}
        if not self.label:  # to the operating system: the current folder
            raise SourceError("no such folder", code="no-such-folder", where="(empty)")
        try:
            self._root = os.path.realpath(self.label, strict=True)
            is_folder = stat.S_ISDIR(os.stat(self._root).st_mode)  # noqa: PTH116 - one stat, one error path
        except (FileNotFoundError, NotADirectoryError):
            raise SourceError("no such folder", code="no-such-folder", where=self.label) from None
        except (OSError, ValueError) as err:
            found = err.strerror if isinstance(err, OSError) else str(err)
            what = "cannot open the source"
            raise SourceError(what, code="unreadable", where=self.label, found=found) from err
        if not is_folder:
            what, hint = "the source is a file, not a folder", "give the folder that holds it"
            raise SourceError(what, code="not-a-folder", where=self.label, hint=hint)

    def __enter__(self) -> "LocalStore":
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    @property
    def root(self) -> Path:
        """The folder, links resolved."""
        return Path(self._root)

    def path_of(self, name: str) -> str:
        """Return what messages call a file: the folder as given, and the name."""
        return os.path.join(self.label, name)  # noqa: PTH118 - keeps the user's own spelling

    def path(self, name: str) -> Path:
        """Return the real path of a listed file, links resolved. Raises SourceError if it is missing."""
        if name not in self.files():
            raise SourceError("no such file in the source", code="missing-file", where=self.path_of(name))
        return Path(self._real[name])

    def count(self, nbytes: int) -> None:
        """Add to ``bytes_read``; blobs call it from any thread."""
        with self._lock:
            self.bytes_read += nbytes

    def files(self) -> Mapping[str, int]:
        """Names and sizes of all files, subfolders included, in sorted order."""
        if self._files is None:
            found = {name: size for name, size in self._walk()}
            self._files = dict(sorted(found.items()))
        return self._files

    def _walk(self) -> Iterator[tuple[str, int]]:
        self.skipped.clear()
        folders = [""]
        while folders:
            here = folders.pop()
            try:
                with os.scandir(os.path.join(self._root, here)) as entries:  # noqa: PTH118
                    listed = sorted(entries, key=lambda entry: entry.name)
            except OSError as err:
                raise os_error(err, "cannot list a folder of the source", self.path_of(here)) from err
            for entry in listed:
                name = f"{here}/{entry.name}" if here else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in UNVISITED:
                        folders.append(name)
                    continue
                size = self._size(entry, name)
                if size is not None:
                    yield name, size

    def _size(self, entry: "os.DirEntry[str]", name: str) -> int | None:
        """Return the size of a regular file; None for what is skipped. Raises SourceError for a bad link."""
        link = entry.is_symlink()
        real = self._resolve(name) if link else os.path.join(self._root, name)  # noqa: PTH118
        try:
            info = os.stat(real)  # noqa: PTH116
        except OSError as err:
            raise os_error(err, "cannot read a file of the source", self.path_of(name)) from err
        if stat.S_ISREG(info.st_mode):
            self._real[name] = real
            return info.st_size
        reason = "a link to a folder" if stat.S_ISDIR(info.st_mode) else "not a regular file"
        self.skipped.append((name, reason))
        return None

    def _resolve(self, name: str) -> str:
        """Follow a link to its end; refuse it unless that lies in the folder or in the cache's blobs."""
        path = os.path.join(self._root, name)  # noqa: PTH118
        try:
            real = os.path.realpath(path, strict=True)
        except OSError as err:
            what = f"`{name}` is a link that leads nowhere"
            raise SourceError(what, code="broken-link", where=self.path_of(name), found=err.strerror) from err
        if any(real.startswith(root + os.sep) for root in self._allowed()):
            return real
        raise SourceError(
            f"`{name}` is a link that leads out of the folder",
            code="path-escape",
            where=self.path_of(name),
            expected="a file of the folder",
            found=f"a link to {os.readlink(path)}",  # noqa: PTH115
        )

    def _allowed(self) -> tuple[str, ...]:
        """Return the folder and, for ``models--X/snapshots/REV`` of a Hub cache, ``models--X/blobs``."""
        root = Path(self._root)
        repo = root.parent.parent
        if root.parent.name == "snapshots" and repo.name.startswith("models--"):
            return self._root, str(repo / "blobs")
        return (self._root,)

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file whole. Raises SourceError if it is missing or larger than ``limit`` bytes."""
        blob = self.blob(name)
        if blob.size > limit:
            raise SourceError(
                f"`{name}` is too large",
                code="file-too-large",
                where=self.path_of(name),
                expected=f"at most {limit:,} bytes",
                found=f"{blob.size:,} bytes",
            )
        data = bytearray(blob.size)
        blob.read_into(0, memoryview(data))
        return bytes(data)

    def blob(self, name: str) -> LocalBlob:
        """Open a file for reading at offsets; opened once, closed with the store."""
        path = os.fspath(self.path(name))
        with self._lock:
            blob = self._blobs.get(name)
        if blob is not None:
            return blob
        blob = LocalBlob(self, name, path)
        with self._lock:
            kept = self._blobs.setdefault(name, blob)
        if kept is not blob:
            blob.close()
        return kept

    def close(self) -> None:
        """Close all files. The store can be used again; files open anew."""
        with self._lock:
            blobs = list(self._blobs.values())
            self._blobs.clear()
        for blob in blobs:
            blob.close()
