"""The Marlin tile: the worked examples, the maps written as loops, the inverses.

The loops of `oracle` and `builders` were written from the descriptions and proved against real files; the
product's formulas are compared with them, place by place.
"""

from __future__ import annotations

import numpy as np
import pytest

import builders
import oracle
from w4pack.kernels import layout

BITS = (4, 8)


@pytest.mark.parametrize(
    ("k", "n", "row", "word", "nibble"),
    [(0, 0, 0, 0, 0), (1, 0, 0, 0, 4), (8, 0, 0, 0, 1), (9, 13, 0, 80, 7), (27, 77, 1, 212, 7)],
)
def test_worked_examples_of_the_four_bit_tile(k: int, n: int, row: int, word: int, nibble: int) -> None:
    assert layout.code_position(np.int64(k), np.int64(n), 4) == (row, word, nibble)
    assert layout.code_at(np.int64(row), np.int64(word), np.int64(nibble), 4) == (k, n)


def test_one_code_in_a_tile_is_the_known_word() -> None:
    codes = np.zeros((16, 64), np.uint8)
    codes[9, 13] = 1
    words = layout.pack_codes(codes, 4).view(np.uint32)
    assert words.shape == (1, 128)
    assert [(int(i), hex(words[0, i])) for i in np.flatnonzero(words[0])] == [(80, "0x10000000")]


@pytest.mark.parametrize("bits", BITS)
def test_every_place_is_the_one_of_the_loop_and_is_taken_once(bits: int) -> None:
    seen = set()
    for k in range(32):
        for n in range(128):
            word, slot = oracle.marlin_place(k % 16, n % 64, bits)
            place = (k // 16, n // 64 * 32 * bits + word, slot)
            assert tuple(int(i) for i in layout.code_position(np.int64(k), np.int64(n), bits)) == place
            assert tuple(int(i) for i in layout.code_at(*(np.int64(i) for i in place), bits)) == (k, n)
            seen.add(place)
    assert len(seen) == 32 * 128


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(16, 64), (48, 64), (16, 192), (32, 128)])
def test_codes_pack_to_the_words_of_the_loop_and_come_back(bits: int, shape: tuple[int, int]) -> None:
    codes = np.random.default_rng(7).integers(0, 1 << bits, shape).astype(np.uint8)
    tiles = layout.pack_codes(codes, bits)
    assert np.array_equal(tiles, builders.marlin_words(codes, bits))
    assert np.array_equal(layout.unpack_codes(tiles, bits), codes)


def test_grouped_order_reads_every_eighth_column() -> None:
    order = layout.grouped_order(192)
    assert order[:8].tolist() == [0, 8, 16, 24, 32, 40, 48, 56]
    values = np.arange(192)[None]
    assert np.array_equal(oracle.grouped_order(values[:, order]), values)


def test_channel_order_reads_pairs_of_columns() -> None:
    order = layout.channel_order(96)
    assert order[:8].tolist() == [0, 1, 8, 9, 16, 17, 24, 25]
    values = np.arange(96)[None]
    assert np.array_equal(oracle.channel_order(values[:, order]), values)


def test_inverse_order_undoes_an_order() -> None:
    values = np.random.default_rng(1).integers(0, 99, (3, 128))
    for order in (layout.grouped_order(128), layout.channel_order(128)):
        assert np.array_equal(values[:, order][:, layout.inverse_order(order)], values)


def test_zero_points_of_a_chunk_are_the_known_word() -> None:
    zeros = (np.arange(64) // 8).astype(np.uint8)[None]
    assert [hex(word) for word in layout.pack_zeros(zeros, 4).view(np.uint32)[0]] == ["0x75316420"] * 8


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("groups", "columns"), [(1, 64), (3, 128), (2, 192)])
def test_zero_points_are_read_by_the_loop_and_come_back(bits: int, groups: int, columns: int) -> None:
    zeros = np.random.default_rng(3).integers(0, 1 << bits, (groups, columns)).astype(np.uint8)
    words = layout.pack_zeros(zeros, bits)
    assert words.shape == (groups, columns * bits // 32)
    assert np.array_equal(oracle.marlin_zeros(words, bits), zeros)
    assert np.array_equal(layout.unpack_zeros(words, bits), zeros)


@pytest.mark.parametrize("bits", BITS)
def test_a_slice_of_the_tiles_is_the_tiles_of_the_slice(bits: int) -> None:
    codes = np.random.default_rng(5).integers(0, 1 << bits, (64, 256)).astype(np.uint8)
    tiles, per_column = layout.pack_codes(codes, bits), bits // 2
    part = tiles[1:3, 64 * per_column : 192 * per_column]
    assert np.array_equal(part, layout.pack_codes(codes[16:48, 64:192], bits))
    assert layout.words_per_tile_row(256, bits) == tiles.shape[1]
