"""What the plan, `check` and `inspect` say of one output, brought into one form and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from w4pack.convert import check, convert, inspect
from w4pack.convert.planning.show import ENGINES, TPS, engine_answers


def plan_of(source: Path, out: Path, **options: Any) -> dict[str, list[int]]:
    """Convert; return the plan's answer: engine -> tensor parallelisms."""
    told: list[dict[str, list[int]]] = []
    convert(
        source,
        out,
        on_plan=lambda plan, warnings, facts, source: told.append(engine_answers(facts)),
        **options,
    )
    return told[0]


def check_of(folder: Path) -> dict[str, list[int]]:
    """Return what `check` answers, in the form of the plan's."""
    answers = check(folder, engines=ENGINES, tp=TPS)
    return {a["engine"]: [r["tp"] for r in a["results"] if r["ok"]] for a in answers}


def agree(out: Path, planned: dict[str, list[int]], to: str) -> dict[str, Any]:
    """Compare the three; return what `inspect` says."""
    assert check_of(out) == planned
    told = inspect(out)
    if to == "marlin":
        taken = planned["w4pack"]
        assert told["max_tp"] == max(taken, default=0)
        assert taken == [tp for tp in TPS if tp <= told["max_tp"]]
    assert all(told["max_tp"] <= layer["max_tp"] for layer in told["layers"])
    assert bool(told["tp_limits"]) is (told["max_tp"] < TPS[-1])
    return told
