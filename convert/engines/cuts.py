"""How far a model can be cut over ranks, whatever engine runs it: whole heads, words, tiles and groups.

An artifact is cut by the rules of w4pack's own runtime, so that `inspect`, plan and `check` give one answer.
Other layouts are cut along their words and groups; the tiles of engines come on top (``rules``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from w4pack.convert.core.facts import LayerFacts, ModelFacts
from w4pack.convert.engines import checks, w4pack
from w4pack.convert.engines.checks import Hit
from w4pack.convert.engines.model import Kind, Model, survey
from w4pack.convert.engines.table import Finding

TP_SIZES = (1, 2, 4, 8)  # that `inspect` and the plan speak of
MODULE_RULES = (w4pack.n_tile, w4pack.k_tile, w4pack.k_order)
BLOCK = 32  # rows that stay together in an order that is constant on aligned blocks


@dataclass(frozen=True, slots=True)
class Cut:
    """Into how many ranks a model can be cut.

    most     the largest of TP_SIZES; 0 where not even one rank takes it
    limits   what breaks at the next size; none at the largest
    modules  name -> the largest of TP_SIZES for this module alone
    """

    most: int
    limits: tuple[Finding, ...]
    modules: Mapping[str, int]


def cut(facts: ModelFacts) -> Cut:
    """Find out how far a model, and each of its modules, can be cut."""
    model = survey(facts, fused=False)
    broken = {tp: tuple(_findings(model, tp)) for tp in TP_SIZES}
    most = max((tp for tp in TP_SIZES if not broken[tp]), default=0)
    above = next((tp for tp in TP_SIZES if tp > most), None)
    modules = {name: _most(model, kind) for kind in model.kinds for name in kind.names}
    return Cut(most, () if above is None else broken[above], modules)


def uncut(facts: ModelFacts, tp: int) -> tuple[tuple[Finding, ...], int]:
    """Return what keeps a model from ``tp`` ranks that one rank takes, and the largest number that fits."""
    model = survey(facts, fused=False)
    alone = tuple(_findings(model, 1))

    def broken(ranks: int) -> tuple[Finding, ...]:
        return tuple(f for f in _findings(model, ranks) if f not in alone)

    return broken(tp), next(ranks for ranks in range(tp, 0, -1) if not broken(ranks))


def max_tp(layer: LayerFacts, config: Mapping[str, Any]) -> int:
    """Return the largest of TP_SIZES at which a module's tensors can be cut.

    Column-parallel: N in whole words, or tiles of an artifact; row-parallel: K in whole groups too, and no
    real order of rows. Key and value heads are repeated, not cut, past their number; vocabularies are padded.
    A module of unknown role must fit both ways, but in an artifact, where it is whole on every rank.
    """
    model = survey(ModelFacts(config, None, None, (layer,), ()), fused=False)
    return _most(model, model.kinds[0])


def _most(model: Model, kind: Kind) -> int:
    return max(tp for tp in TP_SIZES if tp == 1 or _hit(model, kind, tp) is None)


def _findings(model: Model, tp: int) -> Iterator[Finding]:
    if model.labels.method == "w4pack":
        for rule in w4pack.RULES:
            yield from rule.findings(model, tp)
        return
    yield from checks.heads(model, tp)
    for kind in model.kinds:
        hit = _hit(model, kind, tp)
        if hit is not None:
            yield Finding(kind.where, hit[0], hit[1], len(kind.names))


def _hit(model: Model, kind: Kind, tp: int) -> Hit:
    if kind.layer.layout == "marlin":
        return next(filter(None, (rule(model, kind, tp) for rule in MODULE_RULES)), None)
    if kind.role == "unknown":
        return _words(model, replace(kind, role="row"), tp) or _words(model, replace(kind, role="column"), tp)
    return _words(model, kind, tp)


def _words(model: Model, kind: Kind, tp: int) -> Hit:
    """Layouts of other tools are cut along their words and groups."""
    word = checks.pack_factor(kind)
    group = BLOCK if kind.layer.act_order == "block" else kind.layer.group_size
    columns = checks.n_split(model, kind, tp, word) if model.ways(kind, tp) > 1 else None
    return checks.k_order(kind, tp) or checks.k_whole(kind, tp, max(word, group)) or columns
