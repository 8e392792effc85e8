"""Which form of ``hadamard_flat.cu`` transforms and quantizes a row: pure choices. sm_90a only.

A form takes rows of n = m * C values: H_m of at most ``lines`` lines, and C columns of a power of two, or 12
times one; or m heads of C channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from w4pack.convert.rotate import constructions
from w4pack.kernels.quarot.file import File
from w4pack.kernels.quarot.transform import Transform
from w4pack.kernels.tiles import DTYPES

ARCH = "sm_90a"
HEAD_BYTES, BLOCK = 1024, 64  # of shared memory in front of the rows; columns of a block of 128-byte lines
TWELVE = (12, "paley1")
MANY = 512  # rows of x


@dataclass(frozen=True, slots=True)
class Flat:
    """One compiled form; its ``Config`` says what the fields are.

    sizes     rows of so many values, or so many heads, take it
    kt        tiles of 16 lines of H
    nt        tiles of 8 columns of a part
    parts     that a warp holds
    joined    parts are one row's columns, else rows of their own
    groups    warpgroups
    stages    places of rows
    resident  blocks of a multiprocessor that the registers allow
    acts      it is chosen behind an activation too
    steps     C is transformed; else it is a head's channels
    """

    sizes: tuple[int, ...]
    kt: int
    nt: int
    parts: int
    joined: bool
    groups: int
    stages: int
    resident: int
    acts: bool = True
    steps: bool = True

    @property
    def lines(self) -> int:
        """Lines of H, padded."""
        return 16 * self.kt

    @property
    def columns(self) -> int:
        """C."""
        return 8 * self.nt * (self.parts if self.joined else 1)

    @property
    def turn_rows(self) -> int:
        """Rows of x that a block works on at a time."""
        return 1 if self.joined else self.parts

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.groups

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of 16 of H's table: (lines of H transposed, a warp's each; columns)."""
        return 4 * self.groups, self.kt

    @property
    def twelve(self) -> bool:
        """Whether C is 12 times a power of two."""
        return self.nt % 12 == 0

    def entry(self, dtype: str) -> str:
        """Return the kernel's name."""
        parts = f"_{'halves' if self.joined else 'rows'}" if self.parts > 1 else ""
        return f"flat_{dtype}_m{self.lines}_c{self.columns}{parts}{'' if self.steps else '_heads'}"

    def shared_bytes(self, m: int, acts: bool) -> int:
        """Bytes of shared memory for m lines of H; ``acts``: x is gate and up, which are brought first."""
        stage = -(-self.columns // BLOCK) * 128 * self.lines * self.turn_rows
        staging = 4 * m * self.columns * self.turn_rows
        return HEAD_BYTES + (2 * stage + staging if acts else self.stages * stage)

    def lines_of(self, transform: Transform, heads: int, size: int) -> int | None:
        """Return m where this form makes a transform, else None."""
        if (
            transform.block != transform.order
            or bool(heads) == self.steps
            or transform.order not in self.sizes
        ):
            return None
        if heads:
            return heads if size == self.columns else None
        return transform.order // self.columns if self._divides(transform) else None

    def _divides(self, transform: Transform) -> bool:
        """Tell whether C can be taken from the last factors."""
        last, kind = transform.factors[-1]
        if self.twelve:
            return transform.factors[-2:-1] == (TWELVE,) and (12 * last, kind) == (self.columns, "sylvester")
        return kind == "sylvester" and last % self.columns == 0


# Sizes are those that were measured to gain, on an H200: fp16, codes P32 of 8 bits, 2048 and 8192 rows. 5120
# gains nothing; 16384 behind an activation leaves a multiprocessor one block, and takes 1.6 times as long.
FLATS = (
    Flat((4096,), 4, 8, 1, True, 1, 2, 5),
    Flat((8192,), 4, 16, 1, True, 1, 2, 4),
    Flat((9216,), 9, 8, 2, False, 3, 2, 1),
    Flat((11008,), 11, 8, 2, False, 3, 2, 1),
    Flat((13824,), 9, 12, 1, True, 3, 3, 1),
    Flat((14336,), 7, 16, 1, True, 2, 2, 2),
    Flat((16384,), 4, 16, 2, True, 1, 2, 2, acts=False),
    Flat((18944,), 10, 16, 1, True, 3, 3, 1),
    Flat((28672,), 7, 32, 1, True, 2, 3, 1),
    Flat((32,), 2, 16, 1, True, 1, 3, 4, acts=False, steps=False),
    Flat((64,), 4, 16, 1, True, 1, 2, 4, acts=False, steps=False),
)


def choose(transform: Transform, heads: int, size: int, acts: bool, room: int) -> tuple[Flat, int] | None:
    """Return (form, m) of a transform, or None.

    Args:
        transform: of the rows, or over heads.
        heads: it runs over; 0: over the whole row.
        size: channels of a head.
        acts: whether x is gate and up.
        room: bytes of shared memory that a block may take.
    """
    for row in FLATS:
        m = row.lines_of(transform, heads, size)
        if m is not None and (row.acts or not acts) and row.shared_bytes(m, acts) <= room:
            return row, m
    return None


def is_chosen(rows: int, dense: bool) -> bool:
    """Tell whether ``rows`` rows take such a form; ``dense``: ``hadamard_dense.cu`` has one too.

    Fewer than ``MANY`` were not measured, and take the dense kernel. Where there is none, the general one
    takes longer for one row than a form here for ten.
    """
    return rows >= MANY or not dense


def files(arch: str) -> Iterator[File]:
    """Yield what is compiled for an architecture."""
    if arch != ARCH:
        return
    for dtype in DTYPES:
        for row in FLATS:
            yield File("hadamard_flat.cu", row.entry(dtype), _defines(row, dtype))


def _defines(row: Flat, dtype: str) -> tuple[str, ...]:
    fields = (dtype.upper(), row.kt, row.nt, row.parts, row.joined, row.groups, row.stages, row.steps)
    found = (
        f"ENTRY={row.entry(dtype)}",
        f"CONFIG={','.join(map(str, fields)).replace('True', 'true').replace('False', 'false')}",
        f"GROUP_COUNT={row.groups}",
        f"RESIDENT={row.resident}",
    )
    return (*found, f"SIGNS={','.join(map(str, twelve_signs()))}") if row.twelve else found


def twelve_signs() -> list[int]:
    """Return the columns of H_12 as the kernel wants them: bit i is set where H[i, j] is -1."""
    negative = constructions.matrix(*TWELVE) < 0
    return [int(np.dot(negative[:, j], 1 << np.arange(12))) for j in range(12)]
