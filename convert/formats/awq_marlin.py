"""AWQ ``marlin``: Marlin tiles under the names of AWQ, symmetric 4 bit, no zeros.

    qweight  int32 (K/16, 2N)   Marlin tiles (kernels/layout.py)
    scales   fp16 (G, N)        grouped order if G > 1, else the per-channel order

Source: autoawq 0.2.9, modules/linear/marlin.py. GPTQModel writes gemm tensors under the same label: the
shapes decide.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.bitpack import Words
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.core.tiles import pack_tiles, unpack_tiles
from w4pack.convert.formats import (
    Grid,
    Header,
    Match,
    Obstacle,
    bits_limit,
    division_limit,
    first,
    fitting,
    group_limit,
    multiple_limit,
    order_limit,
    symmetry_limit,
    with_targets,
)
from w4pack.kernels import layout

GROUP_SIZES = (ONE_GROUP, 64, 128)


TILES = True  # codes are Marlin tiles: layouts with `to_tiles` can be packed directly
SUFFIXES = ("qweight", "scales")


def grid(bits: int) -> Grid:
    """Return the grid of ``qweight``: tiles of 16 x 64."""
    return Grid("qweight", "I32", 0, layout.TILE_K, 1, layout.TILE_N, layout.TILE_N * bits // 2)


def unpack(block: NDArray[Any], bits: int, out: Words | None = None) -> Words:
    """Turn tiles int32 (K/16, 2N) into canonical words (K/8, N)."""
    return unpack_tiles(block, bits, out)


def pack(words: Words, bits: int, out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    """Turn canonical words (K/8, N) into tiles int32 (K/16, 2N)."""
    return pack_tiles(words, bits, out)


def specs(scheme: QuantScheme) -> dict[str, Header]:
    """Return dtype and shape of every tensor of a linear."""
    rows, cols = scheme.in_features, scheme.out_features
    return {
        "qweight": ("I32", grid(scheme.bits).shape(rows, cols)),
        "scales": (scheme.scale_dtype, (scheme.groups, cols)),
    }


def decode_params(tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme, zero_kind: str) -> GroupParams:
    """Read scales in natural order. Raises SourceError if they are missing or do not fit."""
    stored = fitting(tensors, "scales", (scheme.groups, scheme.out_features))
    order = layout.scale_order(scheme.out_features, scheme.groups)
    return GroupParams(stored[:, layout.inverse_order(order)], None, None)


def encode_params(params: GroupParams, scheme: QuantScheme) -> dict[str, NDArray[Any]]:
    """Write scales in the order of the kernel."""
    return {"scales": params.scales[:, layout.scale_order(scheme.out_features, scheme.groups)]}


def limits(scheme: QuantScheme) -> Obstacle | None:
    """Return what keeps the scheme out of an AWQ marlin file."""
    return first(
        bits_limit("awq marlin", scheme, (4,)),
        symmetry_limit("awq marlin", scheme),
        order_limit("awq marlin", scheme),
        group_limit("awq marlin", scheme, GROUP_SIZES),
        division_limit("awq marlin", scheme),
        multiple_limit("awq marlin", "in_features", scheme.in_features, layout.TILE_K),
        multiple_limit("awq marlin", "out_features", scheme.out_features, layout.TILE_N),
    )


def obstacle(scheme: QuantScheme) -> Obstacle | None:
    """Return ``limits`` with the targets that can hold the scheme."""
    return with_targets(limits(scheme), scheme)


def match(tensors: Mapping[str, Header], values: Mapping[str, NDArray[Any]] | None = None) -> Match | None:
    """Match ``qweight`` int32 (K/16, 2N) with ``scales`` (G, N) and no zeros."""
    dtype, shape = tensors.get("qweight", ("", ()))
    if dtype != "I32" or len(shape) != 2 or 0 in shape or "qzeros" in tensors or "scales" not in tensors:
        return None
    scales = tensors["scales"][1]
    if len(scales) != 2 or 0 in scales or shape[1] != 2 * scales[1] or scales[1] % layout.TILE_N:
        return None
    return Match(4, layout.TILE_K * shape[0], scales[1], scales[0])
