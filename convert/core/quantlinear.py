"""``QuantLinear``: the one value all formats share.

Formats never meet each other; each one decodes to this and encodes from it. The codes are kept packed, along
K, natural row order, low bits first (word ``r`` of column ``n`` holds rows ``32/bits * r ...``): the same
integers as unpacked codes at a half (4 bit) of the memory, and the form most checkpoints already use, so that
a repack is a few word operations per word.

    W[n, k] = (codes[k, n] - zeros[g, n]) * scales[g, n],   g = group[k], or k // group_size

rounded once to the dtype of the scales. Work goes block by block: a *block* is the words of some rows and
columns; ``GroupParams`` are small and handled whole.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.scheme import QuantScheme


@dataclass(frozen=True, slots=True, eq=False)
class GroupParams:
    """Scales, zero points and group map of one linear, in natural order.

    scales  (G, N)  float16, uint16 (the bits of bfloat16) or float32, by ``QuantScheme.scale_dtype``
    zeros   (G, N)  uint8, or None: symmetric
    group   (K,)    int32, or None: row k belongs to group k // group_size
    """

    scales: NDArray[Any]
    zeros: NDArray[np.uint8] | None
    group: NDArray[np.int32] | None


@dataclass(frozen=True, slots=True, eq=False)
class QuantLinear:
    """One whole quantized linear, independent of any file format.

    words  uint32 (ceil(K * bits / 32), N): codes packed along K; bits past row K-1 are 0
    """

    scheme: QuantScheme
    words: NDArray[np.uint32]
    params: GroupParams
