"""Reading tensors in a thread before they are asked for, while the caller computes with others."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from w4pack.convert.files.provider import Provider
from w4pack.convert.files.tensorfile import TensorInfo

if TYPE_CHECKING:
    import torch


class ReadAhead:
    """A provider whose tensors are read before they are asked for. See ``files.provider.Provider``.

    In memory is at most what one call of ``expect`` names. A read that fails in the thread is not told: who
    asks for the tensor reads it again, and so gets the error where it would come without a thread.
    """

    def __init__(self, source: Provider) -> None:
        self.source = source
        self._known = frozenset(source.names())
        self._pool = ThreadPoolExecutor(1, "w4pack-read")
        self._coming: dict[str, tuple[Future[torch.Tensor], int]] = {}

    def names(self) -> Iterable[str]:
        """See ``Provider``."""
        return self.source.names()

    def info(self, name: str) -> TensorInfo:
        """See ``Provider``."""
        return self.source.info(name)

    def expect(self, names: Iterable[str], times: int = 1) -> None:
        """Read tensors in this order; each will be asked for ``times`` times, then it is let go.

        What was expected before and is not used up is let go now. Names that the source lacks are ignored.
        """
        self._forget()
        self._coming = {
            name: (self._pool.submit(self.source.get, name), times) for name in names if name in self._known
        }

    def get(self, name: str, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """See ``Provider``."""
        coming, times = self._coming.pop(name, (None, 0))
        if coming is None or coming.exception() is not None:
            return self.source.get(name, dtype)
        values = coming.result()
        if times > 1:
            self._coming[name] = (coming, times - 1)
        if dtype is not None and dtype != values.dtype:
            return values.to(dtype)
        return values.clone() if times > 1 else values

    def _forget(self) -> None:
        for coming, _ in self._coming.values():
            coming.cancel()
        self._coming = {}

    def close(self) -> None:
        """Wait for the read under way, and let everything go. Tensors can still be asked for."""
        self._forget()
        self._pool.shutdown(wait=True, cancel_futures=True)
