"""The operators in front of an integer product, in ``torch.ops.w4pack``: each one read and one write.

    norm_quantize(x, gain?, eps, transform, bits, clip, order, width) -> (codes, scales)
    act_quantize(gate_up, activation, transform, bits, clip, order, width) -> (codes, scales)
    heads_quantize(x, heads, transform, bits, clip, order, width) -> (codes, scales)

    x           fp16 or bf16 (M, K); gate_up (M, 2K), gate first, or (M, K) for the activation ``none``
    gain        (K,) float32, fp16 or bf16: the whole factor, with the 1 of ``1 + w`` in it; or None
    activation  silu, gelu_tanh or none
    transform   ``Transform.key``; of K values, or of ``heads`` for heads_quantize; empty: none
    bits        4 or 8: codes and a scale for each row; 16: values of x's dtype, scales (0,)
    clip        share of a row's largest value that the codes reach, above 0 and at most 1
    order       of the codes: one of ``orders_int``; 16 bits: 0
    width       columns of the output, at least K: those past K hold zeros

``quantize_reference`` says what they compute. Importing this module registers them, once.
"""

from typing import TYPE_CHECKING, Any

import torch

from w4pack.kernels.quarot import orders_int, quantize_checks, quantize_launch, quantize_reference
from w4pack.kernels.quarot.transform import Transform

if TYPE_CHECKING:
    from torch import Tensor

Made = tuple["Tensor", "Tensor"]

_library: Any = torch.library.Library("w4pack", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAIL = "str transform, int bits, float clip, int order, int width) -> (Tensor, Tensor)"
_library.define(f"norm_quantize(Tensor x, Tensor? gain, float eps, {_TAIL}")
_library.define(f"act_quantize(Tensor gate_up, str activation, {_TAIL}")
_library.define(f"heads_quantize(Tensor x, int heads, {_TAIL}")


def _norm_cpu(
    x: "Tensor",
    gain: "Tensor | None",
    eps: float,
    transform: str,
    bits: int,
    clip: float,
    order: int,
    width: int,
) -> Made:
    found = quantize_checks.norm(x, gain, eps, transform, bits, clip, order, width)
    y = quantize_reference.norm(x, gain, eps, found)
    return quantize_reference.codes(y, x.dtype, bits, clip, order, width)


def _act_cpu(
    gate_up: "Tensor", activation: str, transform: str, bits: int, clip: float, order: int, width: int
) -> Made:
    found = quantize_checks.act(gate_up, activation, transform, bits, clip, order, width)
    y = quantize_reference.act(gate_up, activation, found)
    return quantize_reference.codes(y, gate_up.dtype, bits, clip, order, width)


def _heads_cpu(
    x: "Tensor", heads: int, transform: str, bits: int, clip: float, order: int, width: int
) -> Made:
    found = quantize_checks.heads(x, heads, transform, bits, clip, order, width)
    y = quantize_reference.across_heads(x, heads, found)
    return quantize_reference.codes(y, x.dtype, bits, clip, order, width)


def _outputs(x: "Tensor", bits: int, order: int, width: int) -> Made:
    """Return what a kernel fills."""
    if bits == 16:
        return x.new_empty((x.shape[0], width)), x.new_empty(0, dtype=torch.float32)
    packed = order == orders_int.S64
    shape = (x.shape[0], width // 2 if packed else width)
    return (
        x.new_empty(shape, dtype=torch.uint8 if packed else torch.int8),
        x.new_empty(x.shape[0], dtype=torch.float32),
    )


def _launched(
    x: "Tensor",
    k: int,
    kind: str,
    transform: Transform,
    tail: tuple[int, float, int, int],
    *,
    gain: "Tensor | None" = None,
    eps: float = 0.0,
    heads: int = 0,
) -> Made:
    """Run a kernel on checked arguments; ``tail`` is (bits, clip, order, width)."""
    bits, clip, order, width = tail
    codes, scales = _outputs(x, bits, order, width)
    task = quantize_launch.Task(
        x, k, kind, gain, eps, transform, heads, codes, scales, bits, clip, order, width
    )
    quantize_launch.run(task)
    return codes, scales


def _norm_cuda(
    x: "Tensor",
    gain: "Tensor | None",
    eps: float,
    transform: str,
    bits: int,
    clip: float,
    order: int,
    width: int,
) -> Made:
    found = quantize_checks.norm(x, gain, eps, transform, bits, clip, order, width)
    return _launched(x, x.shape[1], "norm", found, (bits, clip, order, width), gain=gain, eps=eps)


def _act_cuda(
    gate_up: "Tensor", activation: str, transform: str, bits: int, clip: float, order: int, width: int
) -> Made:
    found = quantize_checks.act(gate_up, activation, transform, bits, clip, order, width)
    k = gate_up.shape[1] // (1 if activation == "none" else 2)
    return _launched(gate_up, k, activation, found, (bits, clip, order, width))


def _heads_cuda(
    x: "Tensor", heads: int, transform: str, bits: int, clip: float, order: int, width: int
) -> Made:
    found = quantize_checks.heads(x, heads, transform, bits, clip, order, width)
    return _launched(x, x.shape[1], "none", found, (bits, clip, order, width), heads=heads)


def _norm_fake(
    x: "Tensor",
    gain: "Tensor | None",
    eps: float,
    transform: str,
    bits: int,
    clip: float,
    order: int,
    width: int,
) -> Made:
    return _outputs(x, bits, order, width)


def _act_fake(
    gate_up: "Tensor", activation: str, transform: str, bits: int, clip: float, order: int, width: int
) -> Made:
    return _outputs(gate_up, bits, order, width)


def _heads_fake(
    x: "Tensor", heads: int, transform: str, bits: int, clip: float, order: int, width: int
) -> Made:
    return _outputs(x, bits, order, width)


for _name in ("norm", "act", "heads"):
    _library.impl(f"{_name}_quantize", globals()[f"_{_name}_cuda"], "CUDA")
    _library.impl(f"{_name}_quantize", globals()[f"_{_name}_cpu"], "CPU")
    torch.library.register_fake(f"w4pack::{_name}_quantize", globals()[f"_{_name}_fake"], lib=_library)

norm_quantize = torch.ops.w4pack.norm_quantize.default
act_quantize = torch.ops.w4pack.act_quantize.default
heads_quantize = torch.ops.w4pack.heads_quantize.default
