"""The launch of the gather kernel, for one order of columns or one for each expert."""

from typing import TYPE_CHECKING

from w4pack.kernels import launch
from w4pack.kernels.arguments import int32, pointer, row_stride

if TYPE_CHECKING:
    from torch import Tensor

THREADS = 256
COLUMNS = 8 * THREADS  # that a block makes at once
MOST_ROWS = 8  # that a block takes at once
STAGED_BYTES = 44 * 1024  # of rows a block brings to shared memory; one row may take twice that
BLOCKS_PER_MULTIPROCESSOR = 4
MOST_GRID_ROWS = 65535


def plan(m: int, k: int, width: int, multiprocessors: int) -> tuple[tuple[int, int], int, int]:
    """Return (grid, rows a block takes at once, bytes of shared memory: 0 where rows are read in place)."""
    row, parts = 2 * (max(1, -(-k // 8)) * 8), -(-width // COLUMNS)
    if row > 2 * STAGED_BYTES:
        return (parts, min(m, MOST_GRID_ROWS)), 1, 0
    wanted = BLOCKS_PER_MULTIPROCESSOR * multiprocessors
    each = max(1, min(MOST_ROWS, STAGED_BYTES // row, m // wanted))
    groups = -(-m // each)
    return (max(1, min(parts, wanted // groups)), min(groups, MOST_GRID_ROWS)), each, each * row


def run(
    card: launch.Device,
    stream: int,
    x: "Tensor",
    perm: "Tensor",
    out: "Tensor",
    rows: "Tensor | None" = None,
    offsets: "Tensor | None" = None,
) -> None:
    """Fill ``out`` (R, width) from checked arguments: with ``rows`` and ``offsets``, ``perm`` is (E, K)."""
    m, width = out.shape
    k = perm.shape[-1]
    if out.numel() == 0:
        return
    grid, each, shared = plan(m, k, width, card.multiprocessors)
    launch.start(
        card,
        "gather",
        grid,
        THREADS,
        shared,
        stream,
        x.data_ptr(),
        pointer(rows),
        pointer(offsets),
        perm.data_ptr(),
        out.data_ptr(),
        int32(m),
        int32(k),
        row_stride(x),
        int32(width),
        int32(1 if offsets is None else offsets.shape[0] - 1),
        int32(each),
        int32(shared > 0),
    )
