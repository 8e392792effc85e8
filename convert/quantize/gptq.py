"""GPTQ: columns' codes are chosen one input after another, and what one choice loses the later ones make up.

Static groups: scales are found from the weights as they are, in natural order. Inputs are taken in the order
of their mean square (act-order), and the codes are written back in natural order, so nothing of the order is
left in the file.
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

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


@dataclass(frozen=True, slots=True, eq=False)
class Factored:
    """A Hessian as GPTQ uses it: the order of the inputs, and its factor in that order.

    order  (K,) indices
    upper  (K, K) float32, see ``hessian.Factor``
    dead   (K,) inputs that are always 0
    """

    order: torch.Tensor
    upper: torch.Tensor
    dead: torch.Tensor
    damping: float

    def importance(self) -> torch.Tensor:
        """Return what a squared error of each input costs (K,), in natural order.

        Inputs that come later make up for a part of it, so it is less than the input's mean square.
        """
        cost = torch.empty_like(self.upper[0])
        cost[self.order] = torch.diagonal(self.upper).square().reciprocal()
        cost[self.dead] = 0.0
        return cost


def factored(hessian: torch.Tensor, damping: float) -> Factored | None:
    """Order and factor a Hessian (K, K) float32. None: it cannot be factored at any damping."""
    dead = torch.diagonal(hessian) == 0
    hessian = hessian.clone()
    torch.diagonal(hessian)[dead] = 1.0
    order = order_of(hessian)
    found = factor(hessian[order][:, order], damping)
    return None if found is None else Factored(order, found.upper, dead, found.damping)


def solve(
    weights: torch.Tensor,
    found: Factored,
    grid: Grid,
    scheme: QuantScheme,
    *,
    shift: torch.Tensor | None = None,
    strength: float = 0.0,
) -> Solved:
    """Choose the codes of a linear.

    Args:
        weights: (K, N) float32, not changed.
        found: the Hessian of its input.
        grid: scales and zero points.
        scheme: bits and groups.
        shift: (K, K) float32, the D of ``hessian``: weights are first moved towards those that give the
            source's outputs from the quantized model's inputs.
        strength: how far, 0 to 1.
    """
    order = found.order
    work = weights[order]
    work[found.dead[order]] = 0.0
    if shift is not None and strength > 0:
        _move(work, shift[order][:, order], found.upper, strength)
    places = _groups(scheme, weights.device)[order]
    chosen = _columns(work, found.upper, grid.scales[places], grid.zeros[places], (1 << scheme.bits) - 1)
    codes = torch.empty_like(chosen)
    codes[order] = chosen
    return Solved(codes, found.damping, int(found.dead.sum()))


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
    errors = torch.empty(min(BLOCK, rows), columns, dtype=torch.float32, device=work.device)
    inverse = torch.diagonal(upper).reciprocal()
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        part, own = slice(start, stop), errors[: stop - start]
        block = _Block(work[part], upper[part, part], scales[part], zeros[part], inverse[part])
        if work.device.type == "cuda":
            captured(stop - start, columns, levels, work.device).run(block, codes[part], own)
        else:
            block.choose(codes[part], own, levels)
        if stop < rows:
            work[stop:].addmm_(upper[part, stop:].T, own, alpha=-1)
    return codes


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Rows that are quantized one after another: work, scales, zeros (B, N), upper (B, B), inverse (B,)."""

    work: torch.Tensor
    upper: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    inverse: torch.Tensor

    def choose(self, codes: torch.Tensor, errors: torch.Tensor, levels: int) -> None:
        """Write codes and scaled errors (B, N); ``work`` is used up."""
        work, upper = self.work, self.upper
        inverse = self.inverse.tolist() if work.device.type == "cpu" else self.inverse
        made = torch.empty_like(errors[0])
        for j in range(work.shape[0]):
            row, scale, zero, error = work[j], self.scales[j], self.zeros[j], errors[j]
            torch.div(row, scale, out=made)
            made.round_().add_(zero).clamp_(0, levels)
            codes[j] = made
            made.sub_(zero).mul_(scale)
            torch.sub(row, made, out=error)
            error.mul_(inverse[j])
            work[j + 1 :].addr_(upper[j, j + 1 :], error, alpha=-1)


class Captured:
    """A block's few hundred small operations as one CUDA graph: launching them one by one takes longer."""

    def __init__(self, rows: int, columns: int, levels: int, device: torch.device) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.ones(shape, dtype=torch.float32, device=device)

        sizes = (rows, columns), (rows, rows), (rows, columns), (rows, columns), (rows,)
        self.block = _Block(*(empty(*size) for size in sizes))
        self.codes = torch.empty(rows, columns, dtype=torch.uint8, device=device)
        self.errors = empty(rows, columns)
        aside: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):  # libraries set themselves up outside of the capture
            self.block.choose(self.codes, self.errors, levels)
        torch.cuda.current_stream(device).wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.block.choose(self.codes, self.errors, levels)

    def run(self, block: _Block, codes: torch.Tensor, errors: torch.Tensor) -> None:
        """See ``_Block.choose``; ``block`` is not changed."""
        for field in fields(_Block):
            getattr(self.block, field.name).copy_(getattr(block, field.name))
        self.graph.replay()
        codes.copy_(self.codes)
        errors.copy_(self.errors)


@lru_cache(maxsize=8)  # a model has three or four widths
def captured(rows: int, columns: int, levels: int, device: torch.device) -> Captured:
    """Return the graph of a block's shape."""
    return Captured(rows, columns, levels, device)
