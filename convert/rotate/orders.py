"""Which factors an order is built of: ``n = m_1 m_2 ... 2^k``, every m_i with a direct construction.

A Kronecker product of small Hadamard matrices is one of order n, and it is applied factor by factor, at
``sum(m_i) + k`` multiply-adds an element in place of n. All Hadamard matrices of an order spread outliers
equally, so the cheapest split is taken.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from w4pack.convert.rotate.constructions import (
    BUILDERS,
    GOETHALS_SEIDEL_ROWS,
    WILLIAMSON_ROWS,
    Construction,
    matrix,
    prime_power,
)

Factors = tuple[tuple[int, Construction], ...]
LARGEST = (
    1024  # order of one dense factor; above it neither its cost nor its size is that of a fast transform
)


def direct(n: int) -> Construction | None:
    """Return the construction that is used for order n, or None. Powers of two: Sylvester."""
    if n > 0 and n & (n - 1) == 0:
        return "sylvester"
    if n % 4 or n > LARGEST:
        return None
    if prime_power(n - 1):
        return "paley1"
    if n // 2 % 2 == 0 and (n // 2 - 1) % 4 == 1 and prime_power(n // 2 - 1):
        return "paley2"
    if n // 4 in WILLIAMSON_ROWS:
        return "williamson"
    return "goethals_seidel" if n // 4 in GOETHALS_SEIDEL_ROWS else None


@lru_cache(maxsize=1024)
def exists(n: int, construction: str) -> bool:
    """Tell whether a construction, by any name, gives a Hadamard matrix of order n.

    Powers of two by Sylvester need no look at the entries; all others are multiplied out.
    """
    if construction == "sylvester":
        return n > 0 and n & (n - 1) == 0
    if construction not in BUILDERS or not 0 < n <= LARGEST:
        return False
    try:
        h = matrix(n, construction).astype(np.int32)
    except (KeyError, ValueError, IndexError):  # no rows, no field, no halves of that order
        return False
    return h.shape == (n, n) and bool((h @ h.T == n * np.eye(n, dtype=np.int32)).all())


@lru_cache(maxsize=1024)
def factors(n: int) -> Factors | None:
    """Return the factors of order n, largest first, the power of two last, or None if there is no plan.

    The odd part is split into odd numbers, each taken times the smallest power of two, at least 4, for which
    a direct construction exists. Of all splits that fit, the one of the least sum; ties: fewest factors.
    """
    if n < 1:
        return None
    twos = (n & -n).bit_length() - 1
    splits = [sorted(split, reverse=True) for split in _splits(n >> twos, twos, n)]
    if not splits:
        return None
    best = min(splits, key=lambda split: (sum(split), len(split), split))
    rest = n
    for order in best:
        rest //= order
    return tuple((m, _construction(m)) for m in [*best, *([rest] if rest > 1 else [])])


def _construction(m: int) -> Construction:
    found = direct(m)
    if found is None:
        raise ValueError(f"no construction of order {m}")
    return found


def _splits(odd: int, twos: int, largest: int) -> Iterator[list[int]]:
    """Yield lists of direct orders whose odd parts multiply to ``odd`` and that use at most ``twos`` twos."""
    if odd == 1:
        yield []
        return
    for part in range(3, min(odd, largest) + 1, 2):
        if odd % part:
            continue
        exponent = next((e for e in range(2, twos + 1) if direct(part << e)), None)
        if exponent is not None:
            for rest in _splits(odd // part, twos - exponent, part):
                yield [part << exponent, *rest]


def block_order(n: int) -> int:
    """Return the largest divisor of n that has a plan: n itself where there is one, at the least 1."""
    return max(d for d in range(1, n + 1) if n % d == 0 and factors(d) is not None)
