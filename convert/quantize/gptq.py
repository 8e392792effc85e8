"""GPTQ: columns' codes are chosen one input after another, and what one choice loses the later ones make up.

Static groups: scales are found from the weights as they are, in natural order. Inputs are taken in the order
of their mean square (act-order), and the codes are written back in natural order, so nothing of the order is
left in the file.
"""

from dataclasses import dataclass

import torch

from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.quantize.grids import Grid, expand
from w4pack.convert.quantize.hessian import factor

BLOCK = 64  # inputs whose mutual updates are made one by one; later inputs get them in one product


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """Codes uint8 (K, N) in natural order; ``damping``: what the factorization took."""

    codes: torch.Tensor
    damping: float
    dead: int


def order_of(hessian: torch.Tensor) -> torch.Tensor:
    """Return the inputs by falling mean square; equal ones in natural order."""
    return torch.argsort(torch.diagonal(hessian), descending=True, stable=True)


def solve(
    weights: torch.Tensor,
    hessian: torch.Tensor,
    grid: Grid,
    scheme: QuantScheme,
    *,
    damping: float,
    shift: torch.Tensor | None = None,
    strength: float = 0.0,
) -> Solved | None:
    """Choose the codes of a linear. Returns None where the Hessian cannot be factored.

    Args:
        weights: (K, N) float32, not changed.
        hessian: (K, K) float32.
        grid: scales and zero points.
        scheme: bits and groups.
        damping: share of the mean diagonal that is added to it.
        shift: (K, K) float32, the D of ``hessian``: weights are first moved towards those that give the
            source's outputs from the quantized model's inputs.
        strength: how far, 0 to 1.
    """
    dead = torch.diagonal(hessian) == 0
    hessian = hessian.clone()
    torch.diagonal(hessian)[dead] = 1.0
    order = order_of(hessian)
    found = factor(hessian[order][:, order], damping)
    if found is None:
        return None
    work = weights[order]
    work[dead[order]] = 0.0
    if shift is not None and strength > 0:
        _move(work, shift[order][:, order], found.upper, strength)
    places = _groups(scheme, weights.device)[order]
    chosen = _columns(work, found.upper, grid.scales[places], grid.zeros[places], (1 << scheme.bits) - 1)
    codes = torch.empty_like(chosen)
    codes[order] = chosen
    return Solved(codes, found.damping, int(dead.sum()))


def _move(work: torch.Tensor, shift: torch.Tensor, upper: torch.Tensor, strength: float) -> None:
    """Add strength * inverse(H) Dᵀ W to W, in place."""
    work += strength * (upper.T @ (upper @ (shift.T @ work)))


def _groups(scheme: QuantScheme, device: torch.device) -> torch.Tensor:
    """Return the group of each row (K,)."""
    rows = torch.arange(scheme.groups, device=device).unsqueeze(1).float()
    return expand(rows, scheme).squeeze(1).long()


def _columns(
    work: torch.Tensor, upper: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, levels: int
) -> torch.Tensor:
    """Quantize row after row of ``work`` (K, N), which is used up. Returns codes uint8 (K, N)."""
    rows, columns = work.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=work.device)
    diagonal = torch.diagonal(upper).reciprocal()
    inverse = diagonal.tolist() if work.device.type == "cpu" else diagonal
    errors = torch.empty(min(BLOCK, rows), columns, dtype=torch.float32, device=work.device)
    made = torch.empty(columns, dtype=torch.float32, device=work.device)
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        for j in range(start, stop):
            row, scale, zero = work[j], scales[j], zeros[j]
            torch.div(row, scale, out=made)
            made.round_().add_(zero).clamp_(0, levels)
            codes[j] = made
            made.sub_(zero).mul_(scale)
            error = errors[j - start]
            torch.sub(row, made, out=error)
            error.mul_(inverse[j])
            if j + 1 < stop:
                work[j + 1 : stop].addr_(upper[j, j + 1 : stop], error, alpha=-1)
        if stop < rows:
            work[stop:].addmm_(upper[start:stop, stop:].T, errors[: stop - start], alpha=-1)
    return codes
