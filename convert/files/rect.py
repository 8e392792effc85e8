"""Read a rectangle of a row-major 2-D tensor with few reads and no memory but the result's (plus 1 MiB)."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 20  # bytes of whole rows that pass through memory at a time
SHORT_RUN = 4096  # bytes; below this a read per row costs more than reading past the gap

Fill = Callable[[int, NDArray[np.uint8]], None]


def read_rect(
    fill: Fill,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    rows: slice | NDArray[Any],
    cols: slice | NDArray[Any],
) -> NDArray[Any]:
    """Return ``tensor[rows][:, cols]`` of a tensor whose bytes ``fill(offset, flat uint8 buffer)`` reads.

    rows, cols  slices of step 1, or 1-D integer arrays (any order, repeats allowed, no negative values)
    """
    runs, order = _runs(rows, shape[0], "row")
    first, stop, pick = _span(cols, shape[1])
    width = stop - first if pick is None else len(pick)
    out = np.empty((sum(b - a for a, b in runs), width), dtype=dtype)
    at = 0
    for begin, end in runs if width else ():
        _read_run(fill, shape[1], begin, (first, stop, pick), out[at : at + end - begin])
        at += end - begin
    return out if order is None else out[order]


def _runs(
    index: slice | NDArray[Any], size: int, axis: str
) -> tuple[list[tuple[int, int]], NDArray[Any] | None]:
    """Return runs of neighbouring rows, ascending, and the order that makes the wanted rows of them."""
    if isinstance(index, slice):
        begin, end = _bounds(index, size)
        return ([(begin, end)] if end > begin else []), None
    wanted = _checked(index, size, axis)
    if wanted.size == 0:
        return [], None
    unique, inverse = np.unique(wanted, return_inverse=True)
    breaks = np.flatnonzero(np.diff(unique) != 1) + 1
    starts = unique[np.concatenate(([0], breaks))]
    ends = unique[np.concatenate((breaks - 1, [unique.size - 1]))] + 1
    runs = [(int(a), int(b)) for a, b in zip(starts, ends, strict=True)]
    same = unique.size == wanted.size and bool((inverse == np.arange(wanted.size)).all())
    return runs, None if same else inverse


def _span(index: slice | NDArray[Any], size: int) -> tuple[int, int, NDArray[Any] | None]:
    """Return the columns to read, and which of them to pick (None: all)."""
    if isinstance(index, slice):
        return *_bounds(index, size), None
    wanted = _checked(index, size, "column")
    if wanted.size == 0:
        return 0, 0, None
    first, stop = int(wanted.min()), int(wanted.max()) + 1
    if stop - first == wanted.size and bool((wanted == np.arange(first, stop)).all()):
        return first, stop, None
    return first, stop, wanted - first


def _bounds(index: slice, size: int) -> tuple[int, int]:
    begin, end, step = index.indices(size)
    if step != 1:
        raise ValueError("a slice of step 1 is needed")
    return begin, max(begin, end)


def _checked(index: NDArray[Any], size: int, axis: str) -> NDArray[np.int64]:
    wanted = np.asarray(index)
    if wanted.size and (wanted.ndim != 1 or wanted.dtype.kind not in "iu"):
        raise TypeError(f"{axis} numbers must be a 1-D integer array")
    if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= size):
        raise IndexError(f"{axis} number out of range: {int(wanted.min())} to {int(wanted.max())} of {size}")
    return wanted.astype(np.int64, copy=False)


def _read_run(
    fill: Fill,
    row_len: int,
    row: int,
    span: tuple[int, int, NDArray[Any] | None],
    out: NDArray[Any],
) -> None:
    """Read ``len(out)`` rows from ``row`` on."""
    first, stop, pick = span
    item = out.dtype.itemsize
    row_bytes, part_bytes = row_len * item, (stop - first) * item
    if pick is None and part_bytes == row_bytes:
        fill(row * row_bytes, _bytes_of(out))
        return
    if part_bytes >= SHORT_RUN and part_bytes * 4 < row_bytes * 3:
        _row_by_row(fill, row * row_bytes, row_bytes, span, out)
    else:
        _through_chunks(fill, row, row_len, span, out)


def _row_by_row(
    fill: Fill,
    start: int,
    row_bytes: int,
    span: tuple[int, int, NDArray[Any] | None],
    out: NDArray[Any],
) -> None:
    first, stop, pick = span
    one = None if pick is None else np.empty(stop - first, dtype=out.dtype)
    for i in range(len(out)):
        target = out[i] if one is None else one
        fill(start + i * row_bytes + first * out.dtype.itemsize, _bytes_of(target))
        if one is not None:
            np.take(one, pick, out=out[i])  # type: ignore[arg-type]


def _through_chunks(
    fill: Fill,
    row: int,
    row_len: int,
    span: tuple[int, int, NDArray[Any] | None],
    out: NDArray[Any],
) -> None:
    """Read from the first wanted element of some rows to the last one; keep what is wanted."""
    first, stop, pick = span
    item = out.dtype.itemsize
    step = max(1, CHUNK // (row_len * item))
    buffer = np.empty(min(step, len(out)) * row_len, dtype=out.dtype)
    for begin in range(0, len(out), step):
        count = min(step, len(out) - begin)
        used = (count - 1) * row_len + stop - first
        fill(((row + begin) * row_len + first) * item, _bytes_of(buffer[:used]))
        # the tail after the last wanted element was not read; it is in no wanted column
        part = buffer[: count * row_len].reshape(count, row_len)[:, : stop - first]
        out[begin : begin + count] = part if pick is None else part[:, pick]


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
