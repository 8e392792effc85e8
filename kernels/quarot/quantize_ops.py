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

from w4pack.kernels.arguments import register_fake
from w4pack.kernels.quarot import orders_int, quantize_checks, quantize_launch, quantize_reference
from w4pack.kernels.quarot.calls import Form, with_form
from w4pack.kernels.quarot.transform import Transform

if TYPE_CHECKING:
    from torch import Tensor

Made = tuple["Tensor", "Tensor"]

_library: Any = torch.library.Library("w4pack", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAIL = "str transform, int bits, float clip, int order, int width) -> (Tensor, Tensor)"
_library.define(f"norm_quantize(Tensor x, Tensor? gain, float eps, {_TAIL}")
_library.define(f"act_quantize(Tensor gate_up, str activation, {_TAIL}")
_library.define(f"heads_quantize(Tensor x, int heads, {_TAIL}")


def _norm_cpu(x: "Tensor", gain: "Tensor | None", eps: float, transform: str, form: Form) -> Made:
    found = quantize_checks.norm(x, gain, eps, transform, form)
    return quantize_reference.codes(quantize_reference.norm(x, gain, eps, found), x.dtype, *form)


def _act_cpu(gate_up: "Tensor", activation: str, transform: str, form: Form) -> Made:
    found = quantize_checks.act(gate_up, activation, transform, form)
    return quantize_reference.codes(quantize_reference.act(gate_up, activation, found), gate_up.dtype, *form)


def _heads_cpu(x: "Tensor", heads: int, transform: str, form: Form) -> Made:
    found = quantize_checks.heads(x, heads, transform, form)
    return quantize_reference.codes(quantize_reference.across_heads(x, heads, found), x.dtype, *form)


def _outputs(x: "Tensor", form: Form) -> Made:
    """Return what a kernel fills."""
    if form.bits == 16:
        return x.new_empty((x.shape[0], form.width)), x.new_empty(0, dtype=torch.float32)
    packed = form.order == orders_int.S64
    shape = (x.shape[0], form.width // 2 if packed else form.width)
    return (
        x.new_empty(shape, dtype=torch.uint8 if packed else torch.int8),
        x.new_empty(x.shape[0], dtype=torch.float32),
    )


def _launched(
    x: "Tensor",
    k: int,
    kind: str,
    transform: Transform,
    form: Form,
    *,
    gain: "Tensor | None" = None,
    eps: float = 0.0,
    heads: int = 0,
) -> Made:
    """Run a kernel on checked arguments."""
    made = _outputs(x, form)
    quantize_launch.run(quantize_launch.Task(x, k, kind, gain, eps, transform, heads, *made, form))
    return made


def _norm_cuda(x: "Tensor", gain: "Tensor | None", eps: float, transform: str, form: Form) -> Made:
    found = quantize_checks.norm(x, gain, eps, transform, form)
    return _launched(x, x.shape[1], "norm", found, form, gain=gain, eps=eps)


def _act_cuda(gate_up: "Tensor", activation: str, transform: str, form: Form) -> Made:
    found = quantize_checks.act(gate_up, activation, transform, form)
    k = gate_up.shape[1] // (1 if activation == "none" else 2)
    return _launched(gate_up, k, activation, found, form)


def _heads_cuda(x: "Tensor", heads: int, transform: str, form: Form) -> Made:
    found = quantize_checks.heads(x, heads, transform, form)
    return _launched(x, x.shape[1], "none", found, form, heads=heads)


def _fake(x: "Tensor", *given: Any) -> Made:
    return _outputs(x, given[-1])


for _name, _cuda, _cpu in (
    ("norm_quantize", _norm_cuda, _norm_cpu),
    ("act_quantize", _act_cuda, _act_cpu),
    ("heads_quantize", _heads_cuda, _heads_cpu),
):
    _library.impl(_name, with_form(_cuda), "CUDA")
    _library.impl(_name, with_form(_cpu), "CPU")
    register_fake(_library, _name, with_form(_fake))

norm_quantize = torch.ops.w4pack.norm_quantize.default
act_quantize = torch.ops.w4pack.act_quantize.default
heads_quantize = torch.ops.w4pack.heads_quantize.default
