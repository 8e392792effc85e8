"""What a planned output falls short of: ranks that an option asks for, records that no kernel runs."""

from collections.abc import Iterator

from w4pack.convert.core.facts import ModelFacts, Warning_
from w4pack.convert.errors import name_some
from w4pack.convert.planning.options import ConvertOptions


def limits(options: ConvertOptions, planned: ModelFacts) -> tuple[Warning_, ...]:
    """Warn of each. ``planned``: the output, with what its runtime cannot run of it (``unfit``)."""
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


def _unfit(planned: ModelFacts) -> Iterator[Warning_]:
    """Say what the artifact will not run with as it was calibrated, and with what it will."""
    for item in planned.unfit:
        way = f"converted so, or run so, it needs none: {item.hint}" if item.hint else None
        yield Warning_(
            item.code, item.where, f"what w4pack has kernels for: {item.expected}", item.found, way
        )
