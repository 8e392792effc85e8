"""What the integer product computes, in PyTorch on any device: the kernels' reference, a CPU's fallback.

    acc[m, n] = sum over k of codes[m, k] * (q[k, n] - 2**(bits - 1))        exact, an int32
    one group:   y = fma(fp32(acc) * act_scale[m], scale[n], bias[n])
    groups:      y = fma(sum over G of scale[G, n] * acc_G[m, n], act_scale[m], bias[n])
                 G increasing, each step one fma

All in fp32, rounded once to the output's dtype. Nothing here is fast.
"""

from typing import TYPE_CHECKING

from w4pack.kernels import reference
from w4pack.kernels.quarot import orders_int
from w4pack.kernels.quarot.calls import Product

if TYPE_CHECKING:
    from torch import Tensor

EXACT_FP32 = 1 << 24  # integers up to here are fp32 numbers
MOST_CODE = 128  # of activations: the lowest int8


def weight_codes(weight: "Tensor", bits: int) -> "Tensor":
    """Return the signed codes (K, N) of a packed symmetric weight, int32."""
    signed: Tensor = reference.codes(weight, bits) - 2 ** (bits - 1)
    return signed


def accumulate(codes: "Tensor", weight_codes: "Tensor", bits: int) -> "Tensor":
    """Return the exact sums (M, N) as fp32 or fp64 integers: codes int8 (M, K), weight_codes int32 (K, N).

    Every partial sum is an integer below the bound, so the order of summation does not matter.
    """
    import torch

    bound = MOST_CODE * 2 ** (bits - 1) * codes.shape[1]
    exact = torch.float32 if bound < EXACT_FP32 else torch.float64
    return codes.to(exact) @ weight_codes.to(exact)


def _fma(a: "Tensor", b: "Tensor", c: "Tensor") -> "Tensor":
    """Return a * b + c rounded once to fp32; the product of two fp32 is exact in fp64."""
    return (a.double() * b.double() + c.double()).float()


def gemm(product: Product) -> "Tensor":
    """Return the product (M, N) in its dtype, on any device."""
    import torch

    bits, group_size, bias = product.bits, product.group_size, product.bias
    x, q = orders_int.natural(product.codes, product.order), weight_codes(product.weight, bits)
    s, sx = reference.natural_scales(product.scales).float(), product.act_scales[:, None]
    b = torch.zeros((), device=x.device) if bias is None else bias.float()
    if s.shape[0] == 1:
        return _fma(accumulate(x, q, bits).float() * sx, s[0], b).to(product.dtype)
    sums = torch.zeros((x.shape[0], q.shape[1]), device=x.device)
    for group, row in enumerate(range(0, q.shape[0], group_size)):
        span = slice(row, row + group_size)
        sums = _fma(accumulate(x[:, span], q[span], bits), s[group], sums)
    return _fma(sums, sx, b).to(product.dtype)
