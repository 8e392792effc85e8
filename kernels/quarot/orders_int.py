"""The orders in which integer products read a row of activation codes.

A tensor core wants consecutive values of one column in a register, but a word of the packed weight holds
values of two columns. The kernels part them by bytes; what is left over is a fixed order of K inside blocks
of 32, in which the quantizer writes the activations. The weight's bytes stay as they are.

    NATURAL   column k at position k
    P32       int8, s8 products with 4-bit weights
    S64       two codes a byte (low half first), s4 products with 4-bit weights
    Q32       int8, s8 products with 8-bit weights

Worked example, P32: position 2 of a block holds column 16, position 5 column 3.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from w4pack.convert.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NATURAL, P32, S64, Q32 = range(4)
ORDERS = (NATURAL, P32, S64, Q32)
BLOCK = 32  # columns of a block; S64 is two of them


def columns(order: int) -> "np.ndarray":
    """Return the natural column at each of the 32 positions of a block.

    Raises:
        UsageError: the order is not one of ``ORDERS``.
    """
    check(order)
    place = np.arange(BLOCK)
    if order == P32:  # k' = 16 h + 4 t + i
        t, i, h = place % 16 // 4, place % 4, place // 16
        return 2 * t + i % 2 + 16 * (i // 2) + 8 * h
    if order == Q32:
        t, i, h = place % 16 // 4, place % 4, place // 16
        return 16 * h + 2 * t + 8 * (i % 2) + i // 2
    if order == S64:  # k' = 8 t + i
        t, i = place // 8, place % 8
        return np.where(i < 4, 2 * t + 8 * (i % 2) + i // 2, 2 * t + 16 + 8 * (i % 2) + (i - 4) // 2)
    return place


def check(order: int) -> None:
    """Check an order.

    Raises:
        UsageError: the order is not one of ``ORDERS``.
    """
    if order not in ORDERS:
        raise UsageError(
            "the order of activation codes is not known",
            code="operator-argument",
            where="order",
            expected="0 natural, 1 P32, 2 S64, 3 Q32",
            found=str(order),
        )


@cache
def _index(order: int) -> "torch.Tensor":
    import torch

    return torch.from_numpy(np.ascontiguousarray(columns(order)))


def arrange(codes: "Tensor", order: int) -> "Tensor":
    """Return (M, K) int8 codes in an order: int8 (M, K), or uint8 (M, K/2) for S64. K is a multiple of 64.

    Raises:
        UsageError: the order is not known.
    """
    import torch

    check(order)
    index = _index(order).to(codes.device)
    placed: Tensor = codes.reshape(codes.shape[0], codes.shape[1] // BLOCK, BLOCK)[:, :, index].flatten(1)
    if order != S64:
        return placed
    nibbles = placed.to(torch.int32) & 15
    packed: Tensor = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
    return packed


def natural(codes: "Tensor", order: int) -> "Tensor":
    """Return int8 (M, K) codes in the natural order: inverts ``arrange``.

    Raises:
        UsageError: the order is not known.
    """
    import torch

    check(order)
    if order == S64:
        wide = codes.to(torch.int8)
        low, high = wide << 4 >> 4, wide >> 4  # arithmetic shifts keep the sign
        codes = torch.stack((low, high), -1).flatten(1)
    inverse = torch.argsort(_index(order)).to(codes.device)
    found: Tensor = codes.reshape(codes.shape[0], codes.shape[1] // BLOCK, BLOCK)[:, :, inverse].flatten(1)
    return found
