"""The integer product ``torch.ops.w4pack.int_gemm``: checks, then a kernel, or the reference on a CPU.

    int_gemm(codes, act_scales, weight, scales, bias?, bits, act_bits, group_size, order, k, dtype) -> y

    codes       int8 (M, k) in the order P32 (4-bit weights) or Q32 (8-bit), or uint8 (M, k/2) in S64
    act_scales  fp32 (M,)
    weight      int32 (k/16, N*bits/2), symmetric: what the artifact holds
    scales      fp16 or bf16 (G, N), grouped order
    bias        (N,) of ``dtype``
    bits        4 or 8, of the weight;  act_bits: 4 or 8, of the activations
    order       what ``int_tiles.int_order`` says for the card: the quantizer writes it
    k           rows of the weight, padding included (columns of padding hold code 0)

``int_reference`` says what y is. Importing this module registers the operator, once.
"""

from typing import TYPE_CHECKING, Any

import torch

from w4pack.convert.core.scheme import RUN_CODES
from w4pack.convert.dialects.online import MOST_K
from w4pack.kernels import checks
from w4pack.kernels.quarot import int_launch, int_reference, orders_int
from w4pack.kernels.quarot.calls import Product, register

if TYPE_CHECKING:
    from torch import Tensor

ACT_BITS = RUN_CODES

_library: Any = torch.library.Library("w4pack", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "int_gemm(Tensor codes, Tensor act_scales, Tensor weight, Tensor scales, Tensor? bias, int bits, "
    "int act_bits, int group_size, int order, int k, ScalarType dtype) -> Tensor"
)


def check(product: Product) -> int:
    """Check the arguments of a product; return N.

    Raises:
        UsageError: one of them does not fit.
    """
    codes, act_scales, weight, _, bias, bits, act_bits, group_size, order, k, dtype = product
    rows, n = checks.weight(*product.packed)
    checks.require(k == rows, "k is not the weight's", "k", rows, k)
    checks.require(k < MOST_K, "K is too large for int32 sums", "k", f"less than {MOST_K}", k)
    checks.require(act_bits in ACT_BITS, "the code width is not supported", "act_bits", "4 or 8", act_bits)
    checks.dense_dtype(dtype)
    _check_order(order, bits, act_bits, group_size)
    packed = order == orders_int.S64
    checks.has_dtype(codes, "codes", (torch.uint8 if packed else torch.int8,), 2)
    checks.has_shape(codes, "codes", (codes.shape[0], k // 2 if packed else k))
    checks.rows(codes, "codes", checks.VECTOR)
    checks.starts(codes, "codes", checks.VECTOR)
    checks.has_dtype(act_scales, "act_scales", (torch.float32,), 1)
    checks.has_shape(act_scales, "act_scales", (codes.shape[0],))
    checks.require(act_scales.is_contiguous(), "act_scales is not contiguous", "act_scales", "contiguous", "")
    for name, tensor in (("codes", codes), ("act_scales", act_scales), ("bias", bias)):
        if tensor is not None:
            checks.same_device(name, tensor, "weight", weight)
    if bias is not None:
        checks.has_dtype(bias, "bias", (dtype,), 1)
        checks.has_shape(bias, "bias", (n,))
        checks.require(bias.is_contiguous(), "bias is not contiguous", "bias", "contiguous", bias.stride())
    return n


def _check_order(order: int, bits: int, act_bits: int, group_size: int) -> None:
    orders_int.check(order)
    fits = (orders_int.Q32,) if bits == 8 else (orders_int.P32, orders_int.S64)
    text = "3 (Q32)" if bits == 8 else "1 (P32) or 2 (S64)"
    checks.require(order in fits, "the order does not fit the weight", "order", text, order)
    if order == orders_int.S64:
        checks.require(act_bits == 4, "S64 holds codes of 4 bit", "act_bits", 4, act_bits)
        checks.require(
            group_size != 32, "a step of S64 spans two groups", "group_size", "64, 128 or -1", group_size
        )


def _gemm_cpu(product: Product) -> "Tensor":
    check(product)
    return int_reference.gemm(product)


def _gemm_cuda(product: Product) -> "Tensor":
    n = check(product)
    out = torch.empty((product.codes.shape[0], n), dtype=product.dtype, device=product.codes.device)
    int_launch.gemm(product, out)
    return out


def _gemm_fake(product: Product) -> "Tensor":
    shape = (product.codes.shape[0], product.weight.shape[1] * 2 // product.bits)
    return product.codes.new_empty(shape, dtype=product.dtype)


register(_library, "int_gemm", Product, cuda=_gemm_cuda, cpu=_gemm_cpu, fake=_gemm_fake)

int_gemm = torch.ops.w4pack.int_gemm.default
