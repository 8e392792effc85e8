"""What the operators of this folder are given: each one's arguments as one value, in the operator's order.

``int_ops``, ``int_moe_ops``, ``quantize_ops`` and ``kv`` say what each argument means.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from w4pack.kernels.arguments import Packed, register_fake

if TYPE_CHECKING:
    from torch import Tensor


class Product(NamedTuple):
    """The arguments of ``int_gemm``."""

    codes: "Tensor"
    act_scales: "Tensor"
    weight: "Tensor"
    scales: "Tensor"
    bias: "Tensor | None"
    bits: int
    act_bits: int
    group_size: int
    order: int
    k: int
    dtype: torch.dtype

    @property
    def packed(self) -> Packed:
        """The weight."""
        return _packed(self)


class GroupedProduct(NamedTuple):
    """The arguments of ``int_moe_gemm``."""

    codes: "Tensor"
    act_scales: "Tensor"
    weight: "Tensor"
    scales: "Tensor"
    rows: "Tensor"
    offsets: "Tensor"
    bits: int
    act_bits: int
    group_size: int
    order: int
    k: int
    dtype: torch.dtype

    @property
    def packed(self) -> Packed:
        """The experts' weights."""
        return _packed(self)


def _packed(product: Product | GroupedProduct) -> Packed:
    return Packed(product.weight, product.scales, None, product.bits, product.group_size)


class Form(NamedTuple):
    """What the quantize operators make of a row: their last arguments."""

    bits: int
    clip: float
    order: int
    width: int


def register(
    library: Any,
    name: str,
    call: Callable[..., Any],
    *,
    cuda: Callable[..., Any],
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Register an operator by functions of its arguments as one value, which ``call`` makes of them."""

    def gathered(run: Callable[..., Any]) -> Callable[..., Any]:
        def operator(*arguments: Any) -> Any:
            return run(call(*arguments))

        return operator

    library.impl(name, gathered(cuda), "CUDA")
    library.impl(name, gathered(cpu), "CPU")
    register_fake(library, name, gathered(fake))


def with_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an operator of a function of (..., form)."""

    def operator(*given: Any) -> Any:
        fields = len(Form._fields)
        return function(*given[:-fields], Form(*given[-fields:]))

    return operator


class Append(NamedTuple):
    """The arguments of ``kv_append``."""

    k: "Tensor"
    v: "Tensor"
    codes: "Tensor"
    params: "Tensor"
    block_table: "Tensor"
    start: "Tensor"
    transform: str
    clip_k: float
    clip_v: float
    bits: int
    guide: "Tensor | None" = None


class Attention(NamedTuple):
    """The arguments of ``kv_attention``."""

    q: "Tensor"
    codes: "Tensor"
    params: "Tensor"
    block_table: "Tensor"
    lengths: "Tensor"
    first: "Tensor | None"
    scale: float
    window: int
    softcap: float
    transform: str
    bits: int
