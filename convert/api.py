"""The jobs of w4pack as Python functions. Each command of the command line calls exactly one of them.

Sources and paths are folders or Hub ids (``ORG/NAME``, ``ORG/NAME@revision``). Everything a user can cause is
raised as a ``W4PackError``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4pack.convert.core.facts import ModelFacts, Warning_
from w4pack.convert.errors import EXIT_FAILED, Refused, UsageError
from w4pack.convert.events import Quiet, Reporter
from w4pack.convert.files.checkpoint import Checkpoint, open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.hub.resolve import HubSource, LocalSource, commit_of, parse_source, snapshot
from w4pack.convert.jobs.conversion import (
    CardMaker,
    OnPlan,
    Report,
    Running,
    convert_source,
    folder_of,
    plan_conversion,
)
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Plan, planned_facts
from w4pack.convert.source.detect import Source, read_source
from w4pack.convert.source.facts import source_facts
from w4pack.convert.source.reading import DetectOptions, Evidence

if TYPE_CHECKING:
    from w4pack.convert.hub.access import Access
    from w4pack.convert.hub.push import PushReport

ENGINES = ("vllm", "sglang", "transformers", "w4pack")
SAMPLE_LIMIT = 64 << 20  # bytes of deciding tensors that inspect and check read without ``thorough``


@dataclass(frozen=True, slots=True)
class Where:
    """How to reach a source on the Hub."""

    revision: str | None = None
    cache_dir: str | None = None
    local_files_only: bool = False


@contextmanager
def opened(
    text: str | Path, where: Where, reporter: Reporter
) -> Iterator[tuple[Checkpoint, Mapping[str, str] | None]]:
    """Open a source for reading whole, a Hub id downloaded first. Yields it and its origin, if any."""
    found = parse_source(str(text), where.revision)
    origin: Mapping[str, str] | None = None
    if isinstance(found, HubSource):
        reporter.event("note", text=found.notice)
        folder = snapshot(found, cache_dir=where.cache_dir, local_files_only=where.local_files_only)
        commit = commit_of(folder)
        origin = {"id": found.repo_id, **({"revision": commit} if commit else {})}
    else:
        folder = found.path
    with open_checkpoint(LocalStore(folder)) as checkpoint:
        yield checkpoint, origin


@contextmanager
def glimpsed(
    text: str | Path, where: Where, reporter: Reporter, *, thorough: bool
) -> Iterator[tuple[Checkpoint, str]]:
    """Open a source for a question: a folder, or the Hub by range requests, without a download."""
    found = parse_source(str(text), where.revision)
    if isinstance(found, LocalSource):
        with open_checkpoint(LocalStore(found.path)) as checkpoint:
            yield checkpoint, found.label
        return
    if where.local_files_only:
        with opened(text, where, reporter) as (checkpoint, _):
            yield checkpoint, found.label
        return
    from w4pack.convert.hub.remote import HubStore

    reporter.event("note", text=found.notice)
    with open_checkpoint(HubStore(found, thorough=thorough)) as checkpoint:
        yield checkpoint, found.label


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
        report = convert_source(
            source, Path(out), options, origin, running, card=_card_maker(source, origin), on_plan=on_plan
        )
        if verify_after:
            _verify_now(Path(out), source, str(src), running)
        return report


def plan(
    src: str | Path, *, options: ConvertOptions, where: Where, running: Running
) -> tuple[Plan, tuple[Warning_, ...], ModelFacts, Source]:
    """Plan a conversion without writing. Returns (plan, warnings, facts of the output, source)."""
    options.check()
    with opened(src, where, running.reporter) as (checkpoint, origin):
        source = read_source(checkpoint, detect_options(options))
        made, warnings = plan_conversion(source, options, origin, running)
        return made, warnings, planned_facts(source, made), source


def _verify_now(out: Path, source: Source, label: str, running: Running) -> None:
    from w4pack.convert.errors import VerifyError
    from w4pack.convert.jobs import manifest
    from w4pack.convert.jobs.verify import verify_output

    with open_checkpoint(LocalStore(out)) as made:
        proof = verify_output(made, manifest.load(out), source, str(out), label, running.workers)
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


def inspect(
    path: str | Path, *, where: Where | None = None, thorough: bool = False, reporter: Reporter | None = None
) -> dict[str, Any]:
    """Say what a checkpoint is, from headers and small tensors. Returns the object of ``inspect --json``."""
    from w4pack.convert.source.describe import describe

    with glimpsed(path, where or Where(), reporter or Quiet(), thorough=thorough) as (checkpoint, label):
        source = _glimpse(checkpoint, thorough=thorough)
        value = describe(source_facts(source), label)
    value["problems"] = [p.to_json() for p in source.problems]
    broken = [p for p in source.problems if p.exit_code == EXIT_FAILED]
    if broken:
        raise Refused.together(broken)
    return value


def _glimpse(checkpoint: Checkpoint, *, thorough: bool) -> Source:
    """Read a source for a question: all deciding tensors if they are small or asked for, else a sample."""
    small = sum(
        t.nbytes
        for t in checkpoint.tensors.values()
        if t.name.endswith(("qzeros", "weight_zero_point", "g_idx"))
    )
    evidence: Evidence = "all" if thorough or small <= SAMPLE_LIMIT // 8 else "sample"
    return read_source(checkpoint, DetectOptions(evidence))


def check(
    path: str | Path,
    *,
    engines: Sequence[str] = ENGINES,
    tp: Sequence[int] = (1,),
    where: Where | None = None,
    thorough: bool = False,
    reporter: Reporter | None = None,
) -> list[dict[str, Any]]:
    """Say what each engine would do with a checkpoint at each tensor parallelism: one object per engine."""
    from w4pack.convert.engines import rules

    unknown = [e for e in engines if e not in ENGINES]
    if unknown or not tp or any(t < 1 for t in tp):
        raise UsageError(
            "no such engine or tensor parallelism",
            expected=f"{', '.join(ENGINES)}; TP from 1 on",
            found=f"{', '.join(engines)}; TP {list(tp)}",
        )
    with glimpsed(path, where or Where(), reporter or Quiet(), thorough=thorough) as (checkpoint, label):
        source = _glimpse(checkpoint, thorough=thorough)
        facts = source_facts(source)
    broken = [p for p in source.problems if p.exit_code == EXIT_FAILED]
    if broken:
        raise Refused.together(broken)
    answers = []
    for engine in engines:
        results = [rules.evaluate(facts, engine, t) for t in tp]
        ok = all(r.ok for r in results)
        answers.append(
            {
                "schema": 1,
                "path": label,
                "engine": engine,
                "engine_version": rules.engine_version(engine),
                "ok": ok,
                "evidence": facts.evidence,
                "bytes_read": facts.bytes_read,
                "results": [asdict(r) for r in results],
                "suggestion": None if ok else _pasted(rules.suggest(results, facts), label),
            }
        )
    return answers


def _pasted(command: str | None, label: str) -> str | None:
    """Put the user's own path into a suggested command."""
    return command.replace(" SRC ", f" {label} ") if command else None


def verify(
    out: str | Path,
    *,
    against: str | Path | None = None,
    where: Where | None = None,
    threads: int = 0,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Verify an output, and compare it with its source. Returns the object of ``verify --json``."""
    from w4pack.convert.errors import SourceError
    from w4pack.convert.jobs import manifest
    from w4pack.convert.jobs.verify import compare_plain, verify_output

    folder, reporter = Path(out), reporter or Quiet()
    if not folder.is_dir():
        raise SourceError("no such folder", code="no-such-folder", where=str(out))
    workers = Running(threads=threads).workers
    with open_checkpoint(LocalStore(folder)) as made:
        if against is None:
            proof = verify_output(made, manifest.load(folder), None, str(out), None, workers)
        else:
            with opened(against, where or Where(), reporter) as (checkpoint, _):
                if not (folder / manifest.NAME).exists():
                    proof = compare_plain(made, checkpoint, str(out), str(against))
                else:
                    value = manifest.load(folder)
                    options = ConvertOptions.from_chosen(dict(value["options"]))
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


def unpack(
    path: str | Path, out: str | Path, *, where: Where | None = None, running: Running | None = None
) -> int:
    """Turn an artifact back into its source. Returns the number of tensors, all of them proved."""
    from w4pack.convert.jobs import manifest
    from w4pack.convert.jobs.conversion import check_place
    from w4pack.convert.jobs.unpack import unpack_source

    running = running or Running()
    with opened(path, where or Where(), running.reporter) as (checkpoint, _):
        folder = folder_of(checkpoint)
        if folder is None:
            raise ValueError("an artifact is unpacked from a folder")
        value = manifest.load(folder)
        source = read_source(checkpoint, DetectOptions())
        check_place(source, Path(out), running)
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
