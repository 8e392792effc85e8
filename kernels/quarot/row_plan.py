"""Which kernel quantizes a row without a transform: pure choices, by its width."""

from collections.abc import Iterator
from dataclasses import dataclass

from w4pack.kernels.quarot.file import File
from w4pack.kernels.tiles import DTYPES

WARP_VALUES = 512  # of a warp whose threads hold one pair of octets each
MOST_BLOCKS = 32  # that a multiprocessor holds, however small they are
ACTS_ALONE = ("sm_80", "compute_80")  # two blocks behind an activation would spill


@dataclass(frozen=True, slots=True)
class Rows:
    """One compiled form of ``quantize_rows.cu`` or, where x is gate and up, of ``quantize_acts.cu``.

    pairs     of octets that a thread holds
    warps     of a block at most
    resident  blocks of so many warps that a multiprocessor's registers allow
    ahead     whether a thread asks for the next row before it works on this one
    """

    pairs: int
    warps: int
    resident: int
    ahead: bool = False
    acts: bool = False

    def entry(self, dtype: str) -> str:
        """Return the kernel's name."""
        return f"quantize_{dtype}_p{self.pairs}w{self.warps}{'_acts' if self.acts else ''}"

    def warps_of(self, width: int) -> int:
        """Return how many warps a row takes."""
        return -(-width // (WARP_VALUES * self.pairs))

    def blocks(self, width: int) -> int:
        """Return how many blocks a multiprocessor holds."""
        return min(MOST_BLOCKS, self.resident * self.warps // self.warps_of(width))

    def file(self, dtype: str, arch: str) -> File:
        """Return how it is compiled."""
        entry = self.entry(dtype)
        defines = (f"ENTRY={entry}", f"NUMBER={dtype.upper()}", f"PAIRS={self.pairs}")
        if self.acts:
            resident = 1 if arch in ACTS_ALONE else self.resident
            return File("quantize_acts.cu", entry, (*defines, f"RESIDENT={resident}"))
        more = (f"WARPS={self.warps}", f"RESIDENT={self.resident}", f"AHEAD={int(self.ahead)}")
        return File("quantize_rows.cu", entry, (*defines, *more))


# The first that holds a row takes it. On an H200, 8192 rows of a norm with gain took at 8192 values 50.9
# us with three pairs and the next row ahead, 52.4 to 56 with two, 56 with four; at 12288 75 us with three,
# 84 with four; at 4096 26.3 us with two, 31 with four, 37 with one. Past all others there is one block of
# as many threads as it may have. The compiler for later cards spills with three pairs.
ROWS = (Rows(2, 7, 4), Rows(4, 6, 2, ahead=True), Rows(2, 16, 1, ahead=True))
ROWS_OF = {
    "sm_90a": (
        Rows(2, 4, 8),
        Rows(2, 7, 4),
        Rows(3, 6, 3, ahead=True),
        Rows(3, 8, 2, ahead=True),
        Rows(2, 16, 1, ahead=True),
    )
}
ACTS = (Rows(1, 16, 2, acts=True), Rows(2, 16, 1, acts=True))


def forms(arch: str, acts: bool) -> tuple[Rows, ...]:
    """Return the forms of an architecture; ``acts``: x is gate and up."""
    return ACTS if acts else ROWS_OF.get(arch, ROWS)


def choose(arch: str, width: int, acts: bool) -> Rows | None:
    """Return the form for rows of ``width`` codes, or None: too wide; ``acts``: x is gate and up."""
    return next((row for row in forms(arch, acts) if row.warps_of(width) <= row.warps), None)


def files(arch: str) -> Iterator[File]:
    """Yield what is compiled for an architecture."""
    for dtype in DTYPES:
        for row in (*forms(arch, False), *forms(arch, True)):
            yield row.file(dtype, arch)
