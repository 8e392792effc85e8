"""compressed-tensors ``pack-quantized``: one row of words per output, packed along K.

    weight_packed      int32 (N, ceil(K*b/32))   the transpose of the canonical words, word for word
    weight_scale       (N, G)
    weight_zero_point  int32 (ceil(N*b/32), G)   asymmetric only; packed along N
    weight_shape       int64 (2,)                [N, K]
    weight_g_idx       int32 (K,)                only in files of old releases with a group order

The stored fields are offset binary, signed code + 2^(b-1): our unsigned codes and zeros as they are. Fields
past the last element are 0 (compressed-tensors 0.20.1, pack_to_int32).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.bitpack import pack_axis, unpack_axis
from w4pack.convert.core.order import read_map
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
    order_limit,
    require_shape,
    transposed,
)

SUFFIXES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


unpack, pack = transposed.unpack, transposed.pack


def grid(bits: int) -> Grid:
    """Return the grid of ``weight_packed``: N over the rows, one word for 32/bits of K."""
    return transposed.grid("weight_packed", bits)


def specs(scheme: QuantScheme) -> dict[str, Header]:
    """Return dtype and shape of every tensor of a linear."""
    rows, cols, groups = scheme.in_features, scheme.out_features, scheme.groups
    tensors: dict[str, Header] = {
        "weight_packed": ("I32", grid(scheme.bits).shape(rows, cols)),
        "weight_scale": (scheme.scale_dtype, (cols, groups)),
        "weight_shape": ("I64", (2,)),
    }
    if not scheme.sym:
        tensors["weight_zero_point"] = ("I32", (-(-cols // scheme.codes_per_word), groups))
    if scheme.act_order:
        tensors["weight_g_idx"] = ("I32", (rows,))
    return tensors


def decode_params(tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme, zero_kind: str) -> GroupParams:
    """Read zeros, scales and group map. Raises SourceError for tensors that are missing or do not fit."""
    shapes = {suffix: header[1] for suffix, header in specs(scheme).items()}
    scales = np.ascontiguousarray(fitting(tensors, "weight_scale", shapes["weight_scale"]).T)
    zeros = group = None
    if not scheme.sym:
        words = fitting(tensors, "weight_zero_point", shapes["weight_zero_point"])
        zeros = np.ascontiguousarray(unpack_axis(words, scheme.bits, 0, scheme.out_features).T)
    if scheme.act_order:
        group = read_map(fitting(tensors, "weight_g_idx", shapes["weight_g_idx"]), scheme, "weight_g_idx")
    return GroupParams(scales, zeros, group)


def encode_params(params: GroupParams, scheme: QuantScheme) -> dict[str, NDArray[Any]]:
    """Write zeros, scales, shape and, to rebuild an old source, the group map."""
    tensors: dict[str, NDArray[Any]] = {
        "weight_scale": np.ascontiguousarray(params.scales.T),
        "weight_shape": np.array([scheme.out_features, scheme.in_features], np.int64),
    }
    if not scheme.sym:
        if params.zeros is None:
            raise ValueError("an asymmetric scheme without zeros")
        tensors["weight_zero_point"] = pack_axis(params.zeros.T, scheme.bits, 0).view(np.int32)
    if scheme.act_order and params.group is not None:
        tensors["weight_g_idx"] = params.group.astype(np.int32)
    return tensors


def limits(scheme: QuantScheme) -> Obstacle | None:
    """Return what keeps the scheme out of a file that engines load."""
    return first(
        bits_limit("compressed-tensors", scheme, (4, 8)),
        order_limit("compressed-tensors", scheme),
        division_limit("compressed-tensors", scheme),
    )


def match(tensors: Mapping[str, Header], values: Mapping[str, NDArray[Any]] | None = None) -> Match | None:
    """Match ``weight_packed`` int32 (N, words). K is in the value of ``weight_shape``.

    Without that value K is the fill of the words, and bits come from ``weight_zero_point`` or are taken as 4.
    Raises Refused for experts fused in one tensor.
    """
    dtype, shape = tensors.get("weight_packed", ("", ()))
    if dtype != "I32":
        return None
    if len(shape) != 2:
        raise Refused(
            "`weight_packed` holds several matrices in one tensor",
            code="packed-3d",
            where="weight_packed",
            expected="two axes",
            found=f"{list(shape)}",
            hint=FROM_16_BIT,
        )
    scales = header_of(tensors, "weight_scale")[1]
    require_shape(tensors, "weight_shape", (2,))
    if len(scales) != 2 or scales[0] != shape[0] or 0 in shape or 0 in scales:
        raise mismatch("weight_scale", f"[{shape[0]}, groups]", f"{list(scales)}")
    bits, rows = _bits_and_rows(shape, tensors, values or {})
    if "weight_zero_point" in tensors:
        require_shape(tensors, "weight_zero_point", (-(-shape[0] * bits // 32), scales[1]))
    return Match(bits, rows, shape[0], scales[1])


def _bits_and_rows(
    shape: tuple[int, ...], tensors: Mapping[str, Header], values: Mapping[str, NDArray[Any]]
) -> tuple[int, int]:
    if "weight_shape" not in values:
        zeros = tensors.get("weight_zero_point")
        bits = 4 if zeros is None else max(1, round(32 * zeros[1][0] / shape[0]))
        return bits, 32 * shape[1] // bits
    cols, rows = (int(size) for size in values["weight_shape"])
    fits = [bits for bits in range(1, 9) if rows > 0 and -(-rows * bits // 32) == shape[1]]
    if cols != shape[0] or not fits:
        raise mismatch(
            "weight_shape", f"[{shape[0]}, in_features of {shape[1]} words a row]", f"[{cols}, {rows}]"
        )
    # A short row can hold several widths: take one we read if there is one.
    return next((bits for bits in (4, 8) if bits in fits), fits[0]), rows
