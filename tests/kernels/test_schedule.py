"""Which block does what in a product of many tokens, and how blocks of an integer one hand sums over.

The arithmetic of ``csrc/scheduler.cuh``, and ``csrc/int_exchange.cuh`` with warps in random order.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import w4pack
from w4pack.kernels.quarot import int_tiles

WARPGROUPS, WARPS = 2, 3  # of a block; of a warpgroup (four, but three show the same)
INTEGER, UNIT_64, UNIT_128, FEW_TOKENS = 7, 8, 4, 0  # EXCHANGE_UNITS of int_tile.cuh and tile.cuh


class Schedule:
    """``Grid`` and ``Run`` of csrc/scheduler.cuh: whole tiles in turns, the rest in equal runs."""

    def __init__(self, tiles: int, units: int, grid: int, exchange: int = INTEGER) -> None:
        self.tiles, self.units, self.grid = tiles, units, grid
        rounds, more = divmod(tiles, grid)
        cheap = more == 0 or (grid - more) * units <= exchange * grid
        self.whole = 0 if exchange == 0 else tiles if cheap else max(rounds - 1, 0) * grid

    def begin(self, block: int) -> int:
        each, more = divmod((self.tiles - self.whole) * self.units, self.grid)
        return block * each + min(block, more)

    def segments(self, block: int) -> Iterator[tuple[int, int, int]]:
        """Yield (tile, first unit, unit after the last)."""
        for tile in range(block, self.whole, self.grid):
            yield tile, 0, self.units
        at, end = self.begin(block), self.begin(block + 1)
        while at < end:
            tile, unit = divmod(at, self.units)
            last = min(self.units, unit + end - at)
            yield self.whole + tile, unit, last
            at += last - unit

    def end_of_others(self, block: int, tile: int, begin: int, end: int) -> int:
        """Return the first block past those that have the rest of a tile."""
        last = block + 1
        if begin == 0 and end != self.units:
            while last < self.grid and self.begin(last) < (tile - self.whole + 1) * self.units:
                last += 1
        return last


@pytest.mark.parametrize(
    ("tiles", "units", "grid"), [(1, 9, 7), (5, 64, 132), (300, 32, 132), (264, 3, 132), (130, 40, 132)]
)
@pytest.mark.parametrize("exchange", [INTEGER, UNIT_64, UNIT_128, FEW_TOKENS])
def test_blocks_cover_every_unit_once(tiles: int, units: int, grid: int, exchange: int) -> None:
    schedule = Schedule(tiles, units, grid, exchange)
    seen = Counter(
        (tile, unit)
        for block in range(grid)
        for tile, begin, end in schedule.segments(block)
        for unit in range(begin, end)
    )
    assert seen == Counter((tile, unit) for tile in range(tiles) for unit in range(units))


@pytest.mark.parametrize(
    ("tiles", "units", "whole"),
    [
        (
            256,
            64,
            256,
        ),  # 8192 x 8192, 1024 tokens: eight blocks idle in the second round cost less than the exchange
        (320, 64, 132),  # 10240 x 8192: one round whole, 1.4 rounds cut
        (896, 32, 660),  # 28672 x 4096
        (192, 32, 0),  # 6144 x 4096: all cut
    ],
)
def test_what_blocks_take_whole(tiles: int, units: int, whole: int) -> None:
    assert Schedule(tiles, units, 132, UNIT_128).whole == whole


def test_sources_have_the_same_numbers() -> None:
    sources = Path(w4pack.__file__).parent / "kernels" / "csrc"
    assert (
        "EXCHANGE_UNITS = PRODUCER && TOKENS >= 128 ? 512 / UNIT_K : 0, BAND = 0"
        in (sources / "tile.cuh").read_text()
    )
    assert f"EXCHANGE_UNITS = {INTEGER}, BAND = 4" in (sources / "int_tile.cuh").read_text()
    assert int_tiles.EXCHANGE_UNITS == INTEGER


def test_places_are_a_permutation_in_bands() -> None:
    columns, tokens, band = 7, 19, 4
    places = set()
    for tile in range(columns * tokens):
        b, at = tile // (band * columns), tile % (band * columns)
        wide = min(band, tokens - b * band)
        places.add((at // wide, b * band + at % wide))
    assert places == {(c, t) for c in range(columns) for t in range(tokens)}


class Card:
    """A launch under way. Each warp is a generator that gives way wherever another could come between."""

    def __init__(self, schedule: Schedule, flags: Counter[tuple[int, int]], chance: random.Random) -> None:
        self.schedule, self.flags, self.chance = schedule, flags, chance
        self.partials: dict[tuple[int, int, int], list[int]] = {}
        self.met: Counter[tuple[int, int, int]] = Counter()
        self.stored: dict[tuple[int, int, int], list[int]] = {}
        self.early = self.late = 0

    def run(self) -> None:
        places = [
            (b, g, w) for b in range(self.schedule.grid) for g in range(WARPGROUPS) for w in range(WARPS)
        ]
        warps, steps = [self.warp(*place) for place in places], 0
        while warps:
            at = self.chance.randrange(len(warps))
            steps += 1
            assert steps < 10**6, "warps wait for one another"
            if next(warps[at], "ended") == "ended":
                warps[at] = warps[-1]
                warps.pop()

    def meet(self, block: int, group: int, times: int) -> Iterator[None]:
        self.met[block, group, times] += 1
        while self.met[block, group, times] < WARPS:
            yield

    def warp(self, block: int, group: int, warp: int) -> Iterator[None]:
        meetings = 0
        for tile, begin, end in self.schedule.segments(block):
            next_, to = block + 1, self.schedule.end_of_others(block, tile, begin, end)
            yield
            taken = next_ != to and self.flags[next_, group] == 1  # start()
            yield
            sums = list(self.partials[next_, group, warp]) if taken else []
            self.early, self.late = self.early + taken, self.late + (next_ != to and not taken)
            for unit in range(begin, end):
                sums.append(unit)
                if self.chance.random() < 0.2:
                    yield
            if begin != 0:  # hand_over()
                assert self.flags[block, group] == 0
                self.partials[block, group, warp] = sums
                yield from self.meet(block, group, meetings)
                meetings += 1
                if warp == 0:
                    self.flags[block, group] = 1
                continue
            if next_ != to:  # finish()
                for other in range(next_ + taken, to):
                    while self.flags[other, group] == 0:
                        yield
                    sums += self.partials[other, group, warp]
                yield from self.meet(block, group, meetings)
                meetings += 1
                for other in range(next_ + warp, to, WARPS):
                    self.flags[other, group] = 0
            assert (tile, group, warp) not in self.stored
            self.stored[tile, group, warp] = sums


@pytest.mark.parametrize(
    ("tiles", "units", "grid"),
    [(176, 32, 132), (22, 12, 16), (6, 33, 7), (8, 32, 33), (3, 9, 8), (1, 64, 12), (10, 40, 4), (16, 8, 16)],
)
def test_every_tile_gets_each_unit_once_and_the_flags_are_zero_again(
    tiles: int, units: int, grid: int
) -> None:
    schedule, flags, chance = Schedule(tiles, units, grid), Counter[tuple[int, int]](), random.Random(tiles)
    for _ in range(3):
        card = Card(schedule, flags, chance)
        card.run()
        assert len(card.stored) == tiles * WARPGROUPS * WARPS
        assert all(sorted(units_) == list(range(units)) for units_ in card.stored.values())
        assert not any(flags.values())


def test_with_more_than_a_round_of_tiles_sums_are_mostly_there_at_the_start() -> None:
    card = Card(Schedule(22, 12, 16), Counter(), random.Random(0))
    card.run()
    assert card.early > card.late
