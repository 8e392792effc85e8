"""What 4 and 8 bits make of activations and of the cache: the definition that kernels and calibration share.

Activations: symmetric, one scale for each token, ``m = 2^(bits-1) - 1``:
``s = max|x| * clip / m`` and ``code = clamp(round(x / s), -m - 1, m)``, all in float32.

Keys and values: asymmetric, one scale and zero point for each token and head, ``n = 2^bits - 1``:
``lo = min(x, 0) * clip``, ``hi = max(x, 0) * clip``, ``s = max(fp16((hi - lo) / n), 2^-14)``,
``z = clamp(round(-lo / s), 0, n)`` and ``code = clamp(round(x / s) + z, 0, n)``; a value is
``(code - z) * s``. A ``z`` of zero is +0. Scales stop where n * s leaves float16, so that kernels may hold
values in 16 bit: values beyond 65460 saturate.

Rounding is to nearest, ties to even. A row of zeros has the scale 1 (activations) or the smallest one (cache)
and stays zero. Scales are used as they are stored: float32 for activations, float16 for the cache.
"""

from typing import NamedTuple

import torch

# Scales of the cache: float16's smallest normal value, and the largest at which n * s is a float16 value too.
SMALLEST, LARGEST = 2.0**-14, {4: 4364.0, 8: 256.75}


class CacheCodes(NamedTuple):
    """Codes of keys or values.

    codes   uint8, the shape of the values
    scales  float32 holding float16 values, the last axis gone
    zeros   float32 holding integers, the same shape
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


def quantize_tokens(x: torch.Tensor, bits: int, clip: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations (..., K), each row by itself. Returns (codes int8 (..., K), scales float32 (...)).

    Args:
        x: finite values; taken to float32.
        bits: 4 or 8.
        clip: share of the largest value that the codes reach, above 0 and at most 1.
    """
    most = (1 << (bits - 1)) - 1
    wide = x.float()
    # One product and one quotient, each rounded to float32: kernels do the same two.
    reach = wide.abs().amax(-1) * torch.tensor(clip, dtype=torch.float32)
    scales = reach / torch.full_like(reach, most)  # on a card, a division by a number is a product
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (wide / scales.unsqueeze(-1)).round_().clamp_(-most - 1, most)
    return codes.to(torch.int8), scales


def dequantize_tokens(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values float32 that codes (..., K) with scales (...) stand for."""
    return codes.float() * scales.unsqueeze(-1)


def fake_tokens(x: torch.Tensor, bits: int, clip: float) -> torch.Tensor:
    """Return ``x`` as it is after quantization, in its own dtype; 16 bits: ``x`` itself."""
    if bits == 16:
        return x
    return dequantize_tokens(*quantize_tokens(x, bits, clip)).to(x.dtype)


def quantize_cache(x: torch.Tensor, bits: int, clip: float) -> CacheCodes:
    """Quantize keys or values (..., head size), each head of each token by itself.

    Args:
        x: finite values; taken to float32.
        bits: 4 or 8.
        clip: share of both ends of the range that the codes reach, above 0 and at most 1.
    """
    levels = (1 << bits) - 1
    wide = x.float()
    ratio = torch.tensor(clip, dtype=torch.float32)
    low, high = wide.amin(-1).clamp(max=0) * ratio, wide.amax(-1).clamp(min=0) * ratio
    wanted = ((high - low) / torch.full_like(low, levels)).clamp_(max=LARGEST[bits])
    scales = wanted.to(torch.float16).float().clamp_(min=SMALLEST)
    zeros = ((0 - low) / scales).round_().clamp_(0, levels)  # 0 - 0 is +0: -0 would be another word in memory
    codes = (wide / scales.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, levels)
    return CacheCodes(codes.to(torch.uint8), scales, zeros)


def dequantize_cache(made: CacheCodes) -> torch.Tensor:
    """Return the values float32 that codes of the cache stand for."""
    return (made.codes.float() - made.zeros.unsqueeze(-1)) * made.scales.unsqueeze(-1)


def fake_cache(x: torch.Tensor, bits: int, clip: float) -> torch.Tensor:
    """Return keys or values as the cache gives them back, in their own dtype; 16 bits: ``x`` itself."""
    return x if bits == 16 else dequantize_cache(quantize_cache(x, bits, clip)).to(x.dtype)
