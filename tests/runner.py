"""Runs the command: in this process where that is enough, in a real one where the process is the point."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

IN_PROCESS = os.environ.get("W4PACK_TEST_IN_PROCESS", "1") != "0"


def signals_act() -> None:
    """Before a child starts (``preexec_fn``): SIGINT stops it, also where a background job ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Run:
    """What a command left behind."""

    args: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """Return stdout as one JSON object."""
        return json.loads(self.out)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return stdout as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def plan(self) -> dict[str, Any]:
        """Return the plan event."""
        (plan,) = [event for event in self.events if event["event"] == "plan"]
        return plan

    @property
    def error(self) -> dict[str, Any]:
        """Return the error that ended the run."""
        last = self.events[-1]
        if last.get("event") != "error":
            raise AssertionError(f"no error event at the end of {self}")
        return last

    @property
    def text(self) -> str:
        """Return everything that was said."""
        return self.out + self.err

    def says(self, *parts: object) -> bool:
        """Return whether every part stands somewhere in what was said; thousands separators do not matter."""
        text = self.text.replace("\\u2014", "-")
        return all(str(part) in text or str(part) in text.replace(",", "") for part in parts)

    def saved_traceback(self) -> str:
        """Return the traceback that the command saved for a report, for the message of a failed test."""
        found = re.search(r"\S+/w4pack-\w+\.log", self.text.replace('"', " "))
        return Path(found[0]).read_text()[-3000:] if found and Path(found[0]).exists() else ""

    def expect(self, code: int, *parts: object) -> Run:
        """Check the exit code and the names and numbers that must be said; never a traceback."""
        shown = f"\n$ w4pack {' '.join(self.args)}\nexit {self.code}\n{brief(self.out)}\n{self.err[-3000:]}"
        assert "Traceback" not in self.text, f"a traceback{shown}"
        assert "which is a bug" not in self.text, f"a bug{shown}{self.saved_traceback()}"
        assert self.code == code, f"exit {self.code}, expected {code}{shown}"
        for part in parts:
            assert self.says(part), f"{part!r} is not said{shown}"
        return self


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Put the handlers back that the command may replace."""
    saved = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)


def brief(text: str, width: int = 400) -> str:
    """Shorten JSON lines for the message of a failed test."""
    lines = [
        line if len(line) <= width else f"{line[:width]} ... ({len(line)} characters)"
        for line in text.splitlines()
    ]
    return "\n".join(
        line for line in lines if '"event": "layer"' not in line and '"event": "progress"' not in line
    )


def run_here(*args: str) -> Run:
    """Run the command in this process, with its own streams."""
    from w4pack.cli import main

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code: Any = 0
    with (
        mock.patch.object(sys, "argv", ["w4pack", *args]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        kept_signals(),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    texts = [stream.buffer.getvalue().decode("utf-8") for stream in (out, err)]  # type: ignore[attr-defined]
    return Run(args, code if isinstance(code, int) else int(code is not None), *texts)


def command(*args: str) -> list[str]:
    """Return the command line of a real process."""
    return [sys.executable, "-m", "w4pack", *args]


def run_process(*args: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Run:
    """Run the command in a process of its own."""
    words = tuple(map(str, args))
    full = {**os.environ, **(env or {})}
    done = subprocess.run(
        command(*words), capture_output=True, text=True, env=full, cwd=cwd, timeout=300, check=False
    )
    return Run(words, done.returncode, done.stdout, done.stderr)


def run(*args: str | Path | int) -> Run:
    """Run the command the quick way."""
    words = tuple(map(str, args))
    return run_here(*words) if IN_PROCESS else run_process(*words)


def convert(source: Path, out: Path, to: str, *options: str | int) -> Run:
    """Run ``convert --json``."""
    return run("convert", source, out, "--to", to, "--json", *options)
