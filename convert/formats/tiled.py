"""What two layouts of the first Marlin kernels share: tiles, one scale tensor, symmetric 4 bit, no padding.

codes   int32 (K/16, 2N)   Marlin tiles (kernels/layout.py)
scales  fp16 (G, N)        grouped order if G > 1, else the per-channel order
"""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.formats import Grid, Header, fitting
from w4pack.kernels import layout


def grid(codes: str, bits: int) -> Grid:
    """Return the grid of tensor ``codes``: tiles of 16 x 64."""
    return Grid(codes, "I32", 0, layout.TILE_K, 1, layout.TILE_N, layout.TILE_N * bits // 2)


def specs(codes: str, scales: str, scheme: QuantScheme) -> dict[str, Header]:
    """Return dtype and shape of every tensor of a linear."""
    rows, cols = scheme.in_features, scheme.out_features
    return {
        codes: ("I32", grid(codes, scheme.bits).shape(rows, cols)),
        scales: (scheme.scale_dtype, (scheme.groups, cols)),
    }


def decode_scales(suffix: str, tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme) -> GroupParams:
    """Read scales in natural order. Raises SourceError if they are missing or do not fit."""
    stored = fitting(tensors, suffix, (scheme.groups, scheme.out_features))
    order = layout.scale_order(scheme.out_features, scheme.groups)
    return GroupParams(stored[:, layout.inverse_order(order)], None, None)


def encode_scales(suffix: str, params: GroupParams, scheme: QuantScheme) -> dict[str, NDArray[Any]]:
    """Write scales in the order of the kernel."""
    return {suffix: params.scales[:, layout.scale_order(scheme.out_features, scheme.groups)]}
