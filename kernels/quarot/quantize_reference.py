"""What the operators in front of an integer product compute, in PyTorch on any device: the definition.

    norm    v = x (gain: x * gain), f = 1 / sqrt(mean(x^2) + eps)     y = transform(v) * f
    act     v = round16(act(gate) * up), or x itself                  y = transform(v)
    heads   v = x as (M, heads, head size)                            y = transform along the heads

All of it is float32 between the 16-bit input and the codes; the norm's factor commutes with the transform, so
the transform's first sums run on 16-bit values. ``codes`` says what 4 and 8 bits make of y; at 16 bits y is
rounded to the dtype of x. A row that is not finite has the scale NaN and codes 0: the product's row is NaN.
"""

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from w4pack.convert.quantize.activations import quantize_tokens
from w4pack.kernels.quarot import orders_int
from w4pack.kernels.quarot.transform import Transform, apply

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST = torch.finfo(torch.float32).tiny  # a scale below the normal numbers has no reciprocal: a zero row


def norm(x: "Tensor", gain: "Tensor | None", eps: float, transform: Transform) -> "Tensor":
    """Return the transformed norm of x (M, K), float32."""
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return apply(wide if gain is None else wide * gain.float(), transform) * factor


def activation(gate_up: "Tensor", name: str) -> "Tensor":
    """Return round16(act(gate) * up) of (M, 2K), or the input of (M, K) for ``none``: 16 bit."""
    if name == "none":
        return gate_up
    gate, up = gate_up.float().chunk(2, -1)
    acted = functional.silu(gate) if name == "silu" else functional.gelu(gate, approximate="tanh")
    return (acted * up).to(gate_up.dtype)


def act(gate_up: "Tensor", name: str, transform: Transform) -> "Tensor":
    """Return the transformed activation of (M, 2K), or of (M, K) for ``none``: (M, K) float32."""
    return apply(activation(gate_up, name).float(), transform)


def across_heads(x: "Tensor", heads: int, transform: Transform) -> "Tensor":
    """Return x (M, heads * size) with each channel transformed over the heads, float32."""
    return apply(x.float().reshape(x.shape[0], heads, -1), transform, -2).reshape(x.shape)


def codes(
    y: "Tensor", dtype: "torch.dtype", bits: int, clip: float, order: int, width: int
) -> tuple["Tensor", "Tensor"]:
    """Return (codes, scales) of y (M, K) float32, columns of zeros up to ``width``.

    bits 4 and 8: int8 (M, width), or uint8 (M, width/2) in the order S64, and float32 (M,). bits 16: y in
    ``dtype`` (M, width) and no scales (0,).
    """
    padded = functional.pad(y, (0, width - y.shape[1]))
    if bits == 16:
        return padded.to(dtype), y.new_empty(0)
    made, scales = quantize_tokens(padded.nan_to_num(0, 0, 0), bits, clip)
    small = (scales < SMALLEST).logical_or_(y.isfinite().all(-1).logical_not_())
    made.masked_fill_(small[:, None], 0)
    scales.masked_fill_(small, 1).masked_fill_(y.isfinite().all(-1).logical_not_(), torch.nan)
    return orders_int.arrange(made, order), scales
