"""Launches of the grouped integer product: nothing waits for the card or depends on how tokens are spread."""

from typing import TYPE_CHECKING

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
    moe_checks.fits_kernels(product.weight.shape[0])
    if out.shape[0]:
        int_launch.on_its_card(_gemm, product, out, chosen)


def _gemm(card: launch.Device, product: GroupedProduct, out: "Tensor", chosen: tiles.Launch | None) -> None:
    order, group_size, experts = product.order, product.group_size, product.weight.shape[0]
    arch, sms, (pairs, n) = launch.table_arch(card.arch), card.multiprocessors, out.shape
    choice = chosen or int_moe_tiles.choose(arch, sms, pairs, experts, n, product.k, order, group_size)
    if choice is None:
        raise int_launch.no_kernel(card, order)
    steps = int_tiles.group_steps(choice.tile, order, group_size)
    int_launch.start(
        card,
        choice,
        int_moe_tiles.kernel_name(choice.tile, arguments.NAMES[out.dtype], order, steps),
        int_moe_tiles.shared_bytes(choice.tile, experts, order, steps != 0),
        product,
        out,
        int_launch.addresses(product),
        before=(product.rows.data_ptr(), product.offsets.data_ptr()),
        after=(arguments.row_stride(product.codes), arguments.int32(experts)),
    )
