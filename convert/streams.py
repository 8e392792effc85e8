"""stdout and stderr of a command: what happens when nobody reads them, or nothing can be written.

stdout carries the answer, so a command stops when it cannot be written: without a word where the reader has
gone (``| head``), with an error else (a full disk). stderr only tells, so what it cannot take is dropped. A
stream that was closed before the start is ``/dev/null``: else the first file that is opened would be it.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from w4pack.convert.errors import NobodyReads, StdoutError

STDOUT, STDERR = 1, 2


class _Stream:
    """A text stream whose failures go through ``_failed``; all else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text."""
        try:
            return int(self._stream.write(text))
        except OSError as err:
            self._error = err
            return self._failed(err)

    def flush(self) -> None:
        """Hand on what was written."""
        try:
            self._stream.flush()
        except OSError as err:
            self._error = err
            self._failed(err)

    def _failed(self, err: OSError) -> int:
        return 0

    def close(self) -> None:
        """Let what is left in the buffer go nowhere, so that Python has nothing to complain of at exit."""
        with contextlib.suppress(OSError, NobodyReads, StdoutError):
            self.flush()
        if self._error:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class _Stdout(_Stream):
    def _failed(self, err: OSError) -> NoReturn:
        """Raise. Nothing is muted before the end: libraries swallow errors when they try out a stream,
        and must meet them again when they do.
        """
        if isinstance(err, BrokenPipeError):
            raise NobodyReads from err
        raise StdoutError("the answer cannot be written", where="stdout", found=err.strerror) from err


class _Stderr(_Stream):
    """Drops what it cannot write."""


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Guard ``sys.stdout`` and ``sys.stderr``.

    Raises, from wherever it is printed: NobodyReads where the reader of stdout has gone, StdoutError where
    stdout cannot be written.
    """
    _plug()
    before = sys.stdout, sys.stderr
    for stream in before:  # names of strangers' files may hold what no terminal can show
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    out, err = _Stdout(before[0]), _Stderr(before[1])
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        out.close()
        err.close()


def _plug() -> None:
    """Open ``/dev/null`` for streams that were closed before the start."""
    for name, number in (("stdout", STDOUT), ("stderr", STDERR)):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, os.O_WRONLY)
            if file != number:
                os.dup2(file, number)
                os.close(file)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
