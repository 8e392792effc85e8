"""Which kernel runs a grouped integer product: a pure function of what the host knows, not of the routing.

The tiles are the list ``moe`` of each class of ``int_tiles_<arch>.json``, by the pairs an expert would have
if all had as many. Up to 16, a tile that holds just these is not chosen: half of the experts have more.
``csrc/moe_schedule.cuh`` finds each block's work from the routing.
"""

from collections.abc import Iterator

from w4pack.kernels import moe_tiles, tiles
from w4pack.kernels.quarot import int_tiles
from w4pack.kernels.quarot.file import File

SOURCE = "int_moe.cu"


def all_tiles(arch: str, order: int, grouped: bool) -> tuple[tiles.Tile, ...]:
    """Return the tiles that a grouped product can choose, by rising tokens."""
    return tuple(tile for _, tile in int_tiles.moe_lines(arch, order, grouped))


def choose(
    arch: str,
    multiprocessors: int,
    pairs: int,
    experts: int,
    n: int,
    k: int,
    order: int,
    group_size: int,
) -> tiles.Launch | None:
    """Return the tile and grid of a grouped product; None where the architecture has none of the order."""
    lines = int_tiles.moe_lines(arch, order, group_size != -1)
    if not lines:
        return None
    each = -(-pairs // min(pairs, experts))
    tile = next(tile for most, tile in lines if most == 0 or each <= most)
    return tiles.Launch(tile, grid(tile, multiprocessors, pairs, experts, n, k, order))


def grid(tile: tiles.Tile, multiprocessors: int, pairs: int, experts: int, n: int, k: int, order: int) -> int:
    """Return the blocks to start: all that fit at once, or fewer where no routing could use them."""
    units = -(-k // int_tiles.unit_k(tile, order))
    most = moe_tiles.most_tiles(tile, pairs, experts, n) * units // tile.slots
    return max(1, min(multiprocessors * tile.blocks, most))


def shared_bytes(tile: tiles.Tile, experts: int, order: int, grouped: bool) -> int:
    """Return the bytes of dynamic shared memory of a block: the rings, and the table of tiles."""
    return int_tiles.shared_bytes(tile, order, grouped) + moe_tiles.table_bytes(experts)


def kernel_name(tile: tiles.Tile, dtype: str, order: int, steps: int) -> str:
    """Return the entry of a kernel, for example ``int_moe_fp16_s8w4_g0_mma_t8w4s2x4k128p2b2``."""
    return f"int_moe_{int_tiles.kernel_name(tile, dtype, order, steps).removeprefix('int_')}"


def files(arch: str) -> Iterator[File]:
    """Yield the kernels of an architecture, each once."""
    yield from dict.fromkeys(_files(arch))


def _files(arch: str) -> Iterator[File]:
    for order in int_tiles.orders_of(arch):
        for steps in (0, int_tiles.ANY_GROUP):
            for tile in all_tiles("sm_80" if arch == tiles.PTX_ARCH else arch, order, steps != 0):
                for dtype in tiles.DTYPES:
                    one = int_tiles.file_of(tile, dtype, order, steps)
                    entry = kernel_name(tile, dtype, order, steps)
                    yield File(SOURCE, entry, (f"ENTRY={entry}", *one.defines[1:]))
