"""Words and codes: literal words, loops over bits, and the word arithmetic against plain indexing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import builders
import oracle
from w4pack.convert.core import bitpack, tiles
from w4pack.kernels import layout

BITS = (4, 8)
rng = np.random.default_rng(11)


def words(*shape: int) -> bitpack.Words:
    return rng.integers(0, 1 << 32, shape, dtype=np.uint32)


def codes(bits: int, *shape: int) -> bitpack.Codes:
    return rng.integers(0, 1 << bits, shape).astype(np.uint8)


def test_codes_0_to_7_are_the_known_word() -> None:
    column = np.arange(8, dtype=np.uint8)[:, None]
    assert hex(bitpack.pack_rows(column, 4)[0, 0]) == "0x76543210"
    assert hex(bitpack.pack_rows(column[:4] + np.uint8(0xA0), 8)[0, 0]) == "0xa3a2a1a0"


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(8, 3), (40, 5), (13, 4), (1, 1), (7, 9)])
def test_rows_pack_as_the_loop_does_and_come_back(bits: int, shape: tuple[int, int]) -> None:
    given = codes(bits, *shape)
    packed = bitpack.pack_rows(given, bits)
    assert np.array_equal(packed.view(np.int32), builders.pack_words(given, bits, 0))
    assert np.array_equal(bitpack.unpack_rows(packed, bits, shape[0]), given)
    assert np.array_equal(bitpack.unpack_rows(packed, bits), oracle.unpack_words(packed, bits, 0))


@pytest.mark.parametrize("bits", BITS)
def test_columns_pack_as_the_loop_does_and_come_back(bits: int) -> None:
    given = codes(bits, 5, 21)
    packed = bitpack.pack_axis(given, bits, 1)
    assert np.array_equal(packed.view(np.int32), builders.pack_words(given, bits, 1))
    assert np.array_equal(bitpack.unpack_axis(packed, bits, 1, 21), given)


def test_words_with_the_sign_bit_unpack_without_a_sign() -> None:
    negative = np.array([[-1], [-0x80000000]], np.int32)
    assert bitpack.unpack_axis(negative, 8, 1).tolist() == [[255] * 4, [0, 0, 0, 128]]


def test_permuted_rows_are_the_words_of_permuted_codes() -> None:
    given, order = codes(4, 24, 6), rng.permutation(24)
    moved = bitpack.permute_rows(bitpack.pack_rows(given, 4), 4, order)
    assert np.array_equal(oracle.unpack_words(moved, 4, 0), given[order])


@pytest.mark.parametrize(
    ("width", "low", "high"),
    [(4, 0xB3B1A2A0, 0xF7F5E6E4), (8, 0xB2A1B0A0, 0xF6E5F4E4), (16, 0xBBBBAAAA, 0xFFFFEEEE)],
)
def test_swap_exchanges_high_fields_with_low_fields(width: int, low: int, high: int) -> None:
    mask, count = (1 << width) - 1, 32 // width
    fields = [[word >> (width * i) & mask for i in range(count)] for word in (low, high)]
    want = [0, 0]
    for pair in range(count // 2):
        (a0, a1), (b0, b1) = (f[2 * pair : 2 * pair + 2] for f in fields)
        for word, (first, second) in enumerate(((a0, b0), (a1, b1))):
            want[word] |= (first | second << width) << (2 * width * pair)
    got = np.array([[low], [high]], np.uint32)
    bitpack.swap_fields(got[0], got[1], width, np.empty(1, np.uint32))
    assert [hex(w) for w in got[:, 0]] == [hex(w) for w in want]


@pytest.mark.parametrize("bits", BITS)
def test_fields_and_planes_change_places(bits: int) -> None:
    count = 32 // bits
    planes = words(count, 17)
    fields = oracle.unpack_words(planes.reshape(count, 17, 1), bits, 2)  # (plane, M, field)
    distances = (1, 2, 4)[: 3 if bits == 4 else 2]
    bitpack.transpose_fields(planes, bits, distances, np.empty(planes.size // 2, np.uint32))
    turned = oracle.unpack_words(planes.reshape(count, 17, 1), bits, 2)
    assert np.array_equal(turned, fields.transpose(2, 1, 0))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (256, 256), (257, 511), (600, 4), (2, 1030)])
def test_transposed_words_are_the_transpose(shape: tuple[int, int]) -> None:
    given = words(*shape)
    out = np.empty(shape[::-1], np.int32)
    assert bitpack.transpose_words(given, out) is out
    assert np.array_equal(out.view(np.uint32), given.T)
    wide = np.zeros((shape[1], shape[0] + 3), np.uint32)
    bitpack.transpose_words(given[:, :], wide[:, 1:-2])
    assert np.array_equal(wide[:, 1:-2], given.T)
    assert not wide[:, [0, -1]].any()


def test_transposition_keeps_the_bits_of_signalling_nans() -> None:
    given = np.full((8, 8), 0x7F800001, np.uint32)
    given[::2] = 0xFFF00000
    out = np.empty((8, 8), np.uint32)
    assert np.array_equal(bitpack.transpose_words(given, out), given.T)


def test_bands_are_whole_steps_and_cover_everything() -> None:
    for total, each, step in ((1000, 700, 8), (5, 10**9, 4), (64, 1, 16), (3, 0, 1)):
        cuts = bitpack.bands(total, each, step)
        assert cuts.step % step == 0
        covered = [i for start in cuts for i in range(start, min(start + cuts.step, total))]
        assert covered == list(range(total))
        assert cuts.step * each <= bitpack.BLOCK_WORDS or cuts.step == step


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(16, 64), (48, 64), (16, 128), (80, 192), (512, 320)])
def test_fast_tiles_equal_the_definition(bits: int, shape: tuple[int, int]) -> None:
    given = codes(bits, *shape)
    packed = bitpack.pack_rows(given, bits)
    made = tiles.pack_tiles(packed, bits)
    assert np.array_equal(made, layout.pack_codes(given, bits))
    assert np.array_equal(tiles.unpack_tiles(made, bits), packed)


@pytest.mark.parametrize("bits", BITS)
def test_fast_tiles_equal_the_definition_where_rows_are_cut(bits: int) -> None:
    columns = 64 * (2 * bitpack.BLOCK_WORDS // 64 // (bits // 2) + 3)  # one row exceeds the working set
    given = codes(bits, 32, columns)
    packed = bitpack.pack_rows(given, bits)
    made = tiles.pack_tiles(packed, bits)
    assert np.array_equal(made, builders.marlin_words(given, bits))
    assert np.array_equal(tiles.unpack_tiles(made, bits), packed)


@pytest.mark.parametrize("bits", BITS)
def test_tiles_read_and_write_rectangles_of_larger_arrays(bits: int) -> None:
    whole = words(bits * 16, 64 * 5)  # 128 rows
    tiled = tiles.pack_tiles(whole, bits)
    per_row, per_column = bits // 2, bits // 2
    part = whole[2 * per_row : 6 * per_row, 64:256]
    target = np.zeros_like(tiled)
    view = target[2:6, 64 * per_column : 256 * per_column]
    assert tiles.pack_tiles(part, bits, view) is view
    assert np.array_equal(view, tiled[2:6, 64 * per_column : 256 * per_column])
    assert np.count_nonzero(target) == np.count_nonzero(view)
    back = np.zeros_like(whole)
    tiles.unpack_tiles(view, bits, back[2 * per_row : 6 * per_row, 64:256])
    assert np.array_equal(back[2 * per_row : 6 * per_row, 64:256], part)


@pytest.mark.parametrize("shape", [(3, 64), (4, 32)])
def test_part_of_a_tile_is_an_error(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not whole tiles"):
        tiles.pack_tiles(words(*shape), 4)


def test_threads_do_not_share_scratch() -> None:
    inputs = [words(64, 64 * (1 + i % 3)) for i in range(24)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda w: tiles.pack_tiles(w, 4), inputs))
    for given, got in zip(inputs, made, strict=True):
        assert np.array_equal(got, layout.pack_codes(oracle.unpack_words(given, 4, 0), 4))
