"""What runs in front of a linear: norm, activation or nothing, a transform, and a quantizer; one launch.

A front is given the 16-bit input of its linear as the model's own code hands it over, and returns what the
integer product reads, or 16-bit values. Fronts are made when a model is wired; they hold no tensors but
through the norm that they stand for, so a model can be moved as ever.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from w4pack.convert.core.scheme import WIDE
from w4pack.kernels.quarot import quantize_ops
from w4pack.kernels.quarot.norms import FusedNorm

UNIT = 64  # columns that the operators' output is padded to
Codes = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Front(ABC):
    """bits    of the output: 4, 8, or 16 for values of the input's dtype
    clip       share of a row's largest value that the codes reach
    transform  key of the Hadamard transform, "" for none
    """

    bits: int
    clip: float
    transform: str

    @abstractmethod
    def run(self, x: torch.Tensor, bits: int, order: int, width: int) -> Codes:
        """Return codes of x, of ``width`` columns in ``order``, and their scales; at 16 bits values."""

    def codes(self, x: torch.Tensor, order: int, width: int) -> Codes:
        """Return (codes, scales) of x (M, ...)."""
        return self.run(x, self.bits, order, width)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Return 16-bit values (M, K) of x (M, ...): what a linear in 16 bit reads."""
        features = self.features(x)
        return self.run(x, WIDE, 0, -(-features // UNIT) * UNIT)[0][:, :features]

    def features(self, x: torch.Tensor) -> int:
        """Return how many features the linear reads of x."""
        return x.shape[-1]


@dataclass(frozen=True)
class PlainFront(Front):
    """The input as it is."""

    def run(self, x: torch.Tensor, bits: int, order: int, width: int) -> Codes:
        """Return codes of x (M, K)."""
        found: Codes = quantize_ops.act_quantize(x, "none", self.transform, bits, self.clip, order, width)
        return found


@dataclass(frozen=True)
class NormFront(Front):
    """The norm of the input. Several readers of one norm share it."""

    norm: FusedNorm

    def run(self, x: torch.Tensor, bits: int, order: int, width: int) -> Codes:
        """Return codes of the norm of x (M, K)."""
        norm = self.norm
        found: Codes = quantize_ops.norm_quantize(
            x, norm.gain(), norm.eps, self.transform, bits, self.clip, order, width
        )
        return found


@dataclass(frozen=True)
class HeadsFront(Front):
    """Attention's output: the transform runs across heads."""

    heads: int

    def run(self, x: torch.Tensor, bits: int, order: int, width: int) -> Codes:
        """Return codes of x (M, heads * head size)."""
        found: Codes = quantize_ops.heads_quantize(
            x, self.heads, self.transform, bits, self.clip, order, width
        )
        return found


@dataclass(frozen=True)
class GatedFront(Front):
    """Gate and up, not yet multiplied: act(gate) * up."""

    activation: str

    def run(self, x: torch.Tensor, bits: int, order: int, width: int) -> Codes:
        """Return codes of x (M, 2K), gate first."""
        found: Codes = quantize_ops.act_quantize(
            x, self.activation, self.transform, bits, self.clip, order, width
        )
        return found

    def features(self, x: torch.Tensor) -> int:
        """Return how many features the linear reads of x: half its width."""
        return x.shape[-1] // 2
