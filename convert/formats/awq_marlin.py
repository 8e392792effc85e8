"""AWQ ``marlin``: Marlin tiles under the names of AWQ, symmetric 4 bit, no zeros.

    qweight  int32 (K/16, 2N)   Marlin tiles (kernels/layout.py)
    scales   fp16 (G, N)        grouped order if G > 1, else the per-channel order

Source: autoawq 0.2.9, modules/linear/marlin.py. GPTQModel writes gemm tensors under the same label: the
shapes decide.
"""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

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
    group_limit,
    multiple_limit,
    order_limit,
    symmetry_limit,
    tiled,
)
from w4pack.kernels import layout

GROUP_SIZES = (ONE_GROUP, 64, 128)


TILES = True  # codes are Marlin tiles: layouts with `to_tiles` can be packed directly
SUFFIXES = ("qweight", "scales")


unpack = unpack_tiles
pack = pack_tiles


def grid(bits: int) -> Grid:
    """Return the grid of ``qweight``."""
    return tiled.grid("qweight", bits)


def specs(scheme: QuantScheme) -> dict[str, Header]:
    """Return dtype and shape of every tensor of a linear."""
    return tiled.specs("qweight", "scales", scheme)


def decode_params(tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme, zero_kind: str) -> GroupParams:
    """Read scales in natural order. Raises SourceError if they are missing or do not fit."""
    return tiled.decode_scales("scales", tensors, scheme)


def encode_params(params: GroupParams, scheme: QuantScheme) -> dict[str, NDArray[Any]]:
    """Write scales in the order of the kernel."""
    return tiled.encode_scales("scales", params, scheme)


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


def match(tensors: Mapping[str, Header], values: Mapping[str, NDArray[Any]] | None = None) -> Match | None:
    """Match ``qweight`` int32 (K/16, 2N) with ``scales`` (G, N) and no zeros."""
    dtype, shape = tensors.get("qweight", ("", ()))
    if dtype != "I32" or len(shape) != 2 or 0 in shape or "qzeros" in tensors or "scales" not in tensors:
        return None
    scales = tensors["scales"][1]
    if len(scales) != 2 or 0 in scales or shape[1] != 2 * scales[1] or scales[1] % layout.TILE_N:
        return None
    return Match(4, layout.TILE_K * shape[0], scales[1], scales[0])
