"""Launches of the integer product: what ``int_ops`` runs on a GPU."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from w4pack.convert.errors import UsageError
from w4pack.kernels import arguments, launch, tensor_maps, tiles
from w4pack.kernels.quarot import int_tiles
from w4pack.kernels.quarot.calls import GroupedProduct, Product

if TYPE_CHECKING:
    from torch import Tensor


Run = Callable[[launch.Device, Any, "Tensor", tiles.Launch | None], None]


def gemm(product: Product, out: "Tensor", chosen: tiles.Launch | None = None) -> None:
    """Launch a product into ``out`` (M, N); its arguments were checked. ``chosen`` overrides the table.

    Raises:
        UsageError: the card has no kernel that reads codes of the order.
    """
    if out.shape[0]:
        on_its_card(_gemm, product, out, chosen)


def on_its_card(
    run: Run, product: Product | GroupedProduct, out: "Tensor", chosen: tiles.Launch | None
) -> None:
    """Run a launch where the codes lie. To make a card the current one costs more than to see that it is."""
    index = product.codes.get_device()
    if index == torch.cuda.current_device():
        run(launch.device(index), product, out, chosen)
        return
    with torch.cuda.device(index):
        run(launch.device(index), product, out, chosen)


def _gemm(card: launch.Device, product: Product, out: "Tensor", chosen: tiles.Launch | None) -> None:
    m, n = out.shape
    codes, order, group_size = product.codes, product.order, product.group_size
    arch, sms = launch.table_arch(card.arch), card.multiprocessors
    choice = chosen or int_tiles.choose(arch, sms, m, n, product.k, order, group_size)
    if choice is None:
        raise no_kernel(card, order)
    tile = choice.tile
    steps = int_tiles.group_steps(tile, order, group_size)
    start(
        card,
        choice,
        _entry(tile, out.dtype, order, steps),
        int_tiles.shared_bytes(tile, order, steps != 0),
        product,
        out,
        _operands(card, product, tile, steps),
        before=(arguments.pointer(product.bias),),
        after=(arguments.int32(_row(codes)), arguments.int32(out.stride(0) if m > 1 else n)),
    )


def start(
    card: launch.Device,
    choice: tiles.Launch,
    name: str,
    shared: int,
    product: Product | GroupedProduct,
    out: "Tensor",
    operands: tuple[Any, ...],
    *,
    before: tuple[Any, ...],
    after: tuple[Any, ...],
) -> None:
    """Start the kernel ``name`` with the arguments that products of one weight and of many share.

    operands  codes, their scales, weight and its scales as the kernel takes them
    before    arguments in front of the output; ``after``: behind its sizes
    """
    stream = arguments.current_stream(card.index)
    space, packed = card.workspace(stream), product.packed
    launch.start(
        card,
        name,
        choice.grid,
        choice.tile.threads,
        shared,
        stream,
        *operands,
        *before,
        out.data_ptr(),
        space.marked if choice.tile.marked else space.sums,
        space.flags,
        arguments.int32(out.shape[0]),
        arguments.int32(out.shape[1]),
        arguments.int32(product.k),
        *after,
        packed.group_shift,
        packed.wide_scales,
    )


def _row(codes: "Tensor") -> int:
    """Return the bytes from one token's codes to the next."""
    return codes.stride(0) if codes.shape[0] > 1 else codes.shape[1]


def addresses(product: Product | GroupedProduct) -> tuple[int, ...]:
    """Return codes, their scales, weight and its scales by their addresses."""
    return tuple(t.data_ptr() for t in (product.codes, product.act_scales, product.weight, product.scales))


def _operands(card: launch.Device, product: Product, tile: tiles.Tile, steps: int) -> tuple[Any, ...]:
    """Return the operands as the kernel takes them: maps and, beside them, scales; or addresses."""
    codes, act_scales, weight, scales = addresses(product)
    if not tile.producer:
        return codes, act_scales, weight, scales
    (m, width), (groups, n) = product.codes.shape, product.scales.shape
    unit = int_tiles.unit_k(tile, product.order)
    of_unit = unit // product.group_size if steps else 1
    pairs, row = width // 2, _row(product.codes) // 2  # of bytes
    return (
        tensor_maps.boxes(card, codes, m, pairs, row, tile.tokens),
        act_scales,
        *tensor_maps.packed(
            card, (weight, scales), product.k, n, product.bits, groups, (unit, of_unit), tile.columns
        ),
        scales,
    )


def no_kernel(card: launch.Device, order: int) -> UsageError:
    """Return the error of a card without a kernel that reads codes of an order."""
    return UsageError(
        "the card has no kernel for this order of activation codes",
        code="operator-argument",
        where="order",
        expected="what int_order says for the card",
        found=f"{order} ({int_tiles.KINDS[order]}) on {card.arch}",
    )


_entries: dict[tuple[tiles.Tile, torch.dtype, int, int], str] = {}


def _entry(tile: tiles.Tile, dtype: torch.dtype, order: int, steps: int) -> str:
    key = (tile, dtype, order, steps)
    found = _entries.get(key)
    if found is None:
        found = _entries[key] = int_tiles.kernel_name(tile, arguments.NAMES[dtype], order, steps)
    return found
