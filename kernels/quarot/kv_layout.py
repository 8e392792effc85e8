"""The pages of the quantized KV cache: shapes, bytes, and which settings there are.

A page holds 64 tokens of one layer, K and V, for every KV head:

    codes   uint8    (pages, 2, kv_heads, 64, row bytes)    [:, 0] is K after R3, [:, 1] is V
    params  float16  (pages, 2, kv_heads, 64, 2)            scale s, zero z (an integer)

One row is one token of one head: ``head_dim`` codes, at 4 bit two to a byte (the even channel in the low
nibble), at 8 bit one. A value is ``(code - z) * s``. Token ``slot`` of a sequence lies in row ``slot % 64``
of page ``block_table[sequence, slot // 64]``. Parameters are halves, so a head and token costs
``head_dim * bits / 8 + 4`` bytes for each of K and V: at 128 channels 3.76 times less than fp16.
"""

from typing import TYPE_CHECKING

from w4pack.convert.core.scheme import RUN_CODES
from w4pack.convert.dialects.online import HEAD_SIZES
from w4pack.kernels.checks import require

if TYPE_CHECKING:
    import torch

PAGE = 64  # tokens
BITS = RUN_CODES
HEAD_DIMS = HEAD_SIZES
PARAM_BYTES = 4  # scale and zero, of one head and token


def row_bytes(head_dim: int, bits: int) -> int:
    """Return the bytes of the codes of one head and token."""
    return head_dim * bits // 8


def token_bytes(kv_heads: int, head_dim: int, bits: int) -> int:
    """Return the bytes of one token in one layer, K and V, codes and parameters. Query heads do not count."""
    return 2 * kv_heads * (row_bytes(head_dim, bits) + PARAM_BYTES)


def pages_of(tokens: int) -> int:
    """Return how many pages a sequence of so many tokens takes."""
    return -(-tokens // PAGE)


def setting(head_dim: int, bits: int) -> None:
    """Check head size and code width.

    Raises:
        UsageError: one of them has no kernel; names the value and what there is.
    """
    require(bits in BITS, "the width of the cache's codes is not supported", "bits", "4 or 8", bits)
    known = ", ".join(map(str, HEAD_DIMS))
    require(head_dim in HEAD_DIMS, "the head size is not supported", "head_dim", known, head_dim)


def empty(
    pages: int, kv_heads: int, head_dim: int, bits: int, device: "torch.device | str"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return (codes, params) of ``pages`` pages for one layer; the content is undefined until it is written.

    Raises:
        UsageError: the head size or the width is not supported.
    """
    import torch

    setting(head_dim, bits)
    codes = torch.empty(
        (pages, 2, kv_heads, PAGE, row_bytes(head_dim, bits)), dtype=torch.uint8, device=device
    )
    params = torch.empty((pages, 2, kv_heads, PAGE, 2), dtype=torch.float16, device=device)
    return codes, params
