"""Tensor maps: how the copy engine of sm_90 and later finds boxes of a matrix. Kept once they are made."""

from typing import Any

from w4pack.kernels.launch import Device

MAPS_KEPT = 4096  # one for each address and shape of activations
BOX_COLUMNS = 64  # 16-bit values: the 128 bytes that the swizzle spans


class _Rows:
    """Rows of 16-bit values on a card, for a map of them: only an address, so that nothing is kept alive."""

    def __init__(self, pointer: int, rows: int, columns: int, row: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (rows, columns),
            "strides": (2 * row, 2),
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
    key = (pointer, rows, columns, row, box_rows)
    found = card.maps.get(key)
    if found is None:
        if len(card.maps) >= MAPS_KEPT:
            card.maps.clear()
        found = card.maps[key] = _make(key)
    return found


def _make(key: tuple[int, int, int, int, int]) -> Any:
    from cuda.core import TensorMapDescriptorOptions
    from cuda.core.utils import StridedMemoryView

    pointer, rows, columns, row, box_rows = key
    box = (box_rows, BOX_COLUMNS)
    # cuda-core 1.2 does not export the enum of swizzles: the default of the option is a member of it.
    swizzles = type(TensorMapDescriptorOptions(box_dim=box).swizzle)
    view = StridedMemoryView.from_cuda_array_interface(_Rows(pointer, rows, columns, row), stream_ptr=-1)
    return view.as_tensor_map(options=TensorMapDescriptorOptions(box_dim=box, swizzle=swizzles.SWIZZLE_128B))
