"""Which kernel runs a product: a pure function of architecture, multiprocessors, M, N, K and scheme.

A ``Tile`` is one shape of the W4A16 kernels (``csrc/tile.cuh`` has the same arithmetic, and the build checks that
both agree on the bytes of shared memory). ``tiles/<arch>.json`` lists, per code width, tiles by the largest M they
serve, with exceptions for single (N, K); each file says on which card, driver, date and commit it was measured.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

UNIT_K = 64
UNIT_TILES = 4
ARCHES = ("sm_80", "sm_90a", "sm_100", "sm_120")
PTX_ARCH = "compute_80"
LEAST_CAPABILITY = (8, 0)
DTYPES = ("fp16", "bf16")
GROUP_SIZES = (-1, 32, 64, 128)
ONE_GROUP = 31  # a shift that sends every row of K to group 0
TABLES = Path(__file__).resolve().parent / "tiles"


@dataclass(frozen=True, slots=True)
class Tile:
    """One shape of the kernel; the fields are the template's parameters, ``blocks`` is per multiprocessor."""

    engine: str  # "mma" or "wgmma"
    tokens: int
    warps: int
    slots: int
    words: int
    stages: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * self.slots * 32

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
        weight = chunks * UNIT_TILES * 512 * (bits // 4)
        total = self.tokens * 128 + weight + 2 * chunks * 128 + (2 * chunks * 8 * bits if zeros else 0)
        return -(-total // 1024) * 1024

    def shared_bytes(self, bits: int, zeros: bool) -> int:
        """Bytes of dynamic shared memory of a block."""
        ring = self.slots * self.stages * self.stage_bytes(bits, zeros)
        return ring + (self.slots - 1) * self.partial_bytes

    @property
    def text(self) -> str:
        """The part of a kernel's name that says its shape."""
        return (
            f"{self.engine}_t{self.tokens}w{self.warps}s{self.slots}x{self.words}p{self.stages}b{self.blocks}"
        )


def kernel_name(tile: Tile, dtype: str, bits: int, zeros: bool) -> str:
    """Return the entry of a W4A16 kernel, for example ``w4a16_fp16_b4_sym_mma_t8w2s4x4p4b2``."""
    return f"w4a16_{dtype}_b{bits}_{'zp' if zeros else 'sym'}_{tile.text}"


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and the number of blocks to start."""

    tile: Tile
    grid: int


@cache
def table(arch: str) -> dict[str, object]:
    """Return the parsed ``tiles/<arch>.json``."""
    data: dict[str, object] = json.loads((TABLES / f"{arch}.json").read_text())
    return data


def _tile(fields: list[object]) -> Tile:
    engine, *numbers = fields
    return Tile(str(engine), *(int(str(n)) for n in numbers))


@cache
def _classes(arch: str, bits: int) -> tuple[tuple[int, Tile], ...]:
    rows = table(arch)["classes"][str(bits)]  # type: ignore[index]
    return tuple((int(limit), _tile(fields)) for limit, fields in rows)


@cache
def _exceptions(arch: str, bits: int) -> dict[tuple[int, int], tuple[tuple[int, Tile], ...]]:
    rows = table(arch).get("exceptions", {}).get(str(bits), {})  # type: ignore[attr-defined]
    out = {}
    for key, entries in rows.items():
        n, k = key.split("x")
        out[int(n), int(k)] = tuple((int(limit), _tile(fields)) for limit, fields in entries)
    return out


def choose(arch: str, multiprocessors: int, m: int, n: int, k: int, bits: int) -> Launch:
    """Return the tile and grid for a product; the same for every dtype, group size and kind of zero."""
    tile = _first(_exceptions(arch, bits).get((n, k), ()), m) or _first(_classes(arch, bits), m)
    assert tile is not None  # the last class of every table has no limit
    return Launch(tile, grid(tile, multiprocessors, m, n, k))


def _first(rows: tuple[tuple[int, Tile], ...], m: int) -> Tile | None:
    return next((tile for limit, tile in rows if m <= limit or limit == 0), None)


def grid(tile: Tile, multiprocessors: int, m: int, n: int, k: int) -> int:
    """Return the blocks to start: all that fit at once, but no block without a unit for each slot.

    Every block must be resident or finish without the others, so never more than fit (``csrc/scheduler.cuh``).
    """
    units = -(-m // tile.tokens) * -(-n // tile.columns) * (k // UNIT_K)
    return max(1, min(multiprocessors * tile.blocks, units // tile.slots))


def all_tiles(arch: str, bits: int) -> Iterator[Tile]:
    """Yield every tile that a table can choose, each once."""
    rows = [*_classes(arch, bits), *(row for rows in _exceptions(arch, bits).values() for row in rows)]
    yield from dict.fromkeys(tile for _, tile in rows)


def workspace_bytes(arch: str, multiprocessors: int) -> tuple[int, int]:
    """Return (bytes of sums, flags) that serve every kernel of an architecture."""
    tiles = [tile for bits in (4, 8) for tile in all_tiles(arch, bits)]
    sums = max(tile.partial_bytes * tile.blocks * multiprocessors for tile in tiles)
    return sums, max(tile.blocks for tile in tiles) * multiprocessors


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
