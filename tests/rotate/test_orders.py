"""Hadamard matrices: the factors of every size that models have, and exactness in integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from w4pack.convert.rotate import constructions, orders
from w4pack.convert.rotate.constructions import GOETHALS_SEIDEL_ROWS, WILLIAMSON_ROWS, matrix

# What hidden sizes, intermediate sizes and head counts of published models come to. Written out by hand: the
# list enters digests, so a change of rule would be a change of every artifact.
TABLE: dict[int, tuple[int, ...]] = {
    576: (12, 12, 4), 640: (20, 32), 768: (12, 64), 896: (28, 32), 960: (20, 12, 4), 1152: (12, 12, 8),
    1408: (44, 32), 2816: (44, 64), 1536: (12, 128), 2304: (12, 12, 16), 2560: (20, 128),
    2880: (20, 12, 12), 3072: (12, 256), 3584: (28, 128), 3840: (20, 12, 16), 4544: (284, 16),
    4608: (12, 12, 32), 4864: (76, 64), 5120: (20, 256), 5376: (28, 12, 16), 5632: (44, 128),
    5760: (20, 12, 12, 2), 6144: (12, 512), 6400: (20, 20, 16), 6656: (52, 128), 6912: (12, 12, 12, 4),
    7168: (28, 256), 8960: (28, 20, 16), 9216: (12, 12, 64), 9728: (76, 128), 10240: (20, 512),
    10752: (28, 12, 32), 10944: (76, 12, 12), 11008: (172, 64), 12288: (12, 1024), 12800: (20, 20, 32),
    13696: (428, 32), 13824: (12, 12, 12, 8), 14336: (28, 512), 15360: (20, 12, 64), 17408: (68, 256),
    17920: (28, 20, 32), 18176: (284, 64), 18432: (12, 12, 128), 18944: (148, 128), 20480: (20, 1024),
    21504: (28, 12, 64), 22016: (172, 128), 22528: (44, 512), 23040: (20, 12, 12, 8), 24576: (12, 2048),
    25600: (20, 20, 64), 27392: (428, 64), 27648: (12, 12, 12, 16), 28672: (28, 1024),
    29568: (44, 28, 12, 2), 36864: (12, 12, 256), 2048: (2048,), 4096: (4096,), 32768: (32768,),
    12: (12,), 20: (20,), 24: (12, 2), 36: (36,), 40: (20, 2), 48: (12, 4), 52: (52,), 56: (28, 2),
    80: (20, 4), 96: (12, 8), 112: (28, 4), 192: (12, 16), 100: (100,), 244: (244,), 92: (92,),
    116: (116,), 156: (156,), 172: (172,), 188: (188,), 236: (236,), 428: (428,),
}  # fmt: skip
KINDS = {
    12: "paley1", 20: "paley1", 28: "paley1", 44: "paley1", 68: "paley1", 284: "paley1", 244: "paley1",
    36: "paley2", 52: "paley2", 76: "paley2", 148: "paley2", 100: "paley2",
    92: "williamson", 116: "williamson", 156: "williamson", 172: "williamson",
    188: "goethals_seidel", 236: "goethals_seidel", 428: "goethals_seidel",
}  # fmt: skip
# Multiples of 4 up to 1024 that these constructions do not reach.
UNREACHED = {
    260, 268, 292, 324, 356, 372, 404, 412, 436, 452, 476, 508, 520, 532, 536, 584, 596, 604, 612, 652, 668,
    712, 716, 732, 756, 764, 772, 808, 836, 852, 872, 876, 892, 904, 932, 940, 952, 956, 964, 980, 988, 996,
    1004, 1012, 1016,
}  # fmt: skip


@pytest.mark.parametrize("n", sorted(TABLE))
def test_the_factors_of_every_size_of_a_model(n: int) -> None:
    found = orders.factors(n)
    assert found is not None
    assert tuple(m for m, _ in found) == TABLE[n]
    for m, construction in found:
        assert construction == KINDS.get(m, "sylvester")


@pytest.mark.parametrize("m", sorted({m for sizes in TABLE.values() for m in sizes if m <= 512}))
def test_rows_are_signs_and_orthogonal_in_integers(m: int) -> None:
    construction = orders.direct(m)
    assert construction is not None
    h = matrix(m, construction).astype(np.int64)
    assert set(np.unique(h)) == {-1, 1}
    assert np.array_equal(h @ h.T, m * np.eye(m, dtype=np.int64))


def test_what_is_reached_and_what_is_not() -> None:
    without = {n for n in range(4, 1025, 4) if orders.factors(n) is None}
    assert without == UNREACHED
    assert all(orders.factors(n) is None for n in range(3, 200) if n % 4 and n > 2)
    assert orders.factors(1) == ()
    assert orders.factors(2) == ((2, "sylvester"),)
    assert orders.factors(0) is None


@pytest.mark.parametrize(
    ("n", "block"), [(9, 1), (14, 2), (15, 1), (71, 1), (6, 2), (90, 2), (520, 104), (13696, 13696), (7, 1)]
)
def test_where_no_plan_exists_the_largest_divisor_with_one_is_the_block(n: int, block: int) -> None:
    assert orders.block_order(n) == block


@pytest.mark.parametrize("rows", [*WILLIAMSON_ROWS.values(), *GOETHALS_SEIDEL_ROWS.values()])
def test_the_four_sequences_cancel_at_every_shift(rows: tuple[str, ...]) -> None:
    """A row set can be proved without its matrix: periodic autocorrelations add up to nothing."""
    signs = [[1 if char == "+" else -1 for char in row] for row in rows]
    m = len(signs[0])
    assert {len(row) for row in signs} == {m}
    for shift in range(1, m):
        assert sum(row[i] * row[(i + shift) % m] for row in signs for i in range(m)) == 0


@pytest.mark.parametrize("rows", WILLIAMSON_ROWS.values())
def test_williamson_rows_are_symmetric(rows: tuple[str, ...]) -> None:
    assert all(row[1:] == row[1:][::-1] for row in rows)


def test_constructions_that_are_not_symmetric_are_not() -> None:
    """Code that used H for its transpose would pass every test on powers of two."""
    for m, kind in ((12, "paley1"), (28, "paley1"), (92, "williamson"), (188, "goethals_seidel")):
        assert not np.array_equal(matrix(m, kind), matrix(m, kind).T)
    for m, kind in ((16, "sylvester"), (36, "paley2")):
        assert np.array_equal(matrix(m, kind), matrix(m, kind).T)


def test_paley_of_order_12_by_hand() -> None:
    """q = 11: squares are 1, 3, 4, 5, 9. Second row: -1, then J[0, j] = chi(-j), and 1 on the diagonal."""
    squares = {1, 3, 4, 5, 9}
    second = [-1, 1, *(1 if (-j) % 11 in squares else -1 for j in range(1, 11))]
    h = matrix(12, "paley1")
    assert h[0].tolist() == [1] * 12
    assert h[1].tolist() == second


def test_the_field_of_nine_elements_by_hand() -> None:
    """x^2 + 1 is the first irreducible over GF(3). Squares: 1, 2, x, 2x and no other: numbers 1, 2, 3, 6."""
    j = constructions.jacobsthal(9)
    assert [int(v) for v in j[:, 0]] == [0, 1, 1, 1, -1, -1, 1, -1, -1]


@given(st.integers(1, 4000))
def test_factors_multiply_to_the_order(n: int) -> None:
    found = orders.factors(n)
    if found is None:
        return
    product = 1
    for m, construction in found:
        product *= m
        assert orders.direct(m) == construction
    assert product == n
    assert sum(construction == "sylvester" for _, construction in found) <= 1
