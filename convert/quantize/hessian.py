"""What calibration knows of a linear's input: H = sum of x xᵀ over tokens, in float32, and its factor.

With the shift: D = sum of (x - x̂) x̂ᵀ, where x̂ is the input in the quantized model and x that in the
source. Sums are divided once, at the end, by the number of tokens.
"""

from dataclasses import dataclass

import torch

from w4pack.convert.files.provider import is_finite

BAND = 256  # columns of H that are made at a time: H is symmetric, so the lower half is never computed
LEAF = 192  # rows of a triangle that is inverted as it is
DAMPINGS = 3  # values of the damping, each ten times the one before, until a linear is given up


@dataclass(frozen=True, slots=True)
class Factor:
    """U, upper triangular, inverse(H) = Uᵀ U; the damping it took, as a share of the mean diagonal."""

    upper: torch.Tensor
    damping: float


class Statistics:
    """Running sums over the inputs of one linear.

    sum     (K, K) float32, upper half only until ``hessian``
    shift   (K, K) float32 or None, row = index of the difference
    tokens  number of rows added
    routed  they are only the tokens that a router chose
    peak    size of the largest input
    """

    def __init__(
        self, features: int, device: torch.device, *, shifted: bool = False, routed: bool = False
    ) -> None:
        self.sum = torch.zeros(features, features, dtype=torch.float32, device=device)
        self.shift = torch.zeros_like(self.sum) if shifted else None
        self.tokens = 0
        self.routed = routed
        self.peak = 0.0

    def add(
        self, x: torch.Tensor, reference: torch.Tensor | None = None, *, unshifted: slice | None = None
    ) -> None:
        """Add inputs (tokens, K), float32 or 16 bit.

        reference  the same tokens' in the source model
        unshifted  tokens whose difference from it does not count
        """
        features = x.shape[1]
        for start in range(0, features, BAND):
            _add_product(self.sum[start : start + BAND, start:], x[:, start : start + BAND], x[:, start:])
        if self.shift is not None and reference is not None:
            difference = (reference.float() - x.float()).to(x.dtype)
            if unshifted is not None:
                difference[unshifted] = 0
            _add_product(self.shift, difference, x)
        self.tokens += x.shape[0]

    def hessian(self) -> torch.Tensor:
        """Return H / tokens (K, K), symmetric."""
        found = self.sum / max(self.tokens, 1)
        for start in range(0, found.shape[0], BAND):
            stop = start + BAND
            square = torch.triu(found[start:stop, start:stop])
            found[start:stop, start:stop] = square + torch.triu(square, 1).T
            found[stop:, start:stop] = found[start:stop, stop:].T
        return found

    def mean_shift(self) -> torch.Tensor | None:
        """Return D / tokens (K, K), or None."""
        return None if self.shift is None else self.shift / max(self.tokens, 1)

    def importance(self) -> torch.Tensor:
        """Return the mean square of each input (K,)."""
        return torch.diagonal(self.sum) / max(self.tokens, 1)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add aᵀ b to float32 sums."""
    if a.dtype == torch.float32:
        total.addmm_(a.T, b)
    else:
        total += _product(a, b)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return aᵀ b of 16-bit matrices with float32 sums and a float32 result."""
    if a.device.type == "cuda":
        wide = _wide_product(a, b)
        if wide is not None:
            return wide
    return a.float().T @ b.float()


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """Multiply 16-bit matrices on the tensor cores without rounding the sums, where this torch can."""
    try:
        return torch.mm(a.T, b, out_dtype=torch.float32)  # torch 2.8 and later
    except (TypeError, RuntimeError, NotImplementedError):
        return None


def dampings(first: float) -> list[float]:
    """Return the values of the damping that are tried one after another."""
    return [first * 10**i for i in range(DAMPINGS)]


def factor(hessian: torch.Tensor, damping: float) -> Factor | None:
    """Factor a Hessian; the damping grows tenfold until it can be done. None: it cannot.

    One factorization and one triangular inverse: H read from its last row and column is L Lᵀ, and U is the
    inverse of L read the same way. float32 first, then float64, before more damping.
    """
    if not is_finite(hessian):
        return None
    mean = float(torch.diagonal(hessian).mean())
    for share in dampings(damping):
        for dtype in (torch.float32, torch.float64):
            upper = _upper(hessian.to(dtype), share * mean)
            if upper is not None:
                return Factor(upper, share)
    return None


def _upper(hessian: torch.Tensor, added: float) -> torch.Tensor | None:
    flipped = torch.flip(hessian, (0, 1))
    torch.diagonal(flipped).add_(added)
    lower, info = torch.linalg.cholesky_ex(flipped)
    if int(info) != 0:
        return None
    inverse = torch.zeros_like(lower)
    _invert(lower, inverse)
    upper = torch.flip(inverse, (0, 1)).float()
    return upper if is_finite(upper) else None


def _invert(lower: torch.Tensor, inverse: torch.Tensor) -> None:
    """Write the inverse of a lower triangular matrix: of its halves, and what joins them as products.

    A third of the operations of solving for the columns of the identity, nearly all in large products.
    """
    size = lower.shape[0]
    if size <= LEAF:
        eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
        inverse.copy_(torch.linalg.solve_triangular(lower, eye, upper=False))
        return
    half = -(-size // 2 // LEAF) * LEAF
    first, second = slice(None, half), slice(half, None)
    _invert(lower[first, first], inverse[first, first])
    _invert(lower[second, second], inverse[second, second])
    joined = lower[second, first] @ inverse[first, first]
    torch.mm(inverse[second, second], joined, out=inverse[second, first]).neg_()
