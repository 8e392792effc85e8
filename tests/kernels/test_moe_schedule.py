"""The scheduler of the grouped product, block by block, in the arithmetic of ``csrc/moe_schedule.cuh``."""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w4pack.kernels import moe_tiles, tiles
from w4pack.kernels.quarot import int_moe_tiles, orders_int

MULTIPROCESSORS = {"sm_80": 108, "sm_90a": 132, "sm_100": 148, "sm_120": 170}
SHARED_PER_BLOCK = {"sm_80": 99, "sm_90a": 227, "sm_100": 227, "sm_120": 99}  # KiB
SHARED_PER_MULTIPROCESSOR = {"sm_80": 100, "sm_90a": 228, "sm_100": 228, "sm_120": 100}


@dataclass(frozen=True)
class Work:
    """A piece of one tile, as a block takes it: the expert, its columns, its pairs, its units of K."""

    block: int
    tile: int
    expert: int
    column_tile: int
    pairs: range
    units: range


class Schedule:
    """``schedule()`` and ``Grid``: token blocks before each expert, units in all, blocks that share them."""

    def __init__(self, tile: tiles.Tile, counts: Sequence[int], n: int, k: int, grid: int) -> None:
        self.tile, self.grid, self.units = tile, grid, -(-k // tile.unit)
        self.border = [0, *itertools.accumulate(counts)]
        self.first = [0, *itertools.accumulate(-(-c // tile.tokens) for c in counts)]
        self.columns = -(-n // tile.columns)
        count = self.first[-1] * self.columns
        self.total = count * self.units
        even = grid // count * count if count else 0
        rounds = -(-count // grid)
        self.piece = self.units if count >= grid and rounds * grid * 14 <= count * 15 else 1
        self.blocks = max(1, min(even if even * 10 >= grid * 7 else grid, self.total // tile.slots))

    def begin(self, block: int) -> int:
        if block >= self.blocks:
            return self.total
        each, more = divmod(self.total // self.piece, self.blocks)
        return (block * each + min(block, more)) * self.piece

    def work(self, block: int) -> Iterator[Work]:
        """``Run``: a search for the first tile's expert, then steps to later ones."""
        at, end = self.begin(block), self.begin(block + 1)
        expert = bisect_right(self.first, at // self.units // self.columns) - 1 if at < end else 0
        while at < end:
            tile, unit = divmod(at, self.units)
            while tile >= self.first[expert + 1] * self.columns:
                expert += 1
            stop = min(self.units, unit + end - at)
            local = tile - self.first[expert] * self.columns
            column, token_block = divmod(local, self.first[expert + 1] - self.first[expert])
            begin = self.border[expert] + token_block * self.tile.tokens
            pairs = range(begin, min(begin + self.tile.tokens, self.border[expert + 1]))
            yield Work(block, tile, expert, column, pairs, range(unit, stop))
            at += stop - unit


def _check(tile: tiles.Tile, counts: Sequence[int], n: int, k: int, grid: int) -> None:
    schedule = Schedule(tile, counts, n, k, grid)
    owner = [e for e, c in enumerate(counts) for _ in range(c)]
    done: dict[tuple[int, int], list[Work]] = {}
    for work in itertools.chain.from_iterable(schedule.work(b) for b in range(grid)):
        assert len(work.pairs) > 0 and len(work.units) > 0
        assert {owner[r] for r in work.pairs} == {work.expert}
        for pair in work.pairs:
            done.setdefault((pair, work.column_tile), []).append(work)
    assert set(done) == set(itertools.product(range(len(owner)), range(schedule.columns)))
    for pieces in done.values():  # every unit once, and the parts of a tile lie in blocks one after the other
        assert [u for p in pieces for u in p.units] == list(range(schedule.units))
        first = pieces[0].block
        assert [p.block for p in pieces] == list(range(first, first + len(pieces)))
        tile_end = (pieces[0].tile + 1) * schedule.units  # finish_segment() collects from these blocks
        collected = [b for b in range(first + 1, grid) if schedule.begin(b) < tile_end]
        assert collected == [p.block for p in pieces[1:]]


counts_of_experts = st.lists(st.sampled_from([0, 0, 1, 2, 7, 8, 9, 16, 33, 65, 200]), min_size=1, max_size=24)


@given(
    counts=counts_of_experts,
    shape=st.sampled_from([(64, 128), (192, 384), (1536, 2048), (320, 768)]),
    tokens=st.sampled_from([8, 16, 64]),
    warps=st.sampled_from([1, 2, 4]),
    slots=st.sampled_from([1, 3, 8]),
    multiprocessors=st.sampled_from([1, 3, 30]),
)
def test_every_unit_of_every_tile_is_done_once_in_order(
    counts: list[int], shape: tuple[int, int], tokens: int, warps: int, slots: int, multiprocessors: int
) -> None:
    tile = tiles.Tile("mma", tokens, warps, slots, 4, 128, 2, 2)
    pairs = sum(counts)
    if pairs:
        _check(tile, counts, *shape, moe_tiles.grid(tile, multiprocessors, pairs, len(counts), *shape))


@given(
    counts=counts_of_experts, k=st.sampled_from([64, 192, 2752]), multiprocessors=st.sampled_from([1, 3, 30])
)
def test_the_last_unit_of_an_integer_product_may_reach_past_k(
    counts: list[int], k: int, multiprocessors: int
) -> None:
    for tile in int_moe_tiles.all_tiles("sm_90a", orders_int.P32, False):
        pairs, experts, n = sum(counts), len(counts), 320
        if pairs:
            grid = int_moe_tiles.grid(tile, multiprocessors, pairs, experts, n, k, orders_int.P32)
            _check(tile, counts, n, k, grid)


@given(counts=counts_of_experts, tokens=st.sampled_from([8, 16, 64, 96]))
def test_no_routing_has_more_tiles_than_the_host_expects(counts: list[int], tokens: int) -> None:
    tile = tiles.Tile("mma", tokens, 2, 4, 4, 128, 2, 2)
    if sum(counts):
        most = moe_tiles.most_tiles(tile, sum(counts), len(counts), 256)
        assert sum(-(-c // tokens) for c in counts) * 2 <= most


def test_the_device_shares_units_as_the_host_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert with all pairs is a dense product: the blocks ``tiles.grid`` starts, by this rule."""
    monkeypatch.setattr(tiles, "EVEN_SHARE", 0.7)
    for m, n, k in itertools.product((1, 8, 100, 4096), (64, 1536, 28672), (128, 768, 4096)):
        tile = tiles.Tile("mma", 8, 2, 4, 4, 128, 2, 2)
        schedule = Schedule(tile, [m], n, k, moe_tiles.grid(tile, 132, m, 1, n, k))
        assert schedule.blocks == tiles.grid(tile, 132, m, n, k), (m, n, k)


def test_nothing_to_do() -> None:
    schedule = Schedule(tiles.Tile("mma", 8, 2, 4, 4, 128, 2, 2), [0, 0, 0], 128, 128, 7)
    assert [list(schedule.work(b)) for b in range(7)] == [[]] * 7


@pytest.mark.parametrize("arch", tiles.ARCHES)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_grouped_product_finds_a_tile_that_fits(arch: str, bits: int) -> None:
    shapes = ((64, 64), (1536, 2048), (2048, 768), (28672, 4096), (4096, 14336), (320, 192), (192, 2752))
    for (n, k), experts, pairs, zeros in itertools.product(
        shapes, (1, 8, 128, 512), (1, 2, 8, 128, 512, 2048, 70000), (False, True)
    ):
        found = moe_tiles.choose(arch, MULTIPROCESSORS[arch], pairs, experts, n, k, bits, zeros)
        assert k % found.tile.unit == 0
        assert 1 <= found.grid <= MULTIPROCESSORS[arch] * found.tile.blocks


@pytest.mark.parametrize("arch", tiles.ARCHES)
@pytest.mark.parametrize("bits", [4, 8])
def test_grouped_tiles_fit_the_card(arch: str, bits: int) -> None:
    every = [(tile, zeros) for zeros in (False, True) for tile in moe_tiles.all_tiles(arch, bits, zeros)]
    for tile, zeros in every:
        shared = moe_tiles.shared_bytes(tile, moe_tiles.MOST_EXPERTS, bits, zeros)
        assert shared <= SHARED_PER_BLOCK[arch] * 1024, tile
        assert (shared + 1024) * tile.blocks <= SHARED_PER_MULTIPROCESSOR[arch] * 1024, tile
        assert tile.threads <= 1024 and tile.threads * tile.blocks <= 2048
        assert tile.fits_workspace and tile.slots <= 2 * tile.words and tile.sharing == tiles.COLLECTED
        assert tile.engine == "mma" or (arch == "sm_90a" and not tile.producer)


def test_whole_tiles_are_not_cut_where_they_fill_the_card() -> None:
    tile = tiles.Tile("mma", 8, 4, 1, 4, 128, 2, 2)
    for counts, whole in (([1] * 132, True), ([1] * 128, True), ([1] * 150, False)):
        schedule = Schedule(tile, counts, 512, 768, 264)
        pieces = [list(schedule.work(block)) for block in range(264)]
        assert all(len(w.units) == 6 for work in pieces for w in work) == whole, len(counts)
