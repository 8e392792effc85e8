"""Applies engine rules to a model: the face of this package.

evaluate(facts, "vllm", 2)   -> EngineResult: takes it, refuses it, misreads it, or runs it slowly, and why
suggest(results, facts)      -> the convert command that gets around the blockers, if one does
max_tp(layer, config)        -> the largest tensor-parallel size at which a module can be cut
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from w4pack.convert.core.facts import LayerFacts, ModelFacts
from w4pack.convert.engines import sglang, transformers, vllm, w4pack
from w4pack.convert.engines.model import Model, role_of, survey
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
TP_SIZES = (1, 2, 4, 8)
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
    if rule.whole is not None:
        for found in rule.whole(model, tp):
            yield Blocker(found.where, rule.id, found.expected, found.found, found.count, rule.verdict)
    if rule.test is not None:
        for kind in model.kinds:
            hit = rule.test(model, kind, tp)
            if hit is not None:
                yield Blocker(kind.where, rule.id, hit[0], hit[1], len(kind.names), rule.verdict)


def max_tp(layer: LayerFacts, config: Mapping[str, Any]) -> int:
    """Return the largest of 1, 2, 4, 8 at which the module's tensors can be cut, engines' tiles aside.

    Column-parallel: N and its packed words; row-parallel: K in whole groups, and no real order of rows.
    Key and value heads are repeated, not cut, past their number. A module of unknown role must fit both ways.
    """
    heads = _kv_heads(config) if role_of(layer.name) == "column" and _is_kv(layer.name) else None
    best = 1
    for tp in TP_SIZES[1:]:
        if not _fits(layer, min(tp, heads) if heads else tp):
            break
        best = tp
    return best


def _kv_heads(config: Mapping[str, Any]) -> int | None:
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            value = part.get("num_key_value_heads", part.get("num_attention_heads"))
            if isinstance(value, int) and value > 0:
                return value
    return None


def _is_kv(name: str) -> bool:
    return name.rpartition(".")[2] in ("k_proj", "v_proj")


def _fits(layer: LayerFacts, ways: int) -> bool:
    role = role_of(layer.name)
    if role == "replicated":
        return True
    pack = 32 // layer.bits
    column = layer.out_features % ways == 0 and (layer.out_features // ways) % pack == 0
    group = 32 if layer.act_order == "block" else layer.group_size
    row = layer.in_features % ways == 0 and (layer.in_features // ways) % (pack if group <= 0 else group) == 0
    row = row and (layer.act_order != "groups" or ways == 1)
    return column if role == "column" else row if role == "row" else column and row


def suggest(results: Sequence[EngineResult], facts: ModelFacts) -> str | None:
    """Return the convert command that gets around the blockers of one engine; None if there is none."""
    from w4pack.convert.engines import cures  # it asks `evaluate` about what it predicts

    return cures.suggest(results, facts)


def render_markdown() -> str:
    """Return the text of the reference page of all rules."""
    from w4pack.convert.engines import reference

    return reference.render_markdown()
