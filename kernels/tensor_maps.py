"""Tensor maps: how the copy engine of sm_90 and later finds boxes of a matrix. Kept once they are made."""

from dataclasses import dataclass
from typing import Any

from w4pack.kernels.launch import Device
from w4pack.kernels.tiles import CHUNK_N

MAPS_KEPT = 4096  # of activations, one for each address and shape
WEIGHT_MAPS_KEPT = 1 << 15  # a large model has 900 products, a few tiles each
BOX_COLUMNS = 64  # 16-bit values: the 128 bytes that the swizzle spans


@dataclass(frozen=True, slots=True)
class _Kind:
    """Values of a map. The copy engine moves bits: what they are of does not matter, only how wide."""

    typestr: str
    swizzled: bool  # pieces of 16 bytes XOR-ed with their row's number, inside rows of 128 bytes

    @property
    def bytes(self) -> int:
        return int(self.typestr[2:])


HALVES = _Kind("<f2", True)
WORDS = _Kind("<f8", False)  # the widest: a box spans at most 256 values


# What a map is made of: address, shape, steps from value to value, box, values.
Form = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], _Kind]


class _Values:
    """Values on a card, for a map of them: only an address, so that nothing is kept alive."""

    def __init__(self, pointer: int, shape: tuple[int, ...], steps: tuple[int, ...], kind: _Kind) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": tuple(kind.bytes * step for step in steps),
            "typestr": kind.typestr,
            "data": (pointer, False),
            "version": 3,
        }


def boxes(card: Device, pointer: int, rows: int, columns: int, row: int, box_rows: int) -> Any:
    """Return a map of activations for boxes of ``box_rows`` x 64 with the 128-byte swizzle.

    Args:
        card: the device.
        pointer: address of the first value, a multiple of 16.
        rows: rows of the matrix; what lies past them arrives as zeros.
        columns: values of a row.
        row: values from one row's beginning to the next, a multiple of 8.
        box_rows: rows of a box, at most 256.
    """
    return _kept(card, pointer, (rows, columns), (row, 1), (box_rows, BOX_COLUMNS))


def lines(card: Device, pointer: int, shape: tuple[int, int, int], row: int, box_lines: int) -> Any:
    """Return a map of rows cut into lines, for boxes of ``box_lines`` x 64 of a row with the same swizzle.

    Args:
        card: the device.
        pointer: address of the first value, a multiple of 16.
        shape: (rows, lines of a row, columns of a line, a multiple of 8); columns past them arrive as zeros.
        row: values from one row's beginning to the next, a multiple of 8.
        box_lines: lines of a box, at most 256.
    """
    return _kept(card, pointer, shape, (row, shape[2], 1), (1, box_lines, BOX_COLUMNS))


def weights(pointer: int, k: int, n: int, bits: int, unit_tiles: int, columns: int) -> Form:
    """Return the form of a map of a packed weight (K / 16, N * bits / 2): boxes of a unit's tiles."""
    return _runs(pointer, (k // 16, n // CHUNK_N), 128 * bits, (unit_tiles, columns // CHUNK_N))


def scale_rows(pointer: int, groups: int, n: int, unit_groups: int, columns: int) -> Form:
    """Return the form of a map of scales (groups, N) in 16 bit: boxes of a unit's groups."""
    return _runs(pointer, (groups, n // CHUNK_N), 2 * CHUNK_N, (unit_groups, columns // CHUNK_N))


def _runs(pointer: int, shape: tuple[int, int], run: int, box: tuple[int, int]) -> Form:
    """Return rows of runs of bytes, in boxes of whole runs, as they lie; past the rows come zeros."""
    words = run // WORDS.bytes
    return (pointer, (*shape, words), (shape[1] * words, words, 1), (*box, words), WORDS)


def packed(
    card: Device,
    addresses: tuple[int, int],
    k: int,
    n: int,
    bits: int,
    groups: int,
    unit: tuple[int, int],
    columns: int,
) -> tuple[Any, Any]:
    """Return the maps of a packed weight and of its scales: kept beside those of activations, found at once.

    Args:
        card: the device.
        addresses: of the weight and of its scales.
        k: rows of the weight.
        n: columns.
        bits: 4 or 8.
        groups: rows of the scales.
        unit: rows of K, and groups, of a box.
        columns: of a box.
    """
    key = (addresses, k, n, bits, groups, unit, columns)
    found = card.weight_maps.get(key)
    if found is None:
        if len(card.weight_maps) >= WEIGHT_MAPS_KEPT:
            card.weight_maps.clear()
        card.enter()
        found = card.weight_maps[key] = (
            _make(*weights(addresses[0], k, n, bits, unit[0] // 16, columns)),
            _make(*scale_rows(addresses[1], groups, n, unit[1], columns)),
        )
    return found


def _kept(
    card: Device, pointer: int, shape: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    key = (pointer, shape, steps, box)
    found = card.maps.get(key)
    if found is None:
        if len(card.maps) >= MAPS_KEPT:
            card.maps.clear()
        card.enter()
        found = card.maps[key] = _make(*key, HALVES)
    return found


def _make(
    pointer: int, shape: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...], kind: _Kind
) -> Any:
    from cuda.core import TensorMapDescriptorOptions
    from cuda.core.utils import StridedMemoryView

    # cuda-core 1.2 does not export the enum of swizzles: the option's default, no swizzle, is a member of it.
    plain = TensorMapDescriptorOptions(box_dim=box).swizzle
    swizzle = type(plain).SWIZZLE_128B if kind.swizzled else plain
    view = StridedMemoryView.from_cuda_array_interface(_Values(pointer, shape, steps, kind), stream_ptr=-1)
    return view.as_tensor_map(options=TensorMapDescriptorOptions(box_dim=box, swizzle=swizzle))
