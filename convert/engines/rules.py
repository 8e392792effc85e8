"""Applies engine rules to a model: the face of this package.

evaluate(facts, "vllm", 2)   -> EngineResult: takes it, refuses it, misreads it, or runs it slowly, and why
suggest(results, facts)      -> the convert command that gets around the blockers, if one does
max_tp(layer, config)        -> the largest tensor-parallel size at which a module can be cut (``cuts``)
"""

from collections.abc import Iterator, Mapping, Sequence

from w4pack.convert.core.facts import ModelFacts
from w4pack.convert.engines import sglang, transformers, vllm, w4pack
from w4pack.convert.engines.cuts import max_tp
from w4pack.convert.engines.model import Model, survey
from w4pack.convert.engines.table import RANK, Blocker, Engine, EngineResult, Rule

__all__ = [
    "ENGINES",
    "Blocker",
    "EngineResult",
    "engine_version",
    "evaluate",
    "max_tp",
    "render_markdown",
    "suggest",
]

ENGINES: Mapping[str, Engine] = {
    e.name: e for e in (vllm.ENGINE, sglang.ENGINE, transformers.ENGINE, w4pack.ENGINE)
}
_BUILDS_FUSED = ("vllm", "sglang")

# The last model looked at, by identity: one `check` asks for many engines and sizes of one model.
_seen: dict[bool, tuple[ModelFacts, Model]] = {}


def engine_version(engine: str) -> str:
    """Return the version that the rules of ``engine`` were read from. KeyError for an unknown one."""
    return ENGINES[engine].version


def evaluate(facts: ModelFacts, engine: str, tp: int = 1) -> EngineResult:
    """Apply every rule of ``engine``. Raises KeyError for an unknown engine."""
    table = ENGINES[engine]
    model = _model(facts, engine)
    found: list[Blocker] = []
    for rule in table.rules_for(model.labels.method):
        if _applies(rule, model):
            found += _broken(rule, model, tp)
            if rule.id.endswith(".method") and found:
                break  # an engine that does not know the method looks at nothing else
    found.sort(key=lambda b: RANK[b.verdict])
    blockers = tuple(b for b in found if b.verdict != "note")
    verdict = blockers[0].verdict if blockers else "ok"
    return EngineResult(
        tp=tp,
        ok=verdict in ("ok", "slow"),
        verdict="ok" if verdict == "note" else verdict,
        blockers=blockers,
        notes=tuple(b for b in found if b.verdict == "note"),
        engine=engine,
    )


def _model(facts: ModelFacts, engine: str) -> Model:
    fused = engine in _BUILDS_FUSED
    kept = _seen.get(fused)
    if kept is None or kept[0] is not facts:
        kept = _seen[fused] = (facts, survey(facts, fused=fused))
    return kept[1]


def _applies(rule: Rule, model: Model) -> bool:
    return not rule.methods or model.labels.method in rule.methods


def _broken(rule: Rule, model: Model, tp: int) -> Iterator[Blocker]:
    for found in rule.findings(model, tp):
        cure = rule.cure if found.cure is None else found.cure
        yield Blocker(found.where, rule.id, found.expected, found.found, found.count, rule.verdict, cure)


def suggest(results: Sequence[EngineResult], facts: ModelFacts) -> str | None:
    """Return the convert command that gets around the blockers of one engine; None if there is none."""
    from w4pack.convert.engines import cures  # it asks `evaluate` about what it predicts

    return cures.suggest(results, facts)


def render_markdown() -> str:
    """Return the text of the reference page of all rules."""
    from w4pack.convert.engines import reference

    return reference.render_markdown()
