"""What a model with ``online`` records does, seen from outside: the calls of its operators, its layers.

Every call is held against the definition in fp64, and layers can be run on given inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional

from runtime import quarot_reference as fake
from w4pack.kernels import reference
from w4pack.kernels.quarot import int_moe_ops, int_ops, orders_int, quantize_ops
from w4pack.kernels.quarot.calls import GroupedProduct
from w4pack.kernels.quarot.transform import Transform

EXACT_TIE = 1e-6  # of a step: what fp64 itself may be off


class Call(NamedTuple):
    """One call of an operator."""

    kind: str
    args: tuple[Any, ...]
    result: Any

    def on_cpu(self) -> Call:
        """Return the call with its tensors on the CPU."""
        args, result = (_on_cpu(values) for values in (self.args, self.result))
        return Call(self.kind, args, result)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_on_cpu(v) for v in value)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def record(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Return a list that every call of the operators is added to."""
    found: list[Call] = []
    for module, name in (
        (quantize_ops, "norm_quantize"),
        (quantize_ops, "act_quantize"),
        (quantize_ops, "heads_quantize"),
        (int_ops, "int_gemm"),
    ):
        own = getattr(module, name)

        def call(*args: Any, own: Any = own, name: str = name) -> Any:
            result = own(*args)
            found.append(Call(name, args, result))
            return result

        monkeypatch.setattr(module, name, call)
    grouped = int_moe_ops.int_moe_gemm

    def experts(*args: Any) -> Any:
        result = grouped(*args)
        if result.is_cuda:  # on a CPU it is made of products, which are in the list already
            found.extend(_products_of(GroupedProduct(*args), result))
        return result

    monkeypatch.setattr(int_moe_ops, "int_moe_gemm", experts)
    return found


def _products_of(given: GroupedProduct, result: torch.Tensor) -> Iterator[Call]:
    """Yield a grouped product's calls as those of ``int_gemm``, one for each expert that has tokens."""
    offsets = given.offsets.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(offsets)):
        if end > start:
            taken = given.rows[start:end].long()
            tokens = (given.codes[taken], given.act_scales[taken])
            rest = (given.bits, given.act_bits, given.group_size, given.order, given.k, given.dtype)
            args = (*tokens, given.weight[expert], given.scales[expert], None, *rest)
            yield Call("int_gemm", args, result[start:end])


def dense_transform(key: str) -> Any:
    """Return the matrix of a transform, float64."""
    t = Transform.of(key)
    return fake.hadamard({"order": t.order, "block": t.block, "factors": t.factors}) if key else None


def exact_values(call: Call) -> tuple[Any, int, float, int]:
    """Return (values (M, K) float64 before quantization, bits, clip, order) of a call."""
    if call.kind == "norm_quantize":
        x, gain, eps, key, bits, clip, order, _ = call.args
        wide = x.double()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y = wide * factor if gain is None else wide * factor * gain.double()
        turn = dense_transform(key)
        return (y if turn is None else y @ turn), bits, clip, order
    if call.kind == "heads_quantize":
        x, heads, key, bits, clip, order, _ = call.args
        apart = x.double().unflatten(-1, (heads, -1)).transpose(-1, -2)
        return (apart @ dense_transform(key)).transpose(-1, -2).flatten(-2), bits, clip, order
    x, activation, key, bits, clip, order, _ = call.args
    y = x
    if activation != "none":
        gate, up = x.float().chunk(2, -1)
        acts = {"silu": functional.silu, "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh")}
        y = (acts[activation](gate) * up).to(x.dtype)
    turn = dense_transform(key)
    return (y.double() if turn is None else y.double() @ turn), bits, clip, order


def check_codes(call: Call) -> int:
    """Check codes and scales of a call: codes differ from the definition's at ties alone.

    Returns how many do where exact arithmetic sees no tie. Exact ties are many in 8 bit where nothing is
    transformed: in a row whose largest value is a multiple of 127 steps of 16 bit.
    """
    y, bits, clip, order = exact_values(call)
    codes, scales = call.result
    most = 2 ** (bits - 1) - 1
    exact = y.abs().amax(-1) * clip / most
    # act(gate) * up is rounded to 16 bit first, and a card has another exponential: the row's largest may be
    # rounded the other way, by a step.
    behind = call.kind == "act_quantize" and call.args[1] != "none"
    torch.testing.assert_close(scales.double(), exact, rtol=2**-11 if behind else 2e-5, atol=0)
    natural = orders_int.natural(codes, order)[:, : y.shape[1]].double()
    steps = y / exact[:, None]
    off = natural - steps.round().clamp(-most - 1, most)
    assert float(off.abs().max()) <= 1
    # Half a step away, as far as the scale and one rounding of what is transformed can move it.
    near = most * (2**-9 if behind else 4e-5)
    far = ((steps - natural).abs() - 0.5)[off != 0]
    assert float(far.max() if far.numel() else 0) <= near
    return int((far > EXACT_TIE).sum())


def check_product(call: Call) -> None:
    """Check that sums are the exact integers, and y what the definition makes of them."""
    codes, sx, weight, scales, bias, bits, _, group, order, k, dtype = call.args
    x = orders_int.natural(codes, order).to(torch.int64)
    q = reference.codes(weight, bits).to(torch.int64) - 2 ** (bits - 1)
    sw = reference.natural_scales(scales).double()
    step = k if group == -1 else group
    y = sum(
        (x[:, row : row + step] @ q[row : row + step]).double() * sw[number]
        for number, row in enumerate(range(0, k, step))
    )
    y = y * sx.double()[:, None] + (0 if bias is None else bias.double())
    unit = torch.finfo(dtype).eps  # one rounding to dtype is half of it; fp32 sums of groups come on top
    near_zero = 2e-6 * float(y.abs().max())
    torch.testing.assert_close(call.result.double(), y, rtol=unit, atol=near_zero)


# ---- layers from the same input --------------------------------------------------------------------


def layer_inputs(model: Any, tokens: Any) -> tuple[list[Any], list[Any]]:
    """Let a model run; return inputs and outputs of its decoder layers."""
    inputs: list[Any] = []
    outputs: list[Any] = []
    handles = []
    for layer in decoder_layers(model):
        handles.append(layer.register_forward_hook(lambda m, args, y: outputs.append(_tensor(y).float())))
        handles.append(layer.register_forward_pre_hook(lambda m, args: inputs.append(args[0])))
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    return inputs, outputs


def forced(model: Any, inputs: list[Any], run: Callable[[], Any]) -> list[Any]:
    """Let a model run with other inputs of its layers; return their outputs."""
    outputs: list[Any] = []
    handles = []
    for layer, x in zip(decoder_layers(model), inputs, strict=True):
        handles.append(layer.register_forward_pre_hook(lambda m, args, x=x: (x.to(args[0].dtype), *args[1:])))
        handles.append(layer.register_forward_hook(lambda m, args, y: outputs.append(_tensor(y).float())))
    run()
    for handle in handles:
        handle.remove()
    return outputs


def decoder_layers(model: Any) -> Any:
    return model.model.layers


def _tensor(y: Any) -> Any:
    return y[0] if isinstance(y, tuple) else y


def relative(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())
