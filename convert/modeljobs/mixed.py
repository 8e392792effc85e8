"""A scheme for each linear so that all together meet a number of bits per weight, by measured error.

Linears that engines fuse get one scheme. Each set starts with the cheapest scheme of the palette; then, again
and again, the step that takes away most error for its bits is made, while it still fits. The error is that of
the weights, relative and squared, rounded to nearest on the best grid and measured on a sample of outputs:
every linear counts alike, whatever its size.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from w4pack.convert import formats
from w4pack.convert.core import families
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.errors import Refused, W4PackError
from w4pack.convert.files.provider import Provider
from w4pack.convert.planning.output import packed_bytes
from w4pack.convert.planning.targets import Target
from w4pack.convert.quantize import grids

PALETTE = ((4, 128), (4, 64), (4, 32), (8, 128))  # bits, group size; from cheap to dear
SAMPLE = 128  # outputs of a linear that are measured


@dataclass(slots=True)
class _Set:
    """Linears with one scheme: (bits, error, scheme of each) of every step, and the step it is at."""

    steps: list[tuple[float, float, dict[str, QuantScheme]]]
    at: int = 0

    def gain(self) -> float:
        """Return how much error the next step takes away for each bit it adds; 0 at the end."""
        if self.at + 1 >= len(self.steps):
            return 0.0
        bits = self.steps[self.at + 1][0] - self.steps[self.at][0]
        return (self.steps[self.at][1] - self.steps[self.at + 1][1]) / bits


@dataclass(frozen=True, slots=True)
class Chosen:
    """A linear's scheme, and why it has it.

    error     mean relative squared error of the weights in its set
    cheapest  the scheme that the set would have with the fewest bits
    most      the error with that one
    """

    scheme: QuantScheme
    error: float
    cheapest: QuantScheme
    most: float

    def to_json(self) -> dict[str, Any]:
        """Return what the manifest records beside the scheme."""
        return {"error": self.error, "cheapest": self.cheapest.label(), "error_cheapest": self.most}


def choose(
    linears: Mapping[str, QuantScheme],
    provider: Provider,
    target: Target,
    wanted: float,
    device: torch.device,
    fixed: Mapping[str, QuantScheme] | None = None,
) -> dict[str, Chosen]:
    """Return what was chosen for each linear.

    linears  the schemes they would have, of one group size and width
    fixed    of the other quantized linears, whose bits were given: they count in the sum

    Raises Refused where even the cheapest schemes take more than ``wanted`` bits per weight, or where the
    target knows one scheme for all.
    """
    if target.one_scheme:
        raise Refused(
            f"{target.name} has one scheme for all linears",
            code="target-cannot-carry",
            where="--bpw",
            hint="`--to marlin`, `--to gptq` and `--to compressed-tensors` carry several",
        )
    sets = [_measured(names, linears, provider, target, device) for names in _sets(linears)]
    weights = _weights(linears) + _weights(fixed or {})
    spent = sum(one.steps[0][0] for one in sets) + _cost(fixed or {}, target)
    if spent > wanted * weights:
        least = math.ceil(1000 * spent / weights) / 1000
        raise Refused(
            "no schemes take so few bits per weight",
            code="bpw",
            where="--bpw",
            expected=f"at least {least:g}",
            found=str(wanted),
            hint=f"`--bpw {least:g}` is the least that these linears take",
        )
    while True:
        fitting = [
            one
            for one in sets
            if one.gain() > 0 and spent - one.steps[one.at][0] + one.steps[one.at + 1][0] <= wanted * weights
        ]
        if not fitting:
            break
        best = max(fitting, key=_Set.gain)
        spent += best.steps[best.at + 1][0] - best.steps[best.at][0]
        best.at += 1
    return {name: chosen for one in sets for name, chosen in _chosen(one).items()}


def _chosen(one: _Set) -> dict[str, Chosen]:
    (_, most, cheapest), (_, error, schemes) = one.steps[0], one.steps[one.at]
    count = len(schemes)
    return {n: Chosen(s, error / count, cheapest[n], most / count) for n, s in schemes.items()}


def recorded(value: Mapping[str, Any], linears: Mapping[str, QuantScheme]) -> dict[str, Chosen] | None:
    """Return what a manifest says was chosen, or None if it does not say so of these linears.

    value    the manifest
    linears  as ``choose`` takes them
    """
    try:
        chosen = value["quantization"]["chosen"]
        schemes = {layer["source"]: layer["scheme"] for layer in value["layers"].values()}
        if chosen.keys() != linears.keys():
            return None
        return {name: _recorded(linear, schemes[name], chosen[name]) for name, linear in linears.items()}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):  # of another form: edited
        return None


def _recorded(linear: QuantScheme, label: str, entry: Mapping[str, Any]) -> Chosen:
    """Return what ``Chosen.to_json`` wrote of a linear that got the scheme of a label."""
    palette = [replace(linear, bits=bits, group_size=size) for bits, size in PALETTE]
    known = {scheme.label(): scheme for scheme in (linear, *palette)}
    error, most = float(entry["error"]), float(entry["error_cheapest"])
    if not (math.isfinite(error) and math.isfinite(most)):
        raise ValueError("no number")
    return Chosen(known[label], error, known[entry["cheapest"]], most)


def told(chosen: Mapping[str, Chosen]) -> list[str]:
    """Return what was chosen and why, a line for each kind of linear and scheme."""
    kinds: dict[tuple[str, str], list[Chosen]] = {}
    for name, one in chosen.items():
        kinds.setdefault((name.rpartition(".")[2], one.scheme.label()), []).append(one)
    lines = []
    for (kind, label), found in sorted(kinds.items()):
        error, most = (
            sum(values) / len(found) for values in zip(*((c.error, c.most) for c in found), strict=True)
        )
        raised = sum(c.scheme != c.cheapest for c in found)
        why = f", {most:.2e} with the cheapest scheme" if raised else ", the cheapest scheme"
        lines.append(f"{len(found)} x {kind}: {label}; error of the weights {error:.2e}{why}")
    return lines


def _sets(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group linears that need one scheme: all experts of a layer, q/k/v, gate/up; the others alone."""
    known = list(names)
    groups: dict[str, tuple[str, ...]] = {}
    for fused in families.fused_sets(known):
        for name in fused.members:
            if len(fused.members) >= len(groups.get(name, ())):
                groups[name] = fused.members
    return list(dict.fromkeys(groups.get(name, (name,)) for name in known))


def _measured(
    names: tuple[str, ...],
    linears: Mapping[str, QuantScheme],
    provider: Provider,
    target: Target,
    device: torch.device,
) -> _Set:
    samples = {name: _sample(provider.get(f"{name}.weight"), device) for name in names}
    steps: list[tuple[float, float, dict[str, QuantScheme]]] = []
    for bits, size in PALETTE:
        schemes = {n: replace(linears[n], bits=bits, group_size=size) for n in names}
        if any(not _holds(target, s) for s in schemes.values()):
            continue
        cost = _cost(schemes, target)
        error = sum(_error(n, samples[n], s) for n, s in schemes.items())
        if not steps or error < steps[-1][1]:  # a step that costs more and loses more is none
            steps.append((cost, error, schemes))
    if not steps:
        own = {n: linears[n] for n in names}
        steps = [(_cost(own, target), 0.0, own)]
    return _Set(steps)


def _weights(schemes: Mapping[str, QuantScheme]) -> int:
    """Return the number of weights."""
    return sum(s.in_features * s.out_features for s in schemes.values())


def _cost(schemes: Mapping[str, QuantScheme], target: Target) -> float:
    """Return the bits that linears take in the file: see ``core.facts.bits_per_weight``."""
    return 8.0 * sum(packed_bytes(s, target.layout or "") for s in schemes.values())


def _holds(target: Target, scheme: QuantScheme) -> bool:
    whole = target.ragged or scheme.in_features % scheme.group_size == 0
    return whole and formats.get(target.layout or "").limits(scheme) is None


def _sample(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the weights (K, n) float32 of outputs that lie evenly apart."""
    step = max(1, weight.shape[0] // SAMPLE)
    return weight[::step][:SAMPLE].to(device).float().T.contiguous()


def _error(name: str, weights: torch.Tensor, scheme: QuantScheme) -> float:
    """Return the relative squared error. Raises W4PackError, with the name, for weights without a scale."""
    try:
        grid = grids.search(weights, scheme)
    except W4PackError as err:
        err.where = name
        raise
    made = grids.dequantize(grids.nearest(weights, grid, scheme), grid, scheme)
    return float((made - weights).double().square().sum() / weights.double().square().sum().clamp(min=1e-30))
