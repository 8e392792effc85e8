"""How far a model can be cut over ranks, whatever engine runs it: whole heads, words, tiles and groups."""

from collections.abc import Iterator

from w4pack.convert.core.facts import ModelFacts
from w4pack.convert.engines import checks, w4pack
from w4pack.convert.engines.checks import Hit
from w4pack.convert.engines.model import Kind, Model, survey
from w4pack.convert.engines.table import Finding


def uncut(facts: ModelFacts, tp: int) -> tuple[tuple[Finding, ...], int]:
    """Return what cannot be cut into ``tp`` ranks, and the largest number of ranks up to it that fits."""
    model = survey(facts, fused=False)
    found = tuple(_findings(model, tp))
    return found, next(t for t in range(tp, 0, -1) if t == 1 or not any(_findings(model, t)))


def _findings(model: Model, tp: int) -> Iterator[Finding]:
    yield from checks.heads(model, tp)
    for kind in model.kinds:
        hit = _hit(model, kind, tp)
        if hit is not None:
            yield Finding(kind.where, hit[0], hit[1], len(kind.names))


def _hit(model: Model, kind: Kind, tp: int) -> Hit:
    """The artifact is cut along its tiles, other layouts along their words; both along groups."""
    if kind.layer.layout == "marlin":
        rows, columns = w4pack.rows_unit(kind), w4pack.TILE
    else:
        rows = columns = checks.pack_factor(kind)
        rows = max(rows, kind.layer.group_size)
    cut = checks.n_split(model, kind, tp, columns) if model.ways(kind, tp) > 1 else None
    return checks.k_order(kind, tp) or checks.k_whole(kind, tp, rows) or cut
