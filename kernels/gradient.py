"""What a gradient meets at a packed layer: an error, where torch would warn and go on without its part."""

from typing import Any

import torch

from w4pack.convert.errors import UsageError


def wanted(x: torch.Tensor) -> bool:
    """Whether a product of x would be asked for its gradient."""
    return x.requires_grad and torch.is_grad_enabled()


def refused(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return y, computed of x without a record, so that going back through it is an error."""
    out: torch.Tensor = _Refused.apply(x, y)  # type: ignore[no-untyped-call]
    return out


class _Refused(torch.autograd.Function):
    """Stands where the product's record would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y."""
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Say that there is no gradient.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "packed layers have no gradient",
            code="no-gradient",
            hint="w4pack convert SOURCE OUT --to dense, to train",
        )
