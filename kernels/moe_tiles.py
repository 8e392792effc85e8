"""Which kernel runs a grouped product: a pure function of what the host knows, which is not the routing.

The lines are the class ``moe`` of ``tiles_<arch>.json``: up to which number of pairs per expert (0: any), of
chunks of 64 columns over all experts that can be busy (0: any) and of rows K (0: any) a tile serves, and
whether it serves symmetric weights alone (``sym``), those with zero points (``zp``), or both.
``csrc/moe_schedule.cuh`` finds each block's work from the routing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from w4pack.kernels import tiles

MOST_EXPERTS = 512
_WARPS = 32  # of a block, at most: a word each in the table of tiles


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    most_pairs: int
    most_chunks: int
    most_k: int
    tile: tiles.Tile
    kind: str = ""

    def has(self, zeros: bool) -> bool:
        """Whether the line serves weights with zero points, or symmetric ones."""
        return self.kind in ("", tiles.ZEROS[zeros])

    def fits(self, pairs: int, experts: int, n: int, k: int) -> bool:
        """Whether the line serves a product."""
        chunks = min(pairs, experts) * n // tiles.CHUNK_N
        return (
            (self.most_pairs == 0 or pairs <= self.most_pairs * experts)
            and (self.most_chunks == 0 or chunks <= self.most_chunks)
            and (self.most_k == 0 or k <= self.most_k)
            and k % self.tile.unit == 0
        )


@cache
def _rows(arch: str, bits: int) -> tuple[Row, ...]:
    rows = tiles.table(arch)["moe"][str(bits)]  # type: ignore[index]
    return tuple(
        Row(int(p), int(chunks), int(k), tiles.tile_of(fields), *kind) for p, chunks, k, fields, *kind in rows
    )


def choose(
    arch: str, multiprocessors: int, pairs: int, experts: int, n: int, k: int, bits: int, zeros: bool
) -> tiles.Launch:
    """Return the tile and grid of a grouped product; the last lines of a table serve everything."""
    row = next(row for row in _rows(arch, bits) if row.has(zeros) and row.fits(pairs, experts, n, k))
    return tiles.Launch(row.tile, grid(row.tile, multiprocessors, pairs, experts, n, k))


def grid(tile: tiles.Tile, multiprocessors: int, pairs: int, experts: int, n: int, k: int) -> int:
    """Return the blocks to start: all that fit at once, or fewer where no routing could use them."""
    most = most_tiles(tile, pairs, experts, n) * (k // tile.unit) // tile.slots
    return max(1, min(multiprocessors * tile.blocks, most))


def most_tiles(tile: tiles.Tile, pairs: int, experts: int, n: int) -> int:
    """Return the tiles of the output in the worst routing."""
    token_blocks = min(pairs, (pairs + min(pairs, experts) * (tile.tokens - 1)) // tile.tokens)
    return token_blocks * -(-n // tile.columns)


def shared_bytes(tile: tiles.Tile, experts: int, bits: int, zeros: bool) -> int:
    """Return the bytes of dynamic shared memory of a block: the rings, and the table of tiles."""
    return tile.shared_bytes(bits, zeros) + table_bytes(experts)


def table_bytes(experts: int) -> int:
    """Return the bytes of shared memory of the table of tiles that a block makes of the routing."""
    return 4 * (2 * (experts + 1) + _WARPS)


def kernel_name(tile: tiles.Tile, dtype: str, bits: int, zeros: bool) -> str:
    """Return the entry of a grouped kernel, for example ``moe_fp16_b4_sym_mma_t8w2s4x4k128p2b2``."""
    return f"moe_{dtype}_b{bits}_{tiles.ZEROS[zeros]}_{tile.text}"


def all_tiles(arch: str, bits: int, zeros: bool) -> Iterator[tiles.Tile]:
    """Yield every tile that a table can choose, each once."""
    yield from dict.fromkeys(row.tile for row in _rows(arch, bits) if row.has(zeros))
