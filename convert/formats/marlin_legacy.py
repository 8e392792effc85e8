"""Legacy Marlin ``B`` and ``s``: the first Marlin kernel's files, symmetric 4 bit, group 128 or -1.

    B  int32 (K/16, 2N)   Marlin tiles (kernels/layout.py)
    s  fp16 (G, N)        grouped order if G > 1; the per-channel order for one group, also if the config says
                          128 and K is 128 (IST-DASLab/marlin 2f6d7c1: Layer.pack)

The bias is in natural order. K is a multiple of 128, N of 256.
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
    header_of,
    mismatch,
    multiple_limit,
    order_limit,
    symmetry_limit,
    tiled,
)
from w4pack.kernels import layout

GROUP_SIZES = (ONE_GROUP, 128)
K_UNIT, N_UNIT = 128, 256  # thread blocks of that kernel


TILES = True  # codes are Marlin tiles: layouts with `to_tiles` can be packed directly
SUFFIXES = ("B", "s")


unpack = unpack_tiles
pack = pack_tiles


def grid(bits: int) -> Grid:
    """Return the grid of ``B``."""
    return tiled.grid("B", bits)


def specs(scheme: QuantScheme) -> dict[str, Header]:
    """Return dtype and shape of every tensor of a linear."""
    return tiled.specs("B", "s", scheme)


def decode_params(tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme, zero_kind: str) -> GroupParams:
    """Read scales in natural order. Raises SourceError if they are missing or do not fit."""
    return tiled.decode_scales("s", tensors, scheme)


def encode_params(params: GroupParams, scheme: QuantScheme) -> dict[str, NDArray[Any]]:
    """Write scales in the order of the kernel."""
    return tiled.encode_scales("s", params, scheme)


def limits(scheme: QuantScheme) -> Obstacle | None:
    """Return what keeps the scheme out of a legacy Marlin file."""
    return first(
        bits_limit("marlin-legacy", scheme, (4,)),
        symmetry_limit("marlin-legacy", scheme),
        order_limit("marlin-legacy", scheme),
        group_limit("marlin-legacy", scheme, GROUP_SIZES),
        division_limit("marlin-legacy", scheme),
        multiple_limit("marlin-legacy", "in_features", scheme.in_features, K_UNIT),
        multiple_limit("marlin-legacy", "out_features", scheme.out_features, N_UNIT),
    )


def match(tensors: Mapping[str, Header], values: Mapping[str, NDArray[Any]] | None = None) -> Match | None:
    """Match ``B`` int32 (K/16, 2N) with ``s`` (G, N). QQQ has a ``B`` too, but ``s_channel`` beside it."""
    dtype, shape = tensors.get("B", ("", ()))
    if dtype != "I32" or len(shape) != 2 or 0 in shape or "s_channel" in tensors:
        return None
    scales = header_of(tensors, "s")[1]
    if len(scales) != 2 or 0 in scales or shape[1] != 2 * scales[1]:
        raise mismatch("B", f"[in_features / 16, 2 * {scales[-1] if scales else 0}]", f"{list(shape)}")
    if scales[1] % layout.TILE_N:
        raise mismatch("s", f"columns in units of {layout.TILE_N}", f"{list(scales)}")
    return Match(4, layout.TILE_K * shape[0], scales[1], scales[0])
