"""What every operator computes, in PyTorch on any device: reference of the kernels and fallback on a CPU.

Shapes are those of the artifact: ``weight`` int32 (K/16, N*bits/2) in the tile of ``layout.py``; ``scales``
fp16 or bf16 (G, N) in the grouped order; ``zeros`` int32 (G, N*bits/32) or None; K and N multiples of 64; the
last group may be short. Nothing here is fast.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from w4pack.kernels import layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def sizes(weight: "Tensor", bits: int) -> tuple[int, int]:
    """Return (K, N) of a packed weight."""
    return weight.shape[0] * layout.TILE_K, weight.shape[1] * 2 // bits


@cache
def _code_index(bits: int) -> tuple["np.ndarray", "np.ndarray"]:
    """Return, for the 16 x 64 codes of one tile, the word within the tile and the shift."""
    k, n = np.meshgrid(np.arange(layout.TILE_K), np.arange(layout.TILE_N), indexing="ij")
    _, word, slot = layout.code_position(k, n, bits)
    return word, slot * bits


def codes(weight: "Tensor", bits: int) -> "Tensor":
    """Return the (K, N) codes of a packed weight, int32."""
    import torch

    k, n = sizes(weight, bits)
    word, shift = (torch.from_numpy(a).to(weight.device) for a in _code_index(bits))
    tiles = weight.view(k // 16, n // 64, 32 * bits)
    picked = tiles[:, :, word] >> shift.to(torch.int32) & (2**bits - 1)  # (K/16, N/64, 16, 64)
    found: Tensor = picked.permute(0, 2, 1, 3).reshape(k, n)
    return found


def natural_scales(scales: "Tensor") -> "Tensor":
    """Return (G, N) scales in the natural order of columns."""
    import torch

    order = layout.inverse_order(layout.grouped_order(scales.shape[1]))
    return scales[:, torch.from_numpy(order).to(scales.device)]


def natural_zeros(zeros: "Tensor", bits: int) -> "Tensor":
    """Return (G, N) zero points, int32, in the natural order of columns."""
    import torch

    columns = zeros.shape[1] * 32 // bits
    word, slot = layout.zero_position(np.arange(columns), bits)
    shift = torch.from_numpy(slot * bits).to(zeros.device, torch.int32)
    found: Tensor = zeros[:, torch.from_numpy(word).to(zeros.device)] >> shift & (2**bits - 1)
    return found


def rows_to_groups(k: int, group_size: int) -> "np.ndarray":
    """Return the group of each of ``k`` rows."""
    return np.zeros(k, np.int64) if group_size == -1 else np.arange(k) // group_size


def dense(
    weight: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    bits: int,
    group_size: int,
    dtype: "torch.dtype",
) -> "Tensor":
    """Return (q - z) * s as (K, N), computed in ``dtype`` (float32 and float64: one rounding at most)."""
    import torch

    k, _ = sizes(weight, bits)
    group = torch.from_numpy(rows_to_groups(k, group_size)).to(weight.device)
    q = codes(weight, bits)
    z = natural_zeros(zeros, bits)[group] if zeros is not None else 2 ** (bits - 1)
    return (q - z).to(dtype) * natural_scales(scales).to(dtype)[group]


def dequantize(
    weight: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    bits: int,
    group_size: int,
    dtype: "torch.dtype",
) -> "Tensor":
    """Return the dense weight (N, K) in ``dtype``, rounded once."""
    import torch

    return dense(weight, scales, zeros, bits, group_size, torch.float32).to(dtype).t().contiguous()


def gemm(
    x: "Tensor",
    weight: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    bias: "Tensor | None",
    bits: int,
    group_size: int,
) -> "Tensor":
    """Return x (M, K) times the dense weight, plus bias, in fp32 and rounded once to x's dtype: (M, N)."""
    import torch

    y = x.float() @ dense(weight, scales, zeros, bits, group_size, torch.float32)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def gather(x: "Tensor", perm: "Tensor", width: int) -> "Tensor":
    """Return x[:, perm] with zero columns up to ``width``: (M, width)."""
    import torch

    out = torch.zeros((x.shape[0], width), dtype=x.dtype, device=x.device)
    out[:, : perm.numel()] = x[:, perm.long()]
    return out


def repack(words: "Tensor", perm: "Tensor | None", bits: int) -> "Tensor":
    """Return GPTQ words (K*bits/32, N) as the Marlin tile (K/16, N*bits/2), row r from row ``perm[r]``."""
    import torch

    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device).view(1, per_word, 1)
    unpacked = (words[:, None, :] >> shifts & (2**bits - 1)).flatten(0, 1)
    rows = unpacked if perm is None else unpacked[perm.long()]
    packed = layout.pack_codes(rows.cpu().numpy().astype(np.uint8), bits)
    return torch.from_numpy(packed).to(words.device)
