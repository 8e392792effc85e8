"""Round-to-nearest quantization of a matrix with a search for the clipping that loses least.

Used where a layer's order cannot be kept and the user asks for it (``--regroup``): lossy, measured, reported.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core import dtypes
from w4pack.convert.core.order import natural_group
from w4pack.convert.core.scheme import QuantScheme

SHRINK_STEPS = 41  # clip ratios tried from 1.0 downwards
SHRINK_END = 0.6  # smallest clip ratio; below it the clipped tail always costs more than the finer grid gains


@dataclass(frozen=True, slots=True, eq=False)
class RtnResult:
    """codes uint8 (K, N); scales (G, N) in the carrier of the scheme's dtype; zeros uint8 (G, N) or None.

    squared_error and squared_norm are sums over the block, in weight units squared.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[Any]
    zeros: NDArray[np.uint8] | None
    squared_error: float
    squared_norm: float


def _grid(
    low: NDArray[np.float32], high: NDArray[np.float32], scheme: QuantScheme
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (scale rounded to its stored dtype, zero point) for a clipped range per column."""
    levels = (1 << scheme.bits) - 1
    if scheme.sym:
        span = np.maximum(np.abs(low), np.abs(high)) * 2 / levels
        zero = np.full_like(low, scheme.midpoint)
    else:
        span = (np.maximum(high, 0) - np.minimum(low, 0)) / levels
        zero = np.zeros_like(low)
    scale = dtypes.to_f32(dtypes.from_f32(span.astype(np.float32), scheme.scale_dtype), scheme.scale_dtype)
    safe = np.where(scale == 0, np.float32(1), scale)
    if not scheme.sym:
        zero = np.clip(np.rint(-np.minimum(low, 0) / safe), 0, levels)
    return scale, zero.astype(np.float32)


def _round_group(
    weights: NDArray[np.float32], scale: NDArray[np.float32], zero: NDArray[np.float32], levels: int
) -> NDArray[np.float32]:
    safe = np.where(scale == 0, np.float32(1), scale)
    return np.clip(np.rint(weights / safe + zero), 0, levels).astype(np.float32)


def _best_grid(
    weights: NDArray[np.float32], scheme: QuantScheme
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]]:
    """Search the clip ratio per column of one group (g, N): least squared error wins, the first on a tie."""
    levels = (1 << scheme.bits) - 1
    low, high = weights.min(axis=0), weights.max(axis=0)
    best_error = np.full(weights.shape[1], np.inf)
    best_scale, best_zero = np.zeros_like(low), np.zeros_like(low)
    best_codes = np.zeros_like(weights)
    for ratio in np.linspace(1.0, SHRINK_END, SHRINK_STEPS, dtype=np.float32):
        scale, zero = _grid(low * ratio, high * ratio, scheme)
        codes = _round_group(weights, scale, zero, levels)
        error = (((codes - zero) * scale - weights).astype(np.float64) ** 2).sum(axis=0)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale, best_zero = np.where(better, scale, best_scale), np.where(better, zero, best_zero)
        best_codes = np.where(better, codes, best_codes)
    return best_codes, best_scale, best_zero, best_error


def quantize(weights: NDArray[np.float32], scheme: QuantScheme) -> RtnResult:
    """Quantize ``weights`` (K, N) float32 in natural row order.

    Scales are rounded to their dtype before codes are chosen.
    """
    groups = natural_group(weights.shape[0], scheme.group_size)
    codes = np.empty(weights.shape, np.uint8)
    scales = np.empty((scheme.groups, weights.shape[1]), np.float32)
    zeros = np.empty((scheme.groups, weights.shape[1]), np.uint8)
    lost = 0.0
    for g in range(scheme.groups):
        rows = groups == g
        q, scales[g], zero, error = _best_grid(weights[rows], scheme)
        codes[rows], zeros[g] = q.astype(np.uint8), zero.astype(np.uint8)
        lost += float(error.sum())
    stored = dtypes.from_f32(scales, scheme.scale_dtype)
    norm = float((weights.astype(np.float64) ** 2).sum())
    return RtnResult(codes, stored, None if scheme.sym else zeros, lost, norm)
