"""Scales and zero points of a weight matrix, found by a search for the clipping that loses least.

Matrices lie with K first, (in_features, out_features), as everywhere in ``convert``: a group is some rows of
a column. Scales are rounded to the dtype in which they are stored before anything is measured or rounded
with them, so what is simulated is what the file gives.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.errors import Refused

SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
# Smallest scale that is stored. In float16 it is a subnormal with 4 bits of precision left.
SMALLEST = {"F16": 2.0**-20, "BF16": 2.0**-100, "F32": 2.0**-100}
LARGEST = {"F16": 65504.0, "BF16": 3.0e38, "F32": 3.0e38}

COARSE = tuple(1.0 - 0.06 * i for i in range(10))  # clip ratios of the first pass: 1.0 to 0.46
FINE = (0.03, 0.015)  # steps up and down from the best one so far
CHUNK = 1 << 17  # weights of one working set: with its temporaries it stays in a 2 MiB cache
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
    longest = bounds[0][1] - bounds[0][0]
    for first, last in _runs(bounds, max(1, limit // (longest * columns))):
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


def _runs(bounds: list[tuple[int, int]], together: int) -> list[tuple[int, int]]:
    """Cut the groups into runs of equally long ones, at most so many: (first, end)."""
    size = bounds[0][1] - bounds[0][0]
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

    Of equal ones the first counts. ``heed`` (c, g). Returns scales and zeros (c, n).
    """
    low, high = part.amin(1), part.amax(1)
    _refuse_huge(torch.maximum(high, -low), scheme)
    scratch = torch.empty_like(part)

    def errors(ratios: torch.Tensor) -> list[torch.Tensor]:
        scales, zeros = _affine(low * ratios, high * ratios, scheme)
        pairs = zip(scales, zeros, strict=True)
        return [_error(part, scale, zero, scheme, heed, scratch) for scale, zero in pairs]

    ratios = torch.tensor(COARSE, device=part.device).view(-1, 1, 1).expand(-1, *low.shape)
    ratio, least = _cheapest(ratios, errors(ratios))
    for step in FINE:
        ratios = torch.stack([ratio + step, ratio - step])
        found = errors(ratios)
        ratio, least = _cheapest(torch.cat([ratio.unsqueeze(0), ratios]), [least, *found])
    return _affine(low * ratio, high * ratio, scheme)


def _cheapest(ratios: torch.Tensor, errors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each column's ratio of least error, and that error."""
    stacked = torch.stack(errors)
    best = stacked.argmin(0, keepdim=True)
    return ratios.gather(0, best).squeeze(0), stacked.gather(0, best).squeeze(0)


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
    torch.div(part, scale, out=scratch).round_()
    if scheme.sym:
        scratch.clamp_(-scheme.midpoint, levels - scheme.midpoint)
    else:
        zero = zero.unsqueeze(1)
        torch.clamp(scratch, -zero, levels - zero, out=scratch)
    torch.addcmul(part, scratch, scale, value=-1, out=scratch)
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
            hint="if it is what it should be, `--ignore` with the linear's name leaves it in 16 bit",
        )


def expand(values: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Repeat each group's row (G, N) for all of its rows: (K, N)."""
    counts = torch.tensor([stop - start for start, stop in group_bounds(scheme)], device=values.device)
    return values.repeat_interleave(counts, 0)


def _groups(rows: torch.Tensor, grid: Grid, scheme: QuantScheme) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield rows (c, size, N), scales and zeros (c, 1, N): all groups of one length, then a short last one.

    The rows are views.
    """
    bounds = group_bounds(scheme)
    for first, last in _runs(bounds, len(bounds)):
        start, stop = bounds[first][0], bounds[last - 1][1]
        part = rows[start:stop].view(last - first, -1, rows.shape[1])
        yield part, grid.scales[first:last].unsqueeze(1), grid.zeros[first:last].unsqueeze(1)


def dequantize(codes: torch.Tensor, grid: Grid, scheme: QuantScheme) -> torch.Tensor:
    """Return (code - zero) * scale (K, N) in float32: exact products, as the file gives them."""
    made = codes.to(torch.float32, copy=True)
    for part, scale, zero in _groups(made, grid, scheme):
        part.sub_(zero).mul_(scale)
    return made


def nearest(weights: torch.Tensor, grid: Grid, scheme: QuantScheme) -> torch.Tensor:
    """Round to nearest on a grid, half to even of weight / scale. Returns codes uint8 (K, N)."""
    made = weights.clone()
    for part, scale, zero in _groups(made, grid, scheme):
        part.div_(scale).round_().add_(zero).clamp_(0, (1 << scheme.bits) - 1)
    return made.to(torch.uint8)
