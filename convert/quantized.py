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
from w4pack.convert.jobs.places import check_asked, check_standing
from w4pack.convert.jobs.running import CardMaker, OnPlan, Report, Running, check_limit
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Plan
from w4pack.convert.source.detect import Source

if TYPE_CHECKING:
    from w4pack.convert.jobs.journal import Earlier, Journal
    from w4pack.convert.quantize.team import Team


LETTERS = 8  # of a token at most, on average: how much of a data set is read
FIRST = 1 << 20  # characters of a text in which something must stand


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


def missing_extras(what: str) -> UsageError | None:
    """Return the error of torch or transformers that cannot be imported."""
    try:
        require_extras(what)
    except UsageError as err:
        return err
    return None


def _require_after_the_rest(
    source: Source,
    out: Path,
    options: ConvertOptions,
    origin: Mapping[str, str] | None,
    running: Running,
) -> None:
    """Raise UsageError where torch or transformers cannot be imported, but other mistakes first."""
    missing = missing_extras("quantizing")
    if missing is not None:
        _plan_ahead(source, out, options, origin, running, missing)
        raise missing


def _plan_ahead(
    source: Source,
    out: Path,
    options: ConvertOptions,
    origin: Mapping[str, str] | None,
    running: Running,
    missing: UsageError,
) -> tuple[Plan, tuple[Warning_, ...], ModelFacts, Source]:
    """Plan what names and headers decide. Raises what else is wrong; ``missing`` for what is measured."""
    from w4pack.convert.jobs.identity import source_files
    from w4pack.convert.jobs.places import check_place
    from w4pack.convert.jobs.running import check_device
    from w4pack.convert.planning.online import runs_online
    from w4pack.convert.planning.output import facts_of
    from w4pack.convert.planning.quantizing import plan_quantization
    from w4pack.convert.planning.unquantized import as_recorded, unquantized

    check_device(running.device)
    check_place(source.checkpoint, out, running)
    found = unquantized(source, options)
    _read_calibration(options)
    plan, more = plan_quantization(
        found.model,
        as_recorded(options),
        origin=origin,
        files=source_files(source.checkpoint, strict=running.strict),
        record={"device": running.device.partition(":")[0]},
    )
    if runs_online(options) or (options.quantize is not None and options.quantize.bpw is not None):
        raise missing  # clip ratios or schemes are measured: there is no plan without them
    told = Warning_(missing.code, "--quantize", "what it needs", f"{missing.what}: {missing.hint}")
    warnings = (*source.warnings, *found.warnings, *more, told)
    return plan, warnings, facts_of(source.config, plan), source


def quantize(
    source: Source,
    out: Path,
    options: ConvertOptions,
    origin: Mapping[str, str] | None,
    running: Running,
    on_plan: OnPlan | None,
) -> Report:
    """Quantize a source; see ``jobs.quantized.quantize_model``."""
    check_limit(running.max_kl)
    _require_after_the_rest(source, out, options, origin, running)
    check_standing(source.checkpoint, out, running)
    from w4pack.convert.hub.fill import card_of
    from w4pack.convert.modeljobs.follow import follow
    from w4pack.convert.modeljobs.prepared import prepare
    from w4pack.convert.modeljobs.quantized import quantize_model

    with _team(options, running) as (team, own), threads(own.workers):
        prepared = prepare(source, options, origin, own, _checked_texts(options, out, own), out)
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


def _read_calibration(options: ConvertOptions) -> None:
    """Raise UsageError for a calibration text on this disk that gives none."""
    from w4pack.convert.hub.texts import PREFIX
    from w4pack.convert.quantize.texts import Texts

    asked = options.quantize
    if asked is not None and asked.method == "gptq" and not (asked.calibration or "").startswith(PREFIX):
        Texts(asked.calibration, FIRST).check()


def _checked_texts(options: ConvertOptions, out: Path, running: Running) -> tuple[list[str], str] | None:
    """Return ``_texts``. Raises Refused for ``--resume`` with other options, before anything is computed."""
    from w4pack.convert.planning.unquantized import as_recorded

    found = _texts(options)
    check_asked(out, as_recorded(options, None if found is None else found[1]), running)
    return found


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
    except BaseException:
        team.abandon()
        raise
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
    from w4pack.convert.modeljobs.decided import pass_gate

    def gate(log: "Journal", earlier: "Earlier") -> None:
        pass_gate(source, options, running, log, earlier)

    with threads(running.workers):
        return convert_source(source, out, options, origin, running, card=card, on_plan=on_plan, before=gate)


def plan_only(
    source: Source,
    out: Path,
    options: ConvertOptions,
    origin: Mapping[str, str] | None,
    running: Running,
) -> tuple[Plan, tuple[Warning_, ...], ModelFacts, Source]:
    """Plan a quantization. Writes nothing.

    Without torch it is the plan of what headers decide, with a warning: the run itself cannot start, and no
    token of the calibration text is counted.
    """
    check_limit(running.max_kl)
    missing = missing_extras("quantizing")
    if missing is not None:
        return _plan_ahead(source, out, options, origin, running, missing)
    check_standing(source.checkpoint, out, running)
    from w4pack.convert.modeljobs.prepared import prepare
    from w4pack.convert.modeljobs.quantized import plan_quantized

    with threads(running.workers):
        prepared = prepare(source, options, origin, running, _checked_texts(options, out, running), out)
        return plan_quantized(prepared, out, running)
