"""AWQ gemv: one row of words per output, packed along K; zeros and scales padded to whole vectors of groups.

    qweight  int32 (N, K/8)   the transpose of the canonical words, word for word
    qzeros   int32 (N, Z)     low bits first along the groups, true zero points; unused fields 0
    scales   (N, 8 Z)         column j belongs to group j; unused columns 0

8 Z is ``vector_groups``. 4 bit only.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.bitpack import pack_axis, unpack_axis
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
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
    transposed,
    vector_groups,
)

GROUP_SIZES = (ONE_GROUP, 32, 64, 128)


SUFFIXES = ("qweight", "qzeros", "scales")


unpack, pack = transposed.unpack, transposed.pack


def grid(bits: int) -> Grid:
    """Return the grid of ``qweight``: N over the rows, one word for 32/bits of K."""
    return transposed.grid("qweight", bits)


def specs(scheme: QuantScheme) -> dict[str, Header]:
    """Return dtype and shape of every tensor of a linear."""
    rows, cols, groups = scheme.in_features, scheme.out_features, vector_groups(scheme)
    return {
        "qweight": ("I32", grid(scheme.bits).shape(rows, cols)),
        "qzeros": ("I32", (cols, groups // 8)),
        "scales": (scheme.scale_dtype, (cols, groups)),
    }


def decode_params(tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme, zero_kind: str) -> GroupParams:
    """Read zeros and scales without the unused groups. Raises SourceError for tensors that do not fit."""
    shapes = {suffix: header[1] for suffix, header in specs(scheme).items()}
    scales = fitting(tensors, "scales", shapes["scales"])[:, : scheme.groups]
    zeros = None
    if not scheme.sym:
        words = fitting(tensors, "qzeros", shapes["qzeros"])
        zeros = np.ascontiguousarray(unpack_axis(words, scheme.bits, 1, scheme.groups).T)
    return GroupParams(np.ascontiguousarray(scales.T), zeros, None)


def encode_params(params: GroupParams, scheme: QuantScheme) -> dict[str, NDArray[Any]]:
    """Write zeros, the midpoint for a symmetric scheme, and scales; unused groups are 0."""
    shape = scheme.out_features, vector_groups(scheme)
    zeros, scales = np.zeros(shape, np.uint8), np.zeros(shape, params.scales.dtype)
    symmetric = scheme.sym or params.zeros is None
    zeros[:, : scheme.groups] = scheme.midpoint if symmetric or params.zeros is None else params.zeros.T
    scales[:, : scheme.groups] = params.scales.T
    return {"qzeros": pack_axis(zeros, scheme.bits, 1).view(np.int32), "scales": scales}


def limits(scheme: QuantScheme) -> Obstacle | None:
    """Return what keeps the scheme out of an AWQ gemv file."""
    return first(
        bits_limit("awq gemv", scheme, (4,)),
        order_limit("awq gemv", scheme),
        group_limit("awq gemv", scheme, GROUP_SIZES),
        division_limit("awq gemv", scheme),
        multiple_limit("awq gemv", "in_features", scheme.in_features, 8),
    )


def match(tensors: Mapping[str, Header], values: Mapping[str, NDArray[Any]] | None = None) -> Match | None:
    """Match ``qweight`` (N, K/8) int32 with ``scales`` (N, 8 Z) and ``qzeros`` (N, Z).

    GPTQ with one row of words per group (g = 8) has the same shapes; only a ``g_idx`` tells it apart.
    ``groups`` is 0: the file pads them, the config has the number.
    """
    dtype, shape = tensors.get("qweight", ("", ()))
    if dtype != "I32" or len(shape) != 2 or 0 in shape or "g_idx" in tensors:
        return None
    scales, zeros = (tensors.get(suffix, ("", ()))[1] for suffix in ("scales", "qzeros"))
    if len(scales) != 2 or len(zeros) != 2:
        return None
    if scales[0] != shape[0] or zeros[0] != shape[0] or scales[1] != 8 * zeros[1]:
        return None
    return Match(4, 8 * shape[1], shape[0], 0)
