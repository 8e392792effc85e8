"""A process that another one leads: it sends its part of the calibration text through, and writes nothing.

The leader says what to do with each layer, and at the end that OUT is there. It is lost when its process ends
before that; what it has written can be resumed like any other run.
"""

import time
from pathlib import Path

import torch

from w4pack.convert.errors import W4PackError
from w4pack.convert.jobs.running import Report, Running
from w4pack.convert.modeljobs.measuring import settled, settled_plan
from w4pack.convert.modeljobs.modelrun import FINISHED, QUANTIZE, REPEAT, model_run
from w4pack.convert.modeljobs.prepared import Prepared
from w4pack.convert.modeljobs.quantized import planned
from w4pack.convert.planning.plan import Plan
from w4pack.convert.quantize.team import Team, connected, lost


def follow(prepared: Prepared, out: Path, running: Running, team: Team) -> Report:
    """Work for the leader of a team until its output is published. Returns its report, without errors.

    Raises W4PackError where the leader plans another job, stops, or is gone.
    """
    started = time.monotonic()
    plan, warnings = planned(prepared)
    with running.stop.watching(), connected():  # a signal reaches the leader, too, which says when to stop
        digest = team.told()
        if digest not in (plan.digest, FINISHED):
            raise W4PackError(
                "the processes plan different jobs",
                code="team-differs",
                where=f"process {team.rank} of {team.size}",
                expected=f"plan {digest[:16]}, as the leading process",
                found=plan.digest[:16],
                hint="every machine needs the same source, calibration text and version",
            )
        if digest != FINISHED:
            _work(prepared, plan, team)
    return Report(out, plan, warnings, time.monotonic() - started, {}, followed=True)


def _work(prepared: Prepared, plan: Plan, team: Team) -> None:
    if prepared.guides:
        # Of two cards that measure, one may break a tie in another way, and guides are in no digest.
        prepared = settled(prepared, team.told())
        plan = settled_plan(plan, prepared)
    model = model_run(prepared, plan, team)
    with prepared.reading():
        for index in range(model.layers):
            step = team.told()
            if step == QUANTIZE:
                model.quantize(index)
            elif step == REPEAT:
                model.repeat(index, _not_asked)
            else:
                raise lost("it was stopped")
    if team.told() != FINISHED:
        raise lost("its result was not published")


def _not_asked(name: str) -> torch.Tensor:
    raise AssertionError(f"only the leader reads {name}")
