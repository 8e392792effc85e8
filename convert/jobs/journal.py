"""What is finished: one JSON line per operation, written only after its data is on the disk.

The first line says which job this is. A line is believed only as far as its hashes: on resume every finished
tensor is hashed again, and one that does not match is made anew. A torn last line counts as absent.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from w4pack import __version__
from w4pack.convert.errors import OutputError, Refused
from w4pack.convert.jobs.staging import step, write_all, writing
from w4pack.convert.planning.options import as_given
from w4pack.convert.planning.plan import Plan
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
    """What an earlier run of the same job has left. measured: the values that it found before its first step.

    end  of its last whole line, in bytes
    """

    finished: list[Finished] = field(default_factory=list)
    measured: Any = None
    end: int = 0


def head(plan: Plan) -> dict[str, Any]:
    """Return the first line: which job this journal belongs to."""
    return {
        **asked(plan.target, plan.options, strict=any(f.sha256 for f in plan.files)),
        "plan": plan.digest,
        "files": [[f.name, f.size, f.header, f.sha256] for f in plan.files],
        "codes": _decides_codes(plan.quantization or {}),
    }


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
            self._write([head(plan)])

    def cut(self, size: int) -> None:
        """Drop a torn last line: new lines start at byte ``size``."""
        with writing(self.path):
            os.ftruncate(self._fd, size)
        self._end = size

    def append(self, finished: list[Finished], measured: Mapping[str, Any] | None = None) -> None:
        """Record operations whose data has been synced, and with them what was measured."""
        lines = [{"op": f.op, "hashes": dict(f.hashes), "report": dict(f.report)} for f in finished]
        self._write([*lines, *([] if measured is None else [{"measured": dict(measured)}])])

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


def read(path: Path, plan: Plan) -> Earlier:
    """Return what an earlier run has left. Raises Refused, naming what differs, if it had another job."""
    lines, end = _lines(path)
    if not lines:
        return Earlier()
    _same_job(lines[0], head(plan), path)
    found = [line["measured"] for line in lines[1:] if "measured" in line]
    finished = {line["op"]: _finished(line) for line in lines[1:] if _is_finished(line, plan)}
    return Earlier(list(finished.values()), found[-1] if found else None, end)


def has_work(path: Path) -> bool:
    """Whether a journal, of whatever job, tells of something that is finished. Raises OutputError."""
    return path.is_file() and len(_lines(path)[0]) > 1


def check_asked(path: Path, wanted: Mapping[str, Any]) -> None:
    """Raise Refused, naming what differs, where the journal's run was asked for something else.

    wanted  see ``asked``
    """
    lines, _ = _lines(path)
    if lines:
        _same_job(lines[0], wanted, path)


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines of a journal, and where the last of them ends."""
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
    lines: list[dict[str, Any]] = []
    end = 0
    for line in raw.splitlines(keepends=True):
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            break
        lines.append(value)
        end += len(line)
    return lines, end


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
    for old, new in zip(found or [], wanted, strict=False):
        if old != new:
            for label, a, b in zip(("name", "size", "digest", "sha256"), old, new, strict=False):
                if a != b:
                    return str(new[0]), f"{label} {a}", f"{label} {b}"
    return where, f"{len(found or [])} files", f"{len(wanted)} files"
