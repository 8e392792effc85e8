"""What two layouts of the first Marlin kernels share: tiles, one scale tensor, symmetric 4 bit, no padding.

codes   int32 (K/16, 2N)   Marlin tiles (kernels/layout.py)
scales  fp16 (G, N)        grouped order if G > 1, else the per-channel order
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.formats import (
    Grid,
    Header,
    Obstacle,
    bits_limit,
    division_limit,
    first,
    fitting,
    group_limit,
    multiple_limit,
    order_limit,
    symmetry_limit,
)
from w4pack.kernels import layout


@dataclass(frozen=True, slots=True)
class Tiled:
    """One such layout.

    name    in messages
    groups  the group sizes its kernel takes
    unit_k, unit_n  what in_features and out_features are multiples of
    """

    name: str
    codes: str
    scales: str
    groups: tuple[int, ...]
    unit_k: int
    unit_n: int

    def grid(self, bits: int) -> Grid:
        """Return the grid of the codes: tiles of 16 x 64."""
        return Grid(self.codes, "I32", 0, layout.TILE_K, 1, layout.TILE_N, layout.TILE_N * bits // 2)

    def specs(self, scheme: QuantScheme) -> dict[str, Header]:
        """Return dtype and shape of every tensor of a linear."""
        rows, cols = scheme.in_features, scheme.out_features
        return {
            self.codes: ("I32", self.grid(scheme.bits).shape(rows, cols)),
            self.scales: (scheme.scale_dtype, (scheme.groups, cols)),
        }

    def decode_params(
        self, tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme, zero_kind: str
    ) -> GroupParams:
        """Read scales in natural order. Raises SourceError if they are missing or do not fit."""
        stored = fitting(tensors, self.scales, (scheme.groups, scheme.out_features))
        order = layout.scale_order(scheme.out_features, scheme.groups)
        return GroupParams(stored[:, layout.inverse_order(order)], None, None)

    def encode_params(self, params: GroupParams, scheme: QuantScheme) -> dict[str, NDArray[Any]]:
        """Write scales in the order of the kernel."""
        return {self.scales: params.scales[:, layout.scale_order(scheme.out_features, scheme.groups)]}

    def limits(self, scheme: QuantScheme) -> Obstacle | None:
        """Return what keeps the scheme out of such a file."""
        return first(
            bits_limit(self.name, scheme, (4,)),
            symmetry_limit(self.name, scheme),
            order_limit(self.name, scheme),
            group_limit(self.name, scheme, self.groups),
            division_limit(self.name, scheme),
            multiple_limit(self.name, "in_features", scheme.in_features, self.unit_k),
            multiple_limit(self.name, "out_features", scheme.out_features, self.unit_n),
        )
