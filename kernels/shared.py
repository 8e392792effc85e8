"""The tensor of a layer that lies inside a joined one: it cannot be taken out of there unseen.

``part.weight.data = other`` would let a plain parameter leave the joined tensor, which the product reads, and
nothing would show it. Here the values are copied to where the product reads them.
"""

from typing import Any

import torch
from torch import nn

from w4pack.convert.errors import UsageError

_data: Any = torch.Tensor.data  # as every tensor has it: a descriptor


class Shared(nn.Parameter):
    """A view of a joined tensor, as a parameter. Copies and pickles of it are plain tensors."""

    @property
    def data(self) -> torch.Tensor:
        """The view, without a record of what is done to it."""
        found: torch.Tensor = _data.__get__(self)
        return found

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        """Copy values into the joined tensor.

        Raises:
            UsageError: a tensor that does not fit there.
        """
        if _kind(other) != _kind(self):
            raise UsageError(
                "a tensor does not fit where the joined layers have it",
                code="fused-part",
                expected=_words(self),
                found=_words(other),
                hint="model.to(device) moves all of a model; the dtype is chosen as it is loaded",
            )
        self.check(other)
        self.data.copy_(other.detach())

    def check(self, other: torch.Tensor) -> None:
        """Refuse values that do not fit there."""


class SharedOrder(Shared):
    """An act-order, of which the joined layers have one: it is not changed through one of them."""

    def check(self, other: torch.Tensor) -> None:
        """Refuse another order.

        Raises:
            UsageError: the other layers would read their inputs in it too.
        """
        if not torch.equal(self.data, other):
            raise UsageError(
                "the order of inputs is that of all layers that are joined",
                code="fused-part",
                where="act_perm",
                expected="the order that it has",
                found="another",
                hint="load_state_dict with the same order for all of them",
            )


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _words(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
