"""The two questions, ``inspect`` and ``check``, as functions. Nothing of a conversion is imported."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from w4pack.convert.engines import rules
from w4pack.convert.errors import EXIT_FAILED, Refused, UsageError
from w4pack.convert.events import Quiet, Reporter, warning_fields
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.opening import Where, glimpsed
from w4pack.convert.source import written
from w4pack.convert.source.describe import describe
from w4pack.convert.source.detect import Source, read_source
from w4pack.convert.source.facts import source_facts
from w4pack.convert.source.online import records_of
from w4pack.convert.source.reading import DetectOptions, Evidence
from w4pack.convert.source.zeros import AMBIGUOUS

ENGINES = ("vllm", "sglang", "transformers", "w4pack")
# Problems of a conversion that engines have rules for; any other means that the weights are not understood.
JUDGED = ("forward-changing", AMBIGUOUS)
SMALL = 8 << 20  # bytes of deciding tensors that are read whole without ``thorough``


def inspect(
    path: str | Path, *, where: Where | None = None, thorough: bool = False, reporter: Reporter | None = None
) -> dict[str, Any]:
    """Say what a checkpoint is, from headers and small tensors. Returns the object of ``inspect --json``."""
    with glimpsed(path, where or Where(), reporter or Quiet(), thorough=thorough) as (checkpoint, label):
        source = _glimpse(checkpoint, thorough=thorough)
        value = describe(source_facts(source), label, records_of(source))
        problems = (*source.problems, *written.problems_of(source))
    value["problems"] = [p.to_json() for p in problems]
    # Nobody knows what the numbers of an artifact mean whose block is not understood.
    broken = [p for p in source.problems if p.exit_code == EXIT_FAILED or p.code == "artifact-unknown"]
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
    far: Evidence = "sample" if isinstance(checkpoint.store, LocalStore) else "few"
    evidence: Evidence = "all" if thorough or small <= SMALL else far
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
    _check_asked(engines, tp)
    with glimpsed(path, where or Where(), reporter or Quiet(), thorough=thorough) as (checkpoint, label):
        source = _glimpse(checkpoint, thorough=thorough)
        unknown_kind = [p for p in source.problems if p.code not in JUDGED]
        if not unknown_kind and written.is_artifact(source):  # of other outputs engines do not ask it
            unknown_kind = [*written.problems_of(source)]
        facts = source_facts(source)
    if unknown_kind:  # weights that are not understood cannot be judged: never "takes it"
        raise Refused.together(unknown_kind)
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
                "warnings": [dict(warning_fields(w)) for w in facts.warnings],
                "suggestion": None if ok else _pasted(rules.suggest(results, facts), label),
            }
        )
    return answers


def _check_asked(engines: Sequence[str], tp: Sequence[int]) -> None:
    unknown = [engine for engine in engines if engine not in ENGINES]
    if unknown:
        raise UsageError(
            "no such engine", where="--engine", expected=", ".join(ENGINES), found=", ".join(unknown)
        )
    small = [size for size in tp if size < 1]
    if small or not tp:
        raise UsageError(
            "no such tensor parallelism",
            where="--tp",
            expected="sizes from 1 on, e.g. 1,2,4,8",
            found=", ".join(map(str, small)) or "none",
        )


def _pasted(command: str | None, label: str) -> str | None:
    """Put the user's own path into a suggested command."""
    return command.replace(" SRC ", f" {label} ") if command else None
