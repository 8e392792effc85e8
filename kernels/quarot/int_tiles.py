"""Which kernel runs an integer product, and in which order it reads activations: pure functions."""

from collections.abc import Iterator

from w4pack.kernels.quarot import orders_int
from w4pack.kernels.quarot.file import File

S4_CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9))  # cards whose tensor cores multiply s4 by themselves


def int_order(capability: tuple[int, int] | None, bits: int, group_size: int, act_bits: int = 4) -> int:
    """Return the order (``orders_int``) in which the product on a card reads activation codes.

    Args:
        capability: the card's compute capability; None for a CPU.
        bits: 4 or 8, of the weight.
        group_size: of the weight; -1 for one scale a column.
        act_bits: 4 or 8, of the activations.
    """
    if bits == 8:
        return orders_int.Q32
    native = capability in S4_CAPABILITIES and act_bits == 4 and group_size != 32
    return orders_int.S64 if native else orders_int.P32


def files(arch: str) -> Iterator[File]:
    """Yield the kernels of an architecture."""
    yield from ()
