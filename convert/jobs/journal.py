"""What is finished: one JSON line per operation, written only after its data is on the disk.

The first line says which job this is. Every other line ends with a digest of itself: one that is not as it
was written is lost work, which is done again. A line is believed only as far as its hashes: on resume every
finished tensor is hashed again, and one that does not match is made anew. A torn last line counts as absent.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from w4pack.convert.errors import OutputError
from w4pack.convert.jobs.samejob import head, refuse_other_job
from w4pack.convert.jobs.writing import step, write_all, writing
from w4pack.convert.planning.plan import Plan

# What is decided before the first step, and kept by these names: the schemes of `--bpw`, the figures of the
# rotation gate, clip ratios.
CHOSEN, GATE, MEASURED = RESULTS = ("chosen", "gate", "measured")
CHECK = "check"  # of each line but the first: sha256 of the line without it


@dataclass(frozen=True, slots=True)
class Finished:
    """One finished operation: sha256 of each tensor it made, and what the report needs of it."""

    op: int
    hashes: Mapping[str, str]
    report: Mapping[str, Any]

    def report_fields(self) -> dict[str, Any]:
        """Return the part of the report that is told while the job runs."""
        told = ("relative_error", "nonfinite", "flushed")
        return {key: self.report[key] for key in told if key in self.report}


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier run of the same job has left.

    results  what it decided before its first step, of ``RESULTS``
    end      of its last whole line, in bytes
    lost     lines that are not as they were written
    """

    finished: list[Finished] = field(default_factory=list)
    results: Mapping[str, Any] = field(default_factory=dict)
    end: int = 0
    lost: int = 0

    def told(self, kept: int, steps: int) -> list[str]:
        """Return what a run with ``--resume`` says once it knows how many ``steps`` of its plan are kept."""
        told = []
        if self.lost:
            text = f"of the earlier run's journal, lines that are not as they were written: {self.lost}"
            told.append(f"{text}; what they tell of is done again")
        if not kept and not self.results:
            return [*told, "there is nothing to resume: the work starts at the beginning"]
        return [*told, f"resumed: {kept} of {steps} steps of the earlier run are kept"]


class Journal:
    """Append-only file. ``append`` returns after the line is on the disk."""

    def __init__(self, path: Path, plan: Plan, *, fresh: bool) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if fresh else 0)
        with writing(path):
            self._fd = os.open(path, flags, 0o666)
            self._end = os.fstat(self._fd).st_size
        if fresh:
            self._write([_text(head(plan))])

    def cut(self, size: int) -> None:
        """Drop a torn last line: new lines start at byte ``size``."""
        with writing(self.path):
            os.ftruncate(self._fd, size)
        self._end = size

    def append(self, finished: list[Finished], **results: Any) -> None:
        """Record operations whose data has been synced, and with them what was decided, of ``RESULTS``."""
        lines: list[dict[str, Any]] = [
            {"op": f.op, "hashes": dict(f.hashes), "report": dict(f.report)} for f in finished
        ]
        lines += [{name: value} for name, value in results.items()]
        self._write([_text({**line, CHECK: _check(line)}) for line in lines])

    def _write(self, lines: list[str]) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()
        with writing(self.path):
            step()
            write_all(self._fd, memoryview(data), self._end)
            step()
            os.fsync(self._fd)
        self._end += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"))


def _check(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(line).encode()).hexdigest()


def read(path: Path, plan: Plan) -> Earlier:
    """Return what an earlier run has left. Raises Refused, naming what differs, if it had another job."""
    lines, end = _lines(path)
    if not lines:
        return Earlier()
    refuse_other_job(_head(lines, path), head(plan), path)
    whole = _whole(lines)
    finished = {line["op"]: _finished(line) for line in whole if _is_finished(line, plan)}
    lost = len(lines) - 1 - len(whole)
    return Earlier(list(finished.values()), _results(whole), end, lost)


def _whole(lines: Iterable[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Return the lines, behind the one that names the job, that are as they were written."""
    return [line for line in islice(lines, 1, None) if line is not None and _as_written(line)]


def _results(whole: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: line[name] for line in whole for name in RESULTS if name in line}


def _as_written(line: Mapping[str, Any]) -> bool:
    return line.get(CHECK) == _check({name: value for name, value in line.items() if name != CHECK})


def _head(lines: list[dict[str, Any] | None], path: Path) -> dict[str, Any]:
    """Return the line that names the job. Raises OutputError where nobody can tell which job it was."""
    if lines[0] is None:
        raise OutputError(
            "the journal of the earlier run does not say which job it was",
            code="journal",
            where=str(path),
            expected="a JSON object in its first line",
            found="something else",
            hint="start again with `--overwrite` in place of `--resume`, which deletes what that run has "
            "finished",
        )
    return lines[0]


def check_asked(path: Path, wanted: Mapping[str, Any]) -> None:
    """Raise Refused, naming what differs, where the journal's run was asked for something else.

    wanted  see ``samejob.asked``
    """
    read_results(path, wanted)


def read_results(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an earlier run decided before its first step. Raises as ``check_asked`` does.

    wanted  see ``samejob.asked`` and ``samejob.identity``
    """
    lines, _ = _lines(path)
    if not lines:
        return {}
    refuse_other_job(_head(lines, path), wanted, path)
    return _results(_whole(lines))


def _lines(path: Path) -> tuple[list[dict[str, Any] | None], int]:
    """Return the whole lines of a journal, None for what is no object, and where the last of them ends."""
    try:
        raw = path.read_bytes()
    except OSError as err:
        raise OutputError(
            "cannot read the journal of the earlier run",
            code="journal",
            where=str(path),
            found=str(err.strerror),
            hint="start again with `--overwrite` in place of `--resume`",
        ) from err
    end = raw.rfind(b"\n") + 1
    return [_object(line) for line in raw[:end].split(b"\n")[:-1]], end


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_finished(line: Mapping[str, Any], plan: Plan) -> bool:
    op, hashes, report = line.get("op"), line.get("hashes"), line.get("report")
    return (
        type(op) is int
        and 0 <= op < len(plan.ops)
        and isinstance(report, dict)
        and isinstance(hashes, dict)
        and set(hashes) == set(plan.ops[op].outputs)
    )


def _finished(line: Mapping[str, Any]) -> Finished:
    return Finished(line["op"], line["hashes"], line["report"])
