"""Where OUT may be: apart from the source, free or to be replaced, with room, and nobody else at work."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from w4pack.convert.errors import OutputError
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.jobs import journal, samejob
from w4pack.convert.jobs.complete import finished_plan, refuse_other_source
from w4pack.convert.jobs.identity import folder_of
from w4pack.convert.jobs.running import Running
from w4pack.convert.jobs.staging import Staging, check_apart
from w4pack.convert.jobs.writing import existing_parent
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Plan


def settle_place(source: Checkpoint, out: Path, running: Running) -> None:
    """Put OUT back if an overwrite died; raise OutputError if it cannot be where it is asked to be."""
    _check_apart(source, out)
    Staging(out).put_back()
    check_place(source, out, running)


def check_place(source: Checkpoint, out: Path, running: Running) -> None:
    """Raise OutputError if OUT cannot be where it is asked to be; with ``--resume`` the plan decides more."""
    _check_apart(source, out)
    if not running.resume:
        Staging(out).check(overwrite=running.overwrite, resume=False)


def check_standing(source: Checkpoint, out: Path, running: Running) -> None:
    """As ``check_place``, but whatever other process is at work: each of a team may ask, before it begins."""
    _check_apart(source, out)
    if not running.resume:
        Staging(out).check_standing(overwrite=running.overwrite, resume=False)


def _check_apart(source: Checkpoint, out: Path) -> None:
    folder = folder_of(source)
    if folder is not None:
        check_apart(folder, out)


def check_asked(out: Path, options: ConvertOptions, running: Running) -> None:
    """Raise Refused where ``--resume`` was given with other options than the interrupted run's.

    As ``check_resumed`` does, but before there is a plan, for which schemes may be measured.
    options  as a plan records them
    """
    log = Staging(out).journal
    if running.resume and log.is_file():
        journal.check_asked(log, samejob.asked(options.to, options.chosen(), strict=running.strict))


def decided_before(out: Path, job: Mapping[str, Any], running: Running) -> Mapping[str, Any]:
    """Return what an interrupted run decided before its first step, where ``--resume`` was given.

    job  see ``samejob.identity``. Raises Refused where the interrupted run had another one.
    """
    log = Staging(out).journal
    return journal.read_results(log, job) if running.resume and log.is_file() else {}


def check_resumed(out: Path, plan: Plan, running: Running) -> None:
    """Raise what a run with ``--resume`` would raise before it does anything: the plan is known now.

    Raises OutputError for an OUT that it cannot replace, Refused for an interrupted run of another job, or
    for a source that is another one since OUT was made.
    """
    if running.resume and finished_plan(out, plan) is None:
        staging = Staging(out)
        if not running.overwrite:
            refuse_other_source(out, plan)
        staging.check(overwrite=running.overwrite, resume=True)
        if staging.journal.is_file():
            journal.read(staging.journal, plan)


def tell_discarded(out: Path, running: Running) -> None:
    """Say that ``--overwrite`` deletes the work of an unfinished run, before anything is deleted."""
    if running.overwrite and not running.resume and Staging(out).unfinished:
        text = "the unfinished run of this output is discarded; `--resume` would go on with it"
        running.reporter.event("note", text=text)


def check_disk(plan: Plan, staging: Staging) -> None:
    """Raise OutputError if the file system cannot hold the output."""
    place = existing_parent(staging.root)
    have = (
        sum(f.stat().st_blocks * 512 for f in staging.out.glob("*.safetensors"))
        if staging.out.is_dir()
        else 0
    )
    needed = plan.disk_bytes - have
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OutputError(
            "not enough room for the output",
            code="disk-full",
            where=str(place),
            expected=f"{needed:,} bytes",
            found=f"{free:,} bytes free",
            hint="free some space, or choose another OUT",
        )
