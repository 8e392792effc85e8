"""Which kernel runs a product: a pure function of architecture, multiprocessors, M, N, K and scheme.

A ``Tile`` is one shape of the W4A16 kernels (``csrc/tile.cuh`` has the same arithmetic, and the build checks
that both agree on the bytes of shared memory). ``tiles_<arch>.json`` lists tiles per code width, by the
largest M and N they serve, with exceptions for single (N, K), and says on which card it was measured.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHUNK_N = 64
ENGINES = {  # how a tile is computed: its source below csrc
    "mma": "w4a16_sm80.cu",  # mma.sync with cp.async: any card
    "wgmma": "w4a16_sm90a.cu",  # warpgroup products with cp.async: sm_90a
    "tma": "w4a16_tma.cu",  # warpgroup products with a producer warp: sm_90a
}
EVEN_SHARE = 0.8  # of the card's blocks, for a grid that cuts all tiles alike
ARCHES = ("sm_80", "sm_90a", "sm_100", "sm_120")
PTX_ARCH = "compute_80"
LEAST_CAPABILITY = (8, 0)
DTYPES = ("fp16", "bf16")
ZEROS = ("sym", "zp")  # in the name of a kernel without zero points, and with
GROUP_SIZES = (-1, 32, 64, 128)
SUMS_PER_MULTIPROCESSOR = 192 * 1024  # bytes
MARKED_PER_MULTIPROCESSOR = 48 * 1024  # bytes: 192 columns of 64 tokens, the largest tile that gains by marks
BLOCKS_PER_MULTIPROCESSOR = 8
FLAGS_PER_MULTIPROCESSOR = 16  # one a block, or one a warp where blocks share sums out
COLLECTED, SHARED_OUT, SHARED_EVENLY, MARKED_EVENLY, MARKED_COLLECTED = range(5)  # Tile.sharing
ONE_GROUP = 31  # a shift that sends every row of K to group 0
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Tile:
    """One shape of the kernel; the fields are the template's parameters, ``blocks`` is per multiprocessor."""

    engine: str  # one of ENGINES
    tokens: int
    warps: int
    slots: int
    words: int
    unit: int
    stages: int
    blocks: int
    sharing: int = COLLECTED  # who adds up a tile's sums: its first block, or all (csrc/scatter.cuh); evenly:
    # all, and the grid cuts every tile alike; marked: places say themselves whether a sum has come

    @property
    def threads(self) -> int:
        """Threads of a block; producers are one more warpgroup."""
        return self.warps * self.slots * 32 + (128 if self.producer else 0)

    @property
    def producer(self) -> bool:
        """Whether a warp of its own brings the operands, the activations by tensor map."""
        return self.engine == "tma"

    @property
    def columns(self) -> int:
        """Columns of the layer that a block makes."""
        return 16 * self.words * self.warps

    @property
    def partial_bytes(self) -> int:
        """Bytes of one block's sums in the workspace."""
        return self.columns * self.tokens * 4

    def stage_bytes(self, bits: int, zeros: bool) -> int:
        """Bytes of one stage of one slot, rounded up to 1024."""
        chunks = self.columns // 64
        weight = chunks * self.unit // 16 * 512 * (bits // 4)
        checks = self.unit // 32  # groups may change every 32 rows
        columns = 128 + (8 * bits if zeros else 0)  # bytes of scales and zeros of a chunk
        total = self.tokens * 2 * self.unit + weight + checks * chunks * columns
        return -(-total // 1024) * 1024

    def shared_bytes(self, bits: int, zeros: bool) -> int:
        """Bytes of dynamic shared memory of a block."""
        ring = self.slots * self.stages * self.stage_bytes(bits, zeros)
        return ring + (self.slots - 1) * self.partial_bytes + self.producer_bytes

    @property
    def producer_bytes(self) -> int:
        """Bytes of barriers, and of the rows by way of which results leave."""
        if not self.producer:
            return 0
        rows = self.warps * 256 * self.words if self.slots == 1 and self.words > 1 else 0
        return 512 + rows

    @property
    def fits_workspace(self) -> bool:
        """Whether all resident blocks can hand over what they have."""
        if self.marked:
            return self.partial_bytes * self.blocks <= MARKED_PER_MULTIPROCESSOR
        handed_over = 2 if self.sharing == SHARED_OUT else 1  # of a block
        flags = self.warps * self.slots if self.sharing else 1
        return (
            handed_over * self.partial_bytes * self.blocks <= SUMS_PER_MULTIPROCESSOR
            and flags * self.blocks <= FLAGS_PER_MULTIPROCESSOR
            and self.blocks <= BLOCKS_PER_MULTIPROCESSOR
        )

    @property
    def evenly(self) -> bool:
        """Whether the grid must cut every tile alike."""
        return self.sharing in (SHARED_EVENLY, MARKED_EVENLY)

    @property
    def marked(self) -> bool:
        """Whether what is handed over lies in places that are marked between launches."""
        return self.sharing in (MARKED_EVENLY, MARKED_COLLECTED)

    @property
    def shared_how(self) -> tuple[str, ...]:
        """What tells a kernel of it, if anything must."""
        return (f"SHARING={self.sharing}",) if self.sharing else ()

    @property
    def text(self) -> str:
        """The part of a kernel's name that says its shape."""
        shape = (
            f"t{self.tokens}w{self.warps}s{self.slots}x{self.words}k{self.unit}p{self.stages}b{self.blocks}"
        )
        return f"{self.engine}_{shape}" + (f"e{self.sharing}" if self.sharing else "")


def kernel_name(tile: Tile, dtype: str, bits: int, zeros: bool) -> str:
    """Return the entry of a W4A16 kernel, for example ``w4a16_fp16_b4_sym_mma_t8w2s4x4p4b2``."""
    return f"w4a16_{dtype}_b{bits}_{ZEROS[zeros]}_{tile.text}"


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and the number of blocks to start."""

    tile: Tile
    grid: int


@cache
def table(arch: str) -> dict[str, object]:
    """Return the parsed ``tiles_<arch>.json``."""
    data: dict[str, object] = json.loads((HERE / f"tiles_{arch}.json").read_text())
    return data


def tile_of(fields: list[object]) -> Tile:
    """Return the tile of a table's entry: engine, then the numbers."""
    engine, *numbers = fields
    return Tile(str(engine), *(int(str(n)) for n in numbers))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: up to which M and how many chunks of 64 columns (0: any) it holds; the tile."""

    most_m: int
    most_chunks: int
    tile: Tile
    splits: int = 0  # blocks per tile of the output; 0: see ``grid``; -1: all that fit

    def fits(self, m: int, n: int, k: int) -> bool:
        """Whether the line serves a product."""
        wide = self.most_chunks != 0 and n // CHUNK_N > self.most_chunks
        return not wide and (self.most_m == 0 or m <= self.most_m) and k % self.tile.unit == 0


@cache
def _classes(arch: str, bits: int) -> tuple[Row, ...]:
    rows = table(arch)["classes"][str(bits)]  # type: ignore[index]
    return tuple(Row(int(m), int(chunks), tile_of(fields)) for m, chunks, fields in rows)


@cache
def _exceptions(arch: str, bits: int) -> dict[tuple[int, int], tuple[Row, ...]]:
    shapes = table(arch).get("exceptions", {}).get(str(bits), {})  # type: ignore[attr-defined]
    out = {}
    for key, rows in shapes.items():
        n, k = key.split("x")
        out[int(n), int(k)] = tuple(
            Row(int(m), 0, tile_of(fields), int(splits)) for m, fields, splits in rows
        )
    return out


def choose(arch: str, multiprocessors: int, shared: int, m: int, n: int, k: int, bits: int) -> Launch:
    """Return the tile and grid for a product; the same for every dtype, group size and kind of zero.

    ``shared`` is what a block may have on the card, in bytes: cards of one architecture differ. The last
    lines of every table have no limit, a unit of 64, and fit all of them, so that every product finds one.
    """
    rows = (*_exceptions(arch, bits).get((n, k), ()), *_classes(arch, bits))
    row = next(
        row
        for row in rows
        if row.fits(m, n, k)
        and row.tile.shared_bytes(bits, zeros=True) <= shared
        and can_cut(row.tile, multiprocessors, m, n, k)
    )
    return Launch(row.tile, grid(row.tile, multiprocessors, m, n, k, row.splits))


def can_cut(tile: Tile, multiprocessors: int, m: int, n: int, k: int) -> bool:
    """Return whether a card has a grid that the tile's way of sharing sums allows."""
    return not tile.evenly or column_tiles(tile, m, n) <= multiprocessors * tile.blocks


def column_tiles(tile: Tile, m: int, n: int) -> int:
    """Return the output tiles of a product, over columns and tokens."""
    return -(-m // tile.tokens) * -(-n // tile.columns)


def grid(tile: Tile, multiprocessors: int, m: int, n: int, k: int, splits: int = 0) -> int:
    """Return the blocks to start: at most as many as fit at once, ``csrc/scheduler.cuh`` needs that.

    Cutting every tile alike spares the exchange of uneven ends: done where it still uses most of the card, or
    where the tile's sums are shared evenly. No block is without a unit for each slot.
    """
    room, count = multiprocessors * tile.blocks, column_tiles(tile, m, n)
    even = room // count * count
    if tile.evenly:
        units = k // tile.unit
        return count * max(s for s in range(1, room // count + 1) if units % s == 0)
    blocks = even if splits == 0 and even >= EVEN_SHARE * room else room
    if splits > 0:
        blocks = min(room, splits * count)
    return max(1, min(blocks, count * (k // tile.unit) // tile.slots))


def dense_from(arch: str) -> int:
    """Return the M from which dequantizing the weight and a library's GEMM are faster than the kernel."""
    return int(str(table(arch)["dense_from"]))


def all_tiles(arch: str, bits: int) -> Iterator[Tile]:
    """Yield every tile that a table can choose, each once."""
    rows = [*_classes(arch, bits), *(row for rows in _exceptions(arch, bits).values() for row in rows)]
    yield from dict.fromkeys(row.tile for row in rows)


def workspace_bytes(multiprocessors: int) -> tuple[int, int, int]:
    """Return (bytes of sums, of marked places, flags) that serve every kernel (``Tile.fits_workspace``).

    The registers of a multiprocessor hold at most 192 KiB of sums to hand over, in at most eight blocks. A
    block hands over one tile and has one flag; where blocks share sums out, two tiles and a flag a warp. Few
    tokens alone gain by marks.
    """
    each = SUMS_PER_MULTIPROCESSOR, MARKED_PER_MULTIPROCESSOR, FLAGS_PER_MULTIPROCESSOR
    return each[0] * multiprocessors, each[1] * multiprocessors, each[2] * multiprocessors


def arch_of(capability: tuple[int, int]) -> str | None:
    """Return whose cubins a card runs, ``compute_80`` where only PTX will do, None below sm_80.

    Cubins run on later minor versions of the same major one; sm_90a runs on 9.0 only.
    """
    if capability < LEAST_CAPABILITY:
        return None
    major = capability[0]
    if capability == (9, 0):
        return "sm_90a"
    return {8: "sm_80", 10: "sm_100", 12: "sm_120"}.get(major, PTX_ARCH)


def group_shift(group_size: int) -> int:
    """Return log2 of the group size, or the shift that makes one group of everything for -1."""
    return ONE_GROUP if group_size == -1 else group_size.bit_length() - 1
