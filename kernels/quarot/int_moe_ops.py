"""The integer product of a mixture of experts, ``torch.ops.w4pack.int_moe_gemm``.

    int_moe_gemm(codes, act_scales, weight, scales, rows, offsets,
                 bits, act_bits, group_size, order, k, dtype) -> y

    codes       (T, k) of tokens and act_scales fp32 (T,), as ``int_ops`` takes them: quantized once, whatever
                the number of experts that read them
    weight      int32 (E, k/16, N*bits/2);  scales: fp16 or bf16 (E, G, N), grouped order
    rows        int32 (R,): which token a (token, expert) pair reads, pairs sorted by expert
    offsets     int32 (E + 1,): where each expert's pairs begin; pairs from offsets[E] on give zeros
    y           (R, N) of ``dtype``: pair r of its expert's product, as ``int_reference`` has it

The rest is as in ``int_ops`` and ``moe_ops``: neither shapes nor launches depend on how tokens are spread
over experts. Importing this module registers the operator, once.
"""

from typing import TYPE_CHECKING, Any

import torch

from w4pack.kernels import moe_checks
from w4pack.kernels.moe_ops import spans
from w4pack.kernels.quarot import int_moe_launch, int_ops
from w4pack.kernels.quarot.calls import GroupedProduct, Product, register

if TYPE_CHECKING:
    from torch import Tensor

_library: Any = torch.library.Library("w4pack", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "int_moe_gemm(Tensor codes, Tensor act_scales, Tensor weight, Tensor scales, Tensor rows, "
    "Tensor offsets, int bits, int act_bits, int group_size, int order, int k, ScalarType dtype) -> Tensor"
)


def check(given: GroupedProduct) -> int:
    """Check the arguments of a grouped product by shape, dtype, stride and device; return N.

    Raises:
        UsageError: one of them does not fit.
    """
    experts = moe_checks.stack(given.packed)
    n = int_ops.check(_of_expert(given, 0))
    moe_checks.reach(given.codes, "codes")
    moe_checks.routing(given.rows, given.offsets, experts, given.codes)
    return n


def _of_expert(given: GroupedProduct, expert: int) -> Product:
    """Return every token's product with one expert."""
    weight, scales, _, bits, group_size = moe_checks.of_expert(given.packed, expert)
    tokens = (given.codes, given.act_scales)
    return Product(
        *tokens, weight, scales, None, bits, given.act_bits, group_size, given.order, given.k, given.dtype
    )


def _gemm_cpu(given: GroupedProduct) -> "Tensor":
    n = check(given)
    moe_checks.values(given.rows, given.offsets, given.codes.shape[0])
    out = given.codes.new_zeros((given.rows.shape[0], n), dtype=given.dtype)
    for expert, start, end in spans(given.offsets):
        taken = given.rows[start:end].long()
        product = _of_expert(given, expert)
        out[start:end] = int_ops.int_gemm(given.codes[taken], given.act_scales[taken], *product[2:])
    return out


def _gemm_cuda(given: GroupedProduct) -> "Tensor":
    out = given.codes.new_empty((given.rows.shape[0], check(given)), dtype=given.dtype)
    int_moe_launch.gemm(given, out)
    return out


def _gemm_fake(given: GroupedProduct) -> "Tensor":
    shape = (given.rows.shape[0], given.weight.shape[2] * 2 // given.bits)
    return given.codes.new_empty(shape, dtype=given.dtype)


register(_library, "int_moe_gemm", GroupedProduct, cuda=_gemm_cuda, cpu=_gemm_cpu, fake=_gemm_fake)

int_moe_gemm = torch.ops.w4pack.int_moe_gemm.default
