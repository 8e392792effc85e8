"""The jobs of w4pack as Python functions. Each command of the command line calls exactly one of them.

Sources and paths are folders or Hub ids (``ORG/NAME``, ``ORG/NAME@revision``). Everything a user can cause is
raised as a ``W4PackError``.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4pack.convert.core.facts import ModelFacts, Warning_
from w4pack.convert.errors import Refused, SourceError, UsageError
from w4pack.convert.events import Quiet, Reporter
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.hub.resolve import HubSource, parse_source
from w4pack.convert.jobs.conversion import convert_source, plan_conversion
from w4pack.convert.jobs.identity import folder_of
from w4pack.convert.jobs.running import CardMaker, OnPlan, Report, Running
from w4pack.convert.opening import Where, opened
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.output import planned_facts
from w4pack.convert.planning.plan import Plan
from w4pack.convert.source.detect import Source, read_source
from w4pack.convert.source.reading import DetectOptions, Evidence

if TYPE_CHECKING:
    from w4pack.convert.hub.access import Access
    from w4pack.convert.hub.push import PushReport


def detect_options(options: ConvertOptions, evidence: Evidence = "all") -> DetectOptions:
    """Return the part of the options that speaks of the source."""
    return DetectOptions(evidence, options.zero_reading, options.source_format, options.ignore_key)


def convert(
    src: str | Path,
    out: str | Path,
    *,
    options: ConvertOptions | None = None,
    where: Where | None = None,
    running: Running | None = None,
    verify_after: bool = False,
    on_plan: OnPlan | None = None,
    **choices: Any,
) -> Report:
    """Convert ``src`` to ``out``. ``choices`` are fields of ConvertOptions, e.g. ``to="gptq", regroup=True``.

    Returns a Report. Raises Refused (3) before anything is written, SourceError or OutputError (1),
    VerifyError (4) if ``verify_after`` finds a difference.
    """
    options = replace(options or ConvertOptions(), **choices)
    options.check()
    running = running or Running()
    with opened(src, where or Where(), running.reporter) as (checkpoint, origin):
        source = read_source(checkpoint, detect_options(options))
        if options.quantize is not None:
            from w4pack.convert.quantized import quantize

            report = quantize(source, Path(out), options, origin, running, on_plan)
        elif options.rotate != "none":
            from w4pack.convert.quantized import rotate

            card = _card_maker(source, origin)
            report = rotate(source, Path(out), options, origin, running, card, on_plan)
        else:
            report = convert_source(
                source, Path(out), options, origin, running, card=_card_maker(source, origin), on_plan=on_plan
            )
        if verify_after and not report.followed:
            compared = None if options.quantize is not None else source  # codes have no equal in the source
            _verify_now(Path(out), compared, str(src), running)
        return report


def plan(
    src: str | Path, out: str | Path, *, options: ConvertOptions, where: Where, running: Running
) -> tuple[Plan, tuple[Warning_, ...], ModelFacts, Source]:
    """Plan a conversion without writing. Returns (plan, warnings, facts of the output, source).

    Raises what ``convert`` would raise before it writes: also OutputError for an OUT it would not take.
    """
    options.check()
    with opened(src, where, running.reporter) as (checkpoint, origin):
        source = read_source(checkpoint, detect_options(options))
        if options.quantize is not None:
            from w4pack.convert.quantized import plan_only

            return plan_only(source, Path(out), options, origin, running)
        made, warnings = plan_conversion(source, Path(out), options, origin, running)
        return made, warnings, planned_facts(source, made), source


def _verify_now(out: Path, source: Source | None, label: str, running: Running) -> None:
    from w4pack.convert.errors import VerifyError
    from w4pack.convert.jobs import manifest
    from w4pack.convert.jobs.verify import verify_output

    with open_checkpoint(LocalStore(out)) as made:
        proof = verify_output(made, manifest.of(made), source, str(out), label, running.workers)
    if not proof.ok:
        first = proof.failures[0]
        raise VerifyError(
            f"{len(proof.failures)} tensors differ",
            where=first.tensor,
            expected=first.expected,
            found=first.found,
        )
    from w4pack.convert.hub.card import record_proof

    record_proof(out, proof.tensors, proof.compared)


def _card_maker(source: Source, origin: Mapping[str, str] | None) -> CardMaker:
    from w4pack.convert.hub.fill import card_of

    return lambda made, errors: card_of(source, made, origin, errors)


def card_for(source: Source, made: Plan, src: str | Path, where: Where) -> str:
    """Return the model card a conversion would write, to have it checked before the conversion starts."""
    found = parse_source(str(src), where.revision)
    origin = {"id": found.repo_id} if isinstance(found, HubSource) else None
    return _card_maker(source, origin)(made, {})


def verify(
    out: str | Path,
    *,
    against: str | Path | None = None,
    where: Where | None = None,
    threads: int = 0,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Verify an output, and compare it with its source. Returns the object of ``verify --json``."""
    from w4pack.convert.jobs import manifest
    from w4pack.convert.jobs.verify import compare_plain, verify_output

    folder, reporter = Path(out), reporter or Quiet()
    if not folder.is_dir():
        raise SourceError("no such folder", code="no-such-folder", where=str(out))
    workers = Running(threads=threads).workers
    with open_checkpoint(LocalStore(folder)) as made:
        if against is None:
            proof = verify_output(made, manifest.of(made), None, str(out), None, workers)
        else:
            with opened(against, where or Where(), reporter) as (checkpoint, _):
                if not (folder / manifest.NAME).exists():
                    proof = compare_plain(made, checkpoint, str(out), str(against))
                else:
                    value = manifest.of(made)
                    options = _recorded(value, folder)
                    _refuse_quantized(options, str(out), str(against))
                    source = read_source(checkpoint, detect_options(options))
                    proof = verify_output(made, value, source, str(out), str(against), workers)
    return {
        "schema": 1,
        "path": proof.path,
        "against": proof.against,
        "ok": proof.ok,
        "lossless": proof.lossless,
        "tensors": proof.tensors,
        "compared": proof.compared,
        "failures": [asdict(f) for f in proof.failures],
    }


def _refuse_quantized(options: ConvertOptions, out: str, against: str) -> None:
    """Raise Refused for an output whose codes were chosen: nothing in the source is equal to them."""
    if options.quantize is not None:
        raise Refused(
            "a quantized output is not equal to its source",
            code="quantized",
            where=out,
            expected="an output whose codes are those of its source",
            found=f"codes chosen by {options.quantize.method}",
            hint=f"`w4pack verify {out}` proves its hashes; `w4pack eval {out} --text FILE --against "
            f"{against}` measures how far it is from its source",
        )


def _recorded(value: Mapping[str, Any], folder: Path) -> ConvertOptions:
    """Return the options that a manifest records. Raises SourceError if it records none that make sense."""
    try:
        options = ConvertOptions.from_chosen(dict(value["options"]))
        options.check()
    except UsageError as err:
        where = f"{folder / 'w4pack.json'}: options"
        raise SourceError(
            err.what, code="manifest", where=where, expected=err.expected, found=err.found
        ) from err
    return options


def unpack(
    path: str | Path, out: str | Path, *, where: Where | None = None, running: Running | None = None
) -> int:
    """Turn an artifact back into its source. Returns the number of tensors, all of them proved."""
    from w4pack.convert.jobs import manifest
    from w4pack.convert.jobs.places import settle_place
    from w4pack.convert.jobs.unpack import unpack_source

    running = running or Running()
    with opened(path, where or Where(), running.reporter) as (checkpoint, _):
        if folder_of(checkpoint) is None:
            raise ValueError("an artifact is unpacked from a folder")
        value = manifest.of(checkpoint)
        source = read_source(checkpoint, DetectOptions())
        settle_place(checkpoint, Path(out), running)
        return unpack_source(source, value, Path(out), running)


def push(
    out: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    access: "Access | None" = None,
    reporter: Reporter | None = None,
    bars: bool = False,
) -> "PushReport":
    """Upload an output to the Hub, config.json last. Returns a PushReport."""
    from w4pack.convert.hub.push import push as upload

    return upload(
        Path(out), repo_id, private=private, token=token, access=access, reporter=reporter, bars=bars
    )
