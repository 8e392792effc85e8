"""AWQ ``marlin``: Marlin tiles under the names of AWQ, symmetric 4 bit, no zeros.

    qweight  int32 (K/16, 2N)   Marlin tiles (kernels/layout.py)
    scales   fp16 (G, N)        grouped order if G > 1, else the per-channel order

Source: autoawq 0.2.9, modules/linear/marlin.py. GPTQModel writes gemm tensors under the same label: the
shapes decide.
"""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from w4pack.convert.core.scheme import ONE_GROUP
from w4pack.convert.core.tiles import pack_tiles, unpack_tiles
from w4pack.convert.formats import Header, Match
from w4pack.convert.formats.tiled import Tiled
from w4pack.kernels import layout

TILES = True  # codes are Marlin tiles: layouts with `to_tiles` can be packed directly
SUFFIXES = ("qweight", "scales")
_STORED = Tiled("awq marlin", "qweight", "scales", (ONE_GROUP, 64, 128), layout.TILE_K, layout.TILE_N)

unpack, pack = unpack_tiles, pack_tiles
grid, specs, limits = _STORED.grid, _STORED.specs, _STORED.limits
decode_params, encode_params = _STORED.decode_params, _STORED.encode_params


def match(tensors: Mapping[str, Header], values: Mapping[str, NDArray[Any]] | None = None) -> Match | None:
    """Match ``qweight`` int32 (K/16, 2N) with ``scales`` (G, N) and no zeros."""
    dtype, shape = tensors.get("qweight", ("", ()))
    if dtype != "I32" or len(shape) != 2 or 0 in shape or "qzeros" in tensors or "scales" not in tensors:
        return None
    scales = tensors["scales"][1]
    if len(scales) != 2 or 0 in scales or shape[1] != 2 * scales[1] or scales[1] % layout.TILE_N:
        return None
    return Match(4, layout.TILE_K * shape[0], scales[1], scales[0])
