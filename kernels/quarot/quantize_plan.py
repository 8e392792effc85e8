"""Which kernel quantizes a row: pure choices, by shapes and by what a card holds.

rows    no transform: a row in registers (``row_plan``)
cluster a few long rows of m * C values, m up to 32: eight blocks a row (``hadamard_cluster.cu``, sm_90a)
flat    rows and heads of models, where there are many: without an exchange (``flat_plan``, sm_90a)
dense   H_m ⊗ Sylvester of order C, or H_m across heads of C channels: m up to 64 on tensor cores, C inside
        registers with one exchange (``hadamard_dense.cu``)
any     every other transform, factor by factor (``hadamard_any.cu``)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from w4pack.convert.rotate import constructions
from w4pack.kernels.quarot import flat_plan, row_plan
from w4pack.kernels.quarot.file import File
from w4pack.kernels.quarot.transform import Transform
from w4pack.kernels.tiles import DTYPES

RESERVED = 1024  # bytes of shared memory that a block costs beside its own
ANY_THREADS, ANY_FIXED = (
    512,
    4096,
)  # threads; no less than what its blocks take of shared memory beside the row
IN_PLACE = (12, 20, 28)  # orders that the general kernel applies in place
SMALL, FRAGMENT = 64, 512  # rows of H up to which its fragments lie in shared memory; bytes of one
ONE = {"fp16": 0x3C00, "bf16": 0x3F80}  # the bits of 1


@dataclass(frozen=True, slots=True)
class Dense:
    """One compiled form of ``hadamard_dense.cu``; its ``Config`` says what the fields are."""

    rows: int  # m is padded to it
    log_c: int
    nt_bits: int
    mt: int
    warps: int
    steps: bool
    resident: int  # blocks of a multiprocessor that the registers allow

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    def entry(self, dtype: str) -> str:
        """Return the kernel's name."""
        return f"hadamard_{dtype}_m{self.rows}_c{self.log_c}{'' if self.steps else '_heads'}"

    def shared_bytes(self, m: int) -> int:
        """Bytes of shared memory for m rows of H: the input in 16 bit and the exchange in 32."""
        pitch = (1 << self.log_c) + 8
        return 2 * self.rows * pitch + 4 * m * pitch

    @property
    def fixed_bytes(self) -> int:
        """Bytes of shared memory that the kernel declares itself: H's fragments, two numbers a warp."""
        small = self.rows <= SMALL
        return ((self.rows // 16) ** 2 * FRAGMENT if small else 16) + 8 * self.warps

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of 16 of H's table: (rows of H transposed, padded to whole tasks; columns)."""
        columns = self.rows // 16
        return -(-columns // self.mt) * self.mt, columns


WIDTHS = (  # the whole row is transformed
    Dense(16, 7, 3, 1, 4, True, 5),
    Dense(16, 8, 3, 1, 4, True, 6),
    Dense(32, 7, 3, 1, 4, True, 5),
    Dense(48, 7, 3, 1, 6, True, 4),
    Dense(32, 8, 3, 1, 8, True, 4),
    Dense(48, 8, 3, 1, 12, True, 2),
    Dense(32, 9, 3, 2, 8, True, 2),
    Dense(32, 10, 4, 1, 16, True, 1),
    Dense(176, 7, 3, 2, 12, True, 1),
    Dense(176, 6, 2, 2, 12, True, 2),
    Dense(432, 6, 2, 4, 14, True, 1),
    Dense(432, 5, 1, 4, 14, True, 1),
)
HEADS = (  # a channel is transformed across heads
    Dense(16, 6, 2, 1, 4, False, 5),
    Dense(16, 7, 3, 1, 4, False, 5),
    Dense(16, 8, 3, 1, 4, False, 5),
    Dense(32, 6, 2, 1, 4, False, 5),
    Dense(32, 7, 3, 1, 4, False, 4),
    Dense(48, 6, 2, 1, 8, False, 2),
    Dense(48, 7, 3, 1, 8, False, 2),
    Dense(64, 6, 2, 1, 8, False, 2),
    Dense(64, 7, 3, 1, 8, False, 2),
)

ROOM = {"sm_120": 99 * 1024}  # bytes of shared memory that a block may take, where some form never fits

CLUSTER_BLOCKS, CLUSTER_THREADS = 8, 256  # of a row; of a block
CLUSTER_SLICES = (7, 6)  # log2 of the columns of a block, each a kernel
CLUSTER_ORDER = 14336  # values of a row from which it pays that blocks wait for one another


def cluster_entry(dtype: str, log_slice: int) -> str:
    """Return the name of the kernel whose blocks have 2^log_slice columns each of a row's lines."""
    return f"hadamard_{dtype}_cluster{log_slice}"


def cluster_rows(arch: str, multiprocessors: int) -> int:
    """Return up to how many rows several blocks a row pay: while a multiprocessor has at most one of them.

    On an H200 (132 multiprocessors) one row of 28672 values takes 4.3 us instead of 8.3, 16 rows 5.9 instead
    of 8.5; of 14336 values 3.5 instead of 5.4 and 4.2 instead of 5.5.
    """
    return multiprocessors // CLUSTER_BLOCKS if arch == "sm_90a" else 0


def cluster(transform: Transform) -> tuple[int, Dense, int] | None:
    """Return (log2 of a block's columns, the form whose fragments it takes, m) for whole rows, or None."""
    if transform.block != transform.order or transform.order < CLUSTER_ORDER:
        return None
    for log_slice in CLUSTER_SLICES:
        form = Dense(32, log_slice + 3, 3, 1, 16, True, 1)
        m, rest = divmod(transform.order, 1 << form.log_c)
        if rest == 0 and m <= form.rows and _divides(transform, form):
            return log_slice, form, m
    return None


def files(arch: str) -> Iterator[File]:
    """Yield what is compiled for an architecture: what its cards have room for, and more for sm_90a."""
    yield from row_plan.files(arch)
    yield from flat_plan.files(arch)
    for dtype in DTYPES:
        number = dtype.upper()
        for log_slice in CLUSTER_SLICES if arch == "sm_90a" else ():
            entry = cluster_entry(dtype, log_slice)
            yield File("hadamard_cluster.cu", entry, (f"ENTRY={entry}", f"CONFIG={number},32,{log_slice}"))
        entry = any_entry(dtype)
        yield File("hadamard_any.cu", entry, (f"ENTRY={entry}", f"NUMBER={number}"), hot=False)
        for row in (*WIDTHS, *HEADS):
            if arch not in ROOM or _is_chosen(row, ROOM[arch]):
                yield File("hadamard_dense.cu", row.entry(dtype), _defines(row, dtype))


def _is_chosen(row: Dense, room: int) -> bool:
    """Tell whether some transform takes the form."""
    columns = 1 << row.log_c
    if row.steps:
        orders = (m * columns for m in range(1, row.rows + 1))
        whole = (Transform(n, ((n // columns, "any"), (columns, "sylvester")), n) for n in orders)
        found = (dense(transform, 0, 1, room) for transform in whole)
    else:
        found = (dense(Transform(m, (), m), m, columns, room) for m in range(1, row.rows + 1))
    return any(one is not None and one[0] is row for one in found)


def _defines(row: Dense, dtype: str) -> tuple[str, ...]:
    fields = (row.rows, row.log_c, row.nt_bits, row.mt, row.warps, str(row.steps).lower())
    config = ",".join(map(str, (dtype.upper(), *fields)))
    return (
        f"ENTRY={row.entry(dtype)}",
        f"CONFIG={config}",
        f"WARP_COUNT={row.warps}",
        f"RESIDENT={row.resident}",
    )


def any_entry(dtype: str) -> str:
    """Return the name of the kernel for every transform."""
    return f"hadamard_{dtype}_any"


def any_rows(transform: Transform) -> int:
    """Return how many rows of fp32 the general kernel works on: 2 where a factor goes between them."""
    return 1 if all(kind == "sylvester" or m in IN_PLACE for m, kind in transform.factors) else 2


def dense(transform: Transform, heads: int, size: int, room: int) -> tuple[Dense, int] | None:
    """Return (kernel, m) of a transform, or None.

    Args:
        transform: without a block structure inside.
        heads: it runs over; 0: over the whole row.
        size: channels of a head.
        room: bytes of shared memory that a block may take.
    """
    if transform.block != transform.order:
        return None
    if heads:
        fits = (row for row in HEADS if heads <= row.rows and size == 1 << row.log_c)
        found = next(((row, heads) for row in fits), None)
    else:
        whole = ((row, transform.order >> row.log_c) for row in WIDTHS if _divides(transform, row))
        found = next(((row, m) for row, m in whole if m <= row.rows), None)
    return found if found and found[0].shared_bytes(found[1]) + found[0].fixed_bytes <= room else None


def _divides(transform: Transform, row: Dense) -> bool:
    """Tell whether the last factor is a power of two from which C can be taken."""
    last, kind = transform.factors[-1]
    return kind == "sylvester" and last >> row.log_c > 0


class Tiled(Protocol):
    """A compiled form with a table of H."""

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of 16 of the table: (rows of H transposed, columns)."""

    def __hash__(self) -> int:
        """Return a hash: tables are kept by form."""


@cache
def fragments(transform: Transform, row: Tiled, m: int, dtype: str) -> "np.ndarray":
    """Return int32 (m-tiles, k-tiles, 32, 4): the leading m x m part of H, transposed, as A fragments.

    Register e of lane 4 g + t holds row g + 8 (e % 2), column 8 (e // 2) + 2 t in its upper half the next.
    """
    made, columns = row.tiles
    h = np.zeros((16 * made, 16 * columns), np.uint32)
    h[:m, :m] = np.where(leading(transform, m).T < 0, ONE[dtype] | 0x8000, ONE[dtype])
    # (m-tile, e % 2, g, k-tile, e // 2, t, half)
    parts = h.reshape(made, 2, 8, columns, 2, 4, 2)
    pairs = parts[..., 0] | parts[..., 1] << 16
    found: np.ndarray = pairs.transpose(0, 3, 2, 5, 4, 1).reshape(made, columns, 32, 4)
    return np.ascontiguousarray(found).view(np.int32)


def leading(transform: Transform, m: int) -> "np.ndarray":
    """Return the first factors of a transform multiplied out, int8 (m, m); of a power of two a part."""
    made, rest = np.ones((1, 1), np.int8), m
    for order, kind in transform.factors:
        taken = min(order, rest)
        made = np.kron(made, constructions.matrix(taken, kind)) if taken > 1 else made
        rest //= taken
    return made


@cache
def any_tables(transform: Transform, size: int) -> tuple["np.ndarray", "np.ndarray"]:
    """Return (entries, words) int32 as ``hadamard_any.cu`` takes them; ``size``: channels of a head, or 1."""
    entries, words, after = [len(transform.factors)], [np.zeros(1, np.int32)], transform.block * size
    for order, kind in transform.factors:
        after //= order
        first = -1 if kind == "sylvester" else sum(map(len, words))
        entries += [order, after, first]
        if first >= 0:
            words.append(_words(constructions.matrix(order, kind)))
    return np.array(entries, np.int32), np.concatenate(words)


def _words(h: "np.ndarray") -> "np.ndarray":
    """Return the signs of H's columns, 32 to a word, each column's rows in order."""
    padded = np.zeros((h.shape[1], -(-h.shape[0] // 32) * 32), np.uint8)
    padded[:, : h.shape[0]] = h.T < 0
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32).ravel()
