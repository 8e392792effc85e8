"""Tensor maps: how the copy engine of sm_90 and later finds boxes of a matrix. Kept once they are made."""

from typing import Any

from w4pack.kernels.launch import Device

MAPS_KEPT = 4096  # one for each address and shape of activations
BOX_COLUMNS = 64  # 16-bit values: the 128 bytes that the swizzle spans


class _Values:
    """16-bit values on a card, for a map of them: only an address, so that nothing is kept alive."""

    def __init__(self, pointer: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": tuple(2 * step for step in steps),
            "typestr": "<f2",  # the copy engine moves bits: bfloat16 too
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


def _kept(
    card: Device, pointer: int, shape: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    key = (pointer, shape, steps, box)
    found = card.maps.get(key)
    if found is None:
        if len(card.maps) >= MAPS_KEPT:
            card.maps.clear()
        found = card.maps[key] = _make(*key)
    return found


def _make(pointer: int, shape: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...]) -> Any:
    from cuda.core import TensorMapDescriptorOptions
    from cuda.core.utils import StridedMemoryView

    # cuda-core 1.2 does not export the enum of swizzles: the default of the option is a member of it.
    swizzles = type(TensorMapDescriptorOptions(box_dim=box).swizzle)
    view = StridedMemoryView.from_cuda_array_interface(_Values(pointer, shape, steps), stream_ptr=-1)
    return view.as_tensor_map(options=TensorMapDescriptorOptions(box_dim=box, swizzle=swizzles.SWIZZLE_128B))
