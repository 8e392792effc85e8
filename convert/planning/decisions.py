"""What was decided: values that the planner lays out and the jobs carry out, and the state while deciding."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from w4pack.convert.core import families
from w4pack.convert.core.facts import Warning_
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.errors import W4PackError
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.targets import Target
from w4pack.convert.source.detect import Source
from w4pack.convert.source.layers import SourceLayer

Action = Literal["pack", "dense", "regroup", "quantize"]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What becomes of one quantized linear.

    source     its name in the source; ``name`` in the output (experts may be spelled differently)
    action     pack: codes move; dense: dequantized, one rounding; regroup: re-quantized without order, lossy;
               quantize: 16-bit weights get codes
    scheme     of the output; for ``dense`` the bits describe the source
    rows       natural, or sorted by the layer's own group map
    cols_from  source name of the down projection whose sorting the output columns follow, or None
    halves     2 where gate and up are stacked along N, else 1
    notes      short phrases for the plan, one per transformation
    reason     why it does not stay packed, for dense and regroup
    """

    source: str
    name: str
    action: Action
    scheme: QuantScheme
    rows: Literal["natural", "sorted"] = "natural"
    cols_from: str | None = None
    halves: int = 1
    notes: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class DensePlan:
    """A tensor outside the quantized linears.

    rows_from  source name of the down projection whose sorting its rows follow, or None
    shape      of the output; larger than the source's where the intermediate size is padded
    """

    source: str
    name: str
    shape: tuple[int, ...]
    rows_from: str | None = None
    halves: int = 1

    @property
    def is_copy(self) -> bool:
        """Claim: the bytes travel as they are (the shape is compared by the planner)."""
        return self.rows_from is None


@dataclass(frozen=True, slots=True)
class Decisions:
    """Everything that was decided.

    dropped         names of all-zero biases that the architecture lacks
    config_changes  top-level keys of config.json
    """

    layers: tuple[LayerPlan, ...]
    dense: tuple[DensePlan, ...]
    dropped: tuple[str, ...]
    config_changes: Mapping[str, Any]
    warnings: tuple[Warning_, ...]
    lossless: bool


@dataclass(slots=True)
class State:
    """What the steps of ``decide`` work on: the source, plans by source name, and what was found so far."""

    source: Source
    options: ConvertOptions
    target: Target
    layers: dict[str, SourceLayer]
    plans: dict[str, LayerPlan]
    dense: dict[str, DensePlan]
    mlps: tuple[families.IntermediateSet, ...]
    problems: list[W4PackError] = field(default_factory=list)
    warnings: list[Warning_] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    config_changes: dict[str, int] = field(default_factory=dict)

    def note(self, name: str, phrase: str, **changes: Any) -> None:
        """Change a layer's plan and say so in it."""
        plan = self.plans[name]
        self.plans[name] = replace(plan, notes=(*plan.notes, phrase), **changes)

    def leave(self, name: str, reason: str) -> None:
        """Leave a layer in 16 bit."""
        plan, source = self.plans[name], self.layers[name].scheme
        # the weights are the source's: nothing that was decided for packed codes or scales may touch them
        scheme = replace(
            source,
            act_order=False,
            in_features=plan.scheme.in_features,
            out_features=plan.scheme.out_features,
        )
        self.plans[name] = replace(plan, action="dense", reason=reason, scheme=scheme)

    def packed(self) -> Iterable[LayerPlan]:
        """Return the layers that do not become dense."""
        return (p for p in self.plans.values() if p.action != "dense")
