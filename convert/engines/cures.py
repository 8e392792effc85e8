"""From blockers to the command that gets around them.

A command is suggested only if the predicted output does better in the same engine at the sizes asked for:
options that lose nothing come first, ``--regroup`` (re-quantizes layers) last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from w4pack.convert.core.facts import ModelFacts
from w4pack.convert.engines.labels import method_of
from w4pack.convert.engines.predict import PORTABLE, Conversion, convertible, predict
from w4pack.convert.engines.rules import ENGINES, evaluate
from w4pack.convert.engines.table import EngineResult

_WORTH = {"ok": 2, "slow": 1}


def suggest(results: Sequence[EngineResult], facts: ModelFacts) -> str | None:
    """Return the convert command for the results of one engine, or None if nothing does better."""
    if not results or all(r.verdict == "ok" for r in results) or not convertible(facts):
        return None
    engine, sizes = results[0].engine, [r.tp for r in results]
    best, score = None, sum(_WORTH.get(r.verdict, 0) for r in results)
    for conversion in _candidates(facts, engine, max(sizes)):
        after = predict(facts, conversion)
        if after is None:
            continue
        worth = sum(_WORTH.get(evaluate(after, engine, tp).verdict, 0) for tp in sizes)
        if worth > score:
            best, score = conversion, worth
        if score == _WORTH["ok"] * len(sizes):
            break
    return best.command() if best else None


def _candidates(facts: ModelFacts, engine: str, tp: int) -> Iterator[Conversion]:
    own = method_of(facts.quant_config)
    stock = () if engine == "w4pack" else tuple(sorted(PORTABLE, key=lambda t: t != own))
    runs_artifacts = engine == "w4pack" or bool(ENGINES[engine].artifact)
    targets = stock + ("marlin",) * runs_artifacts  # what needs nothing installed comes first
    ordered = any(x.act_order == "groups" for x in facts.layers)
    regroup = (False, True) if ordered else (False,)
    widen = (False, True) if engine != "w4pack" and any(not x.sym for x in facts.layers) else (False,)
    fold = (False, True) if runs_artifacts and ordered and tp > 1 else (False,)
    pad = (0, tp) if tp > 1 else (0,)
    for again, wide, folded, ways in product(regroup, widen, fold, pad):
        for target in targets:
            if not (wide and target in ("awq", "marlin")) and not (folded and target != "marlin"):
                yield replace(Conversion(target), fold=folded, widen=wide, regroup=again, pad=ways)
