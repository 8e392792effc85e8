"""Scales and zero points of a weight matrix, found by a search for the clipping that loses least.

Matrices lie with K first, (in_features, out_features), as everywhere in ``convert``: a group is some rows of
a column. Scales are rounded to the dtype in which they are stored before anything is measured or rounded
with them, so what is simulated is what the file gives.
"""

import math
from dataclasses import dataclass

import torch

from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.errors import Refused

SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
# Smallest scale that is stored. In float16 it is a subnormal with 4 bits of precision left.
SMALLEST = {"F16": 2.0**-20, "BF16": 2.0**-100, "F32": 2.0**-100}
LARGEST = {"F16": 65504.0, "BF16": 3.0e38, "F32": 3.0e38}

COARSE = tuple(1.0 - 0.06 * i for i in range(10))  # clip ratios of the first pass: 1.0 to 0.46
FINE = (0.03, -0.03, 0.015, -0.015)  # steps around the best one so far, one after another
CHUNK = 1 << 16  # weights of one working set: with its temporaries it stays in a 1 MiB cache
CHUNK_CUDA = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The numbers a group's codes stand for: weight = (code - zero) * scale.

    scales  (G, N) float32, each a value of the dtype it is stored in
    zeros   (G, N) float32, whole numbers 0 .. 2**bits - 1
    """

    scales: torch.Tensor
    zeros: torch.Tensor


def group_bounds(scheme: QuantScheme) -> list[tuple[int, int]]:
    """Return first row and end of each group."""
    rows = scheme.in_features
    size = rows if scheme.group_size == ONE_GROUP else scheme.group_size
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def round_codes(weights: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, levels: int) -> torch.Tensor:
    """Return the nearest codes, as float32: round half to even of weight / scale, moved by the zero point."""
    return torch.div(weights, scale).round_().add_(zero).clamp_(0, levels)


def search(weights: torch.Tensor, scheme: QuantScheme, importance: torch.Tensor | None = None) -> Grid:
    """Find the grid of every group by the least sum of importance * (rounded - weight)**2.

    Args:
        weights: (K, N) float32.
        scheme: bits, groups, symmetry, and the dtype of the scales.
        importance: (K,) float32, the mean square of each input; None: all alike.

    Raises:
        Refused: a weight so large that no scale of the stored dtype reaches it.
    """
    bounds = group_bounds(scheme)
    columns = weights.shape[1]
    scales = torch.empty(len(bounds), columns, dtype=torch.float32, device=weights.device)
    zeros = torch.empty_like(scales)
    limit = CHUNK if weights.device.type == "cpu" else CHUNK_CUDA
    for first, last in _runs(bounds, columns, limit):
        start, stop, size = bounds[first][0], bounds[last - 1][1], bounds[first][1] - bounds[first][0]
        heed = None
        if importance is not None:
            heed = torch.stack([_normal(part) for part in torch.split(importance[start:stop], size)])
        width = max(64, limit // (stop - start))
        for n in range(0, columns, width):
            part = weights[start:stop, n : n + width].reshape(last - first, size, -1)
            here = slice(first, last), slice(n, n + width)
            scales[here], zeros[here] = _best(part.contiguous(), scheme, heed)
    return Grid(scales, zeros)


def _runs(bounds: list[tuple[int, int]], columns: int, limit: int) -> list[tuple[int, int]]:
    """Cut the groups into runs of equally long ones that are searched side by side: (first, end)."""
    size = bounds[0][1] - bounds[0][0]
    together = max(1, limit // (size * columns))
    whole = len(bounds) if bounds[-1][1] - bounds[-1][0] == size else len(bounds) - 1
    runs = [(first, min(first + together, whole)) for first in range(0, whole, together)]
    return runs if whole == len(bounds) else [*runs, (whole, len(bounds))]


def _normal(importance: torch.Tensor) -> torch.Tensor:
    """Scale to a mean of 1, and keep inputs that were never seen from counting nothing at all."""
    mean = importance.mean()
    if not bool(mean > 0):
        return torch.ones_like(importance)
    return importance / mean + 1e-2


def _best(
    part: torch.Tensor, scheme: QuantScheme, heed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Search groups (c, g, n): coarse over all ratios, then finer steps around each column's own best.

    ``heed`` (c, g). Returns scales and zeros (c, n).
    """
    low, high = part.amin(1), part.amax(1)
    _refuse_huge(torch.maximum(high, -low), scheme)
    held = torch.full_like(low, math.inf)
    ratio, scale, zero = torch.ones_like(low), torch.ones_like(low), torch.zeros_like(low)
    scratch = torch.empty_like(part)

    def attempt(candidate: torch.Tensor) -> None:
        s, z = _affine(low * candidate, high * candidate, scheme)
        error = _error(part, s, z, scheme, heed, scratch)
        better = error < held
        for target, value in ((held, error), (ratio, candidate), (scale, s), (zero, z)):
            torch.where(better, value, target, out=target)

    for value in COARSE:
        attempt(torch.full_like(low, value))
    for step in FINE:
        attempt(ratio + step)
    return scale, zero


def _error(
    part: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: QuantScheme,
    heed: torch.Tensor | None,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted squared error of each column (c, n)."""
    levels = (1 << scheme.bits) - 1
    scale = scale.unsqueeze(1)
    torch.div(part, scale, out=scratch)
    scratch.round_()
    if scheme.sym:
        scratch.clamp_(-scheme.midpoint, levels - scheme.midpoint)
    else:
        scratch.add_(zero.unsqueeze(1)).clamp_(0, levels).sub_(zero.unsqueeze(1))
    scratch.mul_(scale).sub_(part)
    scratch.mul_(scratch)
    return scratch.sum(1) if heed is None else (heed.unsqueeze(1) @ scratch).squeeze(1)


def _affine(low: torch.Tensor, high: torch.Tensor, scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scale as it is stored, zero point) for a range of each column."""
    levels = (1 << scheme.bits) - 1
    if scheme.sym:
        span = torch.maximum(high, -low) * (2.0 / levels)
    else:
        span = (high.clamp(min=0) - low.clamp(max=0)) / levels
    empty = span == 0  # a group of zeros: scale 1, every code the zero point
    kept = span.clamp(SMALLEST[scheme.scale_dtype], LARGEST[scheme.scale_dtype])
    scale = torch.where(empty, 1.0, kept).to(SCALE_DTYPES[scheme.scale_dtype]).float()
    if scheme.sym:
        return scale, torch.full_like(scale, float(scheme.midpoint))
    return scale, (-low.clamp(max=0) / scale).round_().clamp_(0, levels)


def _refuse_huge(largest: torch.Tensor, scheme: QuantScheme) -> None:
    reach = LARGEST[scheme.scale_dtype] * ((1 << scheme.bits) - 1) / 2
    worst = float(largest.max()) if largest.numel() else 0.0
    if not worst <= reach:
        raise Refused(
            "a weight is not finite, or too large for any scale",
            code="weight-range",
            expected=f"at most {reach:.4g} in size",
            found=f"{worst:.4g}",
        )


def expand(values: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Repeat each group's row (G, N) for all of its rows: (K, N)."""
    counts = torch.tensor([stop - start for start, stop in group_bounds(scheme)], device=values.device)
    return values.repeat_interleave(counts, 0)


def dequantize(codes: torch.Tensor, grid: Grid, scheme: QuantScheme) -> torch.Tensor:
    """Return (code - zero) * scale (K, N) in float32: exact products, as the file gives them."""
    return (codes.float() - expand(grid.zeros, scheme)) * expand(grid.scales, scheme)


def nearest(weights: torch.Tensor, grid: Grid, scheme: QuantScheme) -> torch.Tensor:
    """Round to nearest on a grid. Returns codes uint8 (K, N)."""
    levels = (1 << scheme.bits) - 1
    codes = round_codes(weights, expand(grid.scales, scheme), expand(grid.zeros, scheme), levels)
    return codes.to(torch.uint8)
