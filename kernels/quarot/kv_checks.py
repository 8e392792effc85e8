"""What the arguments of the cache's operators must be; every rule fails before anything is launched."""

import math
from typing import TYPE_CHECKING

import torch

from w4pack.kernels.checks import VECTOR, has_dtype, has_shape, require, same_device, starts
from w4pack.kernels.quarot import kv_layout
from w4pack.kernels.quarot.calls import Append, Attention
from w4pack.kernels.quarot.transform import Transform

if TYPE_CHECKING:
    from torch import Tensor

MODEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CARD_DTYPES = MODEL_DTYPES[:2]  # the kernels' own
MOST_GRID = 65535  # blocks of a grid's second and third axis


def append(given: Append) -> None:
    """Check the arguments of ``kv_append``; on a CPU also that slots and pages exist.

    Raises:
        UsageError: one does not fit.
    """
    k, v, codes, params, block_table, start, transform, clip_k, clip_v, bits, guide = given
    _states(k, "k")
    _states(v, "v")
    has_dtype(v, "v", (k.dtype,), 4)
    has_shape(v, "v", tuple(k.shape))
    _cache(codes, params, k.shape[1], k.shape[3], bits, k)
    _table(block_table, start, "start", k)
    _transform(transform, k.shape[3])
    if guide is not None:
        has_dtype(guide, "guide", (torch.float32,), 3)
        has_shape(guide, "guide", (2, k.shape[1], k.shape[3]))
        require(guide.is_contiguous(), "guide is not contiguous", "guide", "contiguous", guide.stride())
        same_device("guide", guide, "k and q", k)
    for name, clip in (("clip_k", clip_k), ("clip_v", clip_v)):
        require(0 < clip <= 1, "the clip ratio is out of range", name, "above 0, at most 1", clip)
    if not k.is_cuda and k.numel():
        _values(block_table, start, start + k.shape[2], codes.shape[0], "start")


def attention(given: Attention) -> None:
    """Check the arguments of ``kv_attention``; on a CPU also that lengths and pages exist.

    Raises:
        UsageError: one does not fit.
    """
    q, codes, params, block_table, lengths, first, scale, window, softcap, transform, bits = given
    _states(q, "q")
    require(codes.dim() == 5, "codes has the wrong number of dimensions", "codes", 5, codes.dim())
    kv_heads = codes.shape[2]
    whole = kv_heads > 0 and q.shape[1] % kv_heads == 0 and q.shape[1] > 0
    require(whole, "query heads do not divide over the cache's", "q", f"a multiple of {kv_heads}", q.shape[1])
    _cache(codes, params, kv_heads, q.shape[3], bits, q)
    _table(block_table, lengths, "lengths", q)
    if first is not None:
        _slots(first, "first", q)
    _transform(transform, q.shape[3])
    require(math.isfinite(scale) and scale > 0, "the scale is out of range", "scale", "above 0", scale)
    require(window >= 0, "the window is negative", "window", "0 (none) or more tokens", window)
    fine = math.isfinite(softcap) and softcap >= 0
    require(fine, "the soft cap is out of range", "softcap", "0 (none) or more", softcap)
    if not q.is_cuda and q.numel():
        _values(block_table, lengths - q.shape[2], lengths, codes.shape[0], "lengths")


def _states(x: "Tensor", name: str) -> None:
    has_dtype(x, name, CARD_DTYPES if x.is_cuda else MODEL_DTYPES, 4)
    if x.is_cuda:
        fits = x.stride(3) == 1 and all(s % 8 == 0 for s in x.stride()[:3]) and x.data_ptr() % 16 == 0
        wanted = "channels side by side, other strides multiples of 8, a start at 16 bytes"
        require(fits, f"{name} has a stride that is not supported", name, wanted, x.stride())
        require(x.shape[0] <= MOST_GRID, "the batch is too large", name, MOST_GRID, x.shape[0])


def _cache(codes: "Tensor", params: "Tensor", heads: int, head_dim: int, bits: int, x: "Tensor") -> None:
    kv_layout.setting(head_dim, bits)
    has_dtype(codes, "codes", (torch.uint8,), 5)
    has_dtype(params, "params", (torch.float16,), 5)
    pages = codes.shape[0]
    has_shape(codes, "codes", (pages, 2, heads, kv_layout.PAGE, kv_layout.row_bytes(head_dim, bits)))
    has_shape(params, "params", (pages, 2, heads, kv_layout.PAGE, 2))
    for name, tensor in (("codes", codes), ("params", params)):
        require(tensor.is_contiguous(), f"{name} is not contiguous", name, "contiguous", tensor.stride())
        same_device(name, tensor, "k and q", x)
        starts(tensor, name, VECTOR)


def _table(block_table: "Tensor", slots: "Tensor", name: str, x: "Tensor") -> None:
    has_dtype(block_table, "block_table", (torch.int32,), 2)
    pages = block_table.shape[1]
    has_shape(block_table, "block_table", (x.shape[0], pages))
    require(
        block_table.is_contiguous(), "block_table is not contiguous", "block_table", "contiguous", "strided"
    )
    same_device("block_table", block_table, "k and q", x)
    require(pages > 0 or x.numel() == 0, "a sequence has no pages", "block_table", "at least one", pages)
    _slots(slots, name, x)


def _slots(slots: "Tensor", name: str, x: "Tensor") -> None:
    """Check a number for each sequence."""
    has_dtype(slots, name, (torch.int32,), 1)
    has_shape(slots, name, (x.shape[0],))
    require(slots.is_contiguous(), f"{name} is not contiguous", name, "contiguous", slots.stride())
    same_device(name, slots, "k and q", x)


def _transform(key: str, head_dim: int) -> None:
    if key:
        order = Transform.of(key).order
        require(order == head_dim, "the transform is of another size", "transform", head_dim, order)


def _values(block_table: "Tensor", begin: "Tensor", end: "Tensor", pages: int, name: str) -> None:
    """Check what only a CPU can look at without waiting: slots inside the table, pages inside the cache."""
    room = block_table.shape[1] * kv_layout.PAGE
    low, high = int(begin.min()), int(end.max())
    require(low >= 0 and high <= room, "slots lie outside the block table", name, f"0 to {room}", (low, high))
    last = kv_layout.pages_of(high)
    for row in range(block_table.shape[0]):
        used = block_table[
            row, int(begin[row]) // kv_layout.PAGE : min(last, kv_layout.pages_of(int(end[row])))
        ]
        fine = used.numel() == 0 or (int(used.min()) >= 0 and int(used.max()) < pages)
        require(fine, "a page lies outside the cache", "block_table", f"0 to {pages - 1}", used.tolist()[:4])
