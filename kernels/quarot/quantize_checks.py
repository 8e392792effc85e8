"""What the arguments of the quantize operators must be. Every rule fails in Python, before a launch."""

import math
from typing import TYPE_CHECKING

import torch

from w4pack.convert.core.scheme import RUN_BITS
from w4pack.convert.dialects.online import UNIT
from w4pack.kernels import checks
from w4pack.kernels.quarot import orders_int
from w4pack.kernels.quarot.calls import Form
from w4pack.kernels.quarot.transform import Transform

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2}  # as the kernels number them
BITS = RUN_BITS
WIDTH = 64  # columns of a packed weight's tile: what codes are padded to
LONG_STRIDE = 1 << 39  # of x, in values: a tensor map has 40 bits for the bytes


def norm(x: "Tensor", gain: "Tensor | None", eps: float, transform: str, form: Form) -> Transform:
    """Check the arguments of ``norm_quantize``; return the transform.

    Raises:
        UsageError: one of them does not fit.
    """
    k = _input(x, "x")
    checks.require(math.isfinite(eps) and eps >= 0, "eps is no number from 0 on", "eps", ">= 0", eps)
    if gain is not None:
        checks.has_dtype(gain, "gain", (torch.float32, torch.float16, torch.bfloat16), 1)
        checks.has_shape(gain, "gain", (k,))
        checks.require(gain.is_contiguous(), "gain is not contiguous", "gain", "contiguous", gain.stride())
        checks.starts(gain, "gain", checks.VECTOR)
        checks.same_device("gain", gain, "x", x)
    _output(k, form)
    return _transform(transform, k)


def act(gate_up: "Tensor", activation: str, transform: str, form: Form) -> Transform:
    """Check the arguments of ``act_quantize``; return the transform.

    Raises:
        UsageError: one of them does not fit.
    """
    known = ", ".join(ACTIVATIONS)
    checks.require(activation in ACTIVATIONS, "the activation is not known", "activation", known, activation)
    parts = 1 if activation == "none" else 2
    k = _input(gate_up, "gate_up", parts) // parts
    _output(k, form)
    return _transform(transform, k)


def heads(x: "Tensor", heads: int, transform: str, form: Form) -> Transform:
    """Check the arguments of ``heads_quantize``; return the transform.

    Raises:
        UsageError: one of them does not fit.
    """
    k = _input(x, "x")
    checks.require(
        heads > 0 and k % heads == 0, "the heads do not divide K", "heads", f"a divisor of {k}", heads
    )
    _output(k, form)
    return _transform(transform, heads)


def _input(x: "Tensor", name: str, parts: int = 1) -> int:
    checks.has_dtype(x, name, (torch.float16, torch.bfloat16), 2)
    unit, k = UNIT * parts, x.shape[1]
    checks.require(k > 0 and k % unit == 0, "the width is not supported", name, f"K % {unit} = 0", k)
    checks.rows(x, name, UNIT, LONG_STRIDE)
    checks.starts(x, name, checks.VECTOR)
    return k


def _output(k: int, form: Form) -> None:
    bits, clip, order, width = form
    checks.require(bits in BITS, "the code width is not supported", "bits", "4, 8 or 16", bits)
    checks.require(0 < clip <= 1, "the clip ratio is out of range", "clip", "above 0, at most 1", clip)
    orders_int.check(order)
    natural = bits != 16 or order == orders_int.NATURAL
    checks.require(natural, "16-bit values have the natural order", "order", orders_int.NATURAL, order)
    four = order != orders_int.S64 or bits == 4
    checks.require(four, "the order packs codes of 4 bits", "order", "1 or 3 for 8 bits", order)
    fits = width >= k and width % WIDTH == 0
    checks.require(fits, "the width is not supported", "width", f"from {k} on, a multiple of {WIDTH}", width)


def _transform(key: str, order: int) -> Transform:
    found = Transform.of(key)
    fits = not found.factors or found.order == order
    checks.require(fits, "the transform is of another size", "transform", order, found.order)
    return found
