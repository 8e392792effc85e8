"""Launches of the mixture-of-experts kernels: what ``moe_ops`` runs on a GPU.

Nothing here waits for the card or depends on how tokens are spread: grids follow from sizes alone.
"""

from typing import TYPE_CHECKING

import torch

from w4pack.kernels import gather_launch, launch, moe_checks, moe_tiles, tiles
from w4pack.kernels.arguments import NAMES, Packed, current_stream, int32, pointer, row_stride

if TYPE_CHECKING:
    from torch import Tensor


def gemm(x: "Tensor", packed: Packed, rows: "Tensor", offsets: "Tensor") -> "Tensor":
    """Return (R, N): x[rows[r]] times the dequantized weight of r's expert.

    Args:
        x: (T, K) fp16 or bf16.
        packed: a stack, the expert as first dimension.
        rows: (R,) int32, rows of x.
        offsets: (E + 1,) int32, where each expert's pairs begin.

    Raises:
        UsageError: an argument does not fit.
    """
    _, n = moe_checks.gemm(x, packed, rows, offsets)
    out = torch.empty((rows.shape[0], n), dtype=x.dtype, device=x.device)
    run_gemm(x, packed, rows, offsets, out)
    return out


def run_gemm(
    x: "Tensor",
    packed: Packed,
    rows: "Tensor",
    offsets: "Tensor",
    out: "Tensor",
    chosen: tiles.Launch | None = None,
) -> None:
    """Launch a product whose arguments were checked; ``chosen`` overrides the table, for tuning.

    Raises:
        UsageError: more experts than the kernels' tables hold.
    """
    weight, scales, zeros, bits, _ = packed
    pairs, experts, n, k = rows.shape[0], weight.shape[0], out.shape[1], x.shape[1]
    moe_checks.fits_kernels(experts)
    if pairs == 0:
        return
    index = x.get_device()
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            run_gemm(x, packed, rows, offsets, out, chosen)
        return
    card = launch.device(index)
    arch, symmetric = launch.table_arch(card.arch), zeros is None
    choice = chosen or moe_tiles.choose(arch, card.multiprocessors, pairs, experts, n, k, bits, not symmetric)
    stream = current_stream(index)
    space = card.workspace(stream)
    launch.start(
        card,
        moe_tiles.kernel_name(choice.tile, NAMES[x.dtype], bits, not symmetric),
        choice.grid,
        choice.tile.threads,
        moe_tiles.shared_bytes(choice.tile, experts, bits, not symmetric),
        stream,
        x.data_ptr(),
        weight.data_ptr(),
        scales.data_ptr(),
        pointer(zeros),
        rows.data_ptr(),
        offsets.data_ptr(),
        out.data_ptr(),
        space.sums,
        space.flags,
        int32(pairs),
        int32(n),
        int32(k),
        row_stride(x),
        int32(experts),
        packed.group_shift,
        packed.wide_scales,
    )


def gather(x: "Tensor", rows: "Tensor", offsets: "Tensor", perm: "Tensor", width: int) -> "Tensor":
    """Return (R, width): x[rows[r]] in the order of columns of r's expert, zeros up to ``width``.

    Args:
        x: (T, K) fp16 or bf16.
        rows: (R,) int32, rows of x.
        offsets: (E + 1,) int32, where each expert's pairs begin.
        perm: (E, K) int32.
        width: columns of the result, a multiple of 8, at least K.

    Raises:
        UsageError: an argument does not fit.
    """
    moe_checks.gather(x, rows, offsets, perm, width)
    out = torch.empty((rows.shape[0], width), dtype=x.dtype, device=x.device)
    index = x.get_device()
    with torch.cuda.device(index):
        stream = current_stream(index)
        gather_launch.run(launch.device(index), stream, x, perm, out, rows, offsets)
    return out
