"""Transforms between the linears: which Hadamard matrix, as one text that an operator can take.

    Transform(14336, ((28, "paley1"), (512, "sylvester")), 14336).key == "14336:28-paley1,512-sylvester"
    Transform(28672, ((28, "paley1"), (128, "sylvester")), 3584).key  == "28672/3584:28-paley1,128-sylvester"

``y = x (I ⊗ H_b) / sqrt(b)`` on row vectors, with ``order / block`` copies of ``H_b = H_m1 ⊗ H_m2 ...`` on
the diagonal, the last factor runs fastest. The empty text is no transform.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from w4pack.convert.dialects.online import MOST_ORDER
from w4pack.convert.errors import UsageError
from w4pack.convert.rotate import orders, rotation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Transform:
    """A Hadamard transform without signs.

    order    length of the vectors; 1 and no factors: none
    factors  (order, construction) of each Kronecker factor of a block, as an ``online`` record has them
    block    order of one block
    """

    order: int
    factors: tuple[tuple[int, str], ...]
    block: int

    @property
    def key(self) -> str:
        """The transform as a text, which ``of`` reads."""
        if not self.factors:
            return ""
        blocks = "" if self.block == self.order else f"/{self.block}"
        return f"{self.order}{blocks}:" + ",".join(f"{m}-{kind}" for m, kind in self.factors)

    @property
    def scale(self) -> float:
        """What the sums are multiplied by: 1 / sqrt(block)."""
        return 1.0 / math.sqrt(self.block)

    @staticmethod
    def of(key: str) -> "Transform":
        """Return the transform of a text.

        Raises:
            UsageError: it is none: another form, factors that do not multiply to the block, an order without
                such a matrix.
        """
        return _of(key)

    @staticmethod
    def planned(n: int, parts: int = 1) -> "Transform":
        """Return the transform that the converter plans for n values in ``parts`` equal ranges.

        Raises:
            UsageError: there is none but the identity.
        """
        made = rotation.make_rotation("r4", n, parts=parts) if n > 0 and n % parts == 0 else None
        if made is None:
            raise _unknown(str(n), "an order with a Hadamard matrix")
        return Transform(n, made.factors, made.block)


NONE = Transform(1, (), 1)


@cache
def _of(key: str) -> Transform:
    if key == "":
        return NONE
    try:
        sizes, _, names = key.partition(":")
        order, block = (int(part) for part in (sizes if "/" in sizes else f"{sizes}/{sizes}").split("/"))
        parts = [name.split("-") for name in names.split(",")]
        found = Transform(order, tuple((int(m), kind) for m, kind in parts), block)
    except ValueError:
        raise _unknown(key, "ORDER[/BLOCK]:M-CONSTRUCTION,...") from None
    if not 0 < order <= MOST_ORDER or block < 1 or order % block:
        raise _unknown(key, f"an order up to {MOST_ORDER} and a block that divides it")
    if min(m for m, _ in found.factors) < 1 or math.prod(m for m, _ in found.factors) != block:
        raise _unknown(key, f"factors whose product is the block, {block}")
    for m, kind in found.factors:
        if not orders.exists(m, kind):
            raise _unknown(key, f"a construction of order {m}", f"{m}-{kind}")
    return found


def _unknown(key: str, expected: str, found: str | None = None) -> UsageError:
    return UsageError(
        "the transform is not known",
        code="operator-argument",
        where="transform",
        expected=expected,
        found=key if found is None else f"{found} in {key}",
    )


def outside_capture(key: str) -> None:
    """Check that no graph is captured while a transform's signs are brought to a card: its first use.

    Raises:
        UsageError: one is, and would not hold the copy.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "a transform is met for the first time while a graph is captured",
            code="operator-argument",
            where="transform",
            found=key,
            hint="call the operator once before the capture",
        )


def apply(values: "Tensor", transform: Transform, axis: int = -1) -> "Tensor":
    """Return ``values`` with each vector along ``axis`` transformed, in their own dtype (take float32).

    Sums first, factor by factor, then the scale. The axis has ``transform.order`` elements.
    """
    if not transform.factors:
        return values
    # here, as it loads torch: the build of the kernels reads transforms and needs none
    from w4pack.convert.rotate.transform import rotate

    matrix = rotation.Rotation("r4", -1, transform.order, transform.block, transform.factors, None)
    return rotate(values, matrix, axis)
