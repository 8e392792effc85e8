"""A sample of a tensor: a short digest of bytes from its middle, by which it is told from others.

What stands in a manifest beside the hash of the whole. To compare it, half a kilobyte is read and not
gigabytes: tensors that were exchanged are found as a model is loaded, also in files that were cut otherwise
since. The middle, because tables begin and end with rows that may be filled with zeros.
"""

import hashlib
from collections.abc import Callable

SIZE = 512  # bytes: about a thousand codes, or 256 scales
DIGITS = 16  # of the digest


def digest(read: Callable[[int, int], bytes], offset: int, nbytes: int) -> str:
    """Return the digest of the sample of ``nbytes`` bytes from ``offset``; ``read(offset, length)`` reads."""
    length = min(nbytes, SIZE)
    return hashlib.sha256(read(offset + (nbytes - length) // 2, length)).hexdigest()[:DIGITS]
