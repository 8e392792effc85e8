"""How rows are shared out among blocks of the gather kernel: all of them, within what a block has."""

import itertools

import pytest

from w4pack.kernels import gather_launch as g

SHARED_OF_STATIC = 64  # bytes the kernel keeps beside the rows
LEAST_SHARED = 99 * 1024  # of the smallest card


@pytest.mark.parametrize("multiprocessors", [1, 84, 132])
def test_every_row_and_column_has_a_block(multiprocessors: int) -> None:
    sizes = (
        (64, 64),
        (200, 256),
        (4096, 4096),
        (14336, 14336),
        (14336, 16384),
        (28672, 28672),
        (60000, 60000),
    )
    for (k, width), m in itertools.product(sizes, (1, 2, 7, 64, 300, 4100, 70000)):
        (parts, groups), each, shared = g.plan(m, k, width, multiprocessors)
        assert 1 <= each <= g.MOST_ROWS and 1 <= parts <= -(-width // g.COLUMNS)
        assert groups == min(-(-m // each), g.MOST_GRID_ROWS)  # the kernel's loop takes the rest
        assert shared in (0, each * -(-k // 8) * 16)
        assert shared + SHARED_OF_STATIC <= LEAST_SHARED
        assert shared + SHARED_OF_STATIC <= 48 * 1024 or each == 1, "only a long row needs the card's consent"


def test_a_row_that_does_not_fit_is_read_in_place() -> None:
    longest = g.STAGED_BYTES  # values of twice that many bytes
    assert g.plan(8, longest, longest, 132)[2] == 2 * longest
    assert g.plan(8, longest + 8, longest + 8, 132)[1:] == (1, 0)


def test_rows_of_nothing_are_zeros_that_one_block_writes() -> None:
    assert g.plan(3, 0, 8, 132) == ((1, 3), 1, 16)
