"""Packed linears on integer tensor cores, and the MLP whose activation runs in front of its last linear.

The layers are those of ``kernels.modules``: they hold the artifact's tensors under the artifact's names. What
is new is the front that stands before the product.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import nn
from torch.nn import functional

from w4pack.convert.core.scheme import WIDE
from w4pack.kernels import gradient, modules
from w4pack.kernels.modules import PackedLinear
from w4pack.kernels.quarot import int_ops, int_tiles
from w4pack.kernels.quarot.fronts import Front
from w4pack.kernels.spec import SUFFIXES, LinearSpec

Tensors = Mapping[str, torch.Tensor | None]


@cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def order_of(spec: LinearSpec, device: torch.device, bits: int) -> int:
    """Return the order in which the product of a layer reads its codes of ``bits`` on a device."""
    return int_tiles.int_order(_capability(device), spec.bits, spec.group_size, bits)


def product(
    front: Front, spec: LinearSpec, tensors: Tensors, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return (..., out_features) of what the front makes of x (..., features), in x's dtype.

    Args:
        front: before the product.
        spec: of the layer, symmetric and without act-order unless the front gives 16-bit values.
        tensors: the layer's ``weight``, ``weight_scale``, and what else it has; not the bias.
        x: 16-bit.
        bias: (out_features,) or None.
    """
    if gradient.wanted(x):
        return gradient.refused(x, product(front, spec, tensors, x.detach(), bias))
    flat = x.reshape(-1, x.shape[-1])
    if front.bits == WIDE:
        y = modules.product(spec, tensors, front.values(flat), bias)
    else:
        order = order_of(spec, x.device, front.bits)
        codes, scales = front.codes(flat, order, spec.k)
        y = int_product(spec, tensors, codes, scales, bias, front.bits, x.dtype)
    return y.reshape(*x.shape[:-1], spec.out_features)


def int_product(
    spec: LinearSpec,
    tensors: Tensors,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return (M, out_features) of codes in the order that ``order_of`` says, M scales, in ``dtype``."""
    if bias is not None and spec.n != spec.out_features:
        bias = functional.pad(bias, (0, spec.n - spec.out_features))
    y: torch.Tensor = int_ops.int_gemm(
        codes,
        scales,
        tensors["weight"],
        tensors["weight_scale"],
        bias,
        spec.bits,
        bits,
        spec.group_size,
        order_of(spec, codes.device, bits),
        spec.k,
        dtype,
    )
    return y[:, : spec.out_features]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with the activation in front of down, under the names of the model's own.

    Args:
        parts: name -> module, of the MLP that it replaces: gate_proj and up_proj, or gate_up_proj; down_proj
            with a ``GatedFront``.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in parts.items():
            self.add_module(name, module)
        self.first = tuple(n for n in ("gate_up_proj", "gate_proj", "up_proj") if n in parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., H) of x (..., H)."""
        y: torch.Tensor = self.get_submodule("down_proj")(self._gate_up(x))
        return y

    def _gate_up(self, x: torch.Tensor) -> torch.Tensor:
        """Return gate and up side by side: as they come out of one product where they share one."""
        layers = [self.get_submodule(name) for name in self.first]
        fused = getattr(layers[0], "fused", None)
        if fused is not None and fused.parts == tuple(layers):
            whole: torch.Tensor = fused.product(x)
            return whole
        return torch.cat([layer(x) for layer in layers], -1)


def put_front(layer: nn.Module, front: Front) -> None:
    """Put a front before a linear, packed or in 16 bit, whose calls and names stay as they are."""
    if isinstance(layer, PackedLinear):
        (layer if layer.fused is None else layer.fused).front = _Products(front)
    else:
        layer.register_forward_pre_hook(_Values(front))


class _Products:
    """The product of a packed layer behind a front."""

    def __init__(self, front: Front) -> None:
        self.front = front

    def __call__(self, layer: modules.PackedTensors, x: torch.Tensor) -> torch.Tensor:
        tensors = {name: getattr(layer, name) for name in SUFFIXES[:-1]}
        return product(self.front, layer.spec, tensors, x, layer.bias)


class _Values:
    """Gives a linear in 16 bit what its front makes of the input."""

    def __init__(self, front: Front) -> None:
        self.front = front

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, *rest = args
        flat = x.reshape(-1, x.shape[-1])
        return self.front.values(flat).reshape(*x.shape[:-1], -1), *rest
