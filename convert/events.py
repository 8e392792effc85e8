"""What a job tells while it runs: for people, for programs, or only its errors.

Data goes to stdout, everything else to stderr. JSON lines are flushed one by one; the last is ``done`` or
``error``.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from w4pack.convert.errors import printable

SCHEMA = 1
MIN_INTERVAL = 0.2  # seconds between progress events


class Reporter(Protocol):
    """Receives the events of a job."""

    def event(self, kind: str, **fields: Any) -> None:
        """Tell one event: plan, start, layer, shard, warning, done, error."""
        ...

    def progress(self, done: int, total: int, layer: str) -> None:
        """Tell how many bytes of the output are made."""
        ...

    def close(self) -> None:
        """End the display."""
        ...


class Quiet:
    """Tells nothing; errors are printed by the command."""

    def event(self, kind: str, **fields: Any) -> None:
        """Ignore the event."""

    def progress(self, done: int, total: int, layer: str) -> None:
        """Ignore the progress."""

    def close(self) -> None:
        """Do nothing."""


class Told:
    """Hands every event on, and keeps the warnings for the answer to a question: its JSON carries them.

    warnings  fields of each, in the order they came, after those that were ``known`` before
    """

    def __init__(self, reporter: Reporter, known: Sequence[Mapping[str, Any]] = ()) -> None:
        self._reporter = reporter
        self.warnings = [*known]

    def event(self, kind: str, **fields: Any) -> None:
        """Hand the event on."""
        if kind == "warning":
            self.warnings.append(fields)
        self._reporter.event(kind, **fields)

    def progress(self, done: int, total: int, layer: str) -> None:
        """Hand the progress on."""
        self._reporter.progress(done, total, layer)

    def close(self) -> None:
        """End the display."""
        self._reporter.close()


class JsonLines:
    """One JSON object a line on stdout."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._last = 0.0

    def event(self, kind: str, **fields: Any) -> None:
        """Print the event at once."""
        print(
            json.dumps({"schema": SCHEMA, "event": kind, **fields}, default=str),
            file=self._stream,
            flush=True,
        )

    def progress(self, done: int, total: int, layer: str) -> None:
        """Print progress, a few times a second at most."""
        now = time.monotonic()
        if now - self._last >= MIN_INTERVAL or done == total:
            self._last = now
            self.event("progress", done=done, total=total, layer=layer)

    def close(self) -> None:
        """Do nothing: every line is already out."""


class Human:
    """A bar on a terminal, a line per finished shard elsewhere; both on stderr."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        hidden = os.environ.get("W4PACK_NO_PROGRESS") or os.environ.get("TERM") == "dumb"
        self._animate = self._stream.isatty() and not hidden
        self._bar: Any = None

    def event(self, kind: str, **fields: Any) -> None:
        """Print what is worth keeping: warnings, and shards where no bar is shown."""
        if kind == "warning":
            self._line(f"warning: {fields['text']}")
        elif kind == "shard" and not self._animate:
            self._line(f"wrote {fields['name']}  {size_text(fields['bytes'])}")
        elif kind in ("note", "gate", "measured"):
            self._line(str(fields["text"]))

    def _line(self, text: str) -> None:
        text = printable(text)
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def progress(self, done: int, total: int, layer: str) -> None:
        """Move the bar."""
        if not self._animate:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                file=self._stream,
                leave=False,
                dynamic_ncols=True,
                smoothing=0.1,
            )
        self._bar.update(done - self._bar.n)
        self._bar.set_postfix_str(layer, refresh=False)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def size_text(nbytes: int) -> str:
    """Return a size for people: ``5.19 GiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{int(value)} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def time_text(seconds: float) -> str:
    """Return a duration for people: ``3m 12s``."""
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def warning_fields(warning: Any) -> Mapping[str, str]:
    """Return the fields of a warning event."""
    return {
        "code": warning.code,
        "where": warning.where,
        "expected": warning.expected,
        "found": warning.found,
        "text": warning.text(),
    }
