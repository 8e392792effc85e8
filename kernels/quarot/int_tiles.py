"""Which kernel runs an integer product, and in which order it reads activations: pure functions.

A tile is a ``tiles.Tile`` whose ``unit`` is the bytes of a token's row in a unit, 128 or 256;
``csrc/int_tile.cuh`` has the same arithmetic, and the build checks that both agree on the bytes of shared
memory. ``int_tiles_<arch>.json`` has a class for each width of the operands, for one scale a column and for
groups: ``small`` lists tiles by the largest M and N they serve, ``large`` those that other products choose
from, ``moe`` those of ``int_moe_tiles``.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from w4pack.kernels import tiles
from w4pack.kernels.quarot import orders_int
from w4pack.kernels.quarot.file import File

S4_CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9))  # cards whose tensor cores multiply s4 by themselves
KINDS = {orders_int.P32: "s8w4", orders_int.Q32: "s8w8", orders_int.S64: "s4w4"}  # operands of each order
SOURCES = {"mma": "int_mma.cu", "tma": "int_wgmma.cu"}
ANY_GROUP = 1  # a kernel of mma.sync reads the group size at its launch
MULTIPLIES = 4096  # of int8, a clock and multiprocessor (sm_90)
STORE, EXCHANGE = 4000, 16000  # clocks: results of a tile to the output; sums of a tile from block to block
EXCHANGE_UNITS = 7  # what csrc/scheduler.cuh takes an exchange for
HERE = Path(__file__).resolve().parent


def int_order(capability: tuple[int, int] | None, bits: int, group_size: int, act_bits: int = 4) -> int:
    """Return the order (``orders_int``) in which the product on a card reads activation codes.

    Args:
        capability: the card's compute capability; None for a CPU.
        bits: 4 or 8, of the weight.
        group_size: of the weight; -1 for one scale a column.
        act_bits: 4 or 8, of the activations.
    """
    if bits == 8:
        return orders_int.Q32
    native = capability in S4_CAPABILITIES and act_bits == 4 and group_size != 32
    return orders_int.S64 if native else orders_int.P32


def _step_k(order: int) -> int:
    """Return the rows of K that 32 bytes of a token's codes span: one product of a tensor core."""
    return 64 if order == orders_int.S64 else 32


def unit_k(tile: tiles.Tile, order: int) -> int:
    """Return the rows of K in a unit."""
    return tile.unit // 32 * _step_k(order)


def group_steps(tile: tiles.Tile, order: int, group_size: int) -> int:
    """Return how a kernel knows its groups: 0 it has none, 1 from its launch, else their length in steps."""
    if group_size == -1:
        return 0
    return group_size // _step_k(order) if tile.producer else ANY_GROUP


def stage_bytes(tile: tiles.Tile, order: int, grouped: bool) -> int:
    """Return the bytes of one stage of one slot, rounded up to 1024."""
    chunks, vectors = tile.columns // tiles.CHUNK_N, 2 if order == orders_int.Q32 else 1
    weight = chunks * unit_k(tile, order) // 16 * 512 * vectors
    scales = tile.unit // 32 * chunks * 128 if grouped else 0
    return -(-(tile.tokens * tile.unit + weight + scales) // 1024) * 1024


def shared_bytes(tile: tiles.Tile, order: int, grouped: bool) -> int:
    """Return the bytes of dynamic shared memory of a block."""
    ring = tile.slots * tile.stages * stage_bytes(tile, order, grouped)
    spread = tile.producer and tile.slots == 1 and tile.words == 2
    more = tile.warps * (2048 - 512 + 4 * tile.tokens) if spread else 0  # buffers and scales of int_store.cuh
    return ring + (tile.slots - 1) * tile.partial_bytes + tile.producer_bytes + more


def kernel_name(tile: tiles.Tile, dtype: str, order: int, steps: int) -> str:
    """Return the entry of a kernel, for example ``int_fp16_s8w4_g0_tma_t128w8s1x2k128p6b1``."""
    return f"int_{dtype}_{KINDS[order]}_g{steps}_{tile.text}"


@cache
def _lines(arch: str, order: int, grouped: bool) -> dict[str, list[list[object]]]:
    """Return a class of a table: ``small`` lines, and the tiles that ``large`` products choose from."""
    table = json.loads((HERE / f"int_tiles_{arch}.json").read_text())["classes"]
    found: dict[str, list[list[object]]] = table.get(KINDS[order], {}).get(
        "groups" if grouped else "channel", {}
    )
    return found


@cache
def _small(arch: str, order: int, grouped: bool) -> tuple[tiles.Row, ...]:
    lines = _lines(arch, order, grouped).get("small", [])
    return tuple(tiles.Row(int(str(m)), int(str(c)), tiles.tile_of(list(f))) for m, c, f in lines)  # type: ignore[call-overload]


@cache
def _large(arch: str, order: int, grouped: bool) -> tuple[tuple[tiles.Tile, float], ...]:
    lines = _lines(arch, order, grouped).get("large", [])
    return tuple((tiles.tile_of(list(f)), float(str(share))) for f, share in lines)  # type: ignore[call-overload]


def all_tiles(arch: str, order: int, grouped: bool) -> Iterator[tiles.Tile]:
    """Yield every tile that a table can choose, each once."""
    large = (tile for tile, _ in _large(arch, order, grouped))
    yield from dict.fromkeys((*(row.tile for row in _small(arch, order, grouped)), *large))


@cache
def moe_lines(arch: str, order: int, grouped: bool) -> tuple[tuple[int, tiles.Tile], ...]:
    """Return (most pairs an expert, or 0: any; tile) of a class, for products of a mixture of experts."""
    lines = _lines(arch, order, grouped).get("moe", [])
    return tuple((int(str(most)), tiles.tile_of(list(f))) for most, f in lines)  # type: ignore[call-overload]


def choose(
    arch: str, multiprocessors: int, m: int, n: int, k: int, order: int, group_size: int
) -> tiles.Launch | None:
    """Return the tile and grid for a product; None where the architecture has no kernel of the order.

    A few tokens: the first line that fits. More: the tile that takes the fewest clocks. Groups of 32 are too
    short for the warpgroup's kernels.
    """
    grouped = group_size != -1
    small = [r.tile for r in _small(arch, order, grouped) if m <= r.most_m and r.fits(m, n, 0)]
    large = [(t, share) for t, share in _large(arch, order, grouped) if group_size != 32 or not t.producer]
    if not small and not large:
        return None
    tile = (
        small[0]
        if small
        else min(large, key=lambda t: clocks(t[0], t[1], multiprocessors, m, n, k, order))[0]
    )
    return tiles.Launch(tile, grid(tile, multiprocessors, m, n, k, order))


def clocks(tile: tiles.Tile, share: float, multiprocessors: int, m: int, n: int, k: int, order: int) -> float:
    """Return about how many clocks a large product takes: its rounds of tiles (``csrc/scheduler.cuh``).

    Args:
        tile: one block of it on each multiprocessor.
        share: of the tensor cores' rate that the tile's main loop reaches.
        multiprocessors: of the card.
        m: tokens.
        n: columns.
        k: rows of the weight.
        order: of the activations.
    """
    units, count = -(-k // unit_k(tile, order)), tiles.column_tiles(tile, m, n)
    unit = tile.tokens * tile.columns * unit_k(tile, order) / MULTIPLIES / share
    blocks = grid(tile, multiprocessors, m, n, k, order)
    rounds, more = divmod(count, blocks)
    if more == 0 or (blocks - more) * units <= EXCHANGE_UNITS * blocks:
        return (rounds + (more > 0)) * (units * unit + STORE)
    rounds = max(rounds - 1, 0)
    return (
        rounds * (units * unit + STORE) + (count - rounds * blocks) * units / blocks * unit + STORE + EXCHANGE
    )


def grid(tile: tiles.Tile, multiprocessors: int, m: int, n: int, k: int, order: int) -> int:
    """Return the blocks to start: at most as many as fit at once, and each with a unit for every slot.

    Fewer tiles than blocks are cut alike where that uses most of the card.
    """
    room, count = multiprocessors * tile.blocks, tiles.column_tiles(tile, m, n)
    even = room // count * count
    blocks = even if even >= tiles.EVEN_SHARE * room else room
    units = -(-k // unit_k(tile, order))
    return max(1, min(blocks, count * units // tile.slots))


def files(arch: str) -> Iterator[File]:
    """Yield the kernels of an architecture, each once."""
    yield from dict.fromkeys(_files(arch))


def _files(arch: str) -> Iterator[File]:
    table_arch = "sm_80" if arch == tiles.PTX_ARCH else arch
    for order in orders_of(arch):
        for group_size in (-1, 64, 128):
            for tile in all_tiles(table_arch, order, group_size != -1):
                for dtype in tiles.DTYPES:
                    yield file_of(tile, dtype, order, group_steps(tile, order, group_size))


def orders_of(arch: str) -> Iterator[int]:
    """Yield the orders that kernels of an architecture read; nothing says that cards to come know s4."""
    yield from (order for order in KINDS if order != orders_int.S64 or arch != tiles.PTX_ARCH)


def file_of(tile: tiles.Tile, dtype: str, order: int, steps: int) -> File:
    """Return what compiles one kernel."""
    entry, kind = kernel_name(tile, dtype, order, steps), KINDS[order].upper().replace("W", "_W")
    shape = (steps, tile.tokens, tile.warps, tile.slots, tile.words, tile.unit, tile.stages)
    defines = (
        f"ENTRY={entry}",
        f"CONFIG={dtype.upper()},{kind},{','.join(map(str, shape))}",
        f"BLOCKS={tile.blocks}",
        f"SHARED={shared_bytes(tile, order, steps != 0)}",
        *tile.shared_how,
    )
    return File(SOURCES[tile.engine], entry, defines)
