"""What a planned output falls short of: ranks that an option asks for, records that no kernel runs.

What runs between the linears of an artifact is run by w4pack alone, so what its loader refuses is refused
before it is made, by the loader's own rules.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from w4pack.convert.core.facts import ModelFacts, Warning_
from w4pack.convert.errors import Refused, name_some
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.source import online
from w4pack.convert.source.online_rules import RUN_ALL_THE_SAME

if TYPE_CHECKING:
    from w4pack.convert.engines.table import Blocker


def limits(options: ConvertOptions, planned: ModelFacts) -> tuple[Warning_, ...]:
    """Warn of each. ``planned``: the output, with what its runtime cannot run of it (``unfit``).

    Raises Refused for an artifact that no runtime would load.
    """
    _refuse_unrun(planned)
    asked = (("--pad-for-tp", options.pad_for_tp), ("--tp", options.tp))
    uncut = (warning for option, ranks in asked if ranks for warning in _uncut(option, ranks, planned))
    return (*uncut, *_unfit(planned))


def _uncut(option: str, ranks: int, planned: ModelFacts) -> Iterator[Warning_]:
    """Say what keeps the output from being cut into so many ranks, and what fits."""
    from w4pack.convert.engines import cuts

    found, largest = cuts.uncut(planned, ranks)
    if found:
        where = name_some([f.where for f in found])
        wanted = f"a model for TP {ranks}, as `{option} {ranks}` asks: {found[0].expected}"
        short = f"{found[0].found}; the largest that fits is TP {largest}"
        yield Warning_("tp-not-reached", where, wanted, short)


def _refuse_unrun(planned: ModelFacts) -> None:
    """Raise Refused, with every reason, where the loader would refuse what is between the linears."""
    if not (planned.quant_config or {}).get("online"):
        return
    problems = [p for p in online.planned_problems(planned) if p.code not in RUN_ALL_THE_SAME]
    if problems:
        raise Refused.together(problems)
    from w4pack.convert.engines import rules

    blockers = rules.evaluate(planned, "w4pack", 1).blockers
    others = [b for b in blockers if b.verdict == "refuses" and b.rule != "w4pack.online"]
    if others:
        raise Refused.together([_refused(b) for b in others])


def _refused(blocker: "Blocker") -> Refused:
    return Refused(
        "no runtime loads what would be made: what runs between its linears is run by w4pack alone",
        code="online-experts",
        where=blocker.layer,
        expected=blocker.expected,
        found=blocker.found,
        hint=blocker.cure or None,
    )


def _unfit(planned: ModelFacts) -> Iterator[Warning_]:
    """Say what the artifact will not run with as it was calibrated, and with what it will."""
    for item in planned.unfit:
        way = f"converted so, or run so, it needs none: {item.hint}" if item.hint else None
        yield Warning_(
            item.code, item.where, f"what w4pack has kernels for: {item.expected}", item.found, way
        )
