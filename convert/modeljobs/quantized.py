"""Quantizing a 16-bit model: plan, layer after layer (``quantizerun``), publish."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from w4pack.convert.core.facts import ModelFacts, Warning_
from w4pack.convert.events import warning_fields
from w4pack.convert.jobs.complete import finished_before
from w4pack.convert.jobs.conversion import tell_values
from w4pack.convert.jobs.journal import Earlier, Finished, Journal
from w4pack.convert.jobs.outfiles import OutFiles
from w4pack.convert.jobs.places import check_place, check_resumed, settle_place, tell_discarded
from w4pack.convert.jobs.running import OnPlan, Report, Running
from w4pack.convert.jobs.staged import run_staged
from w4pack.convert.modeljobs.decided import keep_chosen, pass_gate
from w4pack.convert.modeljobs.mixed import told
from w4pack.convert.modeljobs.modelrun import FINISHED, say
from w4pack.convert.modeljobs.prepared import Prepared, plan_of
from w4pack.convert.modeljobs.quantizerun import QuantizeRun
from w4pack.convert.modeljobs.rest import CardMaker, write_rest
from w4pack.convert.planning.output import facts_of
from w4pack.convert.planning.plan import Plan
from w4pack.convert.quantize.team import Team
from w4pack.convert.source.detect import Source


def planned(prepared: Prepared) -> tuple[Plan, tuple[Warning_, ...]]:
    """Plan a quantization, wherever it goes."""
    source = prepared.source
    plan, more = plan_of(prepared)
    return plan, (*source.warnings, *prepared.warnings, *more)


def plan_quantized(
    prepared: Prepared, out: Path, running: Running
) -> tuple[Plan, tuple[Warning_, ...], ModelFacts, Source]:
    """Plan, tell what was chosen by measurement, and refuse what the run itself would. Writes nothing."""
    source = prepared.source
    check_place(source.checkpoint, out, running)
    for line in told(prepared.chosen or {}):
        running.reporter.event("note", text=f"--bpw: {line}")
    plan, warnings = planned(prepared)
    check_resumed(out, plan, running)
    tell_discarded(out, running)
    return plan, warnings, facts_of(source.config, plan), source


def quantize_model(
    prepared: Prepared,
    out: Path,
    running: Running,
    *,
    card: CardMaker | None = None,
    on_plan: OnPlan | None = None,
    team: Team | None = None,
) -> Report:
    """Quantize a model and publish it. Raises Refused before anything is written; see ``convert_source``.

    ``team``: the processes that this one leads; the others call ``follow.follow``.

    VerifyError where the result no longer predicts what the source does: then nothing is published.
    """
    started = time.monotonic()
    settle_place(prepared.source.checkpoint, out, running)
    plan, warnings, facts, source = plan_quantized(prepared, out, running)
    if on_plan is not None:
        on_plan(plan, warnings, facts, source)
    for warning in warnings:
        running.reporter.event("warning", **warning_fields(warning))
    if running.resume and finished_before(out, plan, prepared.source, running.workers):
        say(team, FINISHED)
        return Report(out, plan, warnings, time.monotonic() - started, {}, was_complete=True)
    outliers: dict[str, Any] = {}
    done: list[QuantizeRun] = []

    def work(files: OutFiles, log: Journal, earlier: Earlier) -> Mapping[int, Finished]:
        if prepared.chosen is not None:
            keep_chosen(prepared.chosen, log, earlier)
        if prepared.options.rotate != "none":
            gate = pass_gate(source, prepared.options, running, log, earlier, prepared.device)
            before, after = zip(*gate.outliers, strict=True)
            outliers["outliers"] = {"source": before, "rotated": after}
        run = QuantizeRun(prepared, plan, files, log, running, team)
        done.append(run)
        run.adopt(earlier)
        run.run()
        return run.finished

    written = run_staged(
        plan,
        out,
        running,
        lambda folder, w: write_rest(
            folder, w, done[0].told, source, done[0].outcome | outliers, card, plan.digest
        ),
        work,
    )
    say(team, FINISHED)
    tell_values(written, running.reporter)
    errors = {n: float(r["error"]) for n, r in written.reports.items() if "error" in r}
    seconds = time.monotonic() - started
    warnings = (*warnings, *done[0].warnings)
    return Report(out, done[0].told, warnings, seconds, errors, packed_on=running.packed_on(plan))
