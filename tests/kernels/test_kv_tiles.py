"""Kernels of the quantized cache: which there are, what they take of a card, the arithmetic of their layouts.

The layouts and orders are those of ``csrc/kv_image.cuh``, ``kv_items.cuh``, ``kv_unpack.cu`` and
``kv_rotate.cuh``, written down once more: a mistake in one fails here, without a GPU.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from w4pack.convert.rotate.constructions import matrix
from w4pack.kernels.quarot import kv_layout, kv_tiles
from w4pack.kernels.quarot.transform import Transform

SIZES = pytest.mark.parametrize("size", kv_layout.HEAD_DIMS)
HOPPER = 227 * 1024  # bytes of shared memory of a block


@SIZES
@pytest.mark.parametrize("bits", kv_layout.BITS)
def test_blocks_fit_the_smallest_card(size: int, bits: int) -> None:
    small = 99 * 1024  # of a block on sm_86, sm_89 and sm_120
    assert kv_tiles.decode_shared(size, bits, kv_tiles.decode_warps("sm_80", size, bits)) <= small
    warps = kv_tiles.decode_warps("sm_90a", size, bits)
    assert warps == (4 if bits == 8 and size not in (64, 128) else 8)  # else two blocks of eight do not fit
    assert kv_tiles.decode_shared(size, bits, warps) <= HOPPER
    assert kv_tiles.prefill_shared(size, bits) <= small
    assert kv_tiles.flash_shared(size) <= HOPPER


def test_every_launch_finds_its_kernel() -> None:
    for arch in ("sm_80", "sm_90a", "compute_80"):
        built = {file.entry for file in kv_tiles.files(arch)}
        for size, bits in itertools.product(kv_layout.HEAD_DIMS, kv_layout.BITS):
            unpacked = {kv_tiles.unpack_entry(size, bits), kv_tiles.flash_entry(size)}
            assert unpacked & built == (unpacked if kv_tiles.unpacks(arch, size, 4096, 1) else set())
            assert kv_tiles.prefill_entry(size, bits) in built
            assert kv_tiles.decode_entry(size, bits) in built and kv_tiles.append_entry(size) in built


def test_the_context_is_cut_so_that_blocks_fill_the_card_once() -> None:
    assert kv_tiles.splits(16 * 8, 16384, 132, 4) == 4
    assert kv_tiles.splits(16 * 8, 16384, 132, 8) == 2  # twice the warps a block
    assert kv_tiles.splits(1000, 16384, 132, 4) == 1
    assert kv_tiles.splits(8, 1024, 132, 4) == 4  # no part is shorter than eight tiles
    assert kv_tiles.splits(1, 1 << 20, 132, 4) == kv_tiles.MOST_SPLITS


def test_what_is_read_twice_is_unpacked_once() -> None:
    assert [kv_tiles.unpacks("sm_90a", 128, tokens, 1) for tokens in (2, 128, 129)] == [False, False, True]
    assert [kv_tiles.unpacks("sm_90a", 64, tokens, 1) for tokens in (192, 193)] == [False, True]
    assert kv_tiles.unpacks("sm_90a", 256, 2, 2) and not kv_tiles.unpacks("sm_80", 128, 2048, 8)


def test_what_is_unpacked_at_a_time_fills_the_card_and_is_bounded() -> None:
    mib = 1 << 20

    def at_once(pairs: int, pair_mib: int, items: int) -> int:
        return kv_tiles.pairs_at_once(pairs, pair_mib * mib, items, 132)

    assert at_once(64, 1, 128) == 64  # everything fits
    assert at_once(512, 1, 8) == 256  # two equal rounds of 256 MiB
    assert at_once(260, 1, 8) == 130  # not 256 and 4
    assert (
        at_once(128, 64, 8) == 16
    )  # a short chunk over 128k tokens: 1 GiB, 128 items for 132 multiprocessors
    assert at_once(128, 64, 64) == 4  # enough work in 256 MiB
    assert at_once(130, 64, 64) == 4  # 33 rounds
    assert at_once(8, 2048, 8) == 1  # one alone may take more
    assert at_once(70000, 1, 8) == 256 and kv_tiles.pairs_at_once(70000, 1, 8, 132) == 35000


def test_tiles_are_whole_and_sections_of_heads_are_even() -> None:
    assert kv_tiles.flash_tiles(128, 2048) == (16, 2048 * 128 * 2 * 2)
    assert kv_tiles.flash_tiles(64, 97) == (2, 2 * 96 * 64 * 2 * 2)
    assert kv_tiles.flash_tiles(256, 65) == (2, 128 * 256 * 2 * 2)
    assert kv_tiles.section(8, 8, kv_tiles.flash_tiles(128, 2048)[1]) == 64  # all of it stays in the L2
    assert kv_tiles.section(8, 8, kv_tiles.flash_tiles(128, 16384)[1]) == 32
    assert kv_tiles.section(9, 1, kv_tiles.L2_BYTES // 4) == 3
    assert kv_tiles.section(1, 4, 1 << 30) == 4


@dataclass(frozen=True)
class Launch:
    """One launch over unpacked K and V, and ``Item::find``."""

    size: int
    pairs: int
    group: int
    tokens: int
    section: int
    grid: int

    @classmethod
    def of(
        cls, size: int, pairs: int, group: int, tokens: int, length: int, multiprocessors: int
    ) -> "Launch":
        """What the host makes of a card and a block table with room for ``length`` tokens."""
        section = kv_tiles.section(pairs, group, kv_tiles.flash_tiles(size, length)[1])
        blocks = -(-tokens // kv_tiles.flash_queries(size))
        return cls(size, pairs, group, tokens, section, min(multiprocessors, blocks * pairs * group))

    @property
    def blocks(self) -> int:
        return -(-self.tokens // kv_tiles.flash_queries(self.size))

    def items(self, block: int) -> Iterator[tuple[int, int, int]]:
        """(section, query head among all pairs, block of queries) as a block takes them."""
        streams = self.pairs * self.group
        for turn in itertools.count():
            index = turn * self.grid + (self.grid - 1 - block if turn & 1 else block)
            if index >= streams * self.blocks:
                return
            part, inside = divmod(index, self.section * self.blocks)
            back, stream = divmod(inside, min(self.section, streams - part * self.section))
            yield part, part * self.section + stream, self.blocks - 1 - back

    def cost(self, block: int, length: int) -> int:
        """Tiles that a block computes, of sequences of one length."""
        queries, tokens = kv_tiles.flash_queries(self.size), kv_tiles.flash_tokens(self.size)
        first = length - self.tokens
        ends = (first + min(self.tokens, (n + 1) * queries) for _, _, n in self.items(block))
        return sum(-(-end // tokens) for end in ends)


@SIZES
@pytest.mark.parametrize("multiprocessors", [1, 7, 78, 132])
@pytest.mark.parametrize(
    ("pairs", "group", "tokens", "length"),
    [(1, 2, 2, 2), (8, 8, 8, 16384), (3, 1, 1000, 40000), (37, 4, 700, 9000), (8, 8, 2048, 2048)],
)
def test_every_item_is_taken_once_the_longest_of_a_section_first(
    size: int, multiprocessors: int, pairs: int, group: int, tokens: int, length: int
) -> None:
    launch = Launch.of(size, pairs, group, tokens, length, multiprocessors)
    done = [list(launch.items(block)) for block in range(launch.grid)]
    taken = sorted((stream, block) for items in done for _, stream, block in items)
    assert taken == list(itertools.product(range(pairs * group), range(launch.blocks)))
    for items in done:
        assert items and items == sorted(items, key=lambda item: (item[0], -item[2]))
    heads: dict[int, set[int]] = {}
    for part, stream, _ in itertools.chain.from_iterable(done):
        heads.setdefault(part, set()).add(stream // group)
    assert sum(map(len, heads.values())) == pairs  # no KV head lies in two sections
    pair_bytes = kv_tiles.flash_tiles(size, length)[1]
    assert all(len(h) == 1 or len(h) * pair_bytes <= kv_tiles.L2_BYTES for h in heads.values())


@pytest.mark.parametrize(("tokens", "bound"), [(2048, 1.04), (16384, 1.01)])
def test_there_and_back_gives_every_block_as_much(tokens: int, bound: float) -> None:
    launch = Launch.of(128, 8, 8, tokens, tokens, 132)
    costs = [launch.cost(block, tokens) for block in range(launch.grid)]
    assert max(costs) * len(costs) < bound * sum(costs)


class Image:
    """``kv_image.cuh`` for one head size, in bytes."""

    def __init__(self, size: int) -> None:
        self.columns = 64 if size % 64 == 0 else 32 if size % 32 == 0 else 16
        self.row, self.in_block, self.chunks = 2 * self.columns, self.columns // 8, size // 8

    def at(self, row: int, chunk: int, rows: int) -> int:
        block, inside = divmod(chunk, self.in_block)
        return (block * rows + row) * self.row + ((inside ^ row * self.row // 128 % self.in_block) << 4)

    def columns_on(self, step: int, rows: int) -> int:
        blocks, inside = divmod(step, self.columns // 16)
        return blocks * rows * self.row + inside * 32


def _tiles(size: int) -> tuple[int, int]:
    return kv_tiles.flash_queries(size), kv_tiles.flash_tokens(size)


@SIZES
def test_tiles_lie_as_the_swizzle_of_their_rows_says_and_fill_their_bytes(size: int) -> None:
    image = Image(size)
    for rows in _tiles(size):
        assert rows * image.row % 1024 == 0  # every block of columns starts where the pattern does
        places = [image.at(r, c, rows) for r in range(rows) for c in range(image.chunks)]
        assert sorted(places) == list(range(0, rows * size * 2, 16))
        for r, c in itertools.product(range(rows), range(image.chunks)):
            plain = (c // image.in_block * rows + r) * image.row + c % image.in_block * 16
            assert image.at(r, c, rows) == plain ^ (plain >> 7 & image.in_block - 1) << 4


@SIZES
def test_eight_rows_of_a_product_come_from_all_banks(size: int) -> None:
    image, (_, rows) = Image(size), _tiles(size)
    for first, c in itertools.product(range(0, rows, 8), range(image.chunks)):
        assert len({image.at(r, c, rows) // 16 % 8 for r in range(first, first + 8)}) == 8


@SIZES
def test_descriptors_move_to_the_next_columns_and_rows(size: int) -> None:
    image, (queries, tokens) = Image(size), _tiles(size)
    for rows, step in itertools.product((queries, tokens), range(size // 16)):
        assert image.columns_on(step, rows) == image.at(0, 2 * step, rows)
    assert all(16 * i * image.row == image.at(16 * i, 0, tokens) for i in range(tokens // 16))
    assert all(64 * i * image.row == image.at(64 * i, 0, queries) for i in range(queries // 64))
    assert tokens % 16 == 0 and tokens <= 256  # a product's terms and its widest result
    assert tokens * size // 8 % kv_tiles.UNPACK_THREADS == 0


def _halves(words: NDArray[np.uint32]) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    low, high = (words & 0xFFFF).astype(np.uint16), (words >> 16).astype(np.uint16)
    return low.view(np.float16), high.view(np.float16)


def test_words_of_codes_become_values_in_the_order_of_channels() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (4096, 8), dtype=np.uint32)
    word = (codes << np.arange(0, 32, 4, dtype=np.uint32)).sum(1, dtype=np.uint32)
    z, s = 11, np.float16(0.3)
    low, high = np.float16(1024 + z), np.float16(64 + z)
    pairs = []
    for w in (word, word >> 8):
        pairs += [_halves(w & 0x000F000F | 0x64006400), _halves(w & 0x00F000F0 | 0x54005400)]
    made = [[(half - (low, high)[i % 2]) * s for half in pair] for i, pair in enumerate(pairs)]
    ordered = [pair[which] for which in (0, 1) for pair in made]  # in_order(): low halves, then high ones
    exact = ((codes.astype(np.float64) - z) * float(s)).astype(np.float16)
    assert np.array_equal(np.stack(ordered, 1), exact)


def _quotient(x: NDArray[np.float32], s: NDArray[np.float32]) -> NDArray[np.float32]:
    """``quotient`` of kv_append.cu; a fused step is exact in float64, then rounded once more."""
    one = np.float32(1)
    r = one / s
    q = x * r
    rest = (x.astype(np.float64) - q.astype(np.float64) * s).astype(np.float32)
    return (q.astype(np.longdouble) + rest.astype(np.longdouble) * r).astype(np.float32)


def test_a_product_with_the_reciprocal_and_one_correction_is_the_quotient() -> None:
    random = np.random.default_rng(1)
    scales = np.arange(0x0400, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)  # from 2^-14 on
    s = np.repeat(scales, 64)
    steps = random.uniform(-260, 260, s.size).astype(np.float32)
    ties = np.floor(steps) + np.float32(0.5)
    for x in (steps * s, ties * s, np.nextafter(ties * s, np.float32(0)), random.normal(0, 1, s.size)):
        x = x.astype(np.float32)
        assert np.array_equal(_quotient(x, s), x / s)
        v = np.clip(x / s, -1024, 1024)
        shifted = (v + np.float32(12582912)).view(np.int32) - 0x4B400000  # nearest()
        assert np.array_equal(shifted, np.rint(v))


def _entry(k: int, n: int, m: int, log_r: int, block: int, power: bool, signs: NDArray[np.int8]) -> int:
    """``entry`` of kv_rotate.cuh."""
    if power:
        same = k >> log_r == n >> log_r
        return (-1) ** ((k & n & (1 << log_r) - 1).bit_count() & 1) if same else 0
    if k // block != n // block:
        return 0
    r = 1 << log_r
    (a, i), (b, j) = divmod(k % block, r), divmod(n % block, r)
    return (-1) ** ((i & j).bit_count() + int(signs[a, b] < 0))


@SIZES
def test_pieces_of_r3_and_sums_between_them_are_the_whole_transform(size: int) -> None:
    planned, power = Transform.planned(size), size & (size - 1) == 0
    factors, log_r = list(planned.factors), 0
    while factors and factors[-1][1] == "sylvester":
        log_r += factors.pop()[0].bit_length() - 1
    signs = np.ones((1, 1), np.int8)
    whole = np.ones((1, 1), np.int64)
    for order, construction in factors:
        signs = np.kron(signs, matrix(order, construction))
    for order, construction in planned.factors:
        whole = np.kron(whole, matrix(order, construction))
    whole = np.kron(np.eye(size // planned.block, dtype=np.int64), whole)
    piece = 64 if power else size
    part = [
        [_entry(k, n, len(signs), log_r, planned.block, power, signs) for n in range(piece)]
        for k in range(piece)
    ]
    y = np.kron(np.eye(size // piece, dtype=np.int64), np.array(part))
    y = y.reshape(size, size // piece, piece)
    distance = 1
    while distance < size // piece:
        if not (piece * distance) >> log_r:
            for at in (p for p in range(size // piece) if not p & distance):
                a, b = y[:, at].copy(), y[:, at + distance].copy()
                y[:, at], y[:, at + distance] = a + b, a - b
        distance *= 2
    assert np.array_equal(y.reshape(size, size), whole)
