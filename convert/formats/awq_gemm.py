"""AWQ gemm: codes packed along N, true zero points, no group map.

    qweight  int32 (K, N*b/32)
    qzeros   int32 (G, N*b/32)
    scales   (G, N)

4 bit interleaves: nibble i of word c holds column 8c + [0, 2, 4, 6, 1, 3, 5, 7][i], so columns 0..7 with
codes 0..7 are the word 0x75316420 (autoawq 0.2.9, utils/packing_utils). GPTQModel also writes 8 bit, without
an interleave: byte i of word c is column 4c + i.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.bitpack import Words, bands, pack_axis, scratch_words, transpose_fields, unpack_axis
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.formats import (
    Grid,
    Header,
    Match,
    Obstacle,
    bits_limit,
    division_limit,
    first,
    fitting,
    header_of,
    multiple_limit,
    order_limit,
    require_shape,
)
from w4pack.kernels import layout

COLUMN_OF_FIELD = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 1, 2, 3)}

# Planes of fields are kept in the order of the columns: plane i at COLUMN_OF_FIELD[i]. In binary the
# interleave takes field (i2 i1 i0) to column (i1 i0 i2), so planes that differ in
# bit 0, 1, 2 of i lie 2, 4, 1 apart.
PLANE_DISTANCES = {4: (2, 4, 1), 8: (1, 2)}


SUFFIXES = ("qweight", "qzeros", "scales")


def grid(bits: int) -> Grid:
    """Return the grid of ``qweight``: one word for 32/bits columns."""
    return Grid("qweight", "I32", 0, 1, 1, 32 // bits, 1)


def unpack(block: NDArray[Any], bits: int, out: Words | None = None) -> Words:
    """Turn stored words (K, N*b/32) into canonical words (ceil(K*b/32), N) by transposing their fields."""
    per_word = 32 // bits
    rows, width = block.shape
    if out is None:
        out = np.empty((-(-rows // per_word), width * per_word), np.uint32)
    stored = block.view(np.uint32)
    for start in (cuts := bands(rows, width, per_word)):
        band = stored[start : start + cuts.step]
        _unpack_band(band, bits, out[start // per_word : (start + cuts.step) // per_word])
    return out


def _unpack_band(band: Words, bits: int, out: Words) -> None:
    per_word, (high, width) = 32 // bits, (out.shape[0], band.shape[1])
    planes = scratch_words("awq.planes", per_word * high * width).reshape(per_word, high, width)
    for row, column in enumerate(COLUMN_OF_FIELD[bits]):
        part = band[row::per_word]
        planes[column, : part.shape[0]] = part
        planes[column, part.shape[0] :] = 0  # a ragged tail of K
    _transpose(planes, bits)
    np.copyto(out.reshape(high, width, per_word), planes.transpose(1, 2, 0))


def _transpose(planes: Words, bits: int) -> None:
    temp = scratch_words("awq.temp", planes.size // 2)
    transpose_fields(planes.reshape(planes.shape[0], -1), bits, PLANE_DISTANCES[bits], temp)


def pack(words: Words, bits: int, out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    """Turn canonical words (R, N) into stored words (R*32/b, N*b/32): the inverse of ``unpack``."""
    per_word = 32 // bits
    high, width = words.shape[0], words.shape[1] // per_word
    if out is None:
        out = np.empty((high * per_word, width), np.int32)
    stored = out.view(np.uint32)
    for start in (cuts := bands(high, words.shape[1])):
        band = words[start : start + cuts.step]
        _pack_band(band, bits, stored[start * per_word : (start + cuts.step) * per_word])
    return out


def _pack_band(band: Words, bits: int, out: Words) -> None:
    per_word, (high, cols) = 32 // bits, band.shape
    planes = scratch_words("awq.planes", band.size).reshape(per_word, high, cols // per_word)
    np.copyto(planes, band.reshape(high, cols // per_word, per_word).transpose(2, 0, 1))
    _transpose(planes, bits)
    for row, column in enumerate(COLUMN_OF_FIELD[bits]):
        out[row::per_word] = planes[column, : out[row::per_word].shape[0]]


def to_tiles(block: NDArray[Any], out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    """Turn stored 4-bit words (K, N/8) straight into Marlin tiles int32 (K/16, 2N); K % 16 == 0, N % 64 == 0.

    The same bytes as ``pack_tiles(unpack(block, 4), 4)`` in half the time. A stored word and a tile word both
    hold eight codes: fields of the first are columns, those of the second places (row, half) of one column,
    so one transposition takes the words of the eight places to those of the eight columns n % 8.
    """
    rows, width = block.shape
    if rows % layout.TILE_K or width * 8 % layout.TILE_N:
        raise ValueError(f"not whole tiles: {rows} rows, {width * 8} columns")
    if out is None:
        out = np.empty((rows // layout.TILE_K, width * 16), np.int32)
    stored, tiles = block.view(np.uint32), out.view(np.uint32)
    for start in (cuts := bands(rows, width, layout.TILE_K)):
        first, last = start // layout.TILE_K, (start + cuts.step) // layout.TILE_K
        _tile_band(stored[start : start + cuts.step], tiles[first:last])
    return out


def _tile_band(band: Words, out: Words) -> None:
    rows, chunks = out.shape[0], band.shape[1] // 8
    planes = scratch_words("awq.planes", band.size).reshape(8, rows, 4, chunks, 4)
    places = band.reshape(rows, 2, 4, 2, chunks, 4, 2)  # (row, k % 16 // 8, t, k % 2, chunk, j, half)
    for place, column in enumerate(COLUMN_OF_FIELD[4]):
        planes[column] = places[:, place % 2, :, place // 4, :, :, place // 2 % 2]
    _transpose(planes.reshape(8, -1), 4)
    # the four words j of a lane move together, as one element of 16 bytes
    lanes = planes.reshape(8, rows, 4, chunks * 4).view(np.complex128)
    np.copyto(out.view(np.complex128).reshape(rows, chunks, 8, 4), lanes.transpose(1, 3, 0, 2))


def specs(scheme: QuantScheme) -> dict[str, Header]:
    """Return dtype and shape of every tensor of a linear; symmetric schemes too have zeros (all midpoint)."""
    rows, cols = scheme.in_features, scheme.out_features
    return {
        "qweight": ("I32", grid(scheme.bits).shape(rows, cols)),
        "qzeros": ("I32", (scheme.groups, -(-cols // scheme.codes_per_word))),
        "scales": (scheme.scale_dtype, (scheme.groups, cols)),
    }


def decode_params(tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme, zero_kind: str) -> GroupParams:
    """Read zeros and scales. Raises SourceError for tensors that are missing or do not fit."""
    shapes = {suffix: header[1] for suffix, header in specs(scheme).items()}
    zeros = None
    if not scheme.sym:
        zeros = read_zeros(fitting(tensors, "qzeros", shapes["qzeros"]), scheme)
    return GroupParams(fitting(tensors, "scales", shapes["scales"]), zeros, None)


def read_zeros(qzeros: NDArray[Any], scheme: QuantScheme) -> NDArray[np.uint8]:
    """Unpack stored zero words (G, N*b/32) to zero points (G, N)."""
    fields = unpack_axis(qzeros, scheme.bits, 1)
    per_word = scheme.codes_per_word
    inverse = np.argsort(COLUMN_OF_FIELD[scheme.bits])
    return np.ascontiguousarray(
        fields.reshape(len(fields), -1, per_word)[:, :, inverse].reshape(len(fields), -1)
    )


def encode_params(params: GroupParams, scheme: QuantScheme) -> dict[str, NDArray[Any]]:
    """Write zeros, the midpoint for a symmetric scheme, and scales."""
    zeros = params.zeros
    if zeros is None or scheme.sym:
        zeros = np.full((scheme.groups, scheme.out_features), scheme.midpoint, np.uint8)
    order = list(COLUMN_OF_FIELD[scheme.bits])
    fields = zeros.reshape(len(zeros), -1, scheme.codes_per_word)[:, :, order].reshape(len(zeros), -1)
    return {
        "qzeros": pack_axis(fields, scheme.bits, 1).view(np.int32),
        "scales": np.ascontiguousarray(params.scales),
    }


def limits(scheme: QuantScheme) -> Obstacle | None:
    """Return what keeps the scheme out of an AWQ gemm file that engines load."""
    return first(
        bits_limit("awq", scheme, (4,)),
        order_limit("awq", scheme),
        division_limit("awq", scheme),
        multiple_limit("awq", "out_features", scheme.out_features, 8),
    )


def match(tensors: Mapping[str, Header], values: Mapping[str, NDArray[Any]] | None = None) -> Match | None:
    """Match ``qweight`` (K, N/8) or (K, N/4) int32 with ``scales`` (G, N); the width gives 4 or 8 bit."""
    dtype, shape = tensors.get("qweight", ("", ()))
    if dtype != "I32" or len(shape) != 2 or "qzeros" not in tensors:
        return None
    scales = header_of(tensors, "scales")[1]
    if len(scales) != 2 or 0 in shape or 0 in scales or scales[1] not in (8 * shape[1], 4 * shape[1]):
        return None
    require_shape(tensors, "qzeros", (scales[0], shape[1]))
    return Match(32 * shape[1] // scales[1], shape[0], scales[1], scales[0])
