"""How much of the range of a quantizer is given up: ratios tried, and what each costs in a linear's outputs.

Fewer values are clipped with a ratio of 1, but all others are rounded more coarsely. What counts is the
output: ``|(x̂ - x) Wᵀ|² / |x Wᵀ|²``, summed over calibration tokens, averaged over layers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from w4pack.convert.quantize.activations import BITS, fake_tokens

RATIOS = tuple(round(0.70 + 0.025 * i, 3) for i in range(13))  # 0.70 to 1.00
ACT_DEFAULTS: Mapping[int, float] = {4: 0.9, 8: 1.0}  # where nothing is measured
KV_DEFAULTS: Mapping[int, float] = {4: 0.95, 8: 1.0}

Table = Mapping[int, float]  # bits -> ratio


@dataclass(frozen=True, slots=True)
class Clips:
    """The ratios of a model: of the activations of each site, of keys, of values."""

    acts: Mapping[str, Table]
    keys: Table
    values: Table


@dataclass(slots=True)
class Errors:
    """Relative errors by ratio, summed over layers: (what, bits) -> one sum for each ratio."""

    sums: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def add(self, what: str, bits: int, errors: Iterable[float]) -> None:
        """Add one layer's errors, in the order of ``RATIOS``."""
        known = self.sums.setdefault((what, bits), [0.0] * len(RATIOS))
        for i, error in enumerate(errors):
            known[i] += error

    def best(self, what: str, defaults: Table) -> dict[int, float]:
        """Return bits -> the ratio of least error, the largest of equals; a default where none is known."""
        found = {}
        for bits in BITS:
            errors = self.sums.get((what, bits))
            pairs = [] if errors is None else [(e, -r) for e, r in zip(errors, RATIOS, strict=True)]
            found[bits] = -min(pairs)[1] if pairs else defaults[bits]
        return found


def output_errors(x: torch.Tensor, weight: torch.Tensor, bits: int) -> list[float]:
    """Return the error of the outputs for each ratio.

    Args:
        x: inputs (T, K) float32, transformed.
        weight: (N, K) float32, of all linears that read them.
        bits: 4 or 8.
    """
    whole = relative(x @ weight.T, torch.zeros(1))
    return [
        float(((fake_tokens(x, bits, ratio) - x) @ weight.T).double().square().sum()) / whole
        for ratio in RATIOS
    ]


def relative(made: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return ``|made - wanted|²``, at least the smallest number that can be divided by."""
    return max(float((made - wanted).double().square().sum()), 1e-30)
