"""What launches and operators are given: a packed weight as one value, and values in the form of a launch."""

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from w4pack.kernels import checks, tiles

if TYPE_CHECKING:
    from torch import Tensor

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}  # of activations, in the names of kernels
int32 = ctypes.c_int32


class Packed(NamedTuple):
    """A packed weight, or a stack of them with the expert as first dimension.

    weight      int32 (K/16, N*bits/2)
    scales      fp16 or bf16 (G, N), grouped order
    zeros       int32 (G, N*bits/32), or None: symmetric
    bits        4 or 8
    group_size  -1, 32, 64 or 128
    """

    weight: "Tensor"
    scales: "Tensor"
    zeros: "Tensor | None"
    bits: int
    group_size: int

    @property
    def group_shift(self) -> ctypes.c_int32:
        """The group size as kernels take it."""
        return int32(tiles.group_shift(self.group_size))

    @property
    def wide_scales(self) -> ctypes.c_int32:
        """Whether scales are bf16, as kernels take it."""
        return int32(self.scales.dtype == torch.bfloat16)


def with_packed(function: Callable[..., Any], before: int, between: int) -> Callable[..., Any]:
    """Make an operator of a function of (``before`` arguments, packed, ``between`` more, ...).

    Torch hands over (before, weight, scales, zeros?, between, bits, group_size, ...), all by position.
    """
    tensors = before + 3
    scheme = tensors + between

    def operator(*given: Any) -> Any:
        packed = Packed(*given[before:tensors], *given[scheme : scheme + 2])
        return function(*given[:before], packed, *given[tensors:scheme], *given[scheme + 2 :])

    return operator


def pointer(tensor: "Tensor | None") -> int:
    """Return the address of a tensor's first value; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def row_stride(matrix: "Tensor") -> ctypes.c_int32:
    """Return the values from one row's beginning to the next; a single row may have any stride."""
    return int32(matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1])


def _no_stream(index: int) -> int:
    """Stand in on a build of torch without CUDA, where nothing is ever launched."""
    raise RuntimeError(f"no CUDA stream on device {index}")


# Device index -> handle of torch's current stream. The raw handle costs 0.1 us, a Stream object 4.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_stream)


def register_fake(library: Any, name: str, function: Callable[..., Any]) -> None:
    """Register what an operator returns without data.

    A call that mixes a meta tensor with others comes here too, and would get memory that nobody wrote: the
    arguments must lie on one device, as for the operator itself.
    """

    def checked(*given: Any) -> Any:
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        for i, tensor in enumerate(tensors[1:], 2):
            checks.same_device(f"tensor {i}", tensor, "tensor 1", tensors[0])
        return function(*given)

    torch.library.register_fake(f"w4pack::{name}", checked, lib=library)
