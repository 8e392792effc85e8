"""Tensor dtypes by their safetensors tag, and the exact float conversions the converter needs.

numpy has no bfloat16, so such tensors are carried as their 16-bit patterns (``uint16``) beside the tag
``BF16``. Every conversion here is exact or rounds once, to nearest even.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# tag -> (bits per element, numpy dtype that carries the bytes). Types without a numpy twin travel as raw
# bytes.
DTYPES: dict[str, tuple[int, str]] = {
    "BOOL": (8, "<u1"),
    "U8": (8, "<u1"),
    "I8": (8, "<i1"),
    "F8_E4M3": (8, "<u1"),
    "F8_E5M2": (8, "<u1"),
    "F8_E8M0": (8, "<u1"),
    "F8_E4M3FNUZ": (8, "<u1"),
    "F8_E5M2FNUZ": (8, "<u1"),
    "I16": (16, "<i2"),
    "U16": (16, "<u2"),
    "F16": (16, "<f2"),
    "BF16": (16, "<u2"),
    "I32": (32, "<i4"),
    "U32": (32, "<u4"),
    "F32": (32, "<f4"),
    "I64": (64, "<i8"),
    "U64": (64, "<u8"),
    "F64": (64, "<f8"),
    "C64": (64, "<c8"),
}

FLOAT_TAGS = ("F16", "BF16", "F32")
TORCH_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
TAG_OF_NAME = {name: tag for tag, name in TORCH_NAMES.items()}
FLUSHED_F16 = 2.0**-25  # the largest magnitude that rounds to 0 in float16 (half to even)
EXPONENTS = {"F16": np.uint16(0x7C00), "BF16": np.uint16(0x7F80)}  # all ones: NaN or infinity


def numpy_dtype(tag: str) -> np.dtype[Any]:
    """Return the numpy dtype that carries the bytes of a tensor tagged ``tag``."""
    return np.dtype(DTYPES[tag][1])


def to_f32(values: NDArray[Any], tag: str) -> NDArray[np.float32]:
    """Widen to float32. Exact for F16, BF16 and F32."""
    if tag == "BF16":
        wide: NDArray[np.float32] = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return values.astype(np.float32)


def from_f32(values: NDArray[np.float32], tag: str) -> NDArray[Any]:
    """Round float32 once, to nearest even, into the carrier of ``tag``. Overflow gives infinity (IEEE)."""
    if tag == "F32":
        return values.astype(np.float32)
    if tag == "F16":
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    made: NDArray[np.uint16] = np.where(nan, np.uint32(0x7FC0), rounded).astype(np.uint16)
    return made


def nonfinite(values: NDArray[Any], tag: str) -> NDArray[np.bool_]:
    """Mark NaN and infinity. Works on the bits, so it never warns."""
    if tag not in EXPONENTS:
        marks: NDArray[np.bool_] = ~np.isfinite(values)
    else:
        marks = (values.view(np.uint16) & EXPONENTS[tag]) == EXPONENTS[tag]
    return marks
