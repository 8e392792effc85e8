"""What 4 and 8 bits make of activations and of the cache: the definition that kernels and calibration share.

Activations: symmetric, one scale for each token, ``m = 2^(bits-1) - 1``:
``s = max|x| * clip / m`` and ``code = clamp(round(x / s), -m - 1, m)``, all in float32.

Keys and values: asymmetric, one scale and zero point for each token and head, ``n = 2^bits - 1``:
``lo = min(x, 0) * clip``, ``hi = max(x, 0) * clip``, ``s = max(fp16((hi - lo) / n), 2^-14)``,
``z = clamp(round(-lo / s), 0, n)`` and ``code = clamp(round(x / s) + z, 0, n)``; a value is
``(code - z) * s``. A ``z`` of zero is +0. Scales stop where n * s leaves float16, so that kernels may hold
values in 16 bit: values beyond 65460 saturate.

Keys may have a guide, found in the calibration: an offset and a direction for each head. The offset is
subtracted first. It adds the same to all scores of a query, which the softmax does not see, so nothing gives
it back. The direction w says how errors count, as ``|e|^2 + (w e)^2``: what goes wrong with scores is mostly
the error along one direction, in which queries look. So codes are moved, ``MOVES`` times: with
``e = code - z - x / s``, ``a = sum(w e)`` and u = -1 where e > 0, else 1, the first code with the largest
``gain = (2 |e| - 1) - w (2 u a + w)``, which is what the error loses, goes u further, if the gain is above 0;
codes that would leave 0 to n stay.

Rounding is to nearest, ties to even. A row of zeros has the scale 1 (activations) or the smallest one (cache)
and stays zero. Scales are used as they are stored: float32 for activations, float16 for the cache.
"""

from typing import NamedTuple

import torch

# Scales of the cache: float16's smallest normal value, and the largest at which n * s is a float16 value too.
SMALLEST, LARGEST = 2.0**-14, {4: 4364.0, 8: 256.75}
MOVES = 2  # of a code of each key with a guide: the second takes off a quarter of what the first leaves
FAR = 1024.0  # steps that an error is counted up to


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


def quantize_keys(x: torch.Tensor, bits: int, clip: float, guide: torch.Tensor | None) -> CacheCodes:
    """Quantize keys (..., heads, head size) after their transform.

    Args:
        x: finite values; taken to float32.
        bits: 4 or 8.
        clip: as in ``quantize_cache``.
        guide: float32 (2, heads, head size), offset and direction; None: as ``quantize_cache``.
    """
    if guide is None:
        return quantize_cache(x, bits, clip)
    offset, direction = guide
    moved = x.float() - offset
    made = quantize_cache(moved, bits, clip)
    steps = (moved / made.scales.unsqueeze(-1)).clamp_(-FAR, FAR)
    codes, zeros = made.codes.float(), made.zeros.unsqueeze(-1)
    for _ in range(MOVES):
        errors = (codes - zeros) - steps
        along = (errors * direction).sum(-1, keepdim=True)
        turns = torch.where(errors > 0, -1.0, 1.0)
        gains = (2 * errors.abs() - 1) - direction * (2 * turns * along + direction)
        wanted = codes + turns
        gains = gains.where((wanted >= 0) & (wanted < 1 << bits), 0.0)
        best, place = gains.max(-1, keepdim=True)
        codes = codes.scatter(-1, place, wanted.gather(-1, place).where(best > 0, codes.gather(-1, place)))
    return CacheCodes(codes.to(torch.uint8), made.scales, made.zeros)


def dequantize_cache(made: CacheCodes) -> torch.Tensor:
    """Return the values float32 that codes of the cache stand for."""
    return (made.codes.float() - made.zeros.unsqueeze(-1)) * made.scales.unsqueeze(-1)


def fake_cache(x: torch.Tensor, bits: int, clip: float) -> torch.Tensor:
    """Return keys or values as the cache gives them back, in their own dtype; 16 bits: ``x`` itself."""
    return x if bits == 16 else dequantize_cache(quantize_cache(x, bits, clip)).to(x.dtype)


def fake_keys(x: torch.Tensor, bits: int, clip: float, guide: torch.Tensor | None) -> torch.Tensor:
    """Return transformed keys (..., heads, head size) as the cache gives them back, less the offset."""
    return x if bits == 16 else dequantize_cache(quantize_keys(x, bits, clip, guide)).to(x.dtype)
