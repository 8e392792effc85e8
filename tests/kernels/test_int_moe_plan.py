"""The grouped integer product's choices, and where its threads put what they copy (``csrc/int_moe.cuh``)."""

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest

from w4pack.kernels import moe_tiles, tiles
from w4pack.kernels.quarot import int_moe_tiles, int_tiles, orders_int

P32, Q32, S64 = orders_int.P32, orders_int.Q32, orders_int.S64
SHARED = {"sm_80": 99, "sm_90a": 227, "sm_100": 227, "sm_120": 99}  # KiB a block may take
ALL = {"sm_80": 100, "sm_90a": 228, "sm_100": 228, "sm_120": 100}  # KiB a multiprocessor has
CLASSES = [(order, group) for order in (P32, Q32, S64) for group in (-1, 32, 64, 128)]

# ---- choices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "experts", "tokens"),
    [(2, 8, 8), (32, 8, 8), (512, 8, 32), (8, 128, 8), (128, 128, 8), (2048, 128, 32), (1024, 128, 16),
     (4096, 8, 64)],
)  # fmt: skip
def test_more_pairs_an_expert_take_larger_tiles(pairs: int, experts: int, tokens: int) -> None:
    found = int_moe_tiles.choose("sm_90a", 132, pairs, experts, 1536, 2048, P32, -1)
    assert found is not None and found.tile.tokens == tokens


@pytest.mark.parametrize("arch", tiles.ARCHES)
def test_every_grouped_product_finds_a_kernel_that_is_built(arch: str) -> None:
    built = {file.entry for file in int_moe_tiles.files(arch)}
    for (order, group), experts, pairs in itertools.product(CLASSES, (1, 8, 512), (1, 2, 100, 70000)):
        found = int_moe_tiles.choose(arch, 132, pairs, experts, 320, 192, order, group)
        if found is None:
            assert order == S64 and arch in ("sm_100", "sm_120")
            continue
        assert 1 <= found.grid <= 132 * found.tile.blocks
        steps = int_tiles.group_steps(found.tile, order, group)
        for dtype in tiles.DTYPES:
            assert int_moe_tiles.kernel_name(found.tile, dtype, order, steps) in built


def test_cards_to_come_have_the_kernels_of_what_they_choose() -> None:
    built = {file.entry for file in int_moe_tiles.files(tiles.PTX_ARCH)}
    assert built < {file.entry for file in int_moe_tiles.files("sm_80")}
    assert not [entry for entry in built if "s4w4" in entry]


@pytest.mark.parametrize("arch", tiles.ARCHES)
def test_tiles_fit_the_card_with_the_most_experts(arch: str) -> None:
    for order, grouped in itertools.product(int_tiles.KINDS, (False, True)):
        for tile in int_moe_tiles.all_tiles(arch, order, grouped):
            shared = int_moe_tiles.shared_bytes(tile, moe_tiles.MOST_EXPERTS, order, grouped)
            assert shared <= SHARED[arch] * 1024, tile
            assert (shared + 1024) * tile.blocks <= ALL[arch] * 1024, tile
            assert tile.engine == "mma" and tile.fits_workspace and tile.slots <= 2 * tile.words
            assert tile.threads * tile.blocks <= 2048


# ---- the loader -----------------------------------------------------------------------------------------

COUNTS, TOKENS = (3, 0, 17, 1, 70), 9


class Layer(NamedTuple):
    """What five experts' stages are copied from, in pieces of 16 bytes; all of them differ."""

    k: int
    n: int
    group: int
    x: np.ndarray  # token, piece
    words: np.ndarray  # expert, row of tiles, chunk, piece
    scales: np.ndarray  # expert, group, chunk, piece
    rows: np.ndarray
    border: np.ndarray


def make(k: int, n: int, group: int) -> Layer:
    experts, chunks, groups = len(COUNTS), n // 64, -(-k // group)
    shapes = ((TOKENS, k // 16), (experts, k // 16, chunks, 32), (experts, groups, chunks, 8))
    sizes = [math.prod(shape) for shape in shapes]
    first = 1 + np.cumsum([0, *sizes])
    parts = [np.arange(f, f + s).reshape(shape) for f, s, shape in zip(first, sizes, shapes, strict=False)]
    rows = np.random.default_rng(k + n).integers(0, TOKENS, sum(COUNTS))
    return Layer(k, n, group, *parts, rows, np.cumsum([0, *COUNTS]))


class Place(NamedTuple):
    """A unit of a tile."""

    expert: int
    token_block: int
    column_tile: int
    unit: int


def loaded(tile: tiles.Tile, layer: Layer, at: Place) -> tuple[np.ndarray, ...]:
    """Return a stage's pieces after ``seek``, ``weights`` and ``activations`` of all threads of a slot.

    Returns:
        activations (half, token, piece), words (row of tiles, chunk, piece), scales (group, chunk, piece).
    """
    threads, chunks = tile.warps * 32, tile.columns // 64
    thread, all_chunks, unit_tiles = np.arange(threads), layer.n // 64, tile.unit // 16
    codes = np.full(tile.unit // 128 * tile.tokens * 8, -1)
    begin, end = layer.border[at.expert] + at.token_block * tile.tokens, layer.border[at.expert + 1]
    for half, i in np.ndindex(tile.unit // 128, max(1, tile.tokens * 8 // threads)):
        token = i * (threads // 8) + thread // 8
        column = at.unit * (tile.unit // 16) + half * 8 + thread % 8
        there = (begin + token < end) & (16 * column < layer.k)
        row = layer.rows[np.where(there, begin + token, 0)]
        place = (half * tile.tokens + token) * 8 + (thread % 8 ^ token % 8)
        held = token < tile.tokens
        assert (codes[place[held]] == -1).all()
        value = np.where(there, layer.x[row, np.where(there, column, 0)], 0)
        codes[place[held]] = value[held]
    words = np.zeros(chunks * unit_tiles * 32, int)
    vectors, expert = chunks * 32, layer.words[at.expert].reshape(-1)  # pieces of a row of tiles
    per_row, at_once = max(1, vectors // threads), max(1, threads // vectors)
    for i in range(words.size // threads):
        inside = i % per_row * threads + thread % vectors
        chunk = np.minimum(at.column_tile * chunks + inside // 32, all_chunks - 1)
        row = at.unit * unit_tiles + thread // vectors + i // per_row * at_once
        real = row < layer.k // 16
        words[(i * threads + thread)[real]] = expert[(row * all_chunks * 32 + chunk * 32 + inside % 32)[real]]
    group_rows = max(1, tile.unit // layer.group)
    scales = np.zeros(group_rows * chunks * 8, int)
    for first in range(0, scales.size, threads):
        slot = (first + thread)[first + thread < scales.size]
        group = np.minimum(
            at.unit * tile.unit // layer.group + slot // (chunks * 8), (layer.k - 1) // layer.group
        )
        chunk = np.minimum(at.column_tile * chunks + slot % (chunks * 8) // 8, all_chunks - 1)
        scales[slot] = layer.scales[at.expert, group, chunk, slot % 8]
    return codes.reshape(-1, tile.tokens, 8), words.reshape(-1, chunks, 32), scales.reshape(-1, chunks, 8)


@pytest.mark.parametrize("tile", int_moe_tiles.all_tiles("sm_90a", P32, True), ids=lambda tile: tile.text)
@pytest.mark.parametrize(("k", "n", "group"), [(192, 320, 32), (128, 192, 64), (320, 64, 128)])
def test_a_stage_has_its_experts_bytes(tile: tiles.Tile, k: int, n: int, group: int) -> None:
    """Pairs' tokens, their expert's words and scales; past K, N and the expert's pairs what does no harm."""
    layer, chunks, unit_tiles = make(k, n, group), tile.columns // 64, tile.unit // 16
    for expert, count in enumerate(COUNTS):
        blocks, columns, units = -(-count // tile.tokens), -(-n // tile.columns), -(-k // tile.unit)
        for at in itertools.starmap(
            Place, itertools.product([expert], *map(range, (blocks, columns, units)))
        ):
            codes, words, scales = loaded(tile, layer, at)
            first, end = layer.border[expert] + at.token_block * tile.tokens, layer.border[expert + 1]
            for half, token, piece in np.ndindex(*codes.shape):
                column = at.unit * tile.unit // 16 + half * 8 + piece
                real = first + token < end and 16 * column < k
                wanted = layer.x[layer.rows[first + token], column] if real else 0
                assert codes[half, token, piece ^ token % 8] == wanted
            row, chunk = at.unit * unit_tiles, at.column_tile * chunks
            real = layer.words[expert, row : row + unit_tiles, chunk : chunk + chunks]
            np.testing.assert_array_equal(words[: real.shape[0], : real.shape[1]], real)
            group0 = at.unit * tile.unit // group
            real = layer.scales[expert, group0 : group0 + len(scales), chunk : chunk + chunks]
            np.testing.assert_array_equal(scales[: real.shape[0], : real.shape[1]], real)
