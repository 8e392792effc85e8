"""Hadamard matrices: square, entries +1 and -1, ``H Hᵀ = n I``. Each construction is one function.

Orders that are no power of two come from finite fields (Paley) or from four +-1 sequences whose circulants
add up (Williamson, Goethals-Seidel). Everything is exact integer arithmetic, and every function gives the
same matrix for ever: artifacts record factors by order and construction, not entries.

Paley I, Williamson and Goethals-Seidel matrices are not symmetric: ``H`` is never to be used for ``Hᵀ``.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Construction = Literal["sylvester", "paley1", "paley2", "williamson", "goethals_seidel"]
Matrix = NDArray[np.int8]

# First rows of four circulants A, B, C, D of odd size m, for order 4m. Williamson: all four symmetric and
# A² + B² + C² + D² = 4m I. Goethals-Seidel: A Aᵀ + B Bᵀ + C Cᵀ + D Dᵀ = 4m I (from Turyn-type sequences).
WILLIAMSON_ROWS: dict[int, tuple[str, str, str, str]] = {
    23: (
        "+++-+++-+------+-+++-++",
        "+++---++-+-++-+-++---++",
        "+-++-++--++++++--++-++-",
        "++---+---+-++-+---+---+",
    ),
    29: (
        "++--+--+-+++-++++-+++-+--+--+",
        "++++-++-+---++++++---+-++-+++",
        "+-+---++--+-++++++-+--++---+-",
        "+++---++--+-+----+-+--++---++",
    ),
    39: (
        "+++--+-+-----+--++----++--+-----+-+--++",
        "++++---+--++----+-+--+-+----++--+---+++",
        "+++--++-+---+-+--+----+--+-+---+-++--++",
        "+---++-+-+-----+++-++-+++-----+-+-++---",
    ),
    43: (
        "+---++--++++-+-+++-++--++-+++-+-++++--++---",
        "++-++++++----+-+--++-++-++--+-+----++++++-+",
        "+++-+-++--+-+-++++-+----+-++++-+-+--++-+-++",
        "++---++++-+--+--++--------++--+--+-++++---+",
    ),
}
GOETHALS_SEIDEL_ROWS: dict[int, tuple[str, str, str, str]] = {
    47: (
        "+-+----+--+----++---++++---+-+----++++++--+---+",
        "+---+--++++++----+-+---+---+++--++++-++-++++-+-",
        "+--+--+-+++-----+---+---++--+-++-+++-+-+--+---+",
        "+--+--+-+++-----+---+-----++-+--+---+-+-++-+++-",
    ),
    59: (
        "+++++-++++-+--++--++++-+---+-++++-+---+-++---+--++++-++++--",
        "-++-+---+-++---+--++++-++++-++-+---+-++++--++--+-++++-++++-",
        "--++++-++++--+---++-+---+-+++-+-+++-+----++--++-+----+-----",
        "+--+-+++-+--+++-++----+----+-+-+---+-++++--++--+-++++-++++-",
    ),
    107: (
        "+-+++++-+--++++-+++-++--+++-+--+---++++-+-----++--+-+++--+-+-+++-++++-++++----++-+-+-----++++-++-++++-"
        "---+-",
        "-++---++++-++++--++--+--+-+--+++++-++-++++-+++-+-+--+++-+--++-----+-+++-+++-++-+---++--+---+----++-+--"
        "---+-",
        "-+----++++-++-++++-----+-+-++----+++-+----+---+-+-++---+-++--+++++-+----+++-++-+---++--+---+----++-+--"
        "---+-",
        "+--+++----+----++--++-++-+-++-----+-+-++++-+++-+-+--+++-+--++-----+-+++-+++-++-+---++--+---+----++-+--"
        "---+-",
    ),
}


def sylvester(n: int) -> Matrix:
    """Return the matrix of order 2^k by doubling: ``[[H, H], [H, -H]]``. Symmetric."""
    made = np.ones((1, 1), np.int8)
    while made.shape[0] < n:
        made = np.block([[made, made], [made, -made]])
    return made


def paley1(n: int) -> Matrix:
    """Return the matrix of order q + 1, q = 3 mod 4 a prime power: ``[[1, 1], [-1, J + I]]``."""
    made = np.ones((n, n), np.int8)
    made[1:, 0] = -1
    made[1:, 1:] = jacobsthal(n - 1) + np.eye(n - 1, dtype=np.int8)
    return made


def paley2(n: int) -> Matrix:
    """Return the matrix of order 2 (q + 1), q = 1 mod 4 a prime power. Symmetric.

    ``S = [[0, 1], [1, J]]``; its zeros become ``[[1, -1], [-1, -1]]``, its signs times ``[[1, 1], [1, -1]]``.
    """
    half = n // 2
    conference = np.ones((half, half), np.int8)
    conference[0, 0] = 0
    conference[1:, 1:] = jacobsthal(half - 1)
    signs = np.array([[1, 1], [1, -1]], np.int8)
    diagonal = np.array([[1, -1], [-1, -1]], np.int8)
    made: Matrix = np.kron(conference, signs) + np.kron(np.eye(half, dtype=np.int8), diagonal)
    return made


def williamson(n: int) -> Matrix:
    """Return the matrix of order 4m from four symmetric circulants."""
    a, b, c, d = (circulant(row) for row in WILLIAMSON_ROWS[n // 4])
    return np.block([[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]])


def goethals_seidel(n: int) -> Matrix:
    """Return the matrix of order 4m from four circulants; ``R`` reverses the order of columns."""
    a, b, c, d = (circulant(row) for row in GOETHALS_SEIDEL_ROWS[n // 4])
    br, cr, dr = (x[:, ::-1] for x in (b, c, d))
    btr, ctr, dtr = (x.T[:, ::-1] for x in (b, c, d))
    return np.block([[a, br, cr, dr], [-br, a, dtr, -ctr], [-cr, -dtr, a, btr], [-dr, ctr, -btr, a]])


BUILDERS = {
    "sylvester": sylvester,
    "paley1": paley1,
    "paley2": paley2,
    "williamson": williamson,
    "goethals_seidel": goethals_seidel,
}


@lru_cache(maxsize=64)
def matrix(n: int, construction: str) -> Matrix:
    """Return the Hadamard matrix of order ``n``, int8, read-only. Raises KeyError for no construction."""
    made: Matrix = np.ascontiguousarray(BUILDERS[construction](n))
    made.flags.writeable = False
    return made


def circulant(row: str) -> Matrix:
    """Return the circulant matrix whose first row is given as ``+`` and ``-``: each row moves one right."""
    first = np.array([1 if char == "+" else -1 for char in row], np.int8)
    index = np.arange(len(row))
    made: Matrix = first[(index[None, :] - index[:, None]) % len(row)]
    return made


# ---------------------------------------------------------------- finite fields


def prime_power(q: int) -> tuple[int, int] | None:
    """Return (p, e) with q = p^e, p prime, or None."""
    if q < 2:
        return None
    divisor = next((d for d in range(2, int(q**0.5) + 1) if q % d == 0), q)
    exponent, rest = 0, q
    while rest % divisor == 0:
        rest, exponent = rest // divisor, exponent + 1
    return (divisor, exponent) if rest == 1 else None


def jacobsthal(q: int) -> Matrix:
    """Return ``J[i, j] = chi(a_i - a_j)`` over GF(q), q odd; chi is 1 on squares, -1 on others, 0 on 0.

    Element number a is the polynomial whose coefficients are the base-p digits of a, the constant first,
    modulo the first irreducible monic polynomial in lexicographic order of its low coefficients.
    """
    found = prime_power(q)
    if found is None:
        raise ValueError(f"{q} is no prime power")
    p, e = found
    digits = np.array([[a // p**i % p for i in range(e)] for a in range(q)])
    weights = p ** np.arange(e)
    modulus = _first_irreducible(p, e)
    character = np.full(q, -1, np.int8)
    character[0] = 0
    for element in digits[1:].tolist():
        character[int(np.dot(_square(element, modulus, p), weights))] = 1
    differences = (digits[:, None, :] - digits[None, :, :]) % p
    made: Matrix = character[differences @ weights]
    return made


def _square(element: Sequence[int], modulus: Sequence[int], p: int) -> list[int]:
    """Return the square of a polynomial of GF(p^e). ``modulus``: its coefficients but the leading 1."""
    degree = len(modulus)
    product = [0] * (2 * degree - 1)
    for i, j in itertools.product(range(degree), repeat=2):
        product[i + j] += element[i] * element[j]
    for high in range(2 * degree - 2, degree - 1, -1):  # x^degree = -(low coefficients)
        for i in range(degree):
            product[high - degree + i] -= product[high] * modulus[i]
    return [value % p for value in product[:degree]]


def _first_irreducible(p: int, e: int) -> tuple[int, ...]:
    candidates = itertools.product(range(p), repeat=e)
    return (0,) if e == 1 else next(low for low in candidates if _is_irreducible(low, p))


def _is_irreducible(low: Sequence[int], p: int) -> bool:
    """Tell whether ``x^e + low`` has no monic factor of degree 1 to e / 2 (trial division)."""
    degree = len(low)
    for size in range(1, degree // 2 + 1):
        for factor in itertools.product(range(p), repeat=size):
            rest = [*low, 1]
            for high in range(degree, size - 1, -1):
                lead = rest[high]
                for i, value in enumerate((*factor, 1)):
                    rest[high - size + i] = (rest[high - size + i] - lead * value) % p
            if not any(rest[:size]):
                return False
    return True
