"""A plan's operations in the staging folder, and one rename that publishes what they made."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from w4pack.convert.errors import OutputError, Refused, SourceError, VerifyError, W4PackError
from w4pack.convert.jobs import execute, manifest, work
from w4pack.convert.jobs.execute import Executor, Interrupted
from w4pack.convert.jobs.journal import Earlier, Finished, Journal
from w4pack.convert.jobs.outfiles import OutFiles
from w4pack.convert.jobs.places import check_disk
from w4pack.convert.jobs.running import Running
from w4pack.convert.jobs.staging import Staging
from w4pack.convert.planning.plan import Plan

# Errors after which `--resume` may work: a source that is read again, a limit that decides no byte.
PASSING = ("resume-differs", "unreadable", "file-too-short", "quality")

# Errors by which nothing that was made is of use, whatever the source.
FUTILE = ("rotation-differs",)

WriteRest = Callable[[Path, manifest.Written], None]  # staging folder, what was written
# Does what is left of a plan: (files, journal, what an earlier run left) -> everything that is finished.
Operations = Callable[[OutFiles, Journal, Earlier], Mapping[int, Finished]]
# Decides, before the first operation, whether there is to be one: (journal, what an earlier run left).
Before = Callable[[Journal, Earlier], None]


def run_plan(
    plan: Plan,
    recipe: work.Recipe,
    out: Path,
    running: Running,
    write_rest: WriteRest,
    before: Before | None = None,
) -> manifest.Written:
    """Execute a plan in the staging folder and publish it. ``write_rest`` adds the other files."""

    def operations(files: OutFiles, log: Journal, earlier: Earlier) -> Mapping[int, Finished]:
        if before is not None:
            before(log, earlier)
        executor = Executor(plan, recipe, files, log, running.reporter, running.stop)
        executor.adopt(earlier.finished)
        running.tell_kept(earlier, len(executor.finished), plan)
        whole = plan.rotation is not None  # tensors are made as a whole: one at a time
        executor.run(1 if whole else running.workers)
        return executor.finished

    return run_staged(plan, out, running, write_rest, operations)


def _opened(
    stack: ExitStack, staging: Staging, plan: Plan, *, resume: bool
) -> tuple[OutFiles, Journal, Earlier]:
    """Open what is written, and what an earlier run finished; ``stack`` closes it.

    Raises OutputError; then nothing is begun, and of a new run no folder stays. Only on a full disk, where
    `--resume` is what the message names.
    """
    try:
        log, earlier = execute.open_journal(staging.journal, plan, resume=resume)
        stack.callback(log.close)
        return stack.enter_context(OutFiles(staging.out, plan)), log, earlier
    except OutputError as err:
        if not resume and err.code != "disk-full":
            staging.discard()
        raise


def run_staged(
    plan: Plan, out: Path, running: Running, write_rest: WriteRest, operations: Operations
) -> manifest.Written:
    """Do a plan's operations in the staging folder and publish it. ``write_rest`` adds the other files."""
    with running.stop.watching():
        return _staged(plan, out, running, write_rest, operations)


def _staged(
    plan: Plan, out: Path, running: Running, write_rest: WriteRest, operations: Operations
) -> manifest.Written:
    staging = Staging(out)
    check_disk(plan, staging)
    try:
        resume = staging.prepare(overwrite=running.overwrite, resume=running.resume)
        with ExitStack() as stack:
            files, log, earlier = _opened(stack, staging, plan, resume=resume)
            finished = operations(files, log, earlier)
            samples = {tensor.name: files.sample(tensor) for tensor in plan.tensors}
        hashes, reports = execute.tensor_hashes(finished), execute.reports(plan, finished)
        written = manifest.Written(hashes, reports, samples)
        write_rest(staging.out, written)
        staging.publish(overwrite=running.overwrite)
        return written
    except (SourceError, Refused, VerifyError) as err:
        if err.code not in PASSING:
            staging.discard()  # the source itself is at fault: there is nothing to go on with
        raise
    except Interrupted as err:
        if not staging.unfinished:
            staging.discard()  # there is nothing yet
            err.where = err.hint = None
        raise
    except W4PackError as err:
        if err.code in FUTILE:
            staging.discard()
        raise
    finally:
        staging.close()
