"""Codes to weights: the one rounding rule, for whole linears and for blocks.

    w[k, n] = (q[k, n] - z[g, n]) * s[g, n],   g = group[k], or k // group_size

The difference is an integer of at most 255, so the product with a 16-bit scale is exact in float32, and that
with a float32 scale in float64; it is then rounded once, to nearest even, to the wanted dtype. Going through
the dtype of the scales first would round twice.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.dtypes import from_f32, to_f32
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme


def dequantize(
    codes: NDArray[np.uint8], params: GroupParams, scheme: QuantScheme, tag: str, k0: int = 0
) -> NDArray[Any]:
    """Return the weights (rows, N) of rows k0, k0 + 1, ... in the carrier of ``tag``, F16, BF16 or F32.

    codes (rows, N); scales and zeros (G, N) with the same columns. Overflow of the target gives infinity.
    A checkpoint stores the transpose, (out_features, in_features).
    """
    group = rows_to_groups(params, scheme, k0, codes.shape[0])
    steps = codes.astype(np.int16) - _zeros(params, scheme, group)
    if scheme.scale_dtype == "F32":
        return from_f64(steps * params.scales.astype(np.float64)[group], tag)
    # uint16 scales are bits of bfloat16; the products below overflow float32 only where bfloat16 does too
    with np.errstate(over="ignore"):
        product = np.multiply(steps, to_f32(params.scales, scheme.scale_dtype)[group], dtype=np.float32)
    return from_f32(product, tag)


def rows_to_groups(params: GroupParams, scheme: QuantScheme, k0: int, rows: int) -> NDArray[np.intp]:
    """Return the group of rows k0 .. k0 + rows - 1."""
    if params.group is not None:
        return params.group[k0 : k0 + rows].astype(np.intp)
    if scheme.group_size == ONE_GROUP:
        return np.zeros(rows, np.intp)
    return np.arange(k0, k0 + rows, dtype=np.intp) // scheme.group_size


def _zeros(params: GroupParams, scheme: QuantScheme, group: NDArray[np.intp]) -> NDArray[np.int16]:
    if params.zeros is None:
        return np.array(scheme.midpoint, np.int16)
    return params.zeros.astype(np.int16)[group]


def from_f64(values: NDArray[np.float64], tag: str) -> NDArray[Any]:
    """Round float64 once, to nearest even, into the carrier of ``tag``. Overflow gives infinity."""
    with np.errstate(over="ignore", under="ignore"):
        if tag != "BF16":
            return values.astype(np.float16 if tag == "F16" else np.float32)
        # Two roundings equal one if the first one goes to odd: cut towards zero, and mark what was cut off in
        # the last bit, which bfloat16 does not have.
        near = values.astype(np.float32)
        bits = near.view(np.uint32).copy()
        exact = near.astype(np.float64)
        bits[np.abs(exact) > np.abs(values)] -= np.uint32(1)
        bits[exact != values] |= np.uint32(1)
    return from_f32(bits.view(np.float32), tag)
