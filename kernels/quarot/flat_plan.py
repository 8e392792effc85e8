"""Which form of ``hadamard_flat.cu`` transforms and quantizes a row: pure choices. sm_90a only.

A form takes rows of n = m * C values: H_m of m lines, and C columns of a power of two, or 12
times one; or m heads of C channels.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np

from w4pack.convert.rotate import constructions
from w4pack.kernels.quarot.file import File
from w4pack.kernels.quarot.transform import Transform
from w4pack.kernels.tiles import DTYPES

ARCH = "sm_90a"
HEAD_BYTES, BLOCK = 1024, 64  # of shared memory in front of all; columns of a block of 128-byte lines
TWELVE = (12, "paley1")
MANY = 512  # rows of x


@dataclass(frozen=True, slots=True)
class Apart:
    """Warpgroups that only make activations: how many; pieces of 16 bytes and registers of a thread."""

    warpgroups: int
    held: int
    registers: int


@dataclass(frozen=True, slots=True)
class Flat:
    """One compiled form; its ``Config`` says what the fields are.

    size      rows of so many values, or so many heads, take it
    nt        tiles of 8 columns that a warp holds of a row
    rows      of a turn
    groups    warpgroups
    stages    places of rows
    resident  blocks of a multiprocessor that the registers allow
    acts      it has code for an activation, and is chosen behind one too
    steps     C is transformed; else it is a head's channels
    split     shares of the columns, a warp's each
    apart     who makes the activation, if not all; such a form is chosen behind one alone
    """

    size: int
    nt: int
    rows: int
    groups: int
    stages: int
    resident: int
    acts: bool = True
    steps: bool = True
    split: int = 1
    apart: Apart | None = None

    @property
    def m(self) -> int:
        """Lines of H."""
        return self.size // self.columns if self.steps else self.size

    @property
    def kt(self) -> int:
        """Tiles of 16 lines."""
        return -(-self.m // 16)

    @property
    def lines(self) -> int:
        """Lines of H, padded."""
        return 16 * self.kt

    @property
    def columns(self) -> int:
        """C."""
        return 8 * self.nt * self.split

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.groups + (self.apart.warpgroups if self.apart else 0))

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of 16 of H's table: (lines of H transposed, a warp's or some warps' each; columns)."""
        return self.kt if self.split > 1 else 4 * self.groups, self.kt

    @property
    def twelve(self) -> bool:
        """Whether C is 12 times a power of two."""
        return self.nt % 12 == 0

    def entry(self, dtype: str) -> str:
        """Return the kernel's name."""
        kind = "_acts" if self.apart else "" if self.steps else "_heads"
        return f"flat_{dtype}_m{self.m}_c{self.columns}{kind}"

    def shared_bytes(self, acts: bool) -> int:
        """Bytes of shared memory; ``acts``: x is gate and up, which come to a stage and beside."""
        stage = -(-self.columns // BLOCK) * 128 * self.lines * self.rows
        codes = 4 * self.groups * 64 * self.nt  # eight lines of each warp
        return HEAD_BYTES + codes + (3 if acts else self.stages) * stage

    def reads(self, acts: bool) -> bool:
        """Tell whether this form reads such an x; ``acts``: gate and up."""
        return acts if self.apart else self.acts or not acts

    def takes(self, transform: Transform, heads: int, size: int) -> bool:
        """Tell whether this form makes a transform."""
        if transform.block != transform.order or bool(heads) == self.steps or transform.order != self.size:
            return False
        return size == self.columns if heads else self._divides(transform)

    def _divides(self, transform: Transform) -> bool:
        """Tell whether C can be taken from the last factors."""
        last, kind = transform.factors[-1]
        if self.twelve:
            return transform.factors[-2:-1] == (TWELVE,) and (12 * last, kind) == (self.columns, "sylvester")
        return kind == "sylvester" and last % self.columns == 0


# Sizes are those that were measured to gain over the dense form, on an H200: fp16, codes P32 of 8 bits,
# 2048 and 8192 rows. 5120 gains nothing. Warpgroups that only make the activation gain 1 to 27 %; at 9216
# and 13824 they lose. The form for a plain x at 28672 keeps an activation's code: without it the compiler
# holds less in registers (1 % slower). Three blocks of a multiprocessor instead of four at 8192 have the
# registers: 8 % faster at 8192 rows. Three instead of two at 14336 and 16384 spill: 15 to 30 % slower.
FLATS = (
    Flat(4096, 8, 1, 1, 2, 4, apart=Apart(1, 2, 40)),
    Flat(4096, 8, 1, 1, 2, 5, acts=False),
    Flat(8192, 16, 1, 1, 2, 2, apart=Apart(1, 2, 56)),
    Flat(8192, 16, 1, 1, 2, 3, acts=False),
    Flat(9216, 8, 2, 3, 2, 1),
    Flat(11008, 8, 1, 3, 2, 1, apart=Apart(1, 4, 56)),
    Flat(11008, 8, 2, 3, 2, 1, acts=False),
    Flat(13824, 12, 1, 3, 2, 1),
    Flat(14336, 32, 1, 1, 2, 2, apart=Apart(1, 2, 56)),
    Flat(14336, 32, 1, 1, 2, 2, acts=False),
    Flat(16384, 32, 1, 1, 2, 2, apart=Apart(1, 4, 56)),
    Flat(16384, 32, 1, 1, 2, 2, acts=False),
    Flat(18944, 16, 1, 3, 2, 1, apart=Apart(1, 4, 64)),
    Flat(18944, 16, 1, 3, 2, 1, acts=False),
    Flat(28672, 32, 1, 2, 2, 1, apart=Apart(2, 2, 48)),
    Flat(28672, 32, 1, 2, 2, 1),
    Flat(32, 8, 1, 1, 3, 7, acts=False, steps=False, split=2),
    Flat(64, 16, 1, 1, 3, 4, acts=False, steps=False),
)


def choose(transform: Transform, heads: int, size: int, acts: bool, room: int) -> Flat | None:
    """Return the form of a transform, or None.

    Args:
        transform: of the rows, or over heads.
        heads: it runs over; 0: over the whole row.
        size: channels of a head.
        acts: whether x is gate and up.
        room: bytes of shared memory that a block may take.
    """
    fits = (row for row in FLATS if row.takes(transform, heads, size) and row.reads(acts))
    return next((row for row in fits if row.shared_bytes(acts) <= room), None)


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
    shape = (
        dtype.upper(),
        row.m,
        row.nt,
        row.rows,
        row.groups,
        row.stages,
        row.steps,
        row.split,
        row.acts,
        *(astuple(row.apart) if row.apart else (0, 0, 0)),
    )
    found = (
        f"ENTRY={row.entry(dtype)}",
        f"CONFIG={','.join(map(str, shape)).replace('True', 'true').replace('False', 'false')}",
        f"THREAD_COUNT={row.threads}",
        f"RESIDENT={row.resident}",
    )
    return (*found, f"SIGNS={','.join(map(str, twelve_signs()))}") if row.twelve else found


def twelve_signs() -> list[int]:
    """Return the columns of H_12 as the kernel wants them: bit i is set where H[i, j] is -1."""
    negative = constructions.matrix(*TWELVE) < 0
    return [int(np.dot(negative[:, j], 1 << np.arange(12))) for j in range(12)]
