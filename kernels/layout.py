"""The Marlin tile, as integer arithmetic: the only definition of it in this project.

Codes ``q[k, n]`` of a (K, N) matrix lie in tiles of 16 x 64. One tile is one run of words, eight (4 bit) or
sixteen (8 bit) words for each of 16 lane quads; a lane's words hold just the codes that this lane feeds to
the tensor core, so a kernel loads them with one vector load and needs no shuffle.

    lane = (n % 8) * 4 + (k % 8) // 2                                            0..31
    4 bit: word   = (n // 64) * 128 + lane * 4 + (n % 64) // 16
           nibble = (k % 2) * 4 + (n // 8) % 2 * 2 + (k % 16) // 8
    8 bit: word   = (n // 64) * 256 + lane * 8 + (n % 64) // 16 * 2 + (n // 8) % 2
           byte   = (k % 2) * 2 + (k % 16) // 8

Worked example, 4 bit: code (9, 13) is in row 0, lane (13 % 8) * 4 + (9 % 8) // 2 = 20, word 20 * 4 + 0 = 80,
nibble 4 + 2 + 1 = 7.

Everything here is plain and slow on purpose: it works for any array of coordinates, and the fast packer is
tested against it. Only numpy is needed.
"""

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]

TILE_K = 16
TILE_N = 64
CHANNEL_CHUNK = 32  # columns of one chunk of the per-channel scale order


def words_per_tile_row(out_features: int, bits: int) -> int:
    """Return the int32 words that hold 16 rows of ``out_features`` columns: N * bits / 2."""
    return out_features * bits // 2


def code_position(k: Index, n: Index, bits: int) -> tuple[Index, Index, Index]:
    """Return (row, word, slot) of code (k, n); the code is ``(B[row, word] >> bits * slot) % 2**bits``."""
    lane = (n % 8) * 4 + (k % 8) // 2
    if bits == 4:
        word = (n // 64) * 128 + lane * 4 + (n % 64) // 16
        slot = (k % 2) * 4 + (n // 8) % 2 * 2 + (k % 16) // 8
    else:
        word = (n // 64) * 256 + lane * 8 + (n % 64) // 16 * 2 + (n // 8) % 2
        slot = (k % 2) * 2 + (k % 16) // 8
    return k // TILE_K, word, slot


def code_at(row: Index, word: Index, slot: Index, bits: int) -> tuple[Index, Index]:
    """Return the (k, n) whose code lies in ``slot`` of ``word`` of ``row``: inverts ``code_position``."""
    per_lane = bits  # 4 words a lane for 4 bit, 8 for 8 bit
    chunk, inside = word // (32 * per_lane), word % (32 * per_lane)
    lane, j = inside // per_lane, inside % per_lane
    quad, t = lane // 4, lane % 4
    if bits == 4:
        k = 2 * t + slot // 4 + 8 * (slot % 2)
        n = 64 * chunk + 16 * j + 8 * (slot // 2 % 2) + quad
    else:
        k = 2 * t + slot // 2 + 8 * (slot % 2)
        n = 64 * chunk + 8 * j + quad
    return TILE_K * row + k, n


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Pack (K, N) codes to int32 (K/16, N*bits/2). K must be a multiple of 16, N of 64."""
    rows, cols = codes.shape
    k, n = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    row, word, slot = code_position(k, n, bits)
    out = np.zeros((rows // TILE_K, words_per_tile_row(cols, bits)), np.uint32)
    np.bitwise_or.at(out, (row, word), codes.astype(np.uint32) << (slot * bits).astype(np.uint32))
    return out.view(np.int32)


def unpack_codes(tiles: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Unpack int32 (K/16, N*bits/2) to (K, N) codes: the inverse of ``pack_codes``."""
    rows, cols = tiles.shape[0] * TILE_K, tiles.shape[1] * 2 // bits
    k, n = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    row, word, slot = code_position(k, n, bits)
    shifted: NDArray[np.uint32] = tiles.view(np.uint32)[row, word] >> (slot * bits).astype(np.uint32)
    codes: NDArray[np.uint8] = (shifted & np.uint32(2**bits - 1)).astype(np.uint8)
    return codes


def grouped_order(out_features: int) -> Index:
    """Return the column at each position of the grouped scale order (N a multiple of 64).

    Position ``8 * (n % 8) + (n % 64) // 8`` of a chunk of 64 holds column n, so that the quad g8 of a warp
    reads its columns g8, g8 + 8, ..., g8 + 56 as eight consecutive values.
    """
    position = np.arange(out_features)
    inside = position % TILE_N
    return position - inside + 8 * (inside % 8) + inside // 8


def channel_order(out_features: int) -> Index:
    """Return the column at each position of the engines' order for one scale row (N a multiple of 32).

    Position ``8 * ((n % 8) // 2) + 2 * ((n % 32) // 8) + n % 2`` of a chunk of 32 holds column n: lane t
    reads the columns of its accumulator. Bias uses it too in the engines; the artifact never does.
    """
    position = np.arange(out_features)
    inside = position % CHANNEL_CHUNK
    return position - inside + 2 * (inside // 8) + 8 * (inside // 2 % 4) + inside % 2


def scale_order(out_features: int, groups: int) -> Index:
    """Return the scale order of legacy and AWQ Marlin files: per channel for one group, else grouped."""
    return channel_order(out_features) if groups == 1 else grouped_order(out_features)


def inverse_order(order: Index) -> Index:
    """Return the position of each column: ``x[:, order][:, inverse_order(order)]`` is ``x``."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    return inverse


def zero_position(n: Index, bits: int) -> tuple[Index, Index]:
    """Return (word, slot) of the zero point of column n: the grouped order, then interleaved in each word."""
    eighth = n % TILE_N // 8
    if bits == 4:
        return n // TILE_N * 8 + n % 8, eighth // 2 + 4 * (eighth % 2)
    quarter = eighth % 4
    return n // TILE_N * 16 + 2 * (n % 8) + eighth // 4, quarter // 2 + 2 * (quarter % 2)


def pack_zeros(zeros: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Pack (G, N) zero points to int32 (G, N*bits/32). N must be a multiple of 64."""
    groups, cols = zeros.shape
    word, slot = zero_position(np.arange(cols), bits)
    out = np.zeros((cols * bits // 32, groups), np.uint32)
    np.bitwise_or.at(out, word, zeros.T.astype(np.uint32) << (slot * bits).astype(np.uint32)[:, None])
    return np.ascontiguousarray(out.T).view(np.int32)


def unpack_zeros(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Unpack int32 (G, N*bits/32) to (G, N) zero points: the inverse of ``pack_zeros``."""
    word, slot = zero_position(np.arange(words.shape[1] * 32 // bits), bits)
    shifted: NDArray[np.uint32] = words.view(np.uint32)[:, word] >> (slot * bits).astype(np.uint32)
    codes: NDArray[np.uint8] = (shifted & np.uint32(2**bits - 1)).astype(np.uint8)
    return codes
