"""One conversion from source to published output, and the report of it."""

import time
from collections.abc import Mapping
from pathlib import Path

from w4pack.convert.core.facts import Warning_
from w4pack.convert.events import Reporter, warning_fields
from w4pack.convert.jobs import manifest, sidefiles
from w4pack.convert.jobs.complete import finished_before
from w4pack.convert.jobs.identity import refuse_damaged_source, source_files
from w4pack.convert.jobs.places import check_place, check_resumed, settle_place, tell_discarded
from w4pack.convert.jobs.recipe import ConvertRecipe
from w4pack.convert.jobs.running import CardMaker, OnPlan, Report, Running
from w4pack.convert.jobs.staged import Before, run_plan
from w4pack.convert.planning.making import make_plan
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.output import planned_facts
from w4pack.convert.planning.plan import Plan
from w4pack.convert.source.detect import Source
from w4pack.convert.source.written import warnings_of


def plan_conversion(
    source: Source, out: Path, options: ConvertOptions, origin: Mapping[str, str] | None, running: Running
) -> tuple[Plan, tuple[Warning_, ...]]:
    """Plan, and refuse what the run itself would refuse: the source, the options, the place of OUT.

    Writes nothing. Raises Refused, SourceError, OutputError, or VerifyError for a damaged source of ours.
    """
    check_place(source.checkpoint, out, running)
    if source.problems:
        refuse_damaged_source(source.checkpoint, running.workers)
    plan, warnings = make_plan(
        source, options, origin, source_files(source.checkpoint, strict=running.strict)
    )
    check_resumed(out, plan, running)
    tell_discarded(out, running)
    return plan, (*warnings_of(source), *warnings)


def convert_source(
    source: Source,
    out: Path,
    options: ConvertOptions,
    origin: Mapping[str, str] | None,
    running: Running,
    *,
    card: CardMaker | None = None,
    on_plan: OnPlan | None = None,
    before: Before | None = None,
) -> Report:
    """Plan, execute and publish.

    card     ``card(plan, errors) -> str`` makes the output's README; None: no card
    on_plan  called with (plan, warnings, facts of the output, source) before anything is written
    before   called after that, where there is something to do; what it raises stops the job; see ``Before``

    Raises Refused before anything is written; OutputError, SourceError, Interrupted while running. OUT
    appears complete or not at all.
    """
    started = time.monotonic()
    settle_place(source.checkpoint, out, running)
    plan, warnings = plan_conversion(source, out, options, origin, running)
    if on_plan is not None:
        on_plan(plan, warnings, planned_facts(source, plan), source)
    for warning in warnings:
        running.reporter.event("warning", **warning_fields(warning))
    refuse_damaged_source(source.checkpoint, running.workers)
    if running.resume and finished_before(out, plan, source, running.workers):
        return Report(out, plan, warnings, time.monotonic() - started, {}, was_complete=True)
    written = run_plan(
        plan,
        ConvertRecipe(source, plan, strict=running.strict, packer=running.packer),
        out,
        running,
        lambda folder, done: _write_rest(folder, done, plan, source, card),
        before,
    )
    tell_values(written, running.reporter)
    seconds = time.monotonic() - started
    return Report(out, plan, warnings, seconds, _errors(written), packed_on=running.packed_on(plan))


def tell_values(written: manifest.Written, reporter: Reporter) -> None:
    """Warn of values that were counted on the way."""
    told = (
        (
            "flushed",
            "values that float16 holds",
            "smaller ones",
            "values are smaller than float16 holds and became 0; `--dtype bfloat16` keeps them",
        ),
        (
            "nonfinite",
            "finite values",
            "not finite",
            "values are not finite; copied as they are, `w4pack verify` reports them",
        ),
    )
    for name, report in written.reports.items():
        for code, expected, found, text in told:
            count = report.get(code)
            if count:
                reporter.event(
                    "warning",
                    code=code,
                    where=name,
                    expected=expected,
                    found=f"{count} {found}",
                    text=f"{name}: {count} {text}",
                )


def _errors(written: manifest.Written) -> dict[str, float]:
    """Return the relative error of each re-quantized layer."""
    return {n: float(r["relative_error"]) for n, r in written.reports.items() if "relative_error" in r}


def _write_rest(
    folder: Path,
    written: manifest.Written,
    plan: Plan,
    source: Source,
    card: CardMaker | None,
) -> None:
    value = manifest.build(plan, source, written, source.checkpoint.manifest())
    side_files = sidefiles.copy_side_files(source.checkpoint, folder)
    text = card(plan, _errors(written)) if card else None
    sidefiles.write_rest(folder, plan, source.config, side_files, value, text)
