"""What is finished: one JSON line per operation, written only after its data is on the disk.

The first line says which job this is. A line is believed only as far as its hashes: on resume every finished
tensor is hashed again, and one that does not match is made anew. A torn last line counts as absent.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w4pack.convert.errors import OutputError, Refused
from w4pack.convert.jobs.staging import step, write_all, writing
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.record import to_plain

# What may not differ between a run and its resumption, in the order in which it is named. Threads,
# verbosity and everything else that is not here may change: it does not decide bytes.
DECIDES = (
    ("w4pack", "version"),
    ("target", "target"),
    ("options", "options"),
    ("files", "source"),
    ("plan", "plan"),
)


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


def head(plan: Plan) -> dict[str, Any]:
    """Return the first line: which job this journal belongs to."""
    return {
        "w4pack": plan.version,
        "plan": plan.digest,
        "target": plan.target,
        "options": to_plain(plan.options),
        "files": [[f.name, f.size, f.header, f.sha256] for f in plan.files],
    }


class Journal:
    """Append-only file. ``append`` returns after the line is on the disk."""

    def __init__(self, path: Path, plan: Plan, *, fresh: bool) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if fresh else 0)
        with writing(path):
            self._fd = os.open(path, flags, 0o666)
            self._end = os.fstat(self._fd).st_size
        if fresh:
            self._write([head(plan)])

    def cut(self, size: int) -> None:
        """Drop a torn last line: new lines start at byte ``size``."""
        with writing(self.path):
            os.ftruncate(self._fd, size)
        self._end = size

    def append(self, finished: list[Finished]) -> None:
        """Record operations whose data has been synced."""
        self._write([{"op": f.op, "hashes": dict(f.hashes), "report": dict(f.report)} for f in finished])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        with writing(self.path):
            step()
            write_all(self._fd, memoryview(data), self._end)
            step()
            os.fsync(self._fd)
        self._end += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read(path: Path, plan: Plan) -> tuple[list[Finished], int]:
    """Return the finished operations of an earlier run, and where its last whole line ends.

    Raises Refused, naming what differs, if the journal belongs to another job.
    """
    try:
        raw = path.read_bytes()
    except OSError as err:
        raise OutputError(
            "cannot read the journal of the earlier run",
            code="journal",
            where=str(path),
            found=str(err.strerror),
            hint="start again without `--resume`",
        ) from err
    lines, end = [], 0
    for line in raw.splitlines(keepends=True):
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            break
        lines.append(value)
        end += len(line)
    if not lines:
        return [], 0
    _same_job(lines[0], head(plan), path)
    return [_finished(line) for line in lines[1:] if _is_finished(line, plan)], end


def _is_finished(line: Mapping[str, Any], plan: Plan) -> bool:
    op = line.get("op")
    return (
        isinstance(op, int)
        and 0 <= op < len(plan.ops)
        and set(line.get("hashes", {})) == set(plan.ops[op].outputs)
    )


def _finished(line: Mapping[str, Any]) -> Finished:
    return Finished(line["op"], line["hashes"], line.get("report", {}))


def _same_job(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    for key, label in DECIDES:
        old, new = found.get(key), wanted[key]
        if key == "files":
            old, new = _comparable(old, new)
        if old != new:
            raise _differs(label, old, new, path)


def _comparable(old: Any, new: Any) -> tuple[Any, Any]:
    """Drop the hashes of source files unless both runs took them: ``--strict`` may change on resume."""
    if not isinstance(old, list) or any(not isinstance(f, list) or len(f) != 4 for f in old):
        return old, new
    both = all(f[3] for f in old) and all(f[3] for f in new)
    return (old, new) if both else ([f[:3] for f in old], [f[:3] for f in new])


def _differs(label: str, found: Any, wanted: Any, path: Path) -> Refused:
    where = str(path)
    if label == "source":
        where, found, wanted = _first_difference(found, wanted, where)
    elif isinstance(found, dict) and isinstance(wanted, dict):
        where, found, wanted = _differing_fields(found, wanted, where)
    return Refused(
        f"the interrupted run had another {label}",
        code="resume-differs",
        where=where,
        expected=str(wanted),
        found=str(found),
        hint="take the options of the interrupted run, or start again without `--resume`, which deletes what "
        "that run has finished",
    )


def _differing_fields(found: Any, wanted: Any, where: str) -> tuple[str, str, str]:
    """Return (journal and fields, the interrupted run's values, those of now) of what differs alone."""
    old, new = _fields(found), _fields(wanted)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    shown = [", ".join(f"{n} {side.get(n, 'absent')}" for n in names) for side in (old, new)]
    return where, shown[0], shown[1]


def _fields(value: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return the values of nested objects by their names, ``quantize.bits``."""
    out: dict[str, Any] = {}
    for name, inner in value.items():
        out |= _fields(inner, f"{within}{name}.") if isinstance(inner, dict) else {within + name: inner}
    return out


def _first_difference(found: Any, wanted: Any, where: str) -> tuple[str, str, str]:
    """Return (file, what the earlier run had, what is there now) of the first file that differs."""
    for old, new in zip(found or [], wanted, strict=False):
        if old != new:
            for label, a, b in zip(("name", "size", "header", "sha256"), old, new, strict=False):
                if a != b:
                    return str(new[0]), f"{label} {a}", f"{label} {b}"
    return where, f"{len(found or [])} files", f"{len(wanted)} files"
