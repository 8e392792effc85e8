"""Launches of the integer product: what ``int_ops`` runs on a GPU."""

from typing import TYPE_CHECKING, Any

import torch

from w4pack.convert.errors import UsageError
from w4pack.kernels import arguments, launch, tensor_maps, tiles
from w4pack.kernels.quarot import int_tiles
from w4pack.kernels.quarot.calls import Product

if TYPE_CHECKING:
    from torch import Tensor


def gemm(product: Product, out: "Tensor", chosen: tiles.Launch | None = None) -> None:
    """Launch a product into ``out`` (M, N); its arguments were checked. ``chosen`` overrides the table.

    Raises:
        UsageError: the card has no kernel that reads codes of the order.
    """
    codes = product.codes
    m, n = out.shape
    if m == 0:
        return
    index = codes.get_device()
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            gemm(product, out, chosen)
        return
    packed, group_size, order, k = product.packed, product.group_size, product.order, product.k
    card = launch.device(index)
    choice = chosen or int_tiles.choose(
        launch.table_arch(card.arch), card.multiprocessors, m, n, k, order, group_size
    )
    if choice is None:
        raise no_kernel(card, order)
    tile = choice.tile
    steps = int_tiles.group_steps(tile, order, group_size)
    stream = arguments.current_stream(index)
    space = card.workspace(stream)
    launch.start(
        card,
        _entry(tile, out.dtype, order, steps),
        choice.grid,
        tile.threads,
        int_tiles.shared_bytes(tile, order, steps != 0),
        stream,
        _codes(card, codes, tile),
        product.act_scales.data_ptr(),
        product.weight.data_ptr(),
        product.scales.data_ptr(),
        arguments.pointer(product.bias),
        out.data_ptr(),
        space.sums,
        space.flags,
        arguments.int32(m),
        arguments.int32(n),
        arguments.int32(k),
        arguments.int32(_row(codes)),
        arguments.int32(out.stride(0) if m > 1 else n),
        packed.group_shift,
        packed.wide_scales,
    )


def _row(codes: "Tensor") -> int:
    """Return the bytes from one token's codes to the next."""
    return codes.stride(0) if codes.shape[0] > 1 else codes.shape[1]


def _codes(card: launch.Device, codes: "Tensor", tile: tiles.Tile) -> Any:
    """Return the activations as the kernel takes them: a map of pairs of bytes, or their address."""
    if not tile.producer:
        return codes.data_ptr()
    rows, width = codes.shape
    return tensor_maps.boxes(card, codes.data_ptr(), rows, width // 2, _row(codes) // 2, tile.tokens)


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
