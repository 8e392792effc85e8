"""What the kernel of transforms without an exchange computes, lane by lane."""

import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from w4pack.convert.rotate.constructions import matrix  # noqa: E402
from w4pack.kernels.quarot import flat_plan, orders_int, quantize_plan  # noqa: E402
from w4pack.kernels.quarot.transform import Transform, apply  # noqa: E402

ROOM = 227 * 1024  # bytes of shared memory of an sm_90 block
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def form_of(size: int) -> tuple[flat_plan.Flat, Transform]:
    """Return a form, and the transform of rows of ``size`` values, or over so few heads."""
    transform, heads = Transform.planned(size), size if size < 128 else 0
    found = flat_plan.choose(transform, heads, 128 if heads else 1, False, ROOM)
    assert found is not None
    return found, transform


def fragments(row: flat_plan.Flat, transform: Transform) -> np.ndarray:
    """Return the matrix that the products multiply by, (lines of all warps, lines), from registers."""
    table = quantize_plan.fragments(transform, row, row.m, "fp16").view(np.uint32)
    made = np.zeros((16 * table.shape[0], row.lines))
    for i, k, e, half in np.ndindex(table.shape[0], row.kt, 4, 2):
        value = (table[i, k, :, e] >> 16 * half & 0xFFFF).astype(np.uint16).view(np.float16)
        made[16 * i + G + 8 * (e % 2), 16 * k + 8 * (e // 2) + 2 * T + half] = value
    return made


def brought(row: flat_plan.Flat, x: np.ndarray) -> np.ndarray:
    """Return a stage as octets (bytes / 16, 8), as boxes of 64 columns come: 16-byte chunks of bits 4 to 6
    of an address turned by bits 7 to 9."""
    blocks = -(-row.columns // 64)
    lines = np.zeros((row.m, 64 * blocks))  # columns past the row's come as zeros
    lines[:, : row.columns] = x.reshape(row.m, -1)
    to = np.full((blocks * 8 * row.lines, 8), np.nan)
    for block, line, chunk in np.ndindex(blocks, row.m, 8):
        at = 8 * row.lines * block + 8 * line + chunk
        at ^= at >> 3 & 7
        assert np.isnan(to[at]).all()  # each octet is written once
        to[at] = lines[line, 64 * block + 8 * chunk :][:8]
    for block in range(blocks):  # the kernel's zeros past line m
        first = block * 8 * row.lines
        to[first + 8 * row.m : first + 8 * row.lines] = 0
    return to


def read(row: flat_plan.Flat, place_: np.ndarray) -> np.ndarray:
    """Return (lines, columns) as the swizzled descriptor reads a place: chunk c of line j at c ^ (j % 8)."""
    line, column = np.meshgrid(np.arange(row.lines), np.arange(row.columns), indexing="ij")
    chunk = column % 64 // 8 ^ line % 8
    return place_[column // 64 * 8 * row.lines + 8 * line + chunk, column % 8]


def low_bits(d: np.ndarray) -> np.ndarray:
    """Return step 2 of registers (tiles, lane, 4), by the operands' places in ``mma.m16n8k8`` of tf32."""
    a, b = np.empty((d.shape[0], 16, 8)), np.empty((8, 8))
    for e in range(4):  # register e of A: line g + 8 (e % 2), term t + 4 (e / 2)
        a[:, G + 8 * (e % 2), T + 4 * (e // 2)] = d[:, LANE, (e & 1) << 1 | e >> 1]
    for e in range(2):  # register e of B: term t + 4 e, column g
        sign = np.array([bin((2 * t | e) & g).count("1") & 1 for g, t in zip(G, T, strict=True)])
        b[T + 4 * e, G] = 1 - 2 * sign
    c, out = a @ b, np.empty_like(d)
    for e in range(4):
        out[:, LANE, e] = c[:, G + 8 * (e // 2), 2 * T + e % 2]
    return out


def twelve(d: np.ndarray) -> np.ndarray:
    """Return H_12 over tiles as the kernel adds: sums of three, with all signs, then of four."""
    u, v, w = (d[i::3] for i in range(3))
    three = np.stack((u + v + w, u - v + w, u + v - w, u - v - w), 1)
    out = np.zeros_like(d)
    for j, signs in enumerate(flat_plan.twelve_signs()):
        for i in range(4):
            s = signs >> 3 * i & 7
            which = (s >> 1 & 1 ^ s & 1) | (s >> 2 & 1 ^ s & 1) << 1
            out[j] += (1 - 2 * (s & 1)) * three[i, which]
    return out


def high_bits(row: flat_plan.Flat, d: np.ndarray) -> np.ndarray:
    """Return step 3 of registers (tiles, lane, 4)."""
    if row.twelve:
        return twelve(d)
    step = 1
    while step < d.shape[0]:
        u = d.reshape(-1, 2, step, 32, 4)
        d = np.stack((u[:, 0] + u[:, 1], u[:, 0] - u[:, 1]), 1).reshape(d.shape)
        step *= 2
    return d


def lines_of(row: flat_plan.Flat, warp: int) -> tuple[int, int]:
    """Return a warp's first line and first column."""
    return (16 * (warp % row.kt), warp // row.kt * 8 * row.nt) if row.split > 1 else (16 * warp, 0)


def warps(row: flat_plan.Flat) -> range:
    return range(row.threads // 32)


def held(row: flat_plan.Flat, values: np.ndarray) -> np.ndarray:
    """Return values (lines, columns) as registers (warp, tiles, lane, 4)."""
    count = row.columns // 8 // row.split
    d = np.empty((len(warps(row)), count, 32, 4))
    for warp, e in itertools.product(warps(row), range(4)):
        line, column = lines_of(row, warp)
        d[warp, :, :, e] = values[
            line + G + 8 * (e // 2), column + 8 * np.arange(count)[:, None] + 2 * T + e % 2
        ]
    return d


def registers(row: flat_plan.Flat, transform: Transform, x: np.ndarray) -> np.ndarray:
    """Return the sums of a row, (warp, tiles, lane, 4), as threads hold them at the end."""
    product = fragments(row, transform) @ read(row, brought(row, x))
    assert not np.isnan(product).any()
    d = held(row, product)
    if not row.steps:
        return d
    for w in warps(row):
        d[w] = high_bits(row, low_bits(d[w]))
    return d


def words_of(codes: np.ndarray, order: int) -> list[tuple[int, np.ndarray]]:
    """Return (place, bytes (warps, blocks, lane, 4)) of the words that lanes make of blocks of 32 columns.

    Args:
        codes: int8 (warps, blocks, octet, lane, h, e) of one h.
        order: P32, Q32 or S64.
    """
    c = codes.view(np.uint8)

    def word(*at: tuple[int, int]) -> np.ndarray:
        return np.stack([c[:, :, o, :, e] for o, e in at], -1)

    if order == orders_int.Q32:
        pairs = [((2 * b, 0), (2 * b + 1, 0), (2 * b, 1), (2 * b + 1, 1)) for b in (0, 1)]
        return [(16 * b, word(*pairs[b])) for b in (0, 1)]
    halves = [word((b, 0), (b, 1), (b + 2, 0), (b + 2, 1)) for b in (0, 1)]
    if order == orders_int.P32:
        return [(0, halves[0]), (16, halves[1])]
    return [(0, halves[0] & 0x0F | halves[1] << 4 & 0xF0)]


class Lines:
    """Where a warp's lanes write eight lines of words and read pieces of 16 bytes, as the kernel counts."""

    def __init__(self, pieces: int) -> None:
        self.pieces, self.turned = pieces, pieces & (pieces - 1) == 0

    def turn(self, line: int) -> int:
        if not self.turned:
            return 0
        return line % 8 if self.pieces >= 8 else line * self.pieces // 8 % self.pieces

    def put(self, lane: int, first: int, count: int) -> int:
        """Return the piece that a lane names for the words from ``first`` on."""
        line, matrix = lane % 8, lane // 8
        if self.turned:
            return self.pieces * line + (matrix % self.pieces ^ self.turn(line)) ^ first
        return self.pieces * line + first + matrix % count

    def bring(self, lane: int, i: int) -> tuple[int, int, int] | None:
        """Return (place, line, piece) of a lane's i-th piece."""
        line, piece = divmod(lane, self.pieces)
        if self.turned:
            step = i * (32 // self.pieces)
            at = (self.pieces * line + (piece ^ self.turn(line)) ^ self.turn(step)) + 32 * i
            return (at, line + step, piece) if line < 8 else None
        at = 32 * i + lane
        return (at, *divmod(at, self.pieces)) if at < 8 * self.pieces else None


def through_shared(words: np.ndarray) -> np.ndarray:
    """Return eight lines of bytes, from the words (pieces, lane, 4 bytes) that a warp holds of them."""
    lines, first = Lines(len(words)), 0
    shared = np.zeros((8 * len(words), 16), np.uint8)
    free = np.ones(len(shared), bool)
    while first < len(words):
        count = next(c for c in (4, 2, 1) if c <= len(words) - first)
        for lane in range(8 * count):
            at = lines.put(lane, first, count)
            assert free[at]
            free[at] = False
            shared[at] = words[first + lane // 8, 4 * (lane % 8) :][:4].ravel()
        first += count
    out = np.zeros((8, len(words), 16), np.uint8)
    for i, lane in np.ndindex(-(-len(words) // 4), 32):
        if found := lines.bring(lane, i):
            out[found[1], found[2]] = shared[found[0]]
    return out.reshape(8, -1)


def stored(row: flat_plan.Flat, d: np.ndarray, order: int) -> np.ndarray:
    """Return a row's bytes as the lanes write codes, (lines, bytes)."""
    codes = d.astype(np.int8).reshape(d.shape[0], -1, 4, 32, 2, 2)  # warp, block, octet, lane, h, e
    width = 16 if order == orders_int.S64 else 32
    out = np.zeros((16 * row.kt + 64, row.columns // 32 * width), np.uint8)
    for h in (0, 1):
        made = np.stack([word for _, word in words_of(codes[..., h, :], order)], 2)
        for warp in warps(row):
            line, column = lines_of(row, warp)
            for part in np.split(made[warp], made.shape[1] * 4 // row.nt):
                lines = through_shared(part.reshape(-1, 32, 4))
                first = column // 32 * width
                out[line + 8 * h :, first : first + lines.shape[1]][:8] = lines
                column += 8 * row.nt
    return out[: row.m]


SIZES = [*dict.fromkeys(row.size for row in flat_plan.FLATS)]


@pytest.mark.parametrize("size", SIZES)
def test_the_lanes_of_the_kernel_make_the_transform(size: int) -> None:
    """Each form: the way to shared memory and out of it, fragments, tf32 operands, butterflies."""
    row, transform = form_of(size)
    x = np.random.default_rng(size).standard_normal(row.m * row.columns)
    values, axis = (x, -1) if row.steps else (x.reshape(row.m, -1), 0)
    y = apply(torch.from_numpy(values), transform, axis).numpy().reshape(row.m, -1)
    padded = np.zeros((16 * len(warps(row)), row.columns))  # lines that are padding
    padded[: row.m] = y * math.sqrt(transform.block)
    np.testing.assert_allclose(registers(row, transform, x), held(row, padded), atol=1e-9)


def test_a_warp_alone_reads_what_the_product_of_four_reads() -> None:
    """Where the lanes' addresses for the transposed 8 x 8 matrices of ``mma.sync`` point."""
    row, _ = form_of(32)
    octets = np.arange(row.columns // 8 * row.lines)
    for warp, i, k in itertools.product(warps(row), range(0, row.nt, 2), range(row.kt)):
        chunk = warp // row.kt * row.nt + i
        at = 8 * (LANE % 16) + chunk // 8 * 8 * row.lines + (chunk % 8 + LANE // 16 ^ LANE % 8) + 128 * k
        line, column = 16 * k + LANE % 16, chunk + LANE // 16
        assert (octets[at] == column // 8 * 8 * row.lines + 8 * line + (column % 8 ^ line % 8)).all()


@pytest.mark.parametrize("size", [4096, 13824, 16384, 18944, 28672, 32, 64])
@pytest.mark.parametrize("order", [orders_int.P32, orders_int.Q32, orders_int.S64])
def test_the_lanes_write_each_code_where_its_order_wants_it(size: int, order: int) -> None:
    row, _ = form_of(size)
    codes = np.random.default_rng(size).integers(-8, 8, (16 * len(warps(row)), row.columns))
    natural = torch.from_numpy(codes[: row.m].astype(np.int8).reshape(1, -1))
    wanted = orders_int.arrange(natural, order).numpy().view(np.uint8)
    assert np.array_equal(stored(row, held(row, codes), order).reshape(1, -1), wanted)


@pytest.mark.parametrize("pieces", [2, 3, 4, 6, 8, 16])
def test_pieces_of_a_line_meet_in_few_banks(pieces: int) -> None:
    """Eight rows of a matrix, and eight lanes that read at once: of powers of two, no two in a bank."""
    lines, most = Lines(pieces), 1 if pieces & (pieces - 1) == 0 else 2
    first = 0
    while first < pieces:
        count = next(c for c in (4, 2, 1) if c <= pieces - first)
        for lane in range(0, 8 * count, 8):
            banks = [lines.put(lane + line, first, count) % 8 for line in range(8)]
            assert max(map(banks.count, banks)) <= most
        first += count
    for i, lane in itertools.product(range(-(-pieces // 4)), range(0, 32, 8)):
        found = [lines.bring(lane + j, i) for j in range(8)]
        banks = [at[0] % 8 for at in found if at]
        assert all(banks.count(bank) == 1 for bank in banks)


@pytest.mark.parametrize("size", SIZES)
def test_all_lines_have_one_warp_each(size: int) -> None:
    """Warps of a warpgroup are turned from block to block, to spread idle ones; none goes missing."""
    row, _ = form_of(size)
    if row.split > 1:
        found = [lines_of(row, warp) for warp in warps(row)]
        assert len(set(found)) == len(found) == row.kt * row.split
        return
    warp = np.arange(row.threads // 32)
    for block in range(0, 64, 4):
        tile = warp if row.kt % 4 == 0 else (warp & ~3) | ((warp + block // 4) & 3)
        assert sorted(tile) == list(range(row.tiles[0])) and (tile // 4 == warp // 4).all()


@pytest.mark.parametrize("row", [row for row in flat_plan.FLATS if row.apart], ids=lambda row: str(row.size))
def test_each_piece_is_activated_once(row: flat_plan.Flat) -> None:
    """The rounds of a warpgroup that only activates: a thread holds some pieces of a block at a time."""
    pieces, found = 8 * row.m, []
    for first in range(0, pieces, 128 * row.apart.held):
        count = min(row.apart.held, -(-(pieces - first) // 128))
        for i, thread in itertools.product(range(count), range(128)):
            at = first + 128 * i + thread
            found += [at] if first + 128 * i + 128 <= pieces or at < pieces else []
    assert sorted(found) == list(range(pieces))
    blocks = -(-row.columns // flat_plan.BLOCK)
    groups = [range(group, blocks, row.apart.warpgroups) for group in range(row.apart.warpgroups)]
    assert sorted(itertools.chain(*groups)) == list(range(blocks)) and blocks >= row.apart.warpgroups


def test_signs_of_twelve_are_those_of_its_matrix() -> None:
    h = matrix(*flat_plan.TWELVE)
    signs = flat_plan.twelve_signs()
    assert all((signs[j] >> i & 1) == (h[i, j] < 0) for i, j in np.ndindex(12, 12))


def test_two_parts_of_tf32_leave_a_small_error() -> None:
    """The upper and the lower part of a sum, each cut to tf32's 19 bits, are the sum within 2^-21."""
    v = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)

    def cut(a: np.ndarray) -> np.ndarray:
        return (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    upper = cut(v)
    lower = cut(v - upper)
    error = np.abs(upper.astype(np.float64) + lower - v) / np.abs(v)
    assert 0 < error.max() <= 2.0**-21
