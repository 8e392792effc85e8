"""Applies a rotation to tensors, one small matrix for each factor; no dense n x n matrix is built.

One rule holds everywhere: vectors are rows and are multiplied from the right, ``y = x Q``, along whichever
axis they lie. A weight that reads a rotated vector has its columns treated so, one that writes it its rows.
"""

from functools import lru_cache

import torch

from w4pack.convert.rotate.constructions import matrix
from w4pack.convert.rotate.rotation import Rotation

STEP = (
    64  # largest dense piece of a power of two: three products of 16 to 64 beat twelve passes of butterflies
)


def rotate(values: torch.Tensor, rotation: Rotation, axis: int = -1) -> torch.Tensor:
    """Return ``values`` with every vector along ``axis`` multiplied from the right by the rotation.

    Shapes: the axis has ``rotation.n`` elements, others are kept. dtype: that of ``values``, which is also
    the dtype of all arithmetic: float64 where a weight is folded. Does not change its input.
    """
    moved = values.movedim(axis, -1)
    rows = moved.reshape(-1, rotation.n)
    return _rotate_rows(rows, rotation).reshape(moved.shape).movedim(-1, axis)


def _rotate_rows(rows: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    signs = rotation.sign_vector()
    if signs is not None:
        rows = rows * torch.from_numpy(signs).to(rows)
    rows = _hadamard(rows, rotation)
    return _fix_ones(rows, rotation) if rotation.ones else rows


def _hadamard(rows: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Multiply by ``(I ⊗ H_m1 ⊗ H_m2 ...) / √block``, the scale last."""
    count, made = rows.shape[0], rows
    after = rotation.block
    for order, construction in rotation.factors:
        for piece, kind in _pieces(order, construction):
            after //= piece
            h = _dense(piece, kind, rows.dtype, rows.device)
            made = made.reshape(-1, piece) @ h if after == 1 else h.T @ made.reshape(-1, piece, after)
    scaled: torch.Tensor = made.reshape(count, rotation.n) * float(rotation.block) ** -0.5
    return scaled


def _pieces(order: int, construction: str) -> list[tuple[int, str]]:
    """Split a large power of two: a Sylvester matrix is the Kronecker product of smaller ones."""
    if construction != "sylvester":
        return [(order, construction)]
    pieces = []
    while order > STEP:
        pieces.append((STEP, "sylvester"))
        order //= STEP
    return [*pieces, (order, "sylvester")]


@lru_cache(maxsize=32)
def _dense(order: int, construction: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(matrix(order, construction).copy()).to(device, dtype)


def _fix_ones(rows: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Multiply by the reflection that takes ``u = 1 Q0 / √n`` to ``e = 1 / √n``, so that ``1 Q = 1``."""
    v = _reflector(rotation, rows.dtype, rows.device)
    return rows if v is None else rows - (rows @ v)[:, None] * (v * (2 / (v @ v)))


@lru_cache(maxsize=8)
def _reflector(rotation: Rotation, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Return ``u - e``, or None where the two are equal and nothing is left to do."""
    flat = torch.full((1, rotation.n), rotation.n**-0.5, dtype=torch.float64)
    signs = rotation.sign_vector()
    turned = flat if signs is None else flat * torch.from_numpy(signs)
    v = (_hadamard(turned, rotation) - flat)[0]
    return v.to(device, dtype) if float(v @ v) > 1e-20 else None
