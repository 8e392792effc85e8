"""Which job a journal belongs to: what may not differ between a run and its resumption, and how a difference
is told.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from w4pack import __version__
from w4pack.convert.errors import Refused
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


def refuse_other_job(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Raise Refused, naming what differs, where the job of the journal at ``path`` is not the one wanted."""
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
