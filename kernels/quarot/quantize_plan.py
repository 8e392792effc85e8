"""Which kernel quantizes a row: pure choices, by shapes and by what a card holds.

plain   no transform: a row in registers
dense   H_m ⊗ Sylvester of order C, or H_m across heads of C channels: m up to 64 on tensor cores, C inside
        registers with one exchange (``hadamard_dense.cu``)
any     every other transform, factor by factor (``hadamard_any.cu``)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce

import numpy as np

from w4pack.convert.rotate import constructions
from w4pack.kernels.quarot.file import File
from w4pack.kernels.quarot.transform import Transform

DTYPES = ("fp16", "bf16")
RESERVED = 1024  # bytes of shared memory that a block costs beside its own
PLAIN_THREADS, PLAIN_PAIRS = 512, (1, 2, 4)  # at most; how many times 16 values a thread holds
ANY_THREADS = 512


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
        return (self.rows // 16) ** 2 * 512 + 8 * self.warps


WIDTHS = (  # the whole row is transformed
    Dense(16, 7, 3, 1, 4, True, 5),
    Dense(16, 8, 3, 1, 4, True, 6),
    Dense(32, 7, 3, 1, 4, True, 5),
    Dense(32, 8, 3, 1, 8, True, 4),
    Dense(32, 9, 3, 2, 8, True, 2),
    Dense(32, 10, 4, 1, 16, True, 1),
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


def files(arch: str) -> Iterator[File]:
    """Yield what is compiled for an architecture: the same everywhere."""
    for dtype in DTYPES:
        number = dtype.upper()
        for pairs in PLAIN_PAIRS:
            entry = plain_entry(dtype, pairs)
            defines = (f"ENTRY={entry}", f"NUMBER={number}", f"PAIR_COUNT={pairs}")
            yield File("quantize_plain.cu", entry, defines)
        yield File("hadamard_any.cu", any_entry(dtype), (f"ENTRY={any_entry(dtype)}", f"NUMBER={number}"))
        for row in (*WIDTHS, *HEADS):
            yield File("hadamard_dense.cu", row.entry(dtype), _defines(row, dtype))


def _defines(row: Dense, dtype: str) -> tuple[str, ...]:
    fields = (row.rows, row.log_c, row.nt_bits, row.mt, row.warps, str(row.steps).lower())
    config = ",".join(map(str, (dtype.upper(), *fields)))
    return (
        f"ENTRY={row.entry(dtype)}",
        f"CONFIG={config}",
        f"WARP_COUNT={row.warps}",
        f"RESIDENT={row.resident}",
    )


def plain_entry(dtype: str, pairs: int) -> str:
    """Return the name of the kernel without a transform."""
    return f"quantize_{dtype}_p{pairs}"


def any_entry(dtype: str) -> str:
    """Return the name of the kernel for every transform."""
    return f"hadamard_{dtype}_any"


def plain(width: int) -> tuple[int, int] | None:
    """Return (pairs of octets a thread holds, threads) for rows of ``width``, or None: too wide."""
    units = width // 16
    for pairs in PLAIN_PAIRS:
        threads = -(-units // (32 * pairs)) * 32
        if threads <= PLAIN_THREADS // 2 or (pairs == PLAIN_PAIRS[-1] and threads <= PLAIN_THREADS):
            return pairs, threads
    return None


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


@cache
def dense_bits(transform: Transform, m: int) -> "np.ndarray":
    """Return int64 (m,): bit j of word i is set where the leading m x m part has H[i, j] = -1."""
    matrices, rest = [], m
    for order, kind in transform.factors:
        taken = min(order, rest)
        if taken > 1:
            matrices.append(constructions.matrix(taken, kind))
        rest //= taken
    h = reduce(np.kron, matrices).astype(np.int64)
    weights = np.left_shift(np.uint64(1), np.arange(m, dtype=np.uint64))
    bits: np.ndarray = ((h < 0) * weights).sum(1, dtype=np.uint64).view(np.int64)
    return bits


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
