"""One product of a shape and an M: ours and the library's 16-bit one, in turns, checked.

With 4- or 8-bit activations ours is the quantizer of 16-bit rows and the product of integers, two launches.

Numbers are random: codes over all values, scales in [0.005, 0.015], normal activations; the library gets
the dense weight of the same codes. Both outputs are poisoned with NaN and compared on whole chunks of
columns with the product in fp64, whose weight comes from the definition of the tile, not from a kernel.
A product of integers is held against its own codes: whether these are right is no matter of time.
"""

from dataclasses import dataclass

import torch

from w4pack.convert.core.scheme import WIDE
from w4pack.convert.errors import W4PackError
from w4pack.kernels import ops, reference
from w4pack.kernels.bench.rates import Rates
from w4pack.kernels.bench.shapes import Shape
from w4pack.kernels.bench.timing import Candidate, race, rotation, warm_up
from w4pack.kernels.layout import TILE_N
from w4pack.kernels.quarot import orders_int
from w4pack.kernels.quarot.fronts import PlainFront
from w4pack.kernels.quarot.modules import int_product, order_of

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
SAMPLED_CHUNKS = 2  # of 64 columns each
WARM_UP_ROWS = 16
# Two roundings to 16 bit (weight, output), each at most u = half a unit in the last place of 1; fp32 sums of
# up to 57344 terms add under a tenth of u. Norms over thousands of elements with random signs stay below 2 u.
UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
MOST_UNITS = 2.0


@dataclass(frozen=True, slots=True)
class Point:
    """A measured product. Times in seconds.

    bound                 what the floor is made of: ``bytes`` or ``operations``
    error, library_error  norm of the difference from fp64 over the norm, on the sampled columns
    """

    m: int
    floor: float
    bound: str
    seconds: float
    library_seconds: float
    error: float
    library_error: float

    @property
    def share(self) -> float:
        """Share of the floor: 1 is as fast as the card's measured rates allow."""
        return self.floor / self.seconds

    @property
    def speed_up(self) -> float:
        """How many times the library's product takes as long."""
        return self.library_seconds / self.seconds


class Weights:
    """Random packed weights of a shape and the dense weight of the same codes, copied for the rotation."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype, self.device = shape.spec, dtype, device
        self.front = None if shape.act_bits == WIDE else PlainFront(shape.act_bits, 1.0, "")
        spec = shape.spec
        scales = torch.rand((spec.groups, spec.n), device=device) * 0.01 + 0.005
        scales = (scales / 2 ** (spec.bits - 4)).to(DTYPES[shape.scale_dtype])
        words = _words(device, spec.k // 16, spec.n * spec.bits // 2)
        zeros = None if spec.sym else _words(device, spec.groups, spec.n * spec.bits // 32)
        self.perm = torch.randperm(spec.in_features, device=device).int() if spec.act_order else None
        first = (words, scales, zeros)
        self.bytes = sum(t.numel() * t.element_size() for t in first if t is not None)
        self.packed = [first, *(_copy(first) for _ in range(rotation(self.bytes) - 1))]
        dense = ops.dequantize(*first, spec.bits, spec.group_size, dtype)
        copies = rotation(dense.numel() * dense.element_size())
        self.dense = [dense, *(dense.clone() for _ in range(copies - 1))]

    def product(self, i: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Multiply as a layer does, its gather or quantizer included: (M, in_features) to (M, N).

        The result is ``out``, but for a product of integers, which makes its own.
        """
        spec = self.spec
        if self.front is not None:
            codes, scales = self.codes(x)
            tensors = {"weight": self.packed[i][0], "weight_scale": self.packed[i][1]}
            return int_product(spec, tensors, codes, scales, None, self.front.bits, self.dtype)
        given = x if self.perm is None else ops.gather(x, self.perm, spec.k)
        ops.gemm_out(given, *self.packed[i], None, spec.bits, spec.group_size, out)
        return out

    def codes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of x. Only for products of integers."""
        assert self.front is not None
        return self.front.codes(x, order_of(self.spec, self.device, self.front.bits), self.spec.k)

    def multiplied(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows that the product multiplies: as they are, or what their codes mean, in fp64."""
        if self.front is None:
            return rows.double()
        codes, scales = self.codes(x)
        whole = orders_int.natural(codes, order_of(self.spec, self.device, self.front.bits))
        return whole.double() * scales.double()[:, None]

    def inputs(self, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random activations, and the same in the order and width of the packed rows."""
        x = torch.randn(m, self.spec.in_features, device=self.device).to(self.dtype)
        return x, x if self.perm is None else reference.gather(x, self.perm, self.spec.k)

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return columns that were drawn, and the weight there in fp64: (K, columns)."""
        spec = self.spec
        chunks = torch.randperm(spec.n // TILE_N, device=self.device)[:SAMPLED_CHUNKS]
        weight, scales, zeros = (
            None if t is None else _chunks(t, chunks, spec.n // TILE_N) for t in self.packed[0]
        )
        assert weight is not None and scales is not None
        dense = reference.dense(weight, scales, zeros, spec.bits, spec.group_size, torch.float64)
        columns = (chunks[:, None] * TILE_N + torch.arange(TILE_N, device=self.device)).flatten()
        return columns, dense


def warm(weights: Weights) -> None:
    """Bring the card to its working clock."""
    x, _ = weights.inputs(WARM_UP_ROWS)
    out = torch.empty(WARM_UP_ROWS, weights.spec.n, dtype=weights.dtype, device=weights.device)
    warm_up(lambda i: weights.product(i, x, out), len(weights.packed))


def point(weights: Weights, m: int, rates: Rates, repeats: int) -> Point:
    """Measure one M.

    Raises:
        W4PackError: a result, ours or the library's, that is wrong.
    """
    spec, device = weights.spec, weights.device
    x, rows = weights.inputs(m)
    ours, theirs = (
        torch.full((m, spec.n), float("nan"), dtype=weights.dtype, device=device) for _ in range(2)
    )

    def library(i: int) -> None:
        torch.mm(rows, weights.dense[i].t(), out=theirs)

    integers = weights.front is not None
    times = race(
        [
            Candidate("w4pack", lambda i: weights.product(i, x, ours), len(weights.packed), device),
            Candidate("library", library, len(weights.dense), device),
        ],
        repeats,
    )
    if integers:
        ours = weights.product(0, x, ours)
    columns, dense = weights.sample()
    where = f"{spec.n}x{spec.k}, M {m}"
    error = checked(ours, columns, weights.multiplied(x, rows) @ dense, f"w4pack, {where}")
    library_error = checked(theirs, columns, rows.double() @ dense, f"torch.mm, {where}")
    nbytes = weights.bytes + x.element_size() * m * (spec.k + spec.n)
    floor, bound = rates.floor(nbytes, 2 * m * spec.n * spec.k, integers=integers)
    seconds, library_seconds = times["w4pack"] / 1e6, times["library"] / 1e6
    return Point(m, floor, bound, seconds, library_seconds, error, library_error)


def checked(found: torch.Tensor, columns: torch.Tensor, exact: torch.Tensor, where: str) -> float:
    """Return the relative error of an output on the sampled columns.

    Raises:
        W4PackError: an error beyond rounding, or elements anywhere that were never written.
    """
    error = float((found[:, columns].double() - exact).norm() / exact.norm())
    limit = MOST_UNITS * UNITS[found.dtype]
    unwritten = int(found.isnan().sum())
    if unwritten or not error <= limit:
        raise W4PackError(
            "a product is wrong",
            code="wrong-result",
            where=where,
            expected=f"a relative error of at most {limit:.1e} from fp64",
            found=f"{unwritten} elements not written" if unwritten else f"{error:.1e}",
            hint="w4pack generate PATH PROMPT --device cpu computes without the kernels",
        )
    return error


def _words(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device=device).int()


def _copy(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    words, scales, zeros = tensors
    return words.clone(), scales.clone(), None if zeros is None else zeros.clone()


def _chunks(tensor: torch.Tensor, chunks: torch.Tensor, count: int) -> torch.Tensor:
    """Return chunks of 64 columns of a packed tensor of ``count`` chunks side by side."""
    rows = tensor.shape[0]
    return tensor.view(rows, count, -1)[:, chunks].reshape(rows, -1).contiguous()
