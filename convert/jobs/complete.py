"""Whether OUT is already the published result of a plan, and of the source as it is now."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from w4pack import __version__
from w4pack.convert.errors import Refused, SourceError, VerifyError
from w4pack.convert.files.checkpoint import Checkpoint, open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.jobs import manifest, sidefiles
from w4pack.convert.jobs.compare import Failure, compare_files
from w4pack.convert.jobs.staging import Staging
from w4pack.convert.jobs.verify import compare_output, refuse_damaged
from w4pack.convert.planning.plan import Plan, SourceFile
from w4pack.convert.planning.record import to_plain
from w4pack.convert.source.detect import Source


def published(out: Path) -> dict[str, Any] | None:
    """Return the manifest of OUT if it is published and no run is at work on another, else None."""
    staging = Staging(out)
    if staging.out.exists() or not (staging.standing / manifest.NAME).is_file():
        return None
    return manifest.load(staging.standing)


def finished_plan(out: Path, plan: Plan) -> dict[str, Any] | None:
    """Return the manifest of OUT if OUT says that it is the published result of this plan, else None."""
    value = published(out)
    return value if value is not None and value.get("plan") == plan.digest else None


def refuse_other_source(out: Path, plan: Plan) -> None:
    """Raise Refused if OUT is the published result of the same command, but of other files than the plan's.

    Seen from names, sizes, headers, samples of values and the content of small files; see ``finished_before``
    for all values.
    """
    value = of_command(out, plan.target, plan.options, plan.origin)
    if value is not None:
        refuse_other_files(value, plan.files)


def of_command(
    out: Path, target: str, options: Mapping[str, Any], origin: Mapping[str, str] | None
) -> dict[str, Any] | None:
    """Return the manifest of OUT if it is the published result of this command, else None; see ``Plan``."""
    value = published(out)
    if value is None:
        return None
    made = (value["tool"].get("version"), value["target"], value["options"], value["source"].get("origin"))
    return value if made == (__version__, target, to_plain(options), to_plain(origin)) else None


def refuse_other_files(value: Mapping[str, Any], files: Iterable[SourceFile]) -> None:
    """Raise Refused if the manifest ``value`` is of other source files. See ``refuse_other_source``."""
    old = _identities(value["source"].get("files"))
    new: dict[Any, tuple[Any, Any, Any]] = {f.name: (f.size, f.header, f.sample) for f in files}
    for name in (*new, *old):
        if old.get(name) != new.get(name):
            sides = [_shown(files.get(name)) for files in (old, new)]
            raise _changed(Failure(name, "source", *sides))


def _identities(files: Any) -> dict[Any, tuple[Any, Any, Any]]:
    """Return name -> (size, header, sample) of the source's files that a manifest records."""
    rows = [f for f in files if isinstance(f, dict)] if isinstance(files, list) else []
    named = [f for f in rows if isinstance(f.get("name"), str)]
    return {f["name"]: (f.get("size"), f.get("header"), f.get("sample")) for f in named}


def _shown(identity: tuple[Any, Any, Any] | None) -> str:
    if identity is None:
        return "no such file"
    size, header, sample = identity
    values = "" if sample is None else f", values with the digest {str(sample)[:16]}"
    return f"{size} bytes, digest {str(header)[:16]}{values}"


def finished_before(out: Path, plan: Plan, source: Source, threads: int) -> bool:
    """Tell whether OUT is already the published result of this plan; a staging folder left is removed.

    The plan identifies the source's files; the data of weights is compared too, with the hashes that
    ``--strict`` took or else with OUT, value by value. Codes that were computed are nowhere in the source:
    there hashes alone tell. Raises Refused if the source changed since, VerifyError if OUT did.
    """
    value = finished_plan(out, plan)
    if value is None:
        return False
    staging = Staging(out)
    with _opened(out) as written:
        refuse_damaged(written, value, threads)
        _refuse_changed(written, value, source, plan, threads)
    staging.remove_old()
    shutil.rmtree(staging.root, ignore_errors=True)
    return True


def _opened(out: Path) -> Checkpoint:
    """Open OUT. Raises VerifyError where its files are cut, gone or no checkpoint any more."""
    try:
        return open_checkpoint(LocalStore(out))
    except SourceError as err:
        raise VerifyError(
            f"the output of w4pack is damaged: {err.what}",
            code="damaged",
            where=err.where,
            expected=err.expected,
            found=err.found,
            hint="convert again with `--overwrite`, without `--resume`",
        ) from err


def _refuse_changed(
    written: Checkpoint, value: Mapping[str, Any], source: Source, plan: Plan, threads: int
) -> None:
    """Raise Refused if the source is not the one that OUT was made of."""
    recorded = _hashes(value)
    hashed = {f.name: f.sha256 for f in plan.files if f.sha256 and recorded.get(f.name)}
    if len(hashed) == len(plan.files) or plan.quantization is not None:
        failures = [Failure(n, "hash", recorded[n], sha) for n, sha in hashed.items() if sha != recorded[n]]
        failures += compare_files(sidefiles.carried(source.checkpoint), written, source.checkpoint)
    else:
        failures = compare_output(written, value, source, plan, threads)[1]
    if failures:
        raise _changed(failures[0])


def _changed(first: Failure) -> Refused:
    return Refused(
        "the source changed after OUT was made",
        code="resume-differs",
        where=first.tensor,
        expected=first.expected,
        found=first.found,
        hint="convert again with `--overwrite`, without `--resume`",
    )


def _hashes(value: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 of each source file that a manifest records, as far as it does."""
    files = value["source"].get("files")
    found = [f for f in files if isinstance(f, dict)] if isinstance(files, list) else []
    return {
        f["name"]: f["sha256"]
        for f in found
        if isinstance(f.get("name"), str) and isinstance(f.get("sha256"), str)
    }
