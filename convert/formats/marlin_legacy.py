"""Legacy Marlin ``B`` and ``s``: the first Marlin kernel's files, symmetric 4 bit, group 128 or -1.

    B  int32 (K/16, 2N)   Marlin tiles (kernels/layout.py)
    s  fp16 (G, N)        grouped order if G > 1; the per-channel order for one group, also if the config says
                          128 and K is 128 (IST-DASLab/marlin 2f6d7c1: Layer.pack)

The bias is in natural order. K is a multiple of 128, N of 256.
"""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from w4pack.convert.core.scheme import ONE_GROUP
from w4pack.convert.core.tiles import pack_tiles, unpack_tiles
from w4pack.convert.formats import Header, Match, header_of, mismatch
from w4pack.convert.formats.tiled import Tiled
from w4pack.kernels import layout

K_UNIT, N_UNIT = 128, 256  # thread blocks of that kernel

TILES = True  # codes are Marlin tiles: layouts with `to_tiles` can be packed directly
SUFFIXES = ("B", "s")
_STORED = Tiled("marlin-legacy", "B", "s", (ONE_GROUP, 128), K_UNIT, N_UNIT)

unpack, pack = unpack_tiles, pack_tiles
grid, specs, limits = _STORED.grid, _STORED.specs, _STORED.limits
decode_params, encode_params = _STORED.decode_params, _STORED.encode_params


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
