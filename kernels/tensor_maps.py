"""Tensor maps: how the copy engine of sm_90 and later finds boxes of a matrix. Kept once they are made."""

from dataclasses import dataclass
from typing import Any

from w4pack.kernels.launch import Device
from w4pack.kernels.tiles import CHUNK_N

MAPS_KEPT = 4096  # one for each address and shape: of activations, weights and scales
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


class _Values:
    """Values on a card, for a map of them: only an address, so that nothing is kept alive."""

    def __init__(
        self, pointer: int, shape: tuple[int, ...], steps: tuple[int, ...], kind: _Kind = HALVES
    ) -> None:
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


def runs(card: Device, pointer: int, shape: tuple[int, int], run: int, box: tuple[int, int]) -> Any:
    """Return a map of rows of runs of bytes, for boxes of whole runs, as they lie: packed weights and scales.

    Args:
        card: the device.
        pointer: address of the first byte, a multiple of 16.
        shape: (rows, runs of a row); what lies past them arrives as zeros.
        run: bytes of a run, a multiple of 16, at most 2048.
        box: (rows, runs of a row) of a box, at most 256 each.
    """
    words = run // WORDS.bytes
    steps = (shape[1] * words, words, 1)
    return _kept(card, pointer, (*shape, words), steps, (*box, words), WORDS)


def weights(card: Device, pointer: int, k: int, n: int, bits: int, unit_tiles: int, columns: int) -> Any:
    """Return a map of a packed weight (K / 16, N * bits / 2), for boxes of a unit's tiles of some columns."""
    return runs(card, pointer, (k // 16, n // CHUNK_N), 128 * bits, (unit_tiles, columns // CHUNK_N))


def scale_rows(card: Device, pointer: int, groups: int, n: int, unit_groups: int, columns: int) -> Any:
    """Return a map of scales (groups, N) in 16 bit, for boxes of a unit's groups of some columns."""
    return runs(card, pointer, (groups, n // CHUNK_N), 2 * CHUNK_N, (unit_groups, columns // CHUNK_N))


def _kept(
    card: Device,
    pointer: int,
    shape: tuple[int, ...],
    steps: tuple[int, ...],
    box: tuple[int, ...],
    kind: _Kind = HALVES,
) -> Any:
    key = (pointer, shape, steps, box, kind)
    found = card.maps.get(key)
    if found is None:
        if len(card.maps) >= MAPS_KEPT:
            card.maps.clear()
        found = card.maps[key] = _make(*key)
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
