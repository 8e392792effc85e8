"""Sums that several blocks share out (csrc/scatter.cuh): places, owners and orders of events, on the CPU."""

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from w4pack.kernels import tiles

ROOM = 227 << 10  # bytes of shared memory of a block, on every card with such tiles


def _begin(total: int, blocks: int, block: int) -> int:
    each, more = divmod(total, blocks)
    return block * each + min(block, more)


@dataclass
class Card:
    """The blocks of one launch over tiles of some units, in any order of events."""

    count: int  # tiles
    units: int
    blocks: int
    items: int
    evenly: bool = False  # every tile is cut alike, a block has a place for one
    marked: bool = False  # a place tells that its sum has come; nothing is counted
    places: dict[tuple[int, int], tuple[int, int, int, int]] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    made: dict[tuple[int, int], list[tuple[int, int, int, int]]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)

    def begin(self, block: int) -> int:
        """The first unit of a block."""
        return _begin(self.count * self.units, self.blocks, block)

    def run_of(self, block: int) -> list[tuple[int, int, int]]:
        """A block's segments: tile, first unit, end."""
        at, end, out = self.begin(block), self.begin(block + 1), []
        while at < end:
            tile, first = divmod(at, self.units)
            last = min(self.units, first + end - at)
            out.append((tile, first, last))
            at += last - first
        return out

    def sharers(self, tile: int, block: int) -> tuple[int, int, int, bool]:
        """As struct Sharers."""
        low, high = tile * self.units, (tile + 1) * self.units
        first, to = block, block + 1
        while self.begin(first) > low:
            first -= 1
        while to < self.blocks and self.begin(to) < high:
            to += 1
        return first, to, to - 1 if self.begin(to) > high else to, self.begin(first) < low

    def place(self, of: tuple[int, int, int, bool], block: int) -> int:
        """Whether a block's sums are those of its first or its second tile."""
        second = block == of[0] and of[3]
        return block + second if self.evenly else 2 * block + second

    def hand_over(
        self, block: int, segment: tuple[int, int, int], item: int
    ) -> tuple[int, int, int, bool] | None:
        """Write an item of a segment; returns who shares its tile once all are written."""
        tile, first, last = segment
        of = self.sharers(tile, block)
        assert of[0] < of[2], "somebody collects"
        key = self.place(of, block), item
        assert key not in self.places, "a place is written over before it was read"
        self.places[key] = (tile, block, first, last)
        if item < self.items - 1:
            return None
        if not self.marked:
            self.arrived[of[0]] = self.arrived.get(of[0], 0) + 1
        return of

    def share(self, block: int, of: tuple[int, int, int, bool]) -> range:
        """The items that a block adds up."""
        me, sharing = block - of[0], of[2] - of[0]
        return range(me * self.items // sharing, (me + 1) * self.items // sharing)

    def have_come(self, block: int, of: tuple[int, int, int, bool]) -> bool:
        """Whether a block may read its share: all its places hold sums, or all sharers were counted."""
        if not self.marked:
            return self.arrived.get(of[0], 0) == of[1] - of[0]
        return all(
            (self.place(of, b), item) in self.places
            for item in self.share(block, of)
            for b in range(of[0], of[1])
        )

    def collect(self, block: int, tile: int, of: tuple[int, int, int, bool]) -> None:
        """Read a block's share of the items."""
        first, to, owners, _ = of
        for item in self.share(block, of):
            parts = [self.places.pop((self.place(of, b), item)) for b in range(first, to)]
            assert all(part[:2] == (tile, b) for part, b in zip(parts, range(first, to), strict=True))
            assert (tile, item) not in self.made
            self.made[tile, item] = parts
        if self.marked:
            return
        self.left[first] = self.left.get(first, 0) + 1
        if self.left[first] == owners - first:
            del self.left[first], self.arrived[first]

    def go(self, rng: random.Random) -> None:
        """Let blocks go on one at a time until all have ended; fails where all wait for one another."""
        todo = {block: self.run_of(block) for block in range(self.blocks)}
        items = dict.fromkeys(range(self.blocks), 0)  # of the segment in hand that were written
        waiting: dict[int, tuple[int, tuple[int, int, int, bool]]] = {}
        live = list(todo)
        while live:
            block = rng.choice(live)
            if block in waiting:
                tile, of = waiting[block]
                if self.have_come(block, of):
                    self.collect(block, tile, of)
                    del waiting[block]
                else:
                    assert any(b not in waiting for b in live), "all wait"
            elif (segment := todo[block][0])[1:] == (0, self.units):
                self.whole.add(todo[block].pop(0)[0])
            else:
                shared = self.hand_over(block, segment, items[block])
                items[block] = (items[block] + 1) % self.items
                if shared:
                    todo[block].pop(0)
                    if block < shared[2]:
                        assert not todo[block], "nobody waits with work left"
                        waiting[block] = segment[0], shared
            if not todo[block] and block not in waiting:
                live.remove(block)

    def check(self) -> None:
        """Every item is made once, of all units in order; nothing is left behind."""
        assert not self.places and not self.arrived and not self.left
        for tile in set(range(self.count)) - self.whole:
            for item in range(self.items):
                parts = self.made[tile, item]
                assert parts[0][2] == 0 and parts[-1][3] == self.units
                assert all(a[3] == b[2] for a, b in itertools.pairwise(parts))


@pytest.mark.parametrize(
    ("count", "units", "blocks"),
    [
        (48, 32, 132),
        (32, 32, 128),
        (24, 32, 120),
        (64, 64, 264),
        (80, 64, 240),
        (22, 224, 132),
        (150, 64, 132),
        (16, 112, 128),
        (3, 1, 3),
        (5, 7, 6),
        (7, 3, 20),
        (300, 2, 132),
    ],
)
def test_every_share_of_every_tile_is_made_once(count: int, units: int, blocks: int) -> None:
    card = Card(count, units, blocks, 16)
    card.go(random.Random(blocks))
    card.check()


@pytest.mark.parametrize("arch", tiles.ARCHES)
def test_tiles_shared_evenly_are_cut_at_units_and_have_one_place_a_block(arch: str) -> None:
    """Grids of every shape that a table's exceptions name, on cards of several sizes."""
    shapes = tiles.table(arch).get("exceptions", {}).get("4", {})  # type: ignore[attr-defined]
    seen: list[tiles.Tile] = []
    for shape, m in itertools.product(shapes, (33, 64, 65, 96, 128, 129, 256)):
        n, k = map(int, shape.split("x"))
        for multiprocessors in (7, 78, 114, 132):
            tile, grid = (chosen := tiles.choose(arch, multiprocessors, ROOM, m, n, k, 4)).tile, chosen.grid
            if not tile.evenly:
                continue
            count, units = tiles.column_tiles(tile, m, n), k // tile.unit
            assert (
                grid <= multiprocessors * tile.blocks and grid % count == 0 and units % (grid // count) == 0
            )
            card = Card(count, units, grid, 8, evenly=True, marked=tile.marked)
            card.go(random.Random(grid))
            card.check()
            seen.append(tile)
    assert arch != "sm_90a" or (len(seen) >= 8 and any(tile.marked for tile in seen))


def test_a_card_with_too_few_multiprocessors_takes_another_tile() -> None:
    few = tiles.choose("sm_90a", 7, ROOM, 128, 4096, 14336, 4)
    most = tiles.choose("sm_90a", 132, ROOM, 128, 4096, 14336, 4)
    assert not few.tile.evenly and most.tile.evenly and most.grid == 128


def test_any_cut_and_any_order_of_events() -> None:
    rng = random.Random(1)
    for _ in range(300):
        count, units = rng.randint(1, 12), rng.randint(1, 12)
        card = Card(count, units, rng.randint(1, count * units), rng.choice((4, 8, 16)))
        card.go(rng)
        card.check()
        cut = rng.choice([s for s in range(1, units + 1) if units % s == 0])
        even = Card(count, units, count * cut, rng.choice((4, 8, 16)), evenly=True, marked=rng.random() < 0.5)
        even.go(rng)
        even.check()


@pytest.mark.parametrize(
    ("words", "slots", "warps", "tokens"),
    [
        (2, 1, 4, 64),
        (2, 1, 12, 64),
        (1, 1, 12, 64),
        (2, 2, 4, 64),
        (1, 2, 8, 64),
        (2, 4, 4, 32),
        (2, 1, 8, 128),
    ],
)
def test_items_fill_a_partial_tile_and_give_every_result(
    words: int, slots: int, warps: int, tokens: int
) -> None:
    token_tiles, slot_pairs, whole = tokens // 8, 2 * words // slots, slots == 1
    items, lane_bytes = (words if whole else slot_pairs) * token_tiles, 16 if whole else 8
    partial = np.zeros(16 * words * warps * tokens, np.int64)
    results = np.zeros((tokens, 16 * words * warps), np.int64)
    for slot, warp, lane, item in itertools.product(range(slots), range(warps), range(32), range(items)):
        at = ((slot * warps + warp) * items * 32 + lane) * lane_bytes + item * 32 * lane_bytes
        partial[at // 4 : (at + lane_bytes) // 4] += 1
        row, tile = divmod(item, token_tiles)
        pairs = (2 * row, 2 * row + 1) if whole else (slot * slot_pairs + row,)
        for pair in pairs:
            assert pair * slots // (2 * words) == slot, "the slot that has the pair's sums"
            column = warp * 16 * words + 8 * pair + 2 * (lane % 4)
            results[tile * 8 + lane // 4, column : column + 2] += 1
    assert (partial == 1).all() and (results == 1).all()


def test_a_tile_names_how_its_sums_are_added_up() -> None:
    fields = ["tma", 64, 8, 1, 2, 128, 6, 1]
    collected, shared = tiles.tile_of(fields), tiles.tile_of([*fields, tiles.SHARED_OUT])
    assert collected.sharing == tiles.COLLECTED and shared.text == collected.text + "e1"
    assert tiles.kernel_name(shared, "fp16", 4, False) != tiles.kernel_name(collected, "fp16", 4, False)


def test_two_partial_tiles_and_a_flag_for_each_warp_must_fit() -> None:
    def fits(tokens: int, warps: int, slots: int, blocks: int, sharing: int) -> bool:
        return tiles.Tile("tma", tokens, warps, slots, 2, 128, 4, blocks, sharing).fits_workspace

    assert fits(64, 12, 1, 1, tiles.SHARED_OUT), "two times 96 KiB"
    assert fits(128, 8, 1, 1, tiles.COLLECTED) and not fits(128, 8, 1, 1, tiles.SHARED_OUT), "128 KiB"
    assert fits(128, 8, 1, 1, tiles.SHARED_EVENLY), "once 128 KiB"
    assert fits(32, 12, 1, 1, tiles.MARKED_COLLECTED) and not fits(64, 12, 1, 1, tiles.MARKED_COLLECTED), (
        "48 KiB are marked"
    )
    assert fits(16, 4, 2, 2, tiles.SHARED_OUT) and not fits(16, 4, 2, 3, tiles.SHARED_OUT), "24 flags"


@pytest.mark.parametrize("arch", tiles.ARCHES)
def test_every_launch_has_its_places_and_counts_in_the_workspace(arch: str) -> None:
    for tile in (*tiles.all_tiles(arch, 4), *tiles.all_tiles(arch, 8)):
        for multiprocessors in (1, 16, 132):
            sums, marked, flags = tiles.workspace_bytes(multiprocessors)
            blocks = multiprocessors * tile.blocks
            if tile.marked:
                assert blocks * tile.partial_bytes <= marked, tile
            elif tile.sharing:
                places = 1 if tile.evenly else 2
                assert places * blocks * tile.partial_bytes <= sums, tile
                assert blocks * tile.warps * tile.slots <= flags, tile
