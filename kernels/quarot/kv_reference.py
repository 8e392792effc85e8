"""The cache's operators in PyTorch: what the kernels must give, and what runs on a CPU; fp32 throughout.

What codes mean is defined once, in ``convert.quantize.activations``; here is how they lie in pages.
"""

from typing import TYPE_CHECKING

import torch

from w4pack.convert.quantize.activations import CacheCodes, dequantize_cache, quantize_cache, quantize_keys
from w4pack.kernels.quarot import kv_layout
from w4pack.kernels.quarot.calls import Append, Attention
from w4pack.kernels.quarot.transform import Transform, apply

if TYPE_CHECKING:
    from torch import Tensor


def turn(x: "Tensor", transform: str) -> "Tensor":
    """Return x (..., head_dim) in fp32 with R3 applied; no transform: x in fp32."""
    return apply(x.float(), Transform.of(transform))


def pack(codes: "Tensor", bits: int) -> "Tensor":
    """Return rows of bytes of codes (..., head_dim): at 4 bit two to a byte, the even channel low."""
    return codes[..., ::2] | codes[..., 1::2] << 4 if bits == 4 else codes


def unpack(rows: "Tensor", bits: int) -> "Tensor":
    """Return the codes (..., head_dim) of rows of bytes."""
    return torch.stack([rows & 15, rows >> 4], -1).flatten(-2) if bits == 4 else rows


def append(given: Append) -> None:
    """Write T tokens of each sequence from slot ``start`` on; k gets R3 first, then its guide."""
    k, v, codes, params, block_table, start, transform, clip_k, clip_v, bits, guide = given
    slots = start.long()[:, None] + torch.arange(k.shape[2], device=k.device)  # (B, T)
    pages = block_table.long().gather(1, slots // kv_layout.PAGE)
    keys = quantize_keys(turn(k, transform).transpose(1, 2), bits, clip_k, guide)  # (B, T, heads, ...)
    for which, made in enumerate((keys, quantize_cache(v.transpose(1, 2), bits, clip_v))):
        rows = torch.stack([made.scales, made.zeros], -1).half()
        codes[pages, which, :, slots % kv_layout.PAGE] = pack(made.codes, bits)
        params[pages, which, :, slots % kv_layout.PAGE] = rows


def gather(
    codes: "Tensor", params: "Tensor", pages: "Tensor", length: int, bits: int
) -> tuple["Tensor", "Tensor"]:
    """Return one sequence's K (after R3) and V, fp32 (kv_heads, length, head_dim), of its list of pages."""
    used = pages[: kv_layout.pages_of(length)].long()
    s, z = params[used].float().unbind(-1)
    values = dequantize_cache(CacheCodes(unpack(codes[used], bits), s, z))  # (pages, 2, heads, 64, hd)
    k, v = values.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return k, v


def visible(queries: int, length: int, first: int, window: int, device: torch.device) -> "Tensor":
    """Return which slots (length) each of the last ``queries`` positions sees: bool (queries, length)."""
    position = torch.arange(length - queries, length, device=device)[:, None]
    slot = torch.arange(length, device=device)
    seen = (slot <= position) & (slot >= first)
    return seen & (slot > position - window) if window else seen


def attention(given: Attention) -> "Tensor":
    """Return (B, T, heads, head_dim) in q's dtype."""
    q, codes, params, block_table, lengths, first, scale, window, softcap, transform, bits = given
    rows, heads, queries, size = q.shape
    turned = turn(q, transform)
    out = q.new_zeros((rows, queries, heads, size))
    for row, length in enumerate(lengths.tolist()):
        if length == 0 or queries == 0:
            continue
        k, v = gather(codes, params, block_table[row], length, bits)
        group = heads // k.shape[0]
        grouped = turned[row].reshape(-1, group, queries, size)
        x = (grouped @ k[:, None].transpose(-1, -2)) * scale
        x = softcap * torch.tanh(x / softcap) if softcap else x
        seen = visible(queries, length, 0 if first is None else int(first[row]), window, q.device)
        p = torch.softmax(x.masked_fill(~seen, -torch.inf), -1).masked_fill(~seen.any(-1)[:, None], 0.0)
        out[row] = (p @ v[:, None]).flatten(0, 1).transpose(0, 1).to(q.dtype)
    return out
