"""Random packed weights for chains of products: zero mean, and outputs as large as inputs.

Uniform codes 0..15 mean -0.5 scales; over a chain of layers that mean would grow until nothing is finite. So
code 0 becomes the midpoint, and scales are drawn around 1 / (rms of a code * sqrt(K)).
"""

from dataclasses import dataclass

import numpy as np
import torch

from w4pack.kernels import ops

GROUP = 128
CODE_RMS = 17.5**0.5  # of -7..7 with 0 twice as often
SPREAD = (0.5, 1.5)  # of scales around their mean


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed 4-bit weight (K inputs, N outputs) and, where asked for, its dense 16-bit copy (N, K)."""

    n: int
    k: int
    words: torch.Tensor
    scales: torch.Tensor
    dense: torch.Tensor | None

    def packed(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ops.gemm_out(x, self.words, self.scales, None, None, 4, GROUP, out)
        return out

    def library(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert self.dense is not None
        return torch.mm(x, self.dense.t(), out=out)


def linear(n: int, k: int, device: torch.device, *, dense: bool) -> Linear:
    shape = (k // 16, 2 * n)
    words = balanced(torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device=device)).int()
    low, high = SPREAD
    drawn = torch.rand((k // GROUP, n), device=device) * (high - low) + low
    scales = (drawn / (CODE_RMS * k**0.5)).half()
    copy = ops.dequantize(words, scales, None, 4, GROUP, torch.float16) if dense else None
    return Linear(n, k, words, scales, copy)


def uniform(
    n: int, k: int, group: int = GROUP, *, experts: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words (*experts, K/16, 2N) and scales (*experts, groups, N) on the card, the same for a shape.

    Codes of all values alike: for products by themselves. ``group`` -1: one scale a column.
    """
    g = torch.Generator(device="cuda").manual_seed(n + k)
    shape, groups = (*experts, k // 16, 2 * n), 1 if group == -1 else k // group
    words = torch.randint(-(2**31), 2**31, shape, device="cuda", generator=g, dtype=torch.int32)
    drawn = torch.rand((*experts, groups, n), device="cuda", generator=g)
    return words, (drawn * 0.01 + 0.005).half()


def balanced(words: torch.Tensor) -> torch.Tensor:
    """Replace code 0 by 8, the midpoint; words as int64 in the range of int32."""
    zero = ~(words | words >> 1 | words >> 2 | words >> 3) & 0x11111111
    return words | sign_extended(zero << 3)


def sign_extended(words: torch.Tensor) -> torch.Tensor:
    return words - ((words >> 31 & 1) << 32)


def balanced_block(count: int, seed: int = 0) -> np.ndarray:
    """Return ``count`` uint32 words of such codes."""
    words = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    zero = ~(words | words >> 1 | words >> 2 | words >> 3) & np.uint32(0x11111111)
    return words | zero << np.uint32(3)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
