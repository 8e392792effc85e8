"""AWQ gemv_fast, also written by llm-awq: 16-bit words of four outputs interleaved, zeros as scaled floats.

    qweight  int16 (N/4, K)   row r, word 64 b + 16 i + 8 h + m, nibble p: code of output 4 r + i and
                              input 64 b + 32 h + 8 p + m
    scales   fp16 (8 Z, N)    row j belongs to group j; unused rows 0
    qzeros   fp16 (8 Z, N)    -(scale * zero), the product rounded to fp16; unused rows 0

So a word holds four inputs that lie 8 apart, and 64 words hold 64 inputs of four outputs (autoawq 0.2.9,
modules/linear/gemv_fast.py: pack_intweight). Z as in gemv. The integer zero is rint(-qzeros / scale), exact
for every finite fp16 scale whose product did not overflow; refused where rounding it again differs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.bitpack import Words
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.errors import SourceError
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
    vector_groups,
)

GROUP_SIZES = (ONE_GROUP, 32, 64, 128)
K_BLOCK = 64
ROWS = 4  # outputs of one stored row
NIBBLE = np.uint16(15)


SUFFIXES = ("qweight", "qzeros", "scales")


def grid(bits: int) -> Grid:
    """Return the grid of ``qweight``: 64 inputs of 4 outputs are 64 words of one row."""
    return Grid("qweight", "I16", 1, K_BLOCK, K_BLOCK, ROWS, 1)


def _stored(block: NDArray[Any]) -> NDArray[np.uint16]:
    """View stored words as (n // 4, k // 64, n % 4, k % 64 // 32, k % 8)."""
    return block.view(np.uint16).reshape(block.shape[0], -1, ROWS, 2, 8)


def _canonical(words: Words) -> Words:
    """View canonical words as (n // 4, k // 64, n % 4, k % 64 // 32, k % 32 // 8)."""
    view: Words = words.reshape(-1, 2, 4, words.shape[1] // ROWS, ROWS).transpose(3, 0, 4, 1, 2)
    return view


def unpack(block: NDArray[Any], bits: int, out: Words | None = None) -> Words:
    """Turn stored words (N/4, K) into canonical words (K/8, N): nibble p of word m is nibble m of word p."""
    if out is None:
        out = np.empty((block.shape[1] // 8, block.shape[0] * ROWS), np.uint32)
    stored, canonical = _stored(block), _canonical(out)
    for p in range(4):
        fields = ((stored >> np.uint16(4 * p)) & NIBBLE).astype(np.uint32)
        word = fields[..., 0].copy()
        for m in range(1, 8):
            word |= fields[..., m] << np.uint32(4 * m)
        canonical[..., p] = word
    return out


def pack(words: Words, bits: int, out: NDArray[np.int16] | None = None) -> NDArray[np.int16]:
    """Turn canonical words (K/8, N) into stored words (N/4, K): the inverse of ``unpack``."""
    rows, width = words.shape[1] // ROWS, words.shape[0] * 8
    canonical = _canonical(words)
    made = np.empty((rows, width), np.int16)
    stored = _stored(made)
    for m in range(8):
        fields = ((canonical >> np.uint32(4 * m)) & np.uint32(15)).astype(np.uint16)
        word = fields[..., 0].copy()
        for p in range(1, 4):
            word |= fields[..., p] << np.uint16(4 * p)
        stored[..., m] = word
    if out is None:
        return made
    np.copyto(out, made)
    return out


def specs(scheme: QuantScheme) -> dict[str, Header]:
    """Return dtype and shape of every tensor of a linear."""
    cols, groups = scheme.out_features, vector_groups(scheme)
    return {
        "qweight": ("I16", grid(scheme.bits).shape(scheme.in_features, cols)),
        "qzeros": (scheme.scale_dtype, (groups, cols)),
        "scales": (scheme.scale_dtype, (groups, cols)),
    }


def decode_params(tensors: Mapping[str, NDArray[Any]], scheme: QuantScheme, zero_kind: str) -> GroupParams:
    """Read scales and recover the integer zeros. Raises SourceError where no integer gives them."""
    shapes = {suffix: header[1] for suffix, header in specs(scheme).items()}
    scales = np.ascontiguousarray(fitting(tensors, "scales", shapes["scales"])[: scheme.groups])
    zeros = None
    if not scheme.sym:
        zeros = recover_zeros(fitting(tensors, "qzeros", shapes["qzeros"])[: scheme.groups], scales)
    return GroupParams(scales, zeros, None)


def recover_zeros(scaled: NDArray[np.float16], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Return rint(-scaled / scales), 0 where the scale is 0. Raises SourceError where no zero fits."""
    wide = scales.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = np.rint(-scaled.astype(np.float64) / np.where(wide == 0, 1.0, wide))
        zeros: NDArray[np.uint8] = np.clip(np.nan_to_num(ratio), 0, 15).astype(np.uint8)
        again = scale_zeros(zeros, scales)
    bad = np.argwhere((again != scaled) | ~np.isfinite(scaled))
    if bad.size:
        group, column = (int(i) for i in bad[0])
        raise SourceError(
            "`qzeros` is not a zero point times its scale",
            code="zero-recovery",
            where="qzeros",
            expected="-(scale * z) rounded to float16, with an integer z from 0 to 15",
            found=f"{scaled[group, column]} at group {group}, column {column}, where the scale is"
            f" {scales[group, column]} ({len(bad)} such places)",
        )
    return zeros


def scale_zeros(zeros: NDArray[np.uint8], scales: NDArray[np.float16]) -> NDArray[np.float16]:
    """Return -(scale * zero): the product in fp32, rounded once to fp16."""
    with np.errstate(over="ignore"):
        return -(scales.astype(np.float32) * zeros.astype(np.float32)).astype(np.float16)


def encode_params(params: GroupParams, scheme: QuantScheme) -> dict[str, NDArray[Any]]:
    """Write scales and scaled zeros, the midpoint's for a symmetric scheme; unused groups are +0.0."""
    zeros = params.zeros
    if zeros is None or scheme.sym:
        zeros = np.full(params.scales.shape, scheme.midpoint, np.uint8)
    shape = vector_groups(scheme), scheme.out_features
    scales, scaled = np.zeros(shape, np.float16), np.zeros(shape, np.float16)
    scales[: scheme.groups] = params.scales
    scaled[: scheme.groups] = scale_zeros(zeros, params.scales)
    return {"qzeros": scaled, "scales": scales}


def limits(scheme: QuantScheme) -> Obstacle | None:
    """Return what keeps the scheme out of an AWQ gemv_fast file."""
    dtype = None
    if scheme.scale_dtype != "F16":
        dtype = Obstacle("awq gemv_fast scales are float16", "F16", scheme.scale_dtype)
    return first(
        bits_limit("awq gemv_fast", scheme, (4,)),
        order_limit("awq gemv_fast", scheme),
        dtype,
        group_limit("awq gemv_fast", scheme, GROUP_SIZES),
        division_limit("awq gemv_fast", scheme),
        multiple_limit("awq gemv_fast", "in_features", scheme.in_features, K_BLOCK),
        multiple_limit("awq gemv_fast", "out_features", scheme.out_features, ROWS),
    )


def match(tensors: Mapping[str, Header], values: Mapping[str, NDArray[Any]] | None = None) -> Match | None:
    """Match ``qweight`` int16 (N/4, K) with ``qzeros`` fp16. ``groups`` is 0: the file pads them."""
    dtype, shape = tensors.get("qweight", ("", ()))
    if dtype != "I16" or len(shape) != 2 or 0 in shape:
        return None
    scales, zeros = (tensors.get(suffix, ("", ())) for suffix in ("scales", "qzeros"))
    if zeros[0] != "F16" or zeros != scales or len(zeros[1]) != 2 or zeros[1][1] != ROWS * shape[0]:
        return None
    return Match(4, shape[1], ROWS * shape[0], 0)
