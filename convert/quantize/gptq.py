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

PANELS = 8  # of a product with a triangle
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
    if bool(found.dead.any()):
        weights = weights.masked_fill(found.dead.unsqueeze(1), 0.0)
    work = weights[order]
    if shift is not None and strength > 0:
        _move(work, weights, shift[:, order], found.upper, strength)
    places = _groups(scheme, weights.device)[order]
    chosen = _columns(work, found.upper, grid, places, (1 << scheme.bits) - 1)
    codes = torch.empty_like(chosen)
    codes[order] = chosen
    return Solved(codes, found.damping, int(found.dead.sum()))


def _move(
    work: torch.Tensor, weights: torch.Tensor, shift: torch.Tensor, upper: torch.Tensor, strength: float
) -> None:
    """Add strength * inverse(H) Dᵀ W to ``work``, in place.

    ``weights`` lie in natural order, and so do the rows of ``shift``; all else is in the order of GPTQ.
    """
    inputs, outputs = weights.shape
    if work.device.type == "cuda" and outputs < 1.5 * inputs:  # a CPU's sums keep the order that they have
        moved = triangular_product(upper, triangular_product(upper, shift.T @ weights), transposed=True)
    else:
        moved = torch.linalg.multi_dot([upper.T, upper, shift.T, weights])  # in the cheapest order
    work.add_(moved, alpha=strength)


def triangular_product(
    upper: torch.Tensor, values: torch.Tensor, *, transposed: bool = False
) -> torch.Tensor:
    """Return ``upper @ values`` or ``upper.T @ values``, (K, K) by (K, N).

    In panels of rows that leave out the zeros below the diagonal: nine sixteenths of the products remain.
    """
    made = torch.empty_like(values)
    step = -(-upper.shape[0] // PANELS)
    for start in range(0, upper.shape[0], step):
        rows = slice(start, start + step)
        if transposed:
            torch.mm(upper[: rows.stop, rows].T, values[: rows.stop], out=made[rows])
        else:
            torch.mm(upper[rows, start:], values[start:], out=made[rows])
    return made


def _groups(scheme: QuantScheme, device: torch.device) -> torch.Tensor:
    """Return the group of each row (K,)."""
    rows = torch.arange(scheme.groups, device=device).unsqueeze(1).float()
    return expand(rows, scheme).squeeze(1).long()


def _columns(
    work: torch.Tensor, upper: torch.Tensor, grid: Grid, places: torch.Tensor, levels: int
) -> torch.Tensor:
    """Quantize row after row of ``work`` (K, N), which is used up; ``places``: their groups.

    Returns codes uint8 (K, N).
    """
    rows, columns = work.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=work.device)
    errors = torch.empty(min(BLOCK, rows), columns, dtype=torch.float32, device=work.device)
    inverse = torch.diagonal(upper).reciprocal()
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        part, own = slice(start, stop), errors[: stop - start]
        scales, zeros = grid.scales[places[part]], grid.zeros[places[part]]
        block = _Block(work[part], upper[part, part], scales, zeros, inverse[part])
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
        """Write codes and scaled errors (B, N); ``work`` is used up.

        Few operations a row: on a CPU and on a GPU most of the time goes to starting them.
        """
        work = self.work
        passed_on = self.upper * self.inverse.unsqueeze(1)
        chosen, least, most = torch.empty_like(work), -self.zeros, levels - self.zeros
        rows = zip(*(m.unbind() for m in (work, self.scales, least, most, chosen, errors)), strict=True)
        for j, (row, scale, low, high, code, error) in enumerate(rows):
            torch.div(row, scale, out=code)
            torch.clamp(code.round_(), low, high, out=code)
            torch.addcmul(row, code, scale, value=-1, out=error)
            work[j + 1 :].addr_(passed_on[j, j + 1 :], error, alpha=-1)
        errors.mul_(self.inverse.unsqueeze(1))
        codes.copy_(chosen.add_(self.zeros))


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
        # other threads may read files to the card and pack tiles meanwhile; theirs is not captured
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
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
