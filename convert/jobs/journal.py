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

from w4pack import __version__
from w4pack.convert.errors import OutputError, Refused
from w4pack.convert.jobs.writing import step, write_all, writing
from w4pack.convert.planning.options import as_given
from w4pack.convert.planning.plan import Plan, SourceFile
from w4pack.convert.planning.record import to_plain

# What may not differ between a run and its resumption, in the order in which it is named. Threads,
# verbosity and everything else that is not here may change: it does not decide bytes.
DECIDES = (
    ("w4pack", "another version of w4pack"),
    ("target", "another target"),
    ("options", "other options"),
    ("strict", "other options"),
    ("files", "another source"),
    ("codes", "another calibration text or device"),
    ("plan", "another plan"),
)
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


def head(plan: Plan) -> dict[str, Any]:
    """Return the first line: which job this journal belongs to."""
    job = identity(plan.target, plan.options, plan.files, plan.quantization or {})
    return {**job, "plan": plan.digest}


def identity(
    target: str, options: Mapping[str, Any], files: Iterable[SourceFile], record: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the part of ``head`` that is known before schemes are chosen.

    record  what decides bytes beside options and files; see ``Plan.quantization``
    """
    rows = [[f.name, f.size, f.header, f.sample, f.sha256] for f in files]
    asked_for = asked(target, options, strict=any(row[-1] for row in rows))
    return {**asked_for, "files": rows, "codes": _decides_codes(record)}


def asked(target: str, options: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return the part of ``head`` that is known before there is a plan. options: see ``Plan``."""
    return {"w4pack": __version__, "target": target, "options": to_plain(options), "strict": strict}


def _decides_codes(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides codes beside options and source: the device, and the tokens by their digest."""
    text = {name: value for name, value in record.get("calibration", {}).items() if name != "sketch"}
    return {"device": record.get("device"), "calibration": text}


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
    _same_job(_head(lines, path), head(plan), path)
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

    wanted  see ``asked``
    """
    read_results(path, wanted)


def read_results(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an earlier run decided before its first step. Raises as ``check_asked`` does.

    wanted  see ``asked`` and ``identity``
    """
    lines, _ = _lines(path)
    if not lines:
        return {}
    _same_job(_head(lines, path), wanted, path)
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


def _same_job(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    for key, what in DECIDES:
        if key in wanted and found.get(key) != wanted[key]:
            raise _differs(key, what, found.get(key), wanted[key], path)


def _differs(key: str, what: str, old: Any, new: Any, path: Path) -> Refused:
    """Return the refusal. old: of the interrupted run, which is what is expected; new: of this one."""
    where, expected, found = str(path), str(old), str(new)
    if key == "files":
        where, expected, found = _first_difference(old, new, where)
    elif key == "options" and isinstance(old, dict):
        expected, found = _differing(as_given(old), as_given(new))
    elif key == "strict":
        expected, found = ("--strict" if one else "without --strict" for one in (old, new))
    elif isinstance(old, dict) and isinstance(new, dict):
        expected, found = _differing(_fields(old), _fields(new))
    return Refused(
        f"the interrupted run had {what}",
        code="resume-differs",
        where=where,
        expected=expected,
        found=found,
        hint="take what the interrupted run had, or start again with `--overwrite` in place of `--resume`, "
        "which deletes what that run has finished",
    )


def _differing(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, str]:
    """Return both sides of the values that differ alone; of a value that only one side has, that one's."""
    names = [name for name in old if name in new and old[name] != new[name]]
    names = names or [name for name in {**old, **new} if old.get(name) != new.get(name)]
    sides = [", ".join(side[name] for name in names if name in side) for side in (old, new)]
    return sides[0] or "nothing of it", sides[1] or "nothing of it"


def _fields(value: Mapping[str, Any], within: str = "") -> dict[str, str]:
    """Return the values of nested objects by their names: ``calibration.tokens 512``."""
    out: dict[str, str] = {}
    for name, inner in value.items():
        named = f"{within}{name}"
        out |= _fields(inner, f"{named}.") if isinstance(inner, dict) else {named: f"{named} {inner}"}
    return out


def _first_difference(found: Any, wanted: Any, where: str) -> tuple[str, str, str]:
    """Return (file, what the earlier run had, what is there now) of the first file that differs."""
    rows = [row for row in found if isinstance(row, list) and row] if isinstance(found, list) else []
    old, new = ({str(row[0]): row[1:] for row in side} for side in (rows, wanted))
    for name in (*new, *old):
        if name not in old or name not in new:
            was, is_now = ("the file" if name in side else "no such file" for side in (old, new))
            return name, was, is_now
        for label, a, b in zip(
            ("size", "digest", "values with the digest", "sha256"), old[name], new[name], strict=False
        ):
            if a != b:
                return name, f"{label} {a}", f"{label} {b}"
    return where, f"{len(rows)} files", f"{len(wanted)} files"
