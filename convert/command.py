"""What ``convert`` prints: the plan, what happens, what was done. Called with the parsed options.

Data goes to stdout, everything else to stderr; with ``--json`` stdout holds JSON only.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from w4pack.convert import api, formats
from w4pack.convert.console import Given, reporter_of, say, warn, where_of
from w4pack.convert.core.facts import ModelFacts, Warning_
from w4pack.convert.errors import UsageError
from w4pack.convert.events import (
    JsonLines,
    Reporter,
    size_text,
    time_text,
    warning_fields,
)
from w4pack.convert.jobs.execute import StopFlag
from w4pack.convert.jobs.running import Report, Running, check_device
from w4pack.convert.jobs.work import Packer, packs_tiles
from w4pack.convert.outputs import run_push, running_of
from w4pack.convert.planning.options import HUB_FILE_LIMIT, ConvertOptions
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.quantize_options import CALIBRATED, QuantizeOptions, flag
from w4pack.convert.planning.show import plan_event, text
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.quantized import require_extras
from w4pack.convert.source.detect import Source

if TYPE_CHECKING:
    from w4pack.convert.hub.access import Access


PackerOn = Callable[[str], Packer | None]  # the name of a device -> what packs there; None: the CPU


def _convert_options(given: Given) -> ConvertOptions:
    return ConvertOptions(
        to=given["to"],
        dtype=given["dtype"],
        max_shard_size=given["max_shard_size"],
        regroup=given["regroup"],
        widen=given["widen"],
        pad_for_tp=given["pad_for_tp"],
        fold_act_order=given["fold_act_order"],
        round_scales=given["round_scales"],
        zero_reading=given["zero_reading"],
        source_format=given["source_format"],
        ignore_key=tuple(given["ignore_key"]),
        ignore=tuple(given["ignore"]),
        rotate=given["rotate"],
        tp=given["tp"],
        seed=given["seed"],
        quantize=_quantize_options(given),
    )


def _quantize_options(given: Given) -> QuantizeOptions | None:
    """Return how to quantize. Raises UsageError for its options without `--quantize`."""
    names = [f.name for f in fields(QuantizeOptions) if f.name != "method"]
    chosen = {n: given[n] for n in [*names, "max_kl"] if given[n] is not None and given[n] != ()}
    if given["quantize"] is None:
        for name, value in chosen.items():
            named = flag(name, value)
            raise UsageError(f"`{named}` has no meaning without `--quantize`", where=named)
        return None
    if given["quantize"] == "rtn":
        idle = [flag(name, chosen[name]) for name in (*CALIBRATED, "max_kl") if name in chosen]
        idle += ["--seed"] if given["seed"] and given["rotate"] == "none" else []
        for named in idle:
            what = f"`{named}` has no meaning with `--quantize rtn`, which calibrates nothing"
            raise UsageError(what, where=named, expected="--quantize gptq")
    chosen.pop("max_kl", None)  # decides no bytes
    if "module_bits" in chosen:
        chosen["module_bits"] = tuple(chosen["module_bits"])
    return QuantizeOptions(given["quantize"], **chosen)


def _packer(given: Given, options: ConvertOptions, packer_on: PackerOn) -> tuple[Packer | None, str | None]:
    """Return what packs on the device asked for, and a note. Raises UsageError if the option has nothing to
    act on, or the device cannot pack; where it also quantizes, which any card can, that is noted and the CPU
    packs.
    """
    device, layout = given["device"] or "cpu", TARGETS[options.to].layout
    check_device(device)
    if device == "cpu":
        return None, None
    if layout is None or not packs_tiles(formats.get(layout)):
        if options.quantize is None:
            raise UsageError(
                "`--device` has nothing to act on: no code is chosen, and no tile is packed",
                where="--device",
                expected="`--quantize`, or `--to` marlin or marlin-legacy",
                found=f"--to {options.to}",
            )
        return None, None
    try:
        return packer_on(device), None
    except UsageError as err:
        if options.quantize is None:
            raise
        return None, f"the codes are packed on the CPU: {err.what}"


def run_convert(given: Given, stop: StopFlag, packer_on: PackerOn) -> None:
    """Plan, print the plan, work, print what was done."""
    options, out = _convert_options(given), Path(given["out"])
    _check_given(given, options)
    packer, note = _packer(given, options, packer_on)
    reporter = reporter_of(given)
    running = running_of(given, stop, reporter, packer)
    on_plan = partial(_show_plan, given, out, reporter, note)
    try:
        if given["dry_run"]:
            _dry_run(given, options, running, note)
            return
        access = _preflight(given, options, running) if given["push_to"] else None
        report = api.convert(
            given["src"],
            out,
            options=options,
            where=where_of(given),
            running=running,
            verify_after=given["verify_after"],
            on_plan=on_plan,
        )
    finally:
        reporter.close()
    if report.followed:
        return
    _tell_done(given, report)
    if given["push_to"]:
        run_push({**given, "repo_id": given["push_to"], "out": str(out)}, access)


def _check_given(given: Given, options: ConvertOptions) -> None:
    """Refuse or tell what makes no sense with where OUT goes. Raises UsageError."""
    if given["private"] and not given["push_to"]:
        raise UsageError("`--private` has no meaning without `--push-to`", where="--private")
    if options.max_shard_size > HUB_FILE_LIMIT:
        if given["push_to"]:
            raise UsageError(
                "the Hub takes no file of this size",
                where="--max-shard-size",
                expected=f"at most {HUB_FILE_LIMIT} bytes",
                found=str(options.max_shard_size),
            )
        text = f"shards above {HUB_FILE_LIMIT} bytes cannot be uploaded to the Hub"
        reporter_of(given).event(
            "warning",
            code="shard-size",
            where="--max-shard-size",
            expected=f"at most {HUB_FILE_LIMIT}",
            found=str(options.max_shard_size),
            text=text,
        )


def _dry_run(given: Given, options: ConvertOptions, running: Running, note: str | None) -> None:
    """Show the plan. Raises UsageError after it, where what the run needs cannot be imported."""
    made = api.plan(given["src"], given["out"], options=options, where=where_of(given), running=running)
    _show_plan(given, Path(given["out"]), running.reporter, note, *made, dry=True)
    if options.quantize is not None:
        require_extras("quantizing")
    if given["as_json"]:
        for warning in made[1]:
            running.reporter.event("warning", **warning_fields(warning))
        running.reporter.event("done", out=None, dry_run=True)


def _show_plan(
    given: Given,
    out: Path,
    reporter: Reporter,
    note: str | None,
    plan: Plan,
    warnings: Sequence[Warning_],
    facts: ModelFacts,
    source: Source,
    *,
    dry: bool = False,
) -> None:
    """Print the plan, then the note: nothing is refused any more."""
    _print_plan(given, out, plan, warnings, facts, source, dry=dry)
    if note is not None:
        reporter.event("note", text=note)


def _print_plan(
    given: Given,
    out: Path,
    plan: Plan,
    warnings: Sequence[Warning_],
    facts: ModelFacts,
    source: Source,
    *,
    dry: bool,
) -> None:
    if given["quiet"] and not given["as_json"]:
        return
    event = plan_event(plan, warnings, facts, source)
    if given["as_json"]:
        JsonLines().event("plan", **event)
        return
    print(
        text(event, plan, out, verbose=given["verbose"]), file=sys.stdout if dry else sys.stderr, flush=True
    )
    if dry:
        warn(event["warnings"])


def _tell_done(given: Given, report: Report) -> None:
    if given["as_json"]:
        JsonLines().event(
            "done",
            out=str(report.out),
            target=report.target,
            lossless=report.lossless,
            bytes=report.plan.output_bytes,
            seconds=round(report.seconds, 3),
            relative_errors=dict(sorted(report.errors.items())),
            verified=given["verify_after"],
            resumed_complete=report.was_complete,
            packed_on=report.packed_on,
            warnings=len(report.warnings),
        )
        return
    if given["quiet"]:
        return
    quantized = report.plan.quantization is not None
    for name, error in () if quantized else sorted(report.errors.items()):
        say(f"{name}: re-quantized, relative error {error:.3g}")
    if report.was_complete:
        say(f"{report.out} is already the complete result of this command; nothing was written")
        return
    rate = report.plan.source_bytes / max(report.seconds, 1e-9)
    say(
        f"wrote {report.out}: {size_text(report.plan.output_bytes)} in {time_text(report.seconds)} "
        f"({size_text(int(rate))}/s), {'lossless' if report.lossless else 'not lossless'}{_packed(report)}",
        f"verified against {given['src']}: every tensor is as it should be"
        if given["verify_after"]
        else _next(report, given),
    )


def _packed(report: Report) -> str:
    return "" if report.packed_on in (None, "cpu") else f", packed on {report.packed_on}"


def _next(report: Report, given: Given) -> str:
    if report.plan.quantization is not None:
        return f"next: w4pack eval {report.out} --text FILE --against {given['src']}"
    return f"next: w4pack verify {report.out} --against {given['src']}"


def _preflight(given: Given, options: ConvertOptions, running: Running) -> "Access":
    """Find out before the conversion whether the upload can work: token, rights, the card's header."""
    from w4pack.convert.hub.access import preflight

    made, _, _, source = api.plan(
        given["src"], given["out"], options=options, where=where_of(given), running=running
    )
    card = api.card_for(source, made, given["src"], where_of(given))
    return preflight(given["push_to"], None, given["private"], card)
