"""GPTQ: codes packed along K, as AutoGPTQ, GPTQModel, Optimum and AutoRound write them.

    qweight  int32 (K*b/32, N)   low bits first along K: the canonical words as they are
    qzeros   int32 (G, N*b/32)   low bits first along N, natural order
    scales   (G, N)              natural order
    g_idx    int32 (K,)          group of each row; the codes stay in natural row order

Zero points are stored in one of two ways. v1 stores z - 1, v2 stores z. v1 subtracts on whole words, so z = 0
borrows from the next field: z = (0, 5, 8, 8, 8, 8, 8, 8) is 0x88888850 in v2 and 0x7777773F in v1, and only
the addition on whole words gives the zeros back (gptqmodel 7.7.0: its v1/v2 conversion). ``v1-nibble`` reads
each field by itself, field + 1, which may give 16 (256 for 8 bit): writers that did not subtract on words.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.bitpack import Words, pack_axis, unpack_axis
from w4pack.convert.core.order import natural_map, read_map
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.errors import FROM_16_BIT, Refused
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
    mismatch,
    multiple_limit,
    order_limit,
)

ONE_PER_FIELD = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}


SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


def grid(bits: int) -> Grid:
    """Return the grid of ``qweight``: one word for 32/bits rows."""
    return Grid("qweight", "I32", 0, 32 // bits, 1, 1, 1)


def unpack(block: NDArray[Any], bits: int, out: Words | None = None) -> Words:
    """Return the canonical words: the stored words themselves, a view unless ``out`` is given."""
    return _as(block.view(np.uint32), out)


def pack(words: Words, bits: int, out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    """Return the stored words: the canonical words themselves, a view unless ``out`` is given."""
    return _as(words.view(np.int32), out)


def _as(array: NDArray[Any], out: NDArray[Any] | None) -> NDArray[Any]:
    if out is None:
        return array
    np.copyto(out, array)
    return out


def specs(scheme: QuantScheme) -> dict[str, Header]:
    """Return dtype and shape of every tensor of a linear."""
    rows, cols, per_word = scheme.in_features, scheme.out_features, scheme.codes_per_word
    return {
        "qweight": ("I32", grid(scheme.bits).shape(rows, cols)),
        "qzeros": ("I32", (scheme.groups, -(-cols // per_word))),
        "scales": (scheme.scale_dtype, (scheme.groups, cols)),
        "g_idx": ("I32", (rows,)),
    }


def decode_params(tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme, zero_kind: str) -> GroupParams:
    """Read zeros, scales and group map. ``zero_kind``: ``v1``, ``v1-nibble``, ``v2`` (or ``plain``).

    Zeros are uint8, or uint16 where an 8-bit field of ``v1-nibble`` reads 256. Raises SourceError for tensors
    that are missing or do not fit.
    """
    shapes = {suffix: header[1] for suffix, header in specs(scheme).items()}
    zeros = None
    if not scheme.sym:
        zeros = read_zeros(fitting(tensors, "qzeros", shapes["qzeros"]), scheme, zero_kind)
    group = None
    if scheme.act_order:
        group = read_map(fitting(tensors, "g_idx", shapes["g_idx"]), scheme, "g_idx")
    return GroupParams(fitting(tensors, "scales", shapes["scales"]), zeros, group)


def read_zeros(qzeros: NDArray[Any], scheme: QuantScheme, zero_kind: str) -> NDArray[Any]:
    """Unpack stored zero words (G, N*b/32) to zero points (G, N)."""
    words = qzeros.view(np.uint32)
    if zero_kind == "v1":
        words = words + ONE_PER_FIELD[scheme.bits]
    fields = unpack_axis(words, scheme.bits, 1, scheme.out_features)
    if zero_kind != "v1-nibble":
        return fields
    wide: NDArray[np.uint16] = fields.astype(np.uint16) + np.uint16(1)
    return wide.astype(np.uint8) if wide.max(initial=0) < 256 else wide


def encode_params(
    params: GroupParams, scheme: QuantScheme, zero_kind: str | None = None
) -> dict[str, NDArray[Any]]:
    """Write zeros, scales and group map.

    Zeros are v1 for symmetric and v2 for asymmetric schemes, the forms that loaders accept without knowing
    the writer, unless ``zero_kind`` names another (to rebuild a source).
    """
    kind = zero_kind or ("v1" if scheme.sym else "v2")
    group = params.group if scheme.act_order else natural_map(scheme)
    if group is None:
        raise ValueError("act-order without a group map")
    return {
        "qzeros": write_zeros(params.zeros, scheme, kind),
        "scales": np.ascontiguousarray(params.scales),
        "g_idx": group.astype(np.int32),
    }


def write_zeros(zeros: NDArray[Any] | None, scheme: QuantScheme, zero_kind: str) -> NDArray[np.int32]:
    """Pack zero points (G, N), the midpoint if None, to stored words: the inverse of ``read_zeros``."""
    if zeros is None or scheme.sym:
        zeros = np.full((scheme.groups, scheme.out_features), scheme.midpoint, np.uint8)
    if zero_kind == "v1-nibble":
        zeros = (zeros.astype(np.uint16) - np.uint16(1)) & np.uint16(2**scheme.bits - 1)
    words = pack_axis(zeros.astype(np.uint8), scheme.bits, 1)
    if zero_kind == "v1":
        words = words - ONE_PER_FIELD[scheme.bits]
    return words.view(np.int32)


def limits(scheme: QuantScheme) -> Obstacle | None:
    """Return what keeps the scheme out of a GPTQ file that engines load."""
    unit = scheme.codes_per_word
    return first(
        bits_limit("gptq", scheme, (4, 8)),
        order_limit("gptq as engines load it", scheme),
        division_limit("gptq", scheme),
        multiple_limit("gptq", "in_features", scheme.in_features, unit),
        multiple_limit("gptq", "out_features", scheme.out_features, unit),
    )


def match(tensors: Mapping[str, Header], values: Mapping[str, NDArray[Any]] | None = None) -> Match | None:
    """Match ``qweight`` (K*b/32, N) int32 with ``scales`` (G, N). bits = 32 * qzeros columns / N.

    ``in_features`` counts the rows in the file; ``g_idx`` may be shorter, by less than one word of codes.
    """
    dtype, shape = tensors.get("qweight", ("", ()))
    if dtype != "I32" or len(shape) != 2:
        return None
    scales = header_of(tensors, "scales")[1]
    if len(scales) != 2 or shape[1] != scales[1] or 0 in shape or 0 in scales:
        return None
    groups, cols = scales
    bits = _bits(header_of(tensors, "qzeros"), groups, cols)
    if "g_idx" in tensors:
        _check_rows(shape, tensors["g_idx"][1], bits)
    return Match(bits, 32 * shape[0] // bits, cols, groups)


def _bits(header: Header, groups: int, cols: int) -> int:
    dtype, qzeros = header
    if dtype != "I32":
        raise Refused(
            "zero points are stored in a way that no reader here knows",
            code="layout-unknown",
            where="qzeros",
            expected=f"I32 [{groups}, {cols // 8}] (4 bit) or [{groups}, {cols // 4}] (8 bit)",
            found=f"{dtype} {list(qzeros)}",
            hint=FROM_16_BIT,
        )
    if (
        len(qzeros) != 2
        or qzeros[0] != groups
        or not 1 <= 32 * qzeros[1] // cols <= 8
        or 32 * qzeros[1] % cols
    ):
        raise mismatch(
            "qzeros", f"[{groups}, {cols} * bits / 32] beside scales [{groups}, {cols}]", f"{list(qzeros)}"
        )
    return 32 * qzeros[1] // cols


def _check_rows(qweight: tuple[int, ...], g_idx: tuple[int, ...], bits: int) -> None:
    """Compare K, which is the length of ``g_idx``, with the words: some writers fill up the last word."""
    if len(g_idx) != 1 or not g_idx[0]:
        raise mismatch("g_idx", "one group for each row", f"{list(g_idx)}")
    words = -(-g_idx[0] * bits // 32)
    if words != qweight[0]:
        expected = f"[{words}, {qweight[1]}] ({g_idx[0]} rows in g_idx, {bits} bit)"
        raise mismatch("qweight", expected, f"{list(qweight)}")
