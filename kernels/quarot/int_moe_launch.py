"""Launches of the grouped integer product: nothing waits for the card or depends on how tokens are spread."""

from typing import TYPE_CHECKING

import torch

from w4pack.kernels import arguments, launch, moe_checks, tiles
from w4pack.kernels.quarot import int_launch, int_moe_tiles, int_tiles
from w4pack.kernels.quarot.calls import GroupedProduct

if TYPE_CHECKING:
    from torch import Tensor


def gemm(product: GroupedProduct, out: "Tensor", chosen: tiles.Launch | None = None) -> None:
    """Launch a grouped product into ``out`` (R, N); its arguments were checked. ``chosen`` is for tuning.

    Raises:
        UsageError: more experts than the kernels' tables hold, or no kernel that reads codes of the order.
    """
    codes, packed, order, k = product.codes, product.packed, product.order, product.k
    pairs, n, experts = product.rows.shape[0], out.shape[1], product.weight.shape[0]
    moe_checks.fits_kernels(experts)
    if pairs == 0:
        return
    index = codes.get_device()
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            gemm(product, out, chosen)
        return
    card = launch.device(index)
    arch, sms = launch.table_arch(card.arch), card.multiprocessors
    choice = chosen or int_moe_tiles.choose(arch, sms, pairs, experts, n, k, order, packed.group_size)
    if choice is None:
        raise int_launch.no_kernel(card, order)
    steps = int_tiles.group_steps(choice.tile, order, packed.group_size)
    stream = arguments.current_stream(index)
    space = card.workspace(stream)
    launch.start(
        card,
        int_moe_tiles.kernel_name(choice.tile, arguments.NAMES[out.dtype], order, steps),
        choice.grid,
        choice.tile.threads,
        int_moe_tiles.shared_bytes(choice.tile, experts, order, steps != 0),
        stream,
        codes.data_ptr(),
        product.act_scales.data_ptr(),
        product.weight.data_ptr(),
        product.scales.data_ptr(),
        product.rows.data_ptr(),
        product.offsets.data_ptr(),
        out.data_ptr(),
        space.sums,
        space.flags,
        arguments.int32(pairs),
        arguments.int32(n),
        arguments.int32(k),
        arguments.row_stride(codes),
        arguments.int32(experts),
        packed.group_shift,
        packed.wide_scales,
    )
