"""Quantizing and rotating as the API calls them: the extras are there, or are said to be missing.

Imports nothing heavy when loaded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from w4pack.convert.core.facts import ModelFacts, Warning_
from w4pack.convert.errors import UsageError, require_extra
from w4pack.convert.jobs.conversion import CardMaker, OnPlan, Report, Running
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Plan
from w4pack.convert.source.detect import Source

if TYPE_CHECKING:
    from w4pack.convert.quantize.team import Team


LETTERS = 8  # of a token at most, on average: how much of a data set is read


def require_extras(what: str) -> None:
    """Raise UsageError unless torch and transformers are installed."""
    require_extra(what, ("torch", "transformers"), "quantize")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use that many threads within an operation."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def quantize(
    source: Source,
    out: Path,
    options: ConvertOptions,
    origin: Mapping[str, str] | None,
    running: Running,
    on_plan: OnPlan | None,
) -> Report:
    """Quantize a source; see ``jobs.quantized.quantize_model``."""
    require_extras("quantizing")
    from w4pack.convert.hub.fill import card_of
    from w4pack.convert.modeljobs.follow import follow
    from w4pack.convert.modeljobs.prepared import prepare
    from w4pack.convert.modeljobs.quantized import quantize_model

    with _team(options, running) as (team, own), threads(own.workers):
        prepared = prepare(source, options, origin, own, _texts(options))
        if team is not None and not team.leads:
            return follow(prepared, out, own, team)
        return quantize_model(
            prepared,
            out,
            own,
            card=lambda plan, report: card_of(source, plan, origin, {}, report),
            on_plan=on_plan,
            team=team,
        )


def _texts(options: ConvertOptions) -> tuple[list[str], str] | None:
    """Return the calibration text of a data set on the Hub; None for text that lies on this disk."""
    from w4pack.convert.hub import texts

    asked = options.quantize
    if asked is None or asked.method != "gptq" or asked.calibration is None:
        return None
    if not asked.calibration.startswith(texts.PREFIX):
        return None
    return texts.read(asked.calibration, LETTERS * (options.seed + 1) * asked.samples * asked.seqlen)


@contextmanager
def _team(options: ConvertOptions, running: Running) -> "Iterator[tuple[Team | None, Running]]":
    """Join the processes that torchrun started, if it did: (the team, how this process runs)."""
    from w4pack.convert.quantize.team import team_of

    team = team_of(running.device)
    if team is None:
        yield None, running
        return
    try:
        if options.quantize is not None and options.quantize.method != "gptq":
            raise UsageError(
                "nothing is calibrated, so there is nothing to share between processes",
                where="--quantize",
                expected="gptq, or one process",
                found=f"{options.quantize.method}, {team.size} processes",
            )
        yield team, replace(running, device=team.device)
        team.meet()
    finally:
        team.leave()


def rotate(
    source: Source,
    out: Path,
    options: ConvertOptions,
    origin: Mapping[str, str] | None,
    running: Running,
    card: CardMaker,
    on_plan: OnPlan | None,
) -> Report:
    """Write the rotated 16-bit model of a source, once it has passed the gate."""
    require_extras("rotating")
    from w4pack.convert.jobs.conversion import convert_source
    from w4pack.convert.modeljobs.gate import check_rotation

    def gate() -> None:
        check_rotation(source, options, running.reporter)

    with threads(running.workers):
        return convert_source(source, out, options, origin, running, card=card, on_plan=on_plan, before=gate)


def plan_only(
    source: Source,
    out: Path,
    options: ConvertOptions,
    origin: Mapping[str, str] | None,
    running: Running,
) -> tuple[Plan, tuple[Warning_, ...], ModelFacts, Source]:
    """Plan a quantization. Writes nothing."""
    require_extras("quantizing")
    from w4pack.convert.modeljobs.prepared import prepare
    from w4pack.convert.modeljobs.quantized import plan_quantized

    with threads(running.workers):
        return plan_quantized(prepare(source, options, origin, running, _texts(options)), out, running)
