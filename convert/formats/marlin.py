"""The artifact: Marlin tiles padded to 64, scales always in the grouped order.

    weight             int32 (K'/16, N'*b/2)   tiles (kernels/layout.py); rows sorted by group under act-order
    weight_scale       (G', N')                grouped order for every G, also 1
    weight_zero_point  int32 (G', N'*b/32)     asymmetric only; grouped order, interleaved
    act_perm           int32 (K,)              act-order only: packed row r is source row act_perm[r]

K' and N' are K and N rounded up to 64, G' = ceil(K' / g), 1 for g = -1. Padding decodes to zero whatever a
kernel does with it: padded columns and whole padded groups have zero point and code 2^(b-1) and scale +0.0;
padded rows of a group that also holds real rows have that group's zero points as codes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.order import map_of_sorted, read_perm, sorted_rows
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.core.tiles import pack_tiles, unpack_tiles
from w4pack.convert.formats import (
    Grid,
    Header,
    Match,
    Obstacle,
    bits_limit,
    first,
    fitting,
    group_limit,
    header_of,
    mismatch,
)
from w4pack.kernels import layout

UNIT = 64  # K and N are padded to multiples of this
GROUP_SIZES = (ONE_GROUP, 32, 64, 128)


def stored_size(features: int) -> int:
    """Round K or N up to a whole unit."""
    return -(-features // UNIT) * UNIT


def stored_groups(scheme: QuantScheme) -> int:
    """G' = ceil(K' / g), 1 for one group."""
    rows = stored_size(scheme.in_features)
    return 1 if scheme.group_size == ONE_GROUP else -(-rows // scheme.group_size)


TILES = True  # codes are Marlin tiles: layouts with `to_tiles` can be packed directly
SUFFIXES = ("weight", "weight_scale", "weight_zero_point", "act_perm")


unpack = unpack_tiles  # words of padded and, under act-order, sorted rows (``row_order``)
pack = pack_tiles


def grid(bits: int) -> Grid:
    """Return the grid of ``weight``; units are 64 x 64, four tiles, so that shapes come out padded."""
    return Grid("weight", "I32", 0, UNIT, UNIT // layout.TILE_K, UNIT, UNIT * bits // 2)


def specs(scheme: QuantScheme) -> dict[str, Header]:
    """Return dtype and shape of every tensor of a linear, padded."""
    rows, groups, cols = scheme.in_features, stored_groups(scheme), stored_size(scheme.out_features)
    tensors: dict[str, Header] = {
        "weight": ("I32", grid(scheme.bits).shape(rows, cols)),
        "weight_scale": (scheme.scale_dtype, (groups, cols)),
    }
    if not scheme.sym:
        tensors["weight_zero_point"] = ("I32", (groups, cols * scheme.bits // 32))
    if scheme.act_order:
        tensors["act_perm"] = ("I32", (rows,))
    return tensors


def decode_params(tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme, zero_kind: str) -> GroupParams:
    """Read zeros, scales and group map in natural order, without the padding."""
    shapes = {suffix: header[1] for suffix, header in specs(scheme).items()}
    groups, cols = scheme.groups, scheme.out_features
    place = layout.inverse_order(layout.grouped_order(stored_size(cols)))[:cols]
    scales = fitting(tensors, "weight_scale", shapes["weight_scale"])[:groups, place]
    zeros = group = None
    if not scheme.sym:
        words = fitting(tensors, "weight_zero_point", shapes["weight_zero_point"])
        zeros = np.ascontiguousarray(layout.unpack_zeros(words, scheme.bits)[:groups, :cols])
    perm = row_order(tensors, scheme)
    if perm is not None:
        group = map_of_sorted(perm, scheme)
    return GroupParams(np.ascontiguousarray(scales), zeros, group)


def row_order(tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme) -> NDArray[np.int64] | None:
    """Return the source row of each packed row, or None: natural order.

    The words of ``unpack`` go back to source order by ``source[perm] = packed``.
    Raises SourceError if ``act_perm`` is not a permutation of the K rows.
    """
    if not scheme.act_order:
        return None
    return read_perm(fitting(tensors, "act_perm", (scheme.in_features,)), scheme, "act_perm")


def encode_params(params: GroupParams, scheme: QuantScheme) -> dict[str, NDArray[Any]]:
    """Write padded zeros and scales in tile order and, under act-order, ``act_perm``."""
    scales, zeros = pad_params(params, scheme)
    tensors: dict[str, NDArray[Any]] = {"weight_scale": scales[:, layout.grouped_order(scales.shape[1])]}
    if not scheme.sym:
        tensors["weight_zero_point"] = layout.pack_zeros(zeros, scheme.bits)
    if scheme.act_order:
        if params.group is None:
            raise ValueError("act-order without a group map")
        tensors["act_perm"] = sorted_rows(params.group)
    return tensors


def pad_params(params: GroupParams, scheme: QuantScheme) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return scales and zero points (G', N') in natural order; padding is +0.0 and the midpoint."""
    shape = stored_groups(scheme), stored_size(scheme.out_features)
    scales = np.zeros(shape, params.scales.dtype)
    scales[: scheme.groups, : scheme.out_features] = params.scales
    zeros = np.full(shape, scheme.midpoint, np.uint8)
    if params.zeros is not None and not scheme.sym:
        zeros[: scheme.groups, : scheme.out_features] = params.zeros
    return scales, zeros


def limits(scheme: QuantScheme) -> Obstacle | None:
    """Return what keeps the scheme out of the artifact: kernels exist for four group sizes."""
    return first(bits_limit("marlin", scheme, (4, 8)), group_limit("marlin", scheme, GROUP_SIZES))


def match(tensors: Mapping[str, Header], values: Mapping[str, NDArray[Any]] | None = None) -> Match | None:
    """Match ``weight`` int32 (K'/16, N'*b/2) with ``weight_scale`` (G', N').

    Sizes are the stored ones, except K where ``act_perm`` tells it; the artifact's config has the others.
    """
    dtype, shape = tensors.get("weight", ("", ()))
    if dtype != "I32" or len(shape) != 2 or "weight_scale" not in tensors:
        return None
    scales = header_of(tensors, "weight_scale")[1]
    if len(scales) != 2 or 0 in shape or 0 in scales or 2 * shape[1] not in (4 * scales[1], 8 * scales[1]):
        raise mismatch("weight", f"[tile rows, {scales[-1:]} * bits / 2]", f"{list(shape)}")
    rows = layout.TILE_K * shape[0]
    if "act_perm" in tensors:
        known = tensors["act_perm"][1]
        if len(known) != 1 or stored_size(known[0]) != rows:
            raise mismatch("act_perm", f"[at most {rows}, more than {rows - UNIT}]", f"{list(known)}")
        rows = known[0]
    return Match(2 * shape[1] // scales[1], rows, scales[1], scales[0])
