"""What two layouts share that hold the codes with N over the rows, one word for 32/bits of K."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.bitpack import Words, transpose_words
from w4pack.convert.formats import Grid


def grid(codes: str, bits: int) -> Grid:
    """Return the grid of tensor ``codes``."""
    return Grid(codes, "I32", 1, 32 // bits, 1, 1, 1)


def unpack(block: NDArray[Any], bits: int, out: Words | None = None) -> Words:
    """Transpose stored words (N, R) to canonical words (R, N)."""
    if out is None:
        out = np.empty(block.shape[::-1], np.uint32)
    return transpose_words(block, out)


def pack(words: Words, bits: int, out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    """Transpose canonical words (R, N) to stored words (N, R)."""
    if out is None:
        out = np.empty(words.shape[::-1], np.int32)
    return transpose_words(words, out)
