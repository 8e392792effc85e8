"""What an operator's arguments must be. Every rule fails in Python, before anything is launched."""

from typing import TYPE_CHECKING

from w4pack.convert.errors import UsageError
from w4pack.kernels import tiles

if TYPE_CHECKING:
    from torch import Tensor

VECTOR, PAIR = 16, 4  # bytes the kernels read and write at once
MOST_WEIGHT = 1 << 32  # their offsets into a weight are 32 bits wide
MOST_STRIDE = 1 << 31  # values from row to row: a launch hands them over as int32
MOST_OUT_STRIDE = 1 << 27  # of an output: the bytes of eight rows are counted in 32 bits


def require(holds: bool, what: str, where: str, expected: object, found: object) -> None:
    """Raise UsageError unless a rule holds: what is wrong, of which argument, expected against found."""
    if not holds:
        raise UsageError(
            what, code="operator-argument", where=where, expected=str(expected), found=str(found)
        )


def scheme(bits: int, group_size: int) -> None:
    """Check code width and group size.

    Raises:
        UsageError: one of them is not supported.
    """
    require(bits in (4, 8), "the code width is not supported", "bits", "4 or 8", bits)
    allowed = ", ".join(map(str, tiles.GROUP_SIZES))
    require(
        group_size in tiles.GROUP_SIZES, "the group size is not supported", "group_size", allowed, group_size
    )


def weight(
    packed: "Tensor", scales: "Tensor", zeros: "Tensor | None", bits: int, group_size: int
) -> tuple[int, int]:
    """Check a packed weight and what belongs to it; return (K, N).

    Raises:
        UsageError: a dtype, shape or device that does not fit.
    """
    import torch

    scheme(bits, group_size)
    has_dtype(packed, "weight", (torch.int32,), 2)
    k, n = packed.shape[0] * 16, packed.shape[1] * 2 // bits
    require(
        k % 64 == 0 and k > 0, "K is not a multiple of 64", "weight", "rows in fours of 16", packed.shape[0]
    )
    require(
        n % 64 == 0 and n > 0,
        "N is not a multiple of 64",
        "weight",
        f"{32 * bits} words a chunk",
        packed.shape[1],
    )
    whole = n * bits == 2 * packed.shape[1]
    require(whole, "the weight ends inside a column", "weight", f"{32 * bits} words a chunk", packed.shape[1])
    groups = 1 if group_size == -1 else -(-k // group_size)
    has_dtype(scales, "scales", (torch.float16, torch.bfloat16), 2)
    has_shape(scales, "scales", (groups, n))
    if zeros is not None:
        has_dtype(zeros, "zeros", (torch.int32,), 2)
        has_shape(zeros, "zeros", (groups, n * bits // 32))
    for name, tensor in (("weight", packed), ("scales", scales), ("zeros", zeros)):
        if tensor is not None:
            require(tensor.is_contiguous(), f"{name} is not contiguous", name, "contiguous", tensor.stride())
            same_device(name, tensor, "weight", packed)
            starts(tensor, name, VECTOR)
    size = packed.numel() * 4
    require(size < MOST_WEIGHT, "the weight is too large", "weight", f"less than {MOST_WEIGHT} bytes", size)
    return k, n


def dense_dtype(dtype: object) -> None:
    """Check the dtype of a dequantized weight.

    Raises:
        UsageError: it is not one the kernels write.
    """
    import torch

    known = (torch.float16, torch.bfloat16)
    require(dtype in known, "the dtype is not supported", "dtype", "float16 or bfloat16", dtype)


def activations(x: "Tensor", k: int, packed: "Tensor") -> None:
    """Check the activations of a product.

    Raises:
        UsageError: a dtype, shape, stride or device that does not fit.
    """
    import torch

    has_dtype(x, "x", (torch.float16, torch.bfloat16), 2)
    require(x.shape[1] == k, "x has another number of columns than the weight has rows", "x", k, x.shape[1])
    same_device("x", x, "weight", packed)
    rows(x, "x", 8)
    starts(x, "x", VECTOR)


def width(x: "Tensor", in_features: int) -> None:
    """Check the width of a layer's input, of any leading dimensions.

    Raises:
        UsageError: it is another one.
    """
    if x.dim() == 0 or x.shape[-1] != in_features:  # no text is made for what holds
        raise UsageError(
            "the input has another width than the layer",
            code="operator-argument",
            where="x",
            expected=f"(..., {in_features})",
            found=str(tuple(x.shape)),
        )


def starts(tensor: "Tensor", name: str, unit: int) -> None:
    """Check that a tensor on a card starts at a multiple of ``unit`` bytes, as the kernels read it.

    Raises:
        UsageError: it is a view that starts elsewhere.
    """
    if tensor.is_cuda:
        offset = tensor.data_ptr() % unit
        require(offset == 0, f"{name} starts at an odd address", name, f"a multiple of {unit} bytes", offset)


def rows(x: "Tensor", name: str, unit: int, most: int = MOST_STRIDE) -> None:
    """Check that rows are contiguous and each starts at a multiple of ``unit`` values, below ``most`` apart.

    Raises:
        UsageError: a stride that does not fit.
    """
    inner = x.stride(1) == 1 or x.shape[1] == 1
    outer = x.shape[0] <= 1 or (x.stride(0) % unit == 0 and x.shape[1] <= x.stride(0) < most)
    require(
        inner and outer,
        f"{name} has a stride that is not supported",
        name,
        f"(a multiple of {unit} below {most}, 1)",
        x.stride(),
    )


def output(y: "Tensor", x: "Tensor", n: int) -> None:
    """Check the output a product is written to.

    Raises:
        UsageError: a dtype, shape, stride or device that does not fit.
    """
    has_dtype(y, "out", (x.dtype,), 2)
    has_shape(y, "out", (x.shape[0], n))
    same_device("out", y, "x", x)
    rows(y, "out", 2, MOST_OUT_STRIDE)
    starts(y, "out", PAIR)


def bias(tensor: "Tensor | None", x: "Tensor", n: int) -> None:
    """Check a bias: (N,) of the activations' dtype.

    Raises:
        UsageError: a dtype, shape or device that does not fit.
    """
    if tensor is not None:
        has_dtype(tensor, "bias", (x.dtype,), 1)
        has_shape(tensor, "bias", (n,))
        require(tensor.is_contiguous(), "bias is not contiguous", "bias", "contiguous", tensor.stride())
        same_device("bias", tensor, "x", x)


def order(perm: "Tensor", x: "Tensor", name: str, length: int) -> None:
    """Check a permutation of rows or columns: int32, contiguous, one entry for each.

    Raises:
        UsageError: a dtype, shape or device that does not fit.
    """
    import torch

    has_dtype(perm, "perm", (torch.int32,), 1)
    has_shape(perm, "perm", (length,))
    require(perm.is_contiguous(), "perm is not contiguous", "perm", "contiguous", perm.stride())
    same_device("perm", perm, name, x)


def order_values(perm: "Tensor", length: int) -> None:
    """Check what a permutation holds. On a GPU that would wait for the card: there the loader has checked it.

    Raises:
        UsageError: not every number from 0 to ``length`` - 1 once.
    """
    import torch

    if length == 0:
        return
    seen = perm.sort().values
    whole = bool((seen == torch.arange(length, dtype=perm.dtype)).all())
    found = "" if whole else f"{int(seen[0])} .. {int(seen[-1])}"
    require(whole, "perm is no permutation", "perm", f"every number of 0 .. {length - 1} once", found)


def gptq_words(words: "Tensor", bits: int) -> tuple[int, int]:
    """Check GPTQ words (K*bits/32, N); return (K, N).

    Raises:
        UsageError: a dtype or shape that does not fit.
    """
    import torch

    scheme(bits, -1)
    has_dtype(words, "words", (torch.int32,), 2)
    k, n = words.shape[0] * 32 // bits, words.shape[1]
    require(
        k % 16 == 0 and n % 64 == 0,
        "the matrix is off the tile",
        "words",
        "K % 16 = 0, N % 64 = 0",
        f"{k} x {n}",
    )
    require(words.is_contiguous(), "words is not contiguous", "words", "contiguous", words.stride())
    return k, n


def has_dtype(tensor: "Tensor", name: str, dtypes: tuple[object, ...], dims: int) -> None:
    """Check dtype and number of dimensions of an argument; UsageError where one differs."""
    wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    require(
        tensor.dtype in dtypes,
        f"{name} has the wrong dtype",
        name,
        wanted,
        str(tensor.dtype).removeprefix("torch."),
    )
    require(tensor.dim() == dims, f"{name} has the wrong number of dimensions", name, dims, tensor.dim())


def has_shape(tensor: "Tensor", name: str, shape: tuple[int, ...]) -> None:
    """Check the shape of an argument; UsageError where it differs."""
    require(tuple(tensor.shape) == shape, f"{name} has the wrong shape", name, shape, tuple(tensor.shape))


def same_device(name: str, tensor: "Tensor", other_name: str, other: "Tensor") -> None:
    """Check that two tensors lie on one device.

    Raises:
        UsageError: they do not; names both devices.
    """
    require(
        tensor.device == other.device,
        f"{name} and {other_name} are on different devices",
        name,
        other.device,
        tensor.device,
    )
