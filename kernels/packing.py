"""Packing on a GPU for the converter: canonical words go to the card, Marlin tiles come back.

The converter packs with numpy and knows nothing of this; who wants a card to do it hands the packer in. The
bytes are the same. Imports nothing heavy when loaded, so that a missing extra is said in words.
"""

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from w4pack.convert.errors import W4PackError, require_extra

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


def packer_on(device: str) -> "CudaPacker | None":
    """Return what packs on a GPU, ready; None for the CPU, where the converter packs by itself.

    Raises:
        UsageError: torch or cuda-core is missing, the device is not there, or too old for the kernels.
    """
    require_extra("packing on a GPU", ("torch",), "gpu")
    from w4pack.kernels import devices, launch

    found = devices.find(device)
    if found.type == "cpu":
        return None
    launch.device(found.index)
    return CudaPacker(found)


class CudaPacker:
    """Packs on one card. Threads may share it: each has a stream of its own.

    device  as it is told: ``cuda:0``
    """

    def __init__(self, device: "torch.device") -> None:
        self.device = str(device)
        self._card = device
        self._streams = threading.local()

    def __call__(self, words: "NDArray[Any]", bits: int) -> "NDArray[np.int32]":
        """Pack words uint32 (K*bits/32, N) to tiles int32 (K/16, N*bits/2); K % 16 == 0, N % 64 == 0.

        Raises:
            W4PackError: the card has no memory left.
        """
        import torch

        from w4pack.kernels import ops

        # Torch takes no memory that may not be written, and files are mapped or read into such.
        source = torch.from_numpy(np.require(words, requirements=["C", "W"]).view(np.int32))
        try:
            with torch.cuda.stream(self._stream()):
                packed: NDArray[np.int32] = ops.repack(source.to(self._card), None, bits).cpu().numpy()
        except torch.cuda.OutOfMemoryError as err:
            raise W4PackError(
                "not enough memory on the device",
                code="device-memory",
                where=self.device,
                expected=f"{2 * source.nbytes:,} bytes",
                found=f"{torch.cuda.mem_get_info(self._card)[0]:,} bytes free",
                hint="--device cpu writes the same bytes",
            ) from err
        return packed

    def _stream(self) -> Any:
        import torch

        if not hasattr(self._streams, "own"):
            self._streams.own = torch.cuda.Stream(self._card)  # type: ignore[no-untyped-call]
        return self._streams.own
