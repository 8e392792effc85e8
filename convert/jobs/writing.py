"""Writing that a crash may interrupt anywhere: synced, in steps, with errors that a user can act on.

Every step that a crash could fall between goes through ``step``, so that a test can stop the process at each
of them.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from w4pack.convert.errors import OutputError

EXIT_AT = "W4PACK_TEST_EXIT_AT"  # tests: leave the process, without any cleanup, at the n-th step
TEST_EXIT_CODE = 99
PIECE = 1 << 20  # bytes
_steps = 0


def step() -> None:
    """Count one write, fsync or rename; stop the process here if a test asks for it."""
    global _steps
    wanted = os.environ.get(EXIT_AT)
    if wanted is None:
        return
    _steps += 1
    if _steps >= int(wanted):
        os._exit(TEST_EXIT_CODE)


def output_error(err: OSError, path: Path, needed: int | None = None) -> OutputError:
    """Turn an OSError at ``path`` into the error a user can act on."""
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(existing_parent(path)).free
        found = f"{free:,} bytes free" + (f", {needed:,} bytes still to write" if needed is not None else "")
        return OutputError(
            "the disk is full",
            code="disk-full",
            where=str(path),
            expected="room for the whole output",
            found=found,
            hint="free some space, then run the same command with `--resume`",
        )
    more = "allow more open files (`ulimit -n 1024`)" if err.errno in (errno.EMFILE, errno.ENFILE) else None
    return OutputError(
        f"cannot write the output: {_reason(err)}",
        code="cannot-write",
        where=str(path),
        hint=None if more is None else f"{more}, then run the same command with `--resume`",
    )


def _reason(err: OSError) -> str:
    return (os.strerror(err.errno) if err.errno else str(err)).lower()


def unread(path: Path, reason: str) -> OutputError:
    """Return the error of a file in the making that cannot be read back."""
    return OutputError(
        "cannot read back what was written",
        code="cannot-read-back",
        where=str(path),
        found=reason,
        hint="once the disk can be read, the same command with `--resume` goes on; what is not as it was "
        "written is made anew",
    )


@contextlib.contextmanager
def reading_back(path: Path) -> Iterator[None]:
    """Translate OSErrors of the block, which reads a file in the making, into OutputError."""
    try:
        yield
    except OSError as err:
        raise unread(path, _reason(err)) from err


def existing_parent(path: Path) -> Path:
    """Return the nearest folder above ``path`` that exists."""
    for folder in (path, *path.parents):
        if folder.is_dir():
            return folder
    return Path("/")


@contextlib.contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Translate OSErrors of the block into OutputError."""
    try:
        yield
    except OSError as err:
        raise output_error(err, path, needed) from err


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that names in it survive a crash."""
    step()
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file, from pieces if it is long, and fsync it. Its mode is 0666 less the umask."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        step()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            at = 0
            for part in _pieces(data):
                write_all(fd, memoryview(part), at)
                at += len(part)
            step()
            os.fsync(fd)
        finally:
            os.close(fd)


def _pieces(data: bytes | Iterable[bytes]) -> Iterator[bytes]:
    """Gather many small parts to writes of about a MiB."""
    if isinstance(data, bytes):
        yield data
        return
    held = bytearray()
    for part in data:
        held += part
        if len(held) >= PIECE:
            yield bytes(held)
            held.clear()
    yield bytes(held)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``, however often the kernel stops short."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
