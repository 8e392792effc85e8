"""Which kernels of the quantized cache there are, and how a launch is cut: pure functions."""

from collections.abc import Iterator

from w4pack.kernels.quarot import kv_layout
from w4pack.kernels.quarot.file import File

APPEND_ROWS = 8  # that a block quantizes
WARPS, HEADS = 4, 8  # of a block; query heads a decode block takes at once
MORE_WARPS = 8  # of a decode block on sm_90a, where two such blocks fit a multiprocessor
WARPS_PER_MULTIPROCESSOR = 16  # of the decode kernel
QUERIES = 64  # of a block of the prefill kernel that reads codes
UNPACK_THREADS, MOST_PAIRS = 256, 65535  # of its block; sequences and KV heads of one launch
LEAST_READERS = 2  # blocks of queries of a KV head from which on unpacking once is cheaper than in each
MOST_UNPACKED = 256 << 20  # bytes of unpacked K and V at a time that cost nothing worth naming
MOST_FILLING = 1 << 30  # and where so few sequences and KV heads would leave multiprocessors idle
L2_BYTES = 40 << 20  # of K and V that heads worked on at the same time may have
LEAST_TILES = 8  # of 32 slots that a part of the context should have
MOST_SPLITS = 64


def decode_warps(arch: str, head_dim: int, bits: int) -> int:
    """Return the warps of a decode block."""
    fits = 2 * (decode_shared(head_dim, bits, MORE_WARPS) + 2048) <= 228 * 1024
    return MORE_WARPS if arch == "sm_90a" and fits else WARPS


def decode_shared(head_dim: int, bits: int, warps: int) -> int:
    """Return the bytes of shared memory of a decode block: rings of copies, queries, scratch of R3."""
    row = kv_layout.row_bytes(head_dim, bits)
    tile, stages = (32 if row <= 96 else 16), (3 if row <= 128 else 2)
    scratch = 0 if head_dim & (head_dim - 1) == 0 else warps * head_dim
    rings = warps * stages * tile * 2 * (row + kv_layout.PARAM_BYTES)
    return rings + 4 * (HEADS * (head_dim + 4) + scratch)


def prefill_shared(head_dim: int, bits: int) -> int:
    """Return the bytes of shared memory of a prefill block: queries, K and V in fp16, two tiles of codes."""
    tokens = 64 if head_dim < 256 else 32 if bits == 4 else 16
    row = kv_layout.row_bytes(head_dim, bits) + kv_layout.PARAM_BYTES
    return 2 * (head_dim + 8) * (QUERIES + 2 * tokens) + 4 * tokens * row


def unpacks(arch: str, head_dim: int, tokens: int, group: int) -> bool:
    """Return whether prefill unpacks K and V to memory first; ``group``: query heads of one KV head."""
    return arch == "sm_90a" and group * -(-tokens // flash_queries(head_dim)) >= LEAST_READERS


def flash_consumers(head_dim: int) -> int:
    """Return how many warpgroups of 64 queries a block of the kernel over unpacked K and V has."""
    return 3 if head_dim == 64 else 2


def flash_queries(head_dim: int) -> int:
    """Return how many queries of one head are a work item."""
    return 64 * flash_consumers(head_dim)


def flash_threads(head_dim: int) -> int:
    """Return the threads of such a block: its consumers and the warpgroup that fetches."""
    return 128 * (flash_consumers(head_dim) + 1)


def flash_tokens(head_dim: int) -> int:
    """Return how many slots a tile of unpacked K or V has."""
    return {64: 96, 256: 64}.get(head_dim, 128)


def flash_shared(head_dim: int) -> int:
    """Return the bytes of shared memory of such a block: queries, tiles, the matrix of R3, barriers."""
    piece = 64 if head_dim & (head_dim - 1) == 0 else head_dim
    return 2 * head_dim * (flash_queries(head_dim) + 4 * flash_tokens(head_dim)) + 2 * piece * piece + 64


def flash_tiles(head_dim: int, slots: int) -> tuple[int, int]:
    """Return how many tiles so many slots make, and the bytes of K and V of one KV head in them."""
    tokens = flash_tokens(head_dim)
    tiles = -(-slots // tokens)
    return tiles, 4 * tiles * tokens * head_dim


def pairs_at_once(pairs: int, pair_bytes: int, items: int, multiprocessors: int) -> int:
    """Return of how many sequences and KV heads (pairs) K and V are unpacked at a time: in equal rounds.

    As many as ``MOST_UNPACKED`` holds. A short chunk of queries over a long context makes few work items
    (``items`` of a pair) of much memory: there as many pairs as give each multiprocessor one, up to
    ``MOST_FILLING``. A single pair may take more than either.
    """
    filling = min(-(-multiprocessors // items), MOST_FILLING // pair_bytes)
    most = min(max(1, MOST_UNPACKED // pair_bytes, filling), MOST_PAIRS)
    return -(-pairs // -(-pairs // most))


def section(pairs: int, group: int, pair_bytes: int) -> int:
    """Return how many query heads are worked on side by side: equal sections whose K and V stay in the L2."""
    most = max(1, L2_BYTES // pair_bytes)
    return -(-pairs // -(-pairs // most)) * group


def result_bytes(head_dim: int) -> int:
    """Return the bytes of the sums of eight heads over a part of the context."""
    return 4 * HEADS * (head_dim + 4 + 2)


def append_blocks(batch: int, rows: int, multiprocessors: int) -> int:
    """Return how many blocks share one sequence's rows (token, head, K or V): four rounds of a full card."""
    return max(1, min(-(-rows // APPEND_ROWS), 4 * 8 * multiprocessors // batch))


def splits(rows: int, slots: int, multiprocessors: int, warps: int) -> int:
    """Return into how many parts the context is cut, so that the blocks fill the card once.

    rows: blocks that one part of the context makes (sequences x KV heads x tiles of heads); slots: what the
    block table has room for, the only length that the host knows.
    """
    fitting = WARPS_PER_MULTIPROCESSOR // warps * multiprocessors // rows
    return max(1, min(fitting, slots // (32 * LEAST_TILES), MOST_SPLITS))


def files(arch: str) -> Iterator[File]:
    """Yield the kernels of an architecture."""
    for size in kv_layout.HEAD_DIMS:
        entry = append_entry(size)
        yield File("kv_append.cu", entry, (f"ENTRY={entry}", f"HEAD_DIM={size}"), hot=False)
        if arch == "sm_90a":
            entry = flash_entry(size)
            yield File("kv_flash_sm90a.cu", entry, _defines(entry, size, 4, flash_shared(size)))
        for bits in kv_layout.BITS:
            entry = decode_entry(size, bits)
            warps = decode_warps(arch, size, bits)
            common = _defines(entry, size, bits, decode_shared(size, bits, warps))
            yield File("kv_decode.cu", entry, (*common, f"WARPS={warps}", f"MOST_SPLITS={MOST_SPLITS}"))
            if arch == "sm_90a":
                entry = unpack_entry(size, bits)
                defines = (f"ENTRY={entry}", f"HEAD_DIM={size}", f"BITS={bits}")
                yield File("kv_unpack.cu", entry, defines, hot=False)
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


def unpack_entry(head_dim: int, bits: int) -> str:
    """Return the name of a kernel that unpacks K and V."""
    return f"kv_unpack_{head_dim}_b{bits}"


def flash_entry(head_dim: int) -> str:
    """Return the name of a prefill kernel over unpacked K and V."""
    return f"kv_flash_{head_dim}"
