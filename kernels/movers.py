"""How a filled staging buffer gets to where the tensors are: two buffers a thread, on the CPU or with a card.

A mover belongs to one thread. ``buffer(slot)`` waits until the last copies out of that buffer are done, so
that a thread reads the file into one while the card fetches the other. Torch copies a rectangle of bytes by
way of a second tensor on the device; the driver's own pitched copy does not, so that one is called directly
(``ctypes`` drops the interpreter lock, and the driver is there wherever torch finds a card).
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from w4pack.convert.errors import W4PackError
from w4pack.convert.files.twobuffers import not_locked
from w4pack.kernels.chunks import Copy

SLOTS = 2  # buffers of a mover: one is read into while the other is copied from


class Mover(Protocol):
    """Two staging buffers and the way from them to the arenas."""

    def start(self) -> None:
        """Get ready; called by the thread that will use the mover."""
        ...

    def buffer(self, slot: int) -> memoryview:
        """Return a buffer, once nothing is copied from it any more."""
        ...

    def send(self, slot: int, copies: Sequence[Copy]) -> None:
        """Copy from a filled buffer to the arenas; may return before that has happened."""
        ...

    def finish(self) -> None:
        """Wait for all copies."""
        ...


class HostMover:
    """Copies to arenas in main memory."""

    def __init__(self, arenas: Sequence[torch.Tensor], size: int) -> None:
        self._arenas = [arena.numpy() for arena in arenas]
        self._size = size
        self._slots: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def start(self) -> None:
        """Allocate the buffers."""
        self._slots = [np.empty(self._size, np.uint8) for _ in range(SLOTS)]

    def buffer(self, slot: int) -> memoryview:
        """Return a buffer; copies on the CPU are done when ``send`` returns."""
        return memoryview(self._slots[slot].data)

    def send(self, slot: int, copies: Sequence[Copy]) -> None:
        """Copy now."""
        for c in copies:
            source = _rectangle(self._slots[slot], c.at, c.pitch, c.width, c.rows)
            _rectangle(self._arenas[c.arena], c.to, c.step, c.width, c.rows)[...] = source

    def finish(self) -> None:
        """Nothing is under way."""


def _rectangle(flat: Any, at: int, pitch: int, width: int, rows: int) -> Any:
    """View rows of bytes. Stays within ``flat``: the last row ends where it ends, whatever the pitch."""
    if at + (rows - 1) * pitch + width > flat.size:
        raise IndexError(f"{rows} rows of {width} bytes from {at}, {pitch} apart, in {flat.size}")
    return np.lib.stride_tricks.as_strided(flat[at:], (rows, width), (pitch, 1))


class CudaMover:
    """Copies to arenas on a card, from page-locked buffers on a stream of its own."""

    def __init__(self, arenas: Sequence[torch.Tensor], size: int, after: torch.cuda.Event) -> None:
        """``after``: an event behind which the arenas' memory is free to be written."""
        self._device = arenas[0].device
        self._targets = [arena.data_ptr() for arena in arenas]
        self._size = size
        self._after = after
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._slots: list[torch.Tensor] = []
        self._done: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Make the device current in this thread; copies wait for what still uses the memory."""
        torch.cuda.set_device(self._device)
        _driver().enter(self._device.index)
        self._stream.wait_event(self._after)

    def buffer(self, slot: int) -> memoryview:
        """Wait for the last copies from a buffer and return it.

        A buffer is page-locked when it is first asked for: the driver locks one at a time, and threads that
        have theirs read meanwhile. Torch's host allocator keeps them for the next call.
        """
        if slot == len(self._slots):
            self._slots.append(self._page_locked())
            self._done.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._done[slot].synchronize()  # one that was never recorded counts as done
        return memoryview(self._slots[slot].numpy().data)

    def _page_locked(self) -> torch.Tensor:
        try:
            return _pinned(self._size)
        except RuntimeError as err:
            wanted = f"{SLOTS} buffers of {self._size:,} bytes a thread"
            raise not_locked(err, wanted, "use fewer threads") from err

    def send(self, slot: int, copies: Sequence[Copy]) -> None:
        """Put the copies on the stream."""
        driver, stream = _driver(), self._stream.cuda_stream
        source = self._slots[slot].data_ptr()
        for c in copies:
            to = self._targets[c.arena] + c.to
            if c.rows == 1:
                driver.copy(to, source + c.at, c.width, stream)
            else:
                driver.copy_rows(to, c.step, source + c.at, c.pitch, c.width, c.rows, stream)
        self._done[slot].record(self._stream)

    def finish(self) -> None:
        """Wait for the stream: the buffers may go and the arenas may be used."""
        self._stream.synchronize()


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


# ---------------------------------------------------------------- the driver

_HOST, _DEVICE = 1, 2  # CUmemorytype


class _Rows(ctypes.Structure):
    """CUDA_MEMCPY2D of cuda.h."""

    _fields_ = [
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_int),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_int),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class _Driver:
    """The four calls of the CUDA driver that are needed here."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as err:
            raise W4PackError("the CUDA driver cannot be loaded", code="device", found=str(err)) from err
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._calls = {
            name: _declare(library, name, *kinds)
            for name, kinds in {
                "cuDeviceGet": (pointer, ctypes.c_int),
                "cuDevicePrimaryCtxRetain": (pointer, ctypes.c_int),
                "cuCtxSetCurrent": (pointer,),
                "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, pointer, size, pointer),
                "cuMemcpy2DAsync_v2": (pointer, pointer),
            }.items()
        }
        self._contexts: dict[int, int] = {}

    def enter(self, index: int) -> None:
        """Make torch's context of a device current in this thread: the driver sees no device index."""
        if index not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), index)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device.value)
            self._contexts[index] = context.value or 0
        self._call("cuCtxSetCurrent", self._contexts[index])

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes that lie together."""
        self._call("cuMemcpyHtoDAsync_v2", to, source, nbytes, stream)

    def copy_rows(
        self, to: int, step: int, source: int, pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """Copy rows of ``width`` bytes, ``pitch`` apart at the source and ``step`` apart on the device."""
        rectangle = _Rows(
            src_type=_HOST,
            src_host=source,
            src_pitch=pitch,
            dst_type=_DEVICE,
            dst_device=to,
            dst_pitch=step,
            width=width,
            height=rows,
        )
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(rectangle), stream)

    def _call(self, name: str, *args: Any) -> None:
        result = self._calls[name](*args)
        if result:
            raise W4PackError("a copy to the device failed", code="device", found=f"{name}: error {result}")


def _declare(library: Any, name: str, *kinds: Any) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = kinds, ctypes.c_int
    return function


@cache
def _driver() -> _Driver:
    return _Driver()
