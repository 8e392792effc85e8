"""What a run decides before its first step, and keeps in its journal: a run that is resumed takes it up.

The rotation gate's figures, and the schemes that were chosen for `--bpw`. Clip ratios, which guides of keys
belong to, are kept by the run itself (``quantizerun``).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.jobs.execute import Interrupted
from w4pack.convert.jobs.journal import CHOSEN, GATE, Earlier, Journal
from w4pack.convert.jobs.running import Running
from w4pack.convert.modeljobs.gate import GateReport, check_rotation
from w4pack.convert.modeljobs.mixed import Chosen
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.record import from_plain, to_plain
from w4pack.convert.source.detect import Source


def pass_gate(
    source: Source,
    options: ConvertOptions,
    running: Running,
    log: Journal,
    earlier: Earlier,
    device: torch.device | None = None,
) -> GateReport:
    """Tell and return what the gate finds, or what it found in the run that is resumed.

    Raises W4PackError if the rotated model is another one, Interrupted between two layers.
    """

    def check() -> None:
        if running.stop.signum is not None:
            raise Interrupted(running.stop.signum, log.path.parent)

    report = _passed(earlier.results.get(GATE))
    if report is None:
        report = check_rotation(source, options, device or torch.device("cpu"), check)
        log.append([], **{GATE: report.to_json()})
    else:
        running.reporter.event(
            "note", text="the rotated model: as the earlier run held it against its source"
        )
    report.tell(running.reporter)
    return report


def _passed(value: Any) -> GateReport | None:
    try:
        return None if value is None else GateReport.from_json(value)
    except ValueError:
        return None


def keep_chosen(chosen: Mapping[str, Chosen], log: Journal, earlier: Earlier) -> None:
    """Journal the schemes that were chosen, unless an earlier run has."""
    value = to_plain(chosen)
    if earlier.results.get(CHOSEN) != value:
        log.append([], **{CHOSEN: value})


def chosen_before(results: Mapping[str, Any], linears: Mapping[str, QuantScheme]) -> dict[str, Chosen] | None:
    """Return what an earlier run chose, if it is of these linears: name -> the scheme without a choice."""
    value = results.get(CHOSEN)
    if not isinstance(value, dict) or value.keys() != linears.keys():
        return None
    try:
        found = {name: from_plain(Chosen, one) for name, one in value.items()}
    except ValueError:
        return None
    fits = all(_of(linears[n], one.scheme) and _of(linears[n], one.cheapest) for n, one in found.items())
    return found if fits else None


def _of(linear: QuantScheme, scheme: QuantScheme) -> bool:
    """Whether a scheme is one that a linear can be given."""
    return scheme == replace(linear, bits=scheme.bits, group_size=scheme.group_size)
