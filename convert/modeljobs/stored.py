"""One quantized linear in a layout's form, and the weights that such a form stands for."""

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core import bitpack
from w4pack.convert.core.dequant import dequantize
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.jobs.work import Packer, pack_words


def encoded(
    layout: ModuleType,
    words: NDArray[np.uint32],
    params: GroupParams,
    scheme: QuantScheme,
    packer: Packer | None = None,
) -> dict[str, NDArray[Any]]:
    """Return every tensor of a linear in a layout's form, padded where the layout pads."""
    grid = layout.grid(scheme.bits)
    pad_params = getattr(layout, "pad_params", None)
    if pad_params is not None:
        words = _padded(words, pad_params(params, scheme)[1], scheme, layout)
    packed = pack_words(layout, words, scheme.bits, packer)
    _, shape = layout.specs(scheme)[grid.suffix]
    tensors: dict[str, NDArray[Any]] = {grid.suffix: np.ascontiguousarray(packed[: shape[0], : shape[1]])}
    tensors.update(layout.encode_params(params, scheme))
    return tensors


def _padded(
    words: NDArray[np.uint32], zeros: NDArray[np.uint8], scheme: QuantScheme, layout: Any
) -> NDArray[np.uint32]:
    """Pad codes to whole tiles: every code of the padding is its group's zero point."""
    rows, columns = layout.stored_size(scheme.in_features), layout.stored_size(scheme.out_features)
    if (rows, columns) == (scheme.in_features, scheme.out_features):
        return words
    size = scheme.in_features if scheme.group_size == -1 else scheme.group_size
    group = np.minimum(np.arange(rows) // size, zeros.shape[0] - 1)
    codes = zeros[group][:, :columns].copy()
    real = bitpack.unpack_rows(words, scheme.bits, scheme.in_features)
    codes[: scheme.in_features, : scheme.out_features] = real
    return bitpack.pack_rows(codes, scheme.bits)


def decoded(layout: Any, tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme) -> NDArray[np.float32]:
    """Return the weights (K, N) float32 of a linear in a layout's form: exact products."""
    grid = layout.grid(scheme.bits)
    words = layout.unpack(tensors[grid.suffix], scheme.bits)
    codes = bitpack.unpack_rows(words, scheme.bits, scheme.in_features)[:, : scheme.out_features]
    kind = "v1" if scheme.sym else "v2"  # as ``encode_params`` writes them
    params: GroupParams = layout.decode_params(tensors, scheme, kind)
    params = replace(params, group=None)
    weights: NDArray[np.float32] = dequantize(codes, params, scheme, "F32")
    return weights
