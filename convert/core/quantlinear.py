"""The canonical form of a quantized linear: what all formats share.

Formats never meet each other; each one decodes to this form and encodes from it. It has three parts: the
scheme (``QuantScheme``), the codes as words, and the group parameters (``GroupParams``).

The codes are kept packed, uint32 (ceil(K * bits / 32), N): along K, natural row order, low bits first (word
``r`` of column ``n`` holds rows ``32/bits * r ...``), bits past row K-1 zero. Those are the same integers as
unpacked codes at a half of the memory, in the form that most checkpoints already use, so that a repack is a
few word operations a word.

    W[n, k] = (codes[k, n] - zeros[g, n]) * scales[g, n],   g = group[k], or k // group_size

rounded once to the dtype of the scales. Codes go block by block: a *block* is the words of some rows and
columns; group parameters are small and handled whole.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
