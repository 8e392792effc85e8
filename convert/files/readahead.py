"""Reading tensors in a thread before they are asked for, while the caller computes with others."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from w4pack.convert.files.provider import Provider
from w4pack.convert.files.tensorfile import TensorInfo

if TYPE_CHECKING:
    import torch


class _Coming(NamedTuple):
    """A read, how often its tensor will still be asked for, and the number of the call that named it."""

    read: "Future[torch.Tensor]"
    times: int
    call: int


class ReadAhead:
    """A provider whose tensors are read before they are asked for. See ``files.provider.Provider``.

    In memory is at most what the last two calls of ``expect`` name: those of the first are still being asked
    for when the next ones are read. A read that fails in the thread is not told: who
    asks for the tensor reads it again, and so gets the error where it would come without a thread.
    """

    def __init__(self, source: Provider) -> None:
        self.source = source
        self._known = frozenset(source.names())
        self._pool = ThreadPoolExecutor(1, "w4pack-read")
        self._coming: dict[str, _Coming] = {}
        self._calls = 0

    def names(self) -> Iterable[str]:
        """See ``Provider``."""
        return self.source.names()

    def info(self, name: str) -> TensorInfo:
        """See ``Provider``."""
        return self.source.info(name)

    def expect(self, names: Iterable[str], times: int = 1) -> None:
        """Read tensors in this order; each will be asked for ``times`` times, then it is let go.

        What was expected before the last call and is not used up is let go now. Names that the source lacks
        are ignored; what is still there is not read again.
        """
        self._forget(self._calls)
        self._calls += 1
        for name in names:
            if name in self._known:
                held = self._coming.get(name)
                read = self._pool.submit(self.source.get, name) if held is None else held.read
                self._coming[name] = _Coming(read, times, self._calls)

    def get(self, name: str, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """See ``Provider``."""
        coming = self._coming.pop(name, None)
        if coming is None or coming.read.exception() is not None:
            return self.source.get(name, dtype)
        values = coming.read.result()
        shared = coming.times > 1
        if shared:
            self._coming[name] = coming._replace(times=coming.times - 1)
        if dtype is not None and dtype != values.dtype:
            return values.to(dtype)
        return values.clone() if shared else values

    def _forget(self, before: int) -> None:
        """Let go what was expected by calls before that number."""
        for name, coming in list(self._coming.items()):
            if coming.call < before:
                coming.read.cancel()
                del self._coming[name]

    def close(self) -> None:
        """Wait for the read under way, and let everything go. Tensors can still be asked for."""
        self._forget(self._calls + 1)
        self._pool.shutdown(wait=True, cancel_futures=True)
