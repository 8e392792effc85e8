"""Which kernels of the quantized cache there are, and how a launch is cut: pure functions."""

from collections.abc import Iterator

from w4pack.kernels.quarot import kv_layout
from w4pack.kernels.quarot.file import File

APPEND_ROWS = 8  # that a block quantizes
WARPS, HEADS = 4, 8  # of a block of the decode kernel; query heads it takes at once
BLOCKS_PER_MULTIPROCESSOR = 4  # of the decode kernel
QUERIES, WGMMA_QUERIES, WGMMA_THREADS = 64, 128, 384  # of a block of the prefill kernels
WGMMA_HEAD_DIMS = (64, 128)
LEAST_TILES = 8  # of 32 slots that a part of the context should have
MOST_SPLITS = 64


def decode_shared(head_dim: int, bits: int) -> int:
    """Return the bytes of shared memory of a decode block: rings of copies, queries, scratch of R3."""
    row = kv_layout.row_bytes(head_dim, bits)
    tile, stages = (32 if row <= 96 else 16), (3 if row <= 128 else 2)
    scratch = 0 if head_dim & (head_dim - 1) == 0 else WARPS * head_dim
    rings = WARPS * stages * tile * 2 * (row + kv_layout.PARAM_BYTES)
    return rings + 4 * (HEADS * (head_dim + 4) + scratch)


def prefill_shared(head_dim: int, bits: int) -> int:
    """Return the bytes of shared memory of a prefill block: queries, K and V in fp16, two tiles of codes."""
    tokens = 64 if head_dim < 256 else 32 if bits == 4 else 16
    row = kv_layout.row_bytes(head_dim, bits) + kv_layout.PARAM_BYTES
    return 2 * (head_dim + 8) * (QUERIES + 2 * tokens) + 4 * tokens * row


def has_wgmma(arch: str, head_dim: int) -> bool:
    """Return whether prefill of a head size runs on warpgroup products."""
    return arch == "sm_90a" and head_dim in WGMMA_HEAD_DIMS


def wgmma_shared(head_dim: int, bits: int) -> int:
    """Return the bytes of shared memory of such a block: queries, tiles of K and V, units, barriers."""
    tokens = 128 if bits == 4 else 64
    return 2 * head_dim * (WGMMA_QUERIES + 4 * tokens) + 4 * WGMMA_QUERIES + 64


def result_bytes(head_dim: int) -> int:
    """Return the bytes of the sums of eight heads over a part of the context."""
    return 4 * HEADS * (head_dim + 4 + 2)


def append_blocks(batch: int, rows: int, multiprocessors: int) -> int:
    """Return how many blocks share one sequence's rows (token, head, K or V): four rounds of a full card."""
    return max(1, min(-(-rows // APPEND_ROWS), 4 * 8 * multiprocessors // batch))


def splits(rows: int, slots: int, multiprocessors: int) -> int:
    """Return into how many parts the context is cut, so that the blocks fill the card once.

    rows: blocks that one part of the context makes (sequences x KV heads x tiles of heads); slots: what the
    block table has room for, the only length that the host knows.
    """
    fitting = BLOCKS_PER_MULTIPROCESSOR * multiprocessors // rows
    return max(1, min(fitting, slots // (32 * LEAST_TILES), MOST_SPLITS))


def files(arch: str) -> Iterator[File]:
    """Yield the kernels of an architecture."""
    for size in kv_layout.HEAD_DIMS:
        entry = append_entry(size)
        yield File("kv_append.cu", entry, (f"ENTRY={entry}", f"HEAD_DIM={size}"), hot=False)
        for bits in kv_layout.BITS:
            entry = decode_entry(size, bits)
            defines = (*_defines(entry, size, bits, decode_shared(size, bits)), f"MOST_SPLITS={MOST_SPLITS}")
            yield File("kv_decode.cu", entry, defines)
            if has_wgmma(arch, size):
                entry = wgmma_entry(size, bits)
                yield File(
                    "kv_prefill_sm90a.cu", entry, _defines(entry, size, bits, wgmma_shared(size, bits))
                )
            else:
                entry = prefill_entry(size, bits)
                yield File("kv_prefill.cu", entry, _defines(entry, size, bits, prefill_shared(size, bits)))


def _defines(entry: str, head_dim: int, bits: int, shared: int) -> tuple[str, ...]:
    return (f"ENTRY={entry}", f"HEAD_DIM={head_dim}", f"BITS={bits}", f"SHARED_BYTES={shared}")


def append_entry(head_dim: int) -> str:
    """Return the name of a quantize-and-append kernel."""
    return f"kv_append_{head_dim}"


def decode_entry(head_dim: int, bits: int) -> str:
    """Return the name of a decode kernel."""
    return f"kv_decode_{head_dim}_b{bits}"


def prefill_entry(head_dim: int, bits: int) -> str:
    """Return the name of a prefill kernel."""
    return f"kv_prefill_{head_dim}_b{bits}"


def wgmma_entry(head_dim: int, bits: int) -> str:
    """Return the name of a prefill kernel with warpgroup products."""
    return f"kv_prefill_wgmma_{head_dim}_b{bits}"
