"""The ends of a tensor: a short digest of its first and last bytes, by which it is told from others.

What stands in a manifest beside the hash of the whole. To compare it, two pages are read and not gigabytes:
tensors that were exchanged are found before any is loaded, also in files that were cut otherwise since.
"""

import hashlib
from collections.abc import Callable

PAGE = 4096  # bytes of either end
DIGITS = 16  # of the digest


def digest(read: Callable[[int, int], bytes], offset: int, nbytes: int) -> str:
    """Return the digest of the ends of ``nbytes`` bytes from ``offset``; ``read(offset, length)`` reads."""
    sha = hashlib.sha256(read(offset, min(nbytes, PAGE)))
    if nbytes > PAGE:
        start = max(PAGE, nbytes - PAGE)
        sha.update(read(offset + start, nbytes - start))
    return sha.hexdigest()[:DIGITS]
