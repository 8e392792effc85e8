"""What the arguments of the mixture-of-experts operators must be; as ``checks``, with an expert dimension."""

from typing import TYPE_CHECKING

from w4pack.kernels import checks, moe_tiles
from w4pack.kernels.arguments import Packed
from w4pack.kernels.checks import has_dtype, has_shape, require

if TYPE_CHECKING:
    from torch import Tensor

MOST_X = 1 << 36  # bytes from x's first row to the end of its last: kernels count 16 of them in 32 bits


def gemm(x: "Tensor", packed: Packed, rows: "Tensor", offsets: "Tensor") -> tuple[int, int]:
    """Check the arguments of ``moe_gemm`` by shape, dtype, stride and device; return (K, N).

    Raises:
        UsageError: one of them does not fit.
    """
    experts = stack(packed)
    k, n = checks.weight(*of_expert(packed, 0))
    checks.activations(x, k, packed.weight)
    reach(x, "x")
    routing(rows, offsets, experts, x)
    return k, n


def reach(x: "Tensor", name: str) -> None:
    """Check that an offset of a kernel reaches every row that a pair may read.

    Raises:
        UsageError: it does not.
    """
    size = x.shape[0] * x.stride(0) * x.element_size() if x.shape[0] > 1 else 0
    require(size <= MOST_X, f"{name} is too large", name, f"at most {MOST_X} bytes", size)


def stack(packed: Packed) -> int:
    """Check that the tensors of a stack have the expert as first dimension; return how many there are.

    Raises:
        UsageError: one of them is no stack, of other experts, or not contiguous.
    """
    experts = packed.weight.shape[0] if packed.weight.dim() else 0
    for name in ("weight", "scales", "zeros"):
        tensor = getattr(packed, name)
        if tensor is not None:
            require(tensor.dim() == 3, f"{name} has the wrong number of dimensions", name, 3, tensor.dim())
            require(
                tensor.shape[0] == experts > 0, f"{name} is of other experts", name, experts, tensor.shape[0]
            )
            require(tensor.is_contiguous(), f"{name} is not contiguous", name, "contiguous", tensor.stride())
    return experts


def fits_kernels(experts: int) -> None:
    """Check that a block's table of experts holds them.

    Raises:
        UsageError: it does not.
    """
    most = moe_tiles.MOST_EXPERTS
    require(
        experts <= most,
        "the layer has more experts than the kernels take",
        "weight",
        f"at most {most}",
        experts,
    )


def of_expert(packed: Packed, expert: int) -> Packed:
    """Return one expert's weight of a stack."""
    zeros = None if packed.zeros is None else packed.zeros[expert]
    return Packed(packed.weight[expert], packed.scales[expert], zeros, *packed[3:])


def gather(x: "Tensor", rows: "Tensor", offsets: "Tensor", perm: "Tensor", width: int) -> None:
    """Check the arguments of ``moe_gather``.

    Raises:
        UsageError: one of them does not fit.
    """
    import torch

    has_dtype(x, "x", (torch.float16, torch.bfloat16), 2)
    has_dtype(perm, "perm", (torch.int32,), 2)
    has_shape(perm, "perm", (perm.shape[0], x.shape[1]))
    require(perm.is_contiguous(), "perm is not contiguous", "perm", "contiguous", perm.stride())
    checks.same_device("perm", perm, "x", x)
    checks.rows(x, "x", 1)
    fits = width % 8 == 0 and width >= x.shape[1]
    require(fits, "the width is not supported", "width", f"a multiple of 8, at least {x.shape[1]}", width)
    routing(rows, offsets, perm.shape[0], x)


def routing(rows: "Tensor", offsets: "Tensor", experts: int, x: "Tensor") -> None:
    """Check who reads what by shape, dtype, stride and device: ``rows`` (R,), ``offsets`` (E + 1,) int32.

    Raises:
        UsageError: one of them does not fit.
    """
    import torch

    has_dtype(rows, "rows", (torch.int32,), 1)
    has_dtype(offsets, "offsets", (torch.int32,), 1)
    has_shape(offsets, "offsets", (experts + 1,))
    for name, tensor in (("rows", rows), ("offsets", offsets)):
        require(tensor.is_contiguous(), f"{name} is not contiguous", name, "contiguous", tensor.stride())
        checks.same_device(name, tensor, "x", x)


def values(rows: "Tensor", offsets: "Tensor", tokens: int) -> None:
    """Check rows and borders by value. On a GPU that would wait for the card: there only a CPU's are checked.

    Raises:
        UsageError: a row that x does not have, or borders that do not rise from 0 to at most R.
    """
    borders = offsets.tolist()
    rising = borders[0] == 0 and borders == sorted(borders) and borders[-1] <= rows.numel()
    require(rising, "the borders do not rise from 0", "offsets", f"0 .. {rows.numel()}, rising", borders[:8])
    if rows.numel():
        least, most = int(rows.min()), int(rows.max())
        require(
            least >= 0 and most < tokens,
            "a row is not in x",
            "rows",
            f"0 .. {tokens - 1}",
            f"{least} .. {most}",
        )
