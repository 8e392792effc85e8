"""What goes on beside the arithmetic: a layer's files are written while the next layer is in work.

On a card. On a CPU the arithmetic itself takes every core and the memory, so there one thing follows another.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

OVERLAPPED = ("cuda",)  # types of devices


def overlaps(device: torch.device) -> bool:
    """Whether reading and writing go on in threads while a device computes."""
    return device.type in OVERLAPPED


class Behind:
    """A thread that follows the main one by one piece of work: in order, never two of them waiting.

    So memory holds the results of one layer more, and what is journaled is journaled in the order of the
    model. An error comes out of the next call. Leaving the block waits for the work under way.
    """

    def __init__(self, *, threaded: bool) -> None:
        """``threaded=False``: the work is done by the call itself."""
        self._pool = ThreadPoolExecutor(1, "w4pack-write") if threaded else None
        self._last: Future[None] | None = None

    def __enter__(self) -> "Behind":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=True)

    def do(self, work: Callable[[], None]) -> None:
        """Start a piece of work once the one before it is done. Raises what that one raised."""
        self.wait()
        if self._pool is None:
            work()
        else:
            self._last = self._pool.submit(torch.no_grad()(work))  # gradients are off for each thread alone

    def wait(self) -> None:
        """Wait for the work under way. Raises what it raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()
