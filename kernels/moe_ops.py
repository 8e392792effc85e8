"""The operators of mixture-of-experts layers, in ``torch.ops.w4pack`` beside those of ``ops``.

    moe_gemm(x, weight, scales, zeros?, rows, offsets, bits, group_size) -> y
    moe_gather(x, rows, offsets, perm, width) -> x[rows] in each expert's order of columns

R (token, expert) pairs are sorted by expert. ``rows`` int32 (R,) says which row of x (T, K) a pair reads,
``offsets`` int32 (E + 1,) where each expert's pairs begin: it rises from 0 to at most R, and pairs from
``offsets[E]`` on belong to nobody and give zeros. ``weight`` is (E, K/16, N*bits/2), ``scales`` (E, G, N),
``zeros`` (E, G, N*bits/32), ``perm`` (E, K): per expert what ``ops`` takes. Neither shapes nor launches
depend on how tokens are spread over experts.
"""

from typing import TYPE_CHECKING, Any

import torch

from w4pack.kernels import checks, moe_checks, moe_launch, reference
from w4pack.kernels.arguments import Packed, register_fake, with_packed

if TYPE_CHECKING:
    from torch import Tensor

_library: Any = torch.library.Library("w4pack", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "moe_gemm(Tensor x, Tensor weight, Tensor scales, Tensor? zeros, Tensor rows, Tensor offsets, "
    "int bits, int group_size) -> Tensor"
)
_library.define("moe_gather(Tensor x, Tensor rows, Tensor offsets, Tensor perm, int width) -> Tensor")


def _gemm_cpu(x: "Tensor", packed: Packed, rows: "Tensor", offsets: "Tensor") -> "Tensor":
    _, n = moe_checks.gemm(x, packed, rows, offsets)
    moe_checks.values(rows, offsets, x.shape[0])
    out = torch.zeros((rows.numel(), n), dtype=x.dtype, device=x.device)
    for expert, start, end in spans(offsets):
        taken = x[rows[start:end].long()]
        weight, scales, zeros, *scheme = moe_checks.of_expert(packed, expert)
        out[start:end] = reference.gemm(taken, weight, scales, zeros, None, *scheme)
    return out


def _gather_cpu(x: "Tensor", rows: "Tensor", offsets: "Tensor", perm: "Tensor", width: int) -> "Tensor":
    moe_checks.gather(x, rows, offsets, perm, width)
    moe_checks.values(rows, offsets, x.shape[0])
    out = torch.zeros((rows.numel(), width), dtype=x.dtype, device=x.device)
    for expert, start, end in spans(offsets):
        checks.order_values(perm[expert], x.shape[1])
        out[start:end] = reference.gather(x[rows[start:end].long()], perm[expert], width)
    return out


def spans(offsets: "Tensor") -> list[tuple[int, int, int]]:
    """Return (expert, first pair, end) of the experts that have pairs."""
    borders = offsets.tolist()
    spans = zip(range(len(borders) - 1), borders[:-1], borders[1:], strict=True)
    return [(expert, start, end) for expert, start, end in spans if end > start]


def _gemm_fake(x: "Tensor", packed: Packed, rows: "Tensor", offsets: "Tensor") -> "Tensor":
    return x.new_empty((rows.shape[0], packed.weight.shape[2] * 2 // packed.bits))


def _gather_fake(x: "Tensor", rows: "Tensor", offsets: "Tensor", perm: "Tensor", width: int) -> "Tensor":
    return x.new_empty((rows.shape[0], width))


_library.impl("moe_gemm", with_packed(moe_launch.gemm, before=1, between=2), "CUDA")
_library.impl("moe_gather", moe_launch.gather, "CUDA")
_library.impl("moe_gemm", with_packed(_gemm_cpu, before=1, between=2), "CPU")
_library.impl("moe_gather", _gather_cpu, "CPU")
register_fake(_library, "moe_gemm", with_packed(_gemm_fake, before=1, between=2))
register_fake(_library, "moe_gather", _gather_fake)

moe_gemm = torch.ops.w4pack.moe_gemm.default
moe_gather = torch.ops.w4pack.moe_gather.default
