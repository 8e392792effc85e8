"""Launches of the product and of dequantizing: what ``ops`` runs on a GPU, arguments checked."""

from typing import TYPE_CHECKING, Any

import torch

from w4pack.kernels import launch, tensor_maps, tiles
from w4pack.kernels.arguments import NAMES, Packed, current_stream, int32, pointer, row_stride

if TYPE_CHECKING:
    from torch import Tensor


def product(x: "Tensor", packed: Packed, bias: "Tensor | None", out: "Tensor", k: int, n: int) -> None:
    """Run the kernel, or from the table's M on dequantize once and let the library multiply."""
    card = launch.device(x.get_device())
    if x.shape[0] < tiles.dense_from(launch.table_arch(card.arch)):
        run_gemm(x, packed, bias, out, k, n)
        return
    dense = dequantize(packed, k, n, x.dtype).t()
    if bias is None:
        torch.mm(x, dense, out=out)
    else:
        torch.addmm(bias, x, dense, out=out)


def run_gemm(
    x: "Tensor",
    packed: Packed,
    bias: "Tensor | None",
    out: "Tensor",
    k: int,
    n: int,
    chosen: tiles.Launch | None = None,
) -> None:
    """Launch a product into ``out`` (M, N); ``chosen`` overrides the table, for tuning."""
    m = x.shape[0]
    if m == 0:
        return
    index = x.get_device()
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            run_gemm(x, packed, bias, out, k, n, chosen)
        return
    zeros, bits = packed.zeros, packed.bits
    card = launch.device(index)
    table = launch.table_arch(card.arch)
    choice = chosen or tiles.choose(table, card.multiprocessors, card.shared, m, n, k, bits)
    tile = choice.tile
    stream = current_stream(index)
    space = card.workspace(stream)
    row = x.stride(0) if m > 1 else k
    launch.start(
        card,
        _entry(tile, x.dtype, bits, zeros is not None),
        choice.grid,
        tile.threads,
        tile.shared_bytes(bits, zeros is not None),
        stream,
        *_operands(card, tile, x, packed),
        pointer(zeros),
        pointer(bias),
        out.data_ptr(),
        space.marked if tile.marked else space.sums,
        space.flags,
        int32(m),
        int32(n),
        int32(k),
        int32(row),
        row_stride(out),
        packed.group_shift,
        packed.wide_scales,
    )


def _operands(card: launch.Device, tile: tiles.Tile, x: "Tensor", packed: Packed) -> tuple[Any, ...]:
    """Return activations, weight and scales as the kernel takes them: maps of them, or their addresses."""
    weight, scales, _, bits, group_size = packed
    if not tile.producer:
        return x.data_ptr(), weight.data_ptr(), scales.data_ptr()
    addresses, (m, k), (groups, n) = (weight.data_ptr(), scales.data_ptr()), x.shape, scales.shape
    row = x.stride(0) if m > 1 else k
    of_unit = 1 if group_size == -1 else max(1, tile.unit // group_size)
    return (
        tensor_maps.boxes(card, x.data_ptr(), m, k, row, tile.tokens),
        *tensor_maps.packed(card, addresses, k, n, bits, groups, (tile.unit, of_unit), tile.columns),
    )


_entries: dict[tuple[tiles.Tile, torch.dtype, int, bool], str] = {}


def _entry(tile: tiles.Tile, dtype: torch.dtype, bits: int, zeros: bool) -> str:
    key = (tile, dtype, bits, zeros)
    found = _entries.get(key)
    if found is None:
        found = _entries[key] = tiles.kernel_name(tile, NAMES[dtype], bits, zeros)
    return found


def dequantize(packed: Packed, k: int, n: int, dtype: torch.dtype) -> "Tensor":
    """Return the dense weight (N, K)."""
    weight, scales, zeros, bits, _ = packed
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    index = weight.get_device()
    with torch.cuda.device(index):
        launch.start(
            launch.device(index),
            f"dequantize_{NAMES[dtype]}_b{bits}_{'sym' if zeros is None else 'zp'}",
            (n // 64, -(-k // 128)),
            256,
            0,
            current_stream(index),
            weight.data_ptr(),
            scales.data_ptr(),
            pointer(zeros),
            out.data_ptr(),
            int32(n),
            int32(k),
            packed.group_shift,
            packed.wide_scales,
        )
    return out
