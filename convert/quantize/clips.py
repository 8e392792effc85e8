"""How much of the range of a quantizer is given up: ratios tried, and what each costs in a linear's outputs.

Fewer values are clipped with a ratio of 1, but all others are rounded more coarsely. What counts is the
output: ``|(x̂ - x) Wᵀ|² / |x Wᵀ|²``, summed over calibration tokens, averaged over layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from w4pack.convert.quantize.activations import BITS, fake_tokens

Table = Mapping[int, float]  # bits -> ratio

# At 4 bits a token's largest value is often worth half a step of all others; at 8 bits it seldom is.
RATIOS = {4: (0.5, 0.55, 0.6, *(round(0.65 + 0.025 * i, 3) for i in range(15))), 8: (0.9, 0.95, 1.0)}
CACHE_RATIOS = {4: (0.8, 0.85, 0.9, 0.95, 1.0), 8: (1.0,)}
ACT_DEFAULTS: Mapping[int, float] = {4: 0.9, 8: 1.0}  # where nothing is measured
KV_DEFAULTS: Mapping[int, float] = {4: 0.95, 8: 1.0}


@dataclass(frozen=True, slots=True)
class Clips:
    """The ratios of a model: of the activations of each site, of keys, of values."""

    acts: Mapping[str, Table]
    keys: Table
    values: Table


@dataclass(slots=True)
class Errors:
    """Relative errors, summed over layers: (what, bits) -> ratio -> sum."""

    sums: dict[tuple[str, int], dict[float, float]] = field(default_factory=dict)

    def add(self, what: str, bits: int, errors: Mapping[float, float]) -> None:
        """Add one layer's errors: ratio -> error."""
        known = self.sums.setdefault((what, bits), {})
        for ratio, error in errors.items():
            known[ratio] = known.get(ratio, 0.0) + error

    def best(self, what: str, defaults: Table) -> dict[int, float]:
        """Return bits -> the ratio of least error, the largest of equals; a default where none is known."""
        found = {}
        for bits in BITS:
            errors = self.sums.get((what, bits), {})
            found[bits] = min(errors, key=lambda r: (errors[r], -r)) if errors else defaults[bits]
        return found


def output_errors(x: torch.Tensor, weight: torch.Tensor, bits: int) -> dict[float, float]:
    """Return ratio -> the relative error of the outputs.

    Args:
        x: inputs (T, K) float32, transformed.
        weight: (N, K) float32, of all linears that read them.
        bits: 4 or 8.
    """
    whole = energy(x @ weight.T)
    return {ratio: energy((fake_tokens(x, bits, ratio) - x) @ weight.T) / whole for ratio in RATIOS[bits]}


def energy(values: torch.Tensor) -> float:
    """Return the sum of squares, at least the smallest number that can be divided by."""
    return max(float(values.double().square().sum()), 1e-30)
