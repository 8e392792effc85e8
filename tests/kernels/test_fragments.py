"""The lane arithmetic of the kernels, lane by lane in numpy: a mistake in a layout fails here, without a GPU.

Each step is the kernel's own: the words a lane loads, the bit tricks of ``csrc/dequant.cuh``, the register
maps of the tensor cores. The oracle is the code matrix itself.
"""

import numpy as np
import pytest
from numpy.typing import NDArray

from w4pack.kernels import layout

Half = NDArray[np.float16]
LANES = np.arange(32)
G8, T = LANES // 4, LANES % 4


def _codes(k: int, n: int, bits: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 2**bits, (k, n), dtype=np.uint8)


def _lane_words(packed: NDArray[np.int32], row: int, chunk: int, bits: int) -> NDArray[np.uint32]:
    """(32, bits): the words of each lane in one 16 x 64 tile, as one or two 16-byte loads bring them."""
    words = packed.view(np.uint32)[row, chunk * 32 * bits : (chunk + 1) * 32 * bits]
    return words.reshape(32, bits)


def _half(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """(..., 2): a register's two fp16 values, low half first."""
    pair = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    return pair.view(np.float16).astype(np.float64)


def _bf16(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    pair = np.stack([words << np.uint32(16), words & np.uint32(0xFFFF0000)], -1)
    return pair.view(np.float32).astype(np.float64)


def _and_or(w: NDArray[np.uint32], mask: int, bits: int) -> NDArray[np.uint32]:
    return (w & np.uint32(mask)) | np.uint32(bits)


def _prmt(a: NDArray[np.uint32], b: int, selector: int) -> NDArray[np.uint32]:
    """PTX ``prmt``: byte i of the result is byte (selector >> 4 i) & 7 of b:a."""
    source = [(a >> np.uint32(8 * i)) & np.uint32(255) for i in range(4)]
    source += [np.full_like(a, b >> (8 * i) & 255) for i in range(4)]
    out = np.zeros_like(a)
    for i in range(4):
        out |= source[selector >> (4 * i) & 7] << np.uint32(8 * i)
    return out


def _operand(act: str, bits: int, w: NDArray[np.uint32], z: int) -> NDArray[np.float64]:
    """(lanes, register, half): the A operand of a 16 x 16 tile, ``Dequant::run`` word for word."""
    first = w[:, 0]
    if bits == 4 and act == "fp16":
        following = first >> np.uint32(8)
        raw = [
            _half(_and_or(first, 0x000F000F, 0x64006400)) - (1024 + z),
            _half(_and_or(following, 0x000F000F, 0x64006400)) - (1024 + z),
            _half(_and_or(first, 0x00F000F0, 0x54005400)) - (64 + z),
            _half(_and_or(following, 0x00F000F0, 0x54005400)) - (64 + z),
        ]
    elif bits == 4:
        raw = [4 * quarter for quarter in _quarters(first, z)]
    elif act == "fp16":
        picks = ((0, 0x4240), (1, 0x4240), (0, 0x4341), (1, 0x4341))
        raw = [_half(_prmt(w[:, i], 0x64646464, pick)) - (1024 + z) for i, pick in picks]
    else:
        pairs = ((0, 0, 2), (1, 0, 2), (0, 1, 3), (1, 1, 3))
        raw = [np.stack([_from_fp32(w[:, i], b, z) for b in (low, high)], -1) for i, low, high in pairs]
    return np.stack(raw, 1)


def _quarters(w: NDArray[np.uint32], z: int) -> list[NDArray[np.float64]]:
    """The four registers of (q - z) / 4, each rounded as ``fma.rn.bf16x2`` does."""

    def pair(low_and_high: int) -> NDArray[np.uint32]:
        return np.array([low_and_high], np.uint32)

    zero = pair(0x43004300 + z * 0x00010001)
    z_low = pair(0xC200C200 + z * 0x00010001)
    z_high = _multiply_add(zero, pair(0xBE80BE80), pair(0x42004200))
    quarter, power_127, following = pair(0x3E803E80), pair(0x7F007F00), w >> np.uint32(8)
    out = [_multiply_add(_and_or(v, 0x000F000F, 0x43004300), quarter, z_low) for v in (w, following)]
    out += [_multiply_add(v & np.uint32(0x00F000F0), power_127, z_high) for v in (w, following)]
    return [_bf16(v) for v in out]


def _multiply_add(a: NDArray[np.uint32], b: NDArray[np.uint32], c: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """``a * b + c`` of bf16 pairs, rounded once to the nearest even."""
    exact = _bf16(a) * _bf16(b) + _bf16(c)  # 24 bits apart at most: float64 holds it
    bits = exact.astype(np.float32).view(np.uint32)
    assert (bits.view(np.float32) == exact).all(), "no rounding before that of bf16"
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return rounded[..., 0] | rounded[..., 1] << np.uint32(16)


def _from_fp32(w: NDArray[np.uint32], byte: int, z: int) -> NDArray[np.float64]:
    picked = _prmt(w, 0x4B000000, 0x7650 | byte)
    return picked.view(np.float32).astype(np.float64) - (8388608 + z)


def _assemble(operand: NDArray[np.float64]) -> NDArray[np.float64]:
    """(16 n, 16 k): the matrix whose A fragments these are (``mma.m16n8k16``, a row block of ``wgmma``)."""
    out = np.full((16, 16), np.nan)
    for register in range(4):
        for element in range(2):
            out[G8 + 8 * (register % 2), 2 * T + element + 8 * (register // 2)] = operand[
                :, register, element
            ]
    return out


@pytest.mark.parametrize("act", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_lanes_word_is_the_operand_of_16_columns(bits: int, act: str) -> None:
    codes = _codes(64, 192, bits)
    packed = layout.pack_codes(codes, bits)
    per_tile = bits // 4
    for z in (0, 2 ** (bits - 1), 2**bits - 1):
        for row in range(4):
            for chunk in range(3):
                words = _lane_words(packed, row, chunk, bits)
                for j in range(4):
                    found = _assemble(_operand(act, bits, words[:, j * per_tile : (j + 1) * per_tile], z))
                    columns = slice(64 * chunk + 16 * j, 64 * chunk + 16 * (j + 1))
                    wanted = codes[16 * row : 16 * (row + 1), columns].astype(np.float64).T - z
                    np.testing.assert_array_equal(found, wanted)


def test_every_code_and_zero_as_a_bf16_quarter_is_exact() -> None:
    codes = np.arange(16, dtype=np.uint32)
    for z in range(16):
        for register, shift in enumerate((0, 8, 4, 12)):
            words = codes << np.uint32(shift) | codes[::-1] << np.uint32(shift + 16)
            words |= np.uint32(~(0x000F000F << shift) & 0xFFFFFFFF)  # the neighbours' codes are all ones
            quarters = _quarters(words, z)[register]
            wanted = np.stack([codes, codes[::-1]], -1).astype(np.float64) - z
            np.testing.assert_array_equal(4 * quarters, wanted)


def _rounded(values: NDArray[np.float64]) -> NDArray[np.uint32]:
    """The bf16 of float32 values, as bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)


def test_four_times_a_scaled_quarter_is_the_scaled_value_bit_for_bit() -> None:
    """With one-hot activations a sum is one weight: neither the quarter nor the 4 at the end may round it."""
    generator = np.random.default_rng(2)
    scales = _bf16(_rounded(np.exp2(generator.uniform(-24, 15, 400))) * np.uint32(0x00010001))[:, 0]
    for difference in range(-15, 16):
        whole = _bf16(_rounded(difference * scales))[:, 0]
        quarter = _bf16(_rounded(difference / 4 * scales))[:, 0]
        np.testing.assert_array_equal(_rounded(4 * quarter), _rounded(whole))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_lane_finds_the_scales_and_zeros_of_its_columns(bits: int) -> None:
    columns = 192
    scales = np.arange(columns)[layout.grouped_order(columns)]
    zeros = np.random.default_rng(1).integers(0, 2**bits, (1, columns), dtype=np.uint8)
    packed = layout.pack_zeros(zeros, bits).view(np.uint32)[0]
    mask = np.uint32(0x000F000F if bits == 4 else 0x00FF00FF)
    for chunk in range(3):
        for j in range(4):
            column = 64 * chunk + 16 * j + G8
            mine = scales[64 * chunk + 8 * G8 + 2 * j], scales[64 * chunk + 8 * G8 + 2 * j + 1]
            np.testing.assert_array_equal(mine, (column, column + 8))
            at = chunk * 2 * bits + G8 * bits // 4
            word = packed[at if bits == 4 else at + j // 2]
            pair = word >> np.uint32(4 * j if bits == 4 else 8 * (j % 2)) & mask
            np.testing.assert_array_equal(pair & np.uint32(0xFFFF), zeros[0, column])
            np.testing.assert_array_equal(pair >> np.uint32(16), zeros[0, column + 8])


def test_ldmatrix_reads_the_swizzled_activations() -> None:
    """Rows of 128 bytes a token, pieces XOR-ed with token % 8: what is stored is what lanes get."""
    x = np.arange(8 * 64).reshape(8, 64)
    shared = np.full((8, 8, 8), -1)  # token, place, value
    for token in range(8):
        for piece in range(8):
            shared[token, piece ^ (token & 7)] = x[token, 8 * piece : 8 * piece + 8]
    for check in range(2):  # two k-tiles each
        for matrix in range(4):  # ldmatrix: lanes 8 i .. 8 i + 7 give the rows of matrix i
            place = (4 * check + matrix) ^ np.arange(8)
            rows = shared[np.arange(8), place]
            for element in range(2):  # lane receives row g8, columns 2t, 2t + 1: B row k, column token
                k = 32 * check + 8 * matrix + 2 * T + element
                np.testing.assert_array_equal(rows[G8, 2 * T + element], x[G8, k])


@pytest.mark.parametrize("bits", [4, 8])
def test_the_whole_product_lane_by_lane(bits: int) -> None:
    """A warp's product of 64 columns, 64 rows of K and 8 tokens, from packed words to accumulators."""
    rng = np.random.default_rng(2)
    codes, x = _codes(64, 64, bits, 3), rng.integers(-3, 4, (8, 64)).astype(np.float64)
    packed = layout.pack_codes(codes, bits)
    z, per_tile = 2 ** (bits - 1), bits // 4
    y = np.zeros((8, 64))
    for j in range(4):
        sums = np.zeros((16, 8))
        for row in range(4):
            words = _lane_words(packed, row, 0, bits)[:, j * per_tile : (j + 1) * per_tile]
            sums += _assemble(_operand("fp16", bits, words, z)) @ x[:, 16 * row : 16 * row + 16].T
        for register in range(4):  # D: row g8 + 8 (register / 2), token 2t + register % 2
            n, token = G8 + 8 * (register // 2), 2 * T + register % 2
            y[token, 16 * j + n] = sums[n, token]
    np.testing.assert_array_equal(y, x @ (codes.astype(np.float64) - z))


def test_worked_example_of_the_docs() -> None:
    """Code (37, 5): row 2, lane 5 * 4 + 2 = 22, word 88, nibble 4."""
    row, word, slot = layout.code_position(np.array(37), np.array(5), 4)
    assert (int(row), int(word), int(slot)) == (2, 88, 4)
