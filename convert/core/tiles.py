"""Canonical words to Marlin tiles and back, on whole arrays of words.

``kernels/layout.py`` defines the tile; this is the fast form of the same map. A 16-row tile row of a 4-bit
matrix takes two rows of canonical words, a (rows 0..7) and b (rows 8..15). Of each pair of columns c and
c + 8 it needs the four words a[c], a[c+8], b[c], b[c+8]:

    round 1, nibbles, a with b       L = a0 b0 a2 b2 ...   H = a1 b1 a3 b3 ...     a byte is a pair of rows
    round 2, bytes,   c with c + 8   even bytes of L[c], L[c+8] in one word, odd bytes in the other; H too
    round 3, halves,  L with H       the word of t: bytes t of L[c], L[c+8], H[c], H[c+8]

which is the word of lane 4 * (c % 8) + t. 8 bit takes four rows of words, lo and hi being which of rows 0..3,
4..7 (hi 0) and 8..11, 12..15 (hi 1): bytes, then halves, hi 0 with hi 1. So that every round runs over
long contiguous arrays, columns are gathered first, in runs of eight neighbours (32 bytes), and the finished
words are scattered once.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.bitpack import BLOCK_WORDS, Words, scratch_words, swap_fields

TILE_N = 64
RUN = 8  # neighbouring columns that share n // 8


def pack_tiles(words: NDArray[Any], bits: int, out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    """Pack canonical words (K*bits/32, N) to tiles int32 (K/16, N*bits/2); K % 16 == 0, N % 64 == 0.

    ``out`` may be any view whose rows are contiguous. Throws ValueError if the shape is not whole tiles.
    """
    per_row = bits // 2  # rows of words in a tile row
    rows, cols = _whole_tiles(words.shape[0], per_row, words.shape[1])
    if out is None:
        out = np.empty((rows, cols * per_row), np.int32)
    source, target = words.view(np.uint32), out.view(np.uint32)
    for r0, r1, c0, c1 in _sub_blocks(rows, cols, per_row):
        block = source[r0 * per_row : r1 * per_row, c0:c1]
        _pack_block(block, bits, target[r0:r1, c0 * per_row : c1 * per_row])
    return out


def unpack_tiles(tiles: NDArray[Any], bits: int, out: Words | None = None) -> Words:
    """Unpack tiles int32 (K/16, N*bits/2) to canonical words uint32 (K*bits/32, N)."""
    per_row = bits // 2
    rows, cols = _whole_tiles(tiles.shape[0] * per_row, per_row, tiles.shape[1] // per_row)
    if out is None:
        out = np.empty((rows * per_row, cols), np.uint32)
    source = tiles.view(np.uint32)
    for r0, r1, c0, c1 in _sub_blocks(rows, cols, per_row):
        block = source[r0:r1, c0 * per_row : c1 * per_row]
        _unpack_block(block, bits, out[r0 * per_row : r1 * per_row, c0:c1])
    return out


def _whole_tiles(word_rows: int, per_row: int, cols: int) -> tuple[int, int]:
    if word_rows % per_row or cols % TILE_N:
        raise ValueError(f"not whole tiles: {word_rows} rows of words, {cols} columns")
    return word_rows // per_row, cols


def _sub_blocks(rows: int, cols: int, per_row: int) -> list[tuple[int, int, int, int]]:
    """Cut into (row, row end, column, column end): whole rows if one fits twice the working set."""
    width = cols
    if cols * per_row > 2 * BLOCK_WORDS:
        width = BLOCK_WORDS // per_row // TILE_N * TILE_N
    height = max(1, BLOCK_WORDS // (width * per_row)) if width else 1
    return [
        (r, min(r + height, rows), c, min(c + width, cols))
        for r in range(0, rows, height)
        for c in range(0, cols, width or 1)
    ]


@lru_cache(maxsize=64)
def _run_order(rows: int, chunks: int, bits: int) -> NDArray[np.intp]:
    """List the source run (word row, n // 8) of each gathered run.

    Gathered order: 4 bit (a or b, half, j, tile row, chunk) with n = 64 chunk + 16 j + 8 half + ...; 8 bit
    (hi, lo, n % 64 // 8, tile row, chunk).
    """
    runs = np.arange(rows * bits // 2 * chunks * 8, dtype=np.intp)
    if bits == 4:
        ordered = runs.reshape(rows, 2, chunks, 4, 2).transpose(1, 4, 3, 0, 2)
    else:
        ordered = runs.reshape(rows, 2, 2, chunks, 8).transpose(1, 2, 4, 0, 3)
    return np.ascontiguousarray(ordered).reshape(-1)


@lru_cache(maxsize=64)
def _run_place(rows: int, chunks: int, bits: int) -> NDArray[np.intp]:
    """Invert ``_run_order``."""
    order = _run_order(rows, chunks, bits)
    place = np.empty_like(order)
    place[order] = np.arange(order.size, dtype=np.intp)
    return place


def _quads(gathered: Words, bits: int, rows: int, chunks: int) -> Words:
    """View gathered words in the order of a tile row: (tile row, chunk, n % 8, t in two axes, word)."""
    if bits == 4:  # (t // 2, t % 2, j, row, chunk, n % 8)
        view: Words = gathered.reshape(2, 2, 4, rows, chunks, RUN).transpose(3, 4, 5, 0, 1, 2)
    else:  # (t % 2, t // 2, n % 64 // 8, row, chunk, n % 8)
        view = gathered.reshape(2, 2, 8, rows, chunks, RUN).transpose(3, 4, 5, 1, 0, 2)
    return view


def _pack_block(block: Words, bits: int, out: Words) -> None:
    count = block.size
    rows, chunks = out.shape[0], block.shape[1] // TILE_N
    if not block.flags.c_contiguous:
        copy = scratch_words("tiles.copy", count).reshape(block.shape)
        np.copyto(copy, block)
        block = copy
    gathered = scratch_words("tiles.gathered", count)
    order = _run_order(rows, chunks, bits)
    # mode="clip": with the default mode numpy writes to a hidden buffer first. Indices are in range.
    np.take(block.reshape(-1, RUN), order, axis=0, out=gathered.reshape(-1, RUN), mode="clip")
    for low, high, width, temp in _rounds(gathered, bits):
        swap_fields(low, high, width, temp)
    np.copyto(out.reshape(rows, chunks, RUN, 2, 2, bits), _quads(gathered, bits, rows, chunks))


def _unpack_block(block: Words, bits: int, out: Words) -> None:
    count = block.size
    rows, chunks = block.shape[0], out.shape[1] // TILE_N
    gathered = scratch_words("tiles.gathered", count)
    np.copyto(_quads(gathered, bits, rows, chunks), block.reshape(rows, chunks, RUN, 2, 2, bits))
    for low, high, width, temp in reversed(_rounds(gathered, bits)):
        swap_fields(low, high, width, temp)  # each round is its own inverse
    target = out if out.flags.c_contiguous else scratch_words("tiles.copy", count).reshape(out.shape)
    place = _run_place(rows, chunks, bits)
    np.take(gathered.reshape(-1, RUN), place, axis=0, out=target.reshape(-1, RUN), mode="clip")
    if target is not out:
        np.copyto(out, target)


def _rounds(gathered: Words, bits: int) -> list[tuple[Words, Words, int, Words]]:
    """List the (low, high, field width, temp) of each round, as views of ``gathered``."""
    half = gathered.size // 2
    temp = scratch_words("tiles.temp", half)
    low, high = gathered[:half], gathered[half:]
    if bits == 8:
        return [(low, high, 8, temp), (low, high, 16, temp)]
    pairs = gathered.reshape(2, 2, -1)  # (L or H, column c or c + 8, ...)
    return [(low, high, 4, temp), (pairs[:, 0], pairs[:, 1], 8, temp.reshape(2, -1)), (low, high, 16, temp)]
