"""Random products in the artifact's form, with their value in fp64."""

from dataclasses import dataclass

import torch

from w4pack.kernels import reference
from w4pack.kernels.arguments import Packed


@dataclass(frozen=True, slots=True)
class Case:
    """One product: what the operator takes, and the dense weight (K, N) in fp64."""

    x: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bias: torch.Tensor | None
    bits: int
    group_size: int
    dense: torch.Tensor

    @property
    def packed(self) -> Packed:
        """The weight as launches take it."""
        return Packed(self.weight, self.scales, self.zeros, self.bits, self.group_size)

    @property
    def arguments(self) -> tuple[object, ...]:
        """The arguments of ``gemm``."""
        return (self.x, self.weight, self.scales, self.zeros, self.bias, self.bits, self.group_size)

    @property
    def exact(self) -> torch.Tensor:
        """The product in fp64: (M, N)."""
        y = self.x.double() @ self.dense
        return y if self.bias is None else y + self.bias.double()

    def with_x(self, x: torch.Tensor) -> "Case":
        """Return the same weight with other activations."""
        return Case(
            x, self.weight, self.scales, self.zeros, self.bias, self.bits, self.group_size, self.dense
        )


def random_words(shape: tuple[int, ...], device: str, generator: torch.Generator) -> torch.Tensor:
    """Return int32 words of random bits: every code and every zero point occurs."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device=device, generator=generator).to(
        torch.int32
    )


def make(
    m: int,
    k: int,
    n: int,
    bits: int = 4,
    group_size: int = 128,
    *,
    zeros: bool = False,
    dtype: torch.dtype = torch.float16,
    scale_dtype: torch.dtype | None = None,
    bias: bool = False,
    device: str = "cuda",
    seed: int = 0,
    dense: bool = True,
) -> Case:
    """Return a random product; ``dense=False`` leaves the fp64 weight out (it is large)."""
    g = torch.Generator(device=device).manual_seed(seed)
    groups = 1 if group_size == -1 else -(-k // group_size)
    weight = random_words((k // 16, n * bits // 2), device, g)
    packed_zeros = random_words((groups, n * bits // 32), device, g) if zeros else None
    scales = (torch.rand((groups, n), device=device, generator=g) * 0.01 + 0.005).to(scale_dtype or dtype)
    x = torch.randn((m, k), device=device, generator=g).to(dtype)
    b = torch.randn(n, device=device, generator=g).to(dtype) if bias else None
    value = (
        reference.dense(weight, scales, packed_zeros, bits, group_size, torch.float64)
        if dense
        else torch.empty(0, device=device)
    )
    return Case(x, weight, scales, packed_zeros, b, bits, group_size, value)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error (Frobenius norm); NaN counts as infinite."""
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found.double() - exact).norm() / exact.norm())


BOUND = {
    torch.float16: 5e-4,
    torch.bfloat16: 4e-3,
}  # of random small products; the golden files have the sharp one
