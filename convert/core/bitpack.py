"""Packing of codes into 32-bit words, and the word arithmetic that turns one packing into another.

Canonical words hold codes along K, low bits first: bits ``bits * i`` and up of word ``r`` of column ``n`` are
the code of row ``32/bits * r + i``. A ragged tail is filled with zero bits.

Repacking never looks at single codes. A transposition of an 8 x 8 block of nibbles, or of a 4 x 4 block of
bytes, is a few rounds of ``swap_fields`` over whole arrays: every round exchanges the high fields of one
word with the low fields of its partner, six integer operations for two words, whatever the field width.

Scratch arrays are kept per thread, so the functions may run in many threads at once and allocate nothing
after the first call.
"""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Codes = NDArray[np.uint8]

# Masks of the low half of every pair of fields, by field width in bits.
LOW_FIELDS = {4: np.uint32(0x0F0F0F0F), 8: np.uint32(0x00FF00FF), 16: np.uint32(0x0000FFFF)}

# Words of one working set that passes of word arithmetic go over: input, output and temporaries of this
# size stay in a 1 MiB L2 cache, and a numpy call (about 1 us) is small beside the work on it.
BLOCK_WORDS = 1 << 15

SQUARE = 256  # side, in words, of the squares of a transposition: 256 KiB read, as much written
QUAD = 4  # words that move together

_scratch = threading.local()


def scratch_words(name: str, count: int) -> Words:
    """Return ``count`` words of this thread's scratch ``name``; contents are whatever was left there."""
    held: Words | None = getattr(_scratch, name, None)
    if held is None or held.size < count:
        held = np.empty(count, np.uint32)
        setattr(_scratch, name, held)
    return held[:count]


def swap_fields(low: Words, high: Words, width: int, temp: Words) -> None:
    """Exchange, in place, the high field of each pair in ``low`` with the low field of that pair in ``high``.

    With fields of ``width`` bits: (l0, l1), (h0, h1) become (l0, h0), (l1, h1). ``temp`` has the same shape.
    """
    shift = np.uint32(width)
    np.right_shift(low, shift, out=temp)
    np.bitwise_xor(temp, high, out=temp)
    np.bitwise_and(temp, LOW_FIELDS[width], out=temp)
    np.bitwise_xor(high, temp, out=high)
    np.left_shift(temp, shift, out=temp)
    np.bitwise_xor(low, temp, out=low)


def pack_axis(codes: Codes, bits: int, axis: int) -> Words:
    """Pack ``codes`` along ``axis``, low bits first; a ragged tail is filled with zeros."""
    per_word = 32 // bits
    moved = np.moveaxis(codes, axis, 0)
    count = -(-moved.shape[0] // per_word)
    out = np.zeros((count, *moved.shape[1:]), np.uint32)
    for i in range(per_word):
        field = moved[i::per_word]
        out[: field.shape[0]] |= field.astype(np.uint32) << np.uint32(bits * i)
    return np.ascontiguousarray(np.moveaxis(out, 0, axis))


def unpack_axis(words: NDArray[Any], bits: int, axis: int, count: int | None = None) -> Codes:
    """Unpack 32-bit ``words`` along ``axis`` to uint8 codes; keep the first ``count`` if given."""
    per_word = 32 // bits
    moved = np.moveaxis(words.view(np.uint32), axis, 0)
    out = np.empty((moved.shape[0] * per_word, *moved.shape[1:]), np.uint8)
    for i in range(per_word):
        out[i::per_word] = (moved >> np.uint32(bits * i)) & np.uint32(2**bits - 1)
    return np.ascontiguousarray(np.moveaxis(out[:count], 0, axis))


def pack_rows(codes: Codes, bits: int) -> Words:
    """Pack (K, N) codes to canonical words (ceil(K * bits / 32), N)."""
    return pack_axis(codes, bits, 0)


def unpack_rows(words: Words, bits: int, rows: int | None = None) -> Codes:
    """Unpack canonical words to (K, N) codes; ``rows`` cuts the fill of a ragged tail."""
    return unpack_axis(words, bits, 0, rows)


def permute_rows(words: Words, bits: int, order: NDArray[np.integer]) -> Words:
    """Return the words of ``codes[order]``. ``order`` lists rows of the codes ``words`` holds."""
    return pack_rows(np.take(unpack_rows(words, bits), order, axis=0), bits)


def transpose_fields(planes: Words, bits: int, distances: tuple[int, ...], temp: Words) -> None:
    """Exchange, in place, field i of plane r with field r of plane i. ``planes`` is (32/bits, M).

    8 planes of nibbles take three rounds, 4 planes of bytes two: round b exchanges bit b of the plane index
    with bit b of the field index. ``distances[b]`` says how far apart the array holds planes that differ in
    bit b: (1, 2, 4) if plane r is row r. ``temp`` holds half as many words.
    """
    width = bits
    for distance in distances:
        pairs = planes.reshape(planes.shape[0] // (2 * distance), 2, distance, -1)
        swap_fields(pairs[:, 0], pairs[:, 1], width, temp.reshape(pairs[:, 0].shape))
        width *= 2


def transpose_words(source: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    """Write ``source.T`` to ``out``; both hold 32-bit words, rows contiguous.

    A plain transposed copy moves 4 bytes at a time with long strides. Here 16-byte quads of words are
    transposed first, in squares that stay in cache, and split into words on the way out: twice as fast.
    """
    rows, cols = source.shape
    whole = cols - cols % QUAD
    words, target = source.view(np.uint32), out.view(np.uint32)
    for r in range(0, rows, SQUARE):
        for c in range(0, whole, SQUARE):
            part = words[r : r + SQUARE, c : min(c + SQUARE, whole)]
            _transpose_quads(part, target[c : c + part.shape[1], r : r + SQUARE])
    target[whole:] = words[:, whole:].T
    return out


def _transpose_quads(part: Words, out: Words) -> None:
    rows, quads = part.shape[0], part.shape[1] // QUAD
    turned = scratch_words("transpose", part.size).reshape(quads, rows, QUAD)
    # complex128 is numpy's 16-byte element; copies move its bits unchanged
    np.copyto(turned.view(np.complex128)[:, :, 0], part.view(np.complex128).T)
    for i in range(QUAD):
        out[i::QUAD] = turned[:, :, i]


def bands(total: int, words_each: int, step: int = 1) -> range:
    """Cut ``total`` items of ``words_each`` words into cache-sized multiples of ``step``."""
    return range(0, total, max(1, BLOCK_WORDS // max(1, words_each * step)) * step)
