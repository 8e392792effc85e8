"""Bytes of files on their way to a GPU: through two buffers that are used again and again.

Fresh memory costs more than the copy into it: the kernel clears every page when it is first touched. So one
buffer is filled from the file while the card fetches the other, and no tensor is ever whole in main memory.
"""

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

from w4pack.convert.errors import W4PackError

if TYPE_CHECKING:
    import torch

BUFFER = 64 << 20  # bytes of each of the two: eight threads read it in pieces that stay in L2

ReadInto = Callable[[int, memoryview], None]  # (offset, buffer to fill)


class TwoBuffers:
    """Reads to one device. Threads take turns, a tensor at a time."""

    def __init__(self, device: "torch.device", size: int = BUFFER) -> None:
        self._device, self._size = device, size
        self._lock = Lock()
        self._buffers: list[torch.Tensor] = []
        self._sent: list[Any] = []

    def read(self, read_into: ReadInto, nbytes: int) -> "torch.Tensor":
        """Return ``nbytes`` bytes, uint8 on the device; the last copies may still be on the stream.

        Raises what ``read_into`` raises, and W4PackError where no memory can be page-locked.
        """
        import torch

        made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        with self._lock:
            for number, start in enumerate(range(0, nbytes, self._size)):
                part = made[start : start + self._size]
                slot = number % 2
                buffer = self._buffer(slot)[: part.numel()]
                read_into(start, memoryview(buffer.numpy().data))
                part.copy_(buffer, non_blocking=True)
                self._mark(slot)
        return made

    def _buffer(self, slot: int) -> "torch.Tensor":
        """Return a buffer, once the device has fetched what was in it."""
        if slot == len(self._buffers):
            self._buffers.append(self._locked())
            self._sent.append(None)
        if self._sent[slot] is not None:
            self._sent[slot].synchronize()
        return self._buffers[slot]

    def _mark(self, slot: int) -> None:
        """Remember where on the stream the copy out of a buffer ends; on the CPU it has ended."""
        import torch

        if self._device.type == "cuda":
            self._sent[slot] = self._sent[slot] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent[slot].record(torch.cuda.current_stream(self._device))

    def _locked(self) -> "torch.Tensor":
        import torch

        try:
            return torch.empty(self._size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        except RuntimeError as err:
            wanted = f"two buffers of {self._size:,} bytes"
            raise not_locked(err, wanted, "free some memory, or `--device cpu`") from err


def not_locked(err: RuntimeError, expected: str, hint: str) -> W4PackError:
    """Return the error of page-locked memory that torch does not get. expected: what is wanted."""
    return W4PackError(
        "no page-locked memory to read files through",
        code="host-memory",
        expected=expected,
        found=str(err).partition("\n")[0],
        hint=hint,
    )
