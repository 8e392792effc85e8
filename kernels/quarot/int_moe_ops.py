"""The integer product of a mixture of experts, ``torch.ops.w4pack.int_moe_gemm``.

    int_moe_gemm(codes, act_scales, weight, scales, rows, offsets,
                 bits, act_bits, group_size, order, k, dtype) -> y

    codes       (T, k) of tokens and act_scales fp32 (T,), as ``int_ops`` takes them: quantized once, whatever
                the number of experts that read them
    weight      int32 (E, k/16, N*bits/2);  scales: fp16 or bf16 (E, G, N), grouped order
    rows        int32 (R,): which token a (token, expert) pair reads, pairs sorted by expert
    offsets     int32 (E + 1,): where each expert's pairs begin; pairs from offsets[E] on give zeros
    y           (R, N) of ``dtype``: pair r of its expert's product, as ``int_reference`` has it

The rest is as in ``int_ops`` and ``moe_ops``. Each expert that has pairs is one product, on a card one
launch: the borders are read on the host, which waits for the device, so such a layer is not captured in a
CUDA graph.
Importing this module registers the operator, once.
"""

from typing import TYPE_CHECKING, Any

import torch

from w4pack.kernels import moe_checks
from w4pack.kernels.arguments import Packed
from w4pack.kernels.moe_ops import spans
from w4pack.kernels.quarot import int_ops

if TYPE_CHECKING:
    from torch import Tensor

_library: Any = torch.library.Library("w4pack", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "int_moe_gemm(Tensor codes, Tensor act_scales, Tensor weight, Tensor scales, Tensor rows, "
    "Tensor offsets, int bits, int act_bits, int group_size, int order, int k, ScalarType dtype) -> Tensor"
)


def check(
    codes: "Tensor",
    act_scales: "Tensor",
    packed: Packed,
    rows: "Tensor",
    offsets: "Tensor",
    act_bits: int,
    order: int,
    k: int,
    dtype: torch.dtype,
) -> int:
    """Check the arguments of a grouped product by shape, dtype, stride and device; return N.

    Raises:
        UsageError: one of them does not fit.
    """
    experts = moe_checks.stack(packed)
    one = moe_checks.of_expert(packed, 0)
    n = int_ops.check(
        codes,
        act_scales,
        one.weight,
        one.scales,
        None,
        packed.bits,
        act_bits,
        packed.group_size,
        order,
        k,
        dtype,
    )
    moe_checks.routing(rows, offsets, experts, codes)
    return n


def _gemm(
    codes: "Tensor",
    act_scales: "Tensor",
    weight: "Tensor",
    scales: "Tensor",
    rows: "Tensor",
    offsets: "Tensor",
    bits: int,
    act_bits: int,
    group_size: int,
    order: int,
    k: int,
    dtype: torch.dtype,
) -> "Tensor":
    packed = Packed(weight, scales, None, bits, group_size)
    n = check(codes, act_scales, packed, rows, offsets, act_bits, order, k, dtype)
    if not codes.is_cuda:
        moe_checks.values(rows, offsets, codes.shape[0])
    out = codes.new_zeros((rows.shape[0], n), dtype=dtype)
    for expert, start, end in spans(offsets):
        taken, one = rows[start:end].long(), moe_checks.of_expert(packed, expert)
        out[start:end] = int_ops.int_gemm(
            codes[taken],
            act_scales[taken],
            one.weight,
            one.scales,
            None,
            bits,
            act_bits,
            group_size,
            order,
            k,
            dtype,
        )
    return out


def _gemm_fake(
    codes: "Tensor",
    act_scales: "Tensor",
    weight: "Tensor",
    scales: "Tensor",
    rows: "Tensor",
    offsets: "Tensor",
    bits: int,
    act_bits: int,
    group_size: int,
    order: int,
    k: int,
    dtype: torch.dtype,
) -> "Tensor":
    return codes.new_empty((rows.shape[0], weight.shape[2] * 2 // bits), dtype=dtype)


_library.impl("int_moe_gemm", _gemm, "CUDA")
_library.impl("int_moe_gemm", _gemm, "CPU")
torch.library.register_fake("w4pack::int_moe_gemm", _gemm_fake, lib=_library)

int_moe_gemm = torch.ops.w4pack.int_moe_gemm.default
