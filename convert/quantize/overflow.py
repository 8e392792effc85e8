"""Activations that are no numbers: the job stops at once and says where, and how large the last ones were."""

import torch

from w4pack.convert.errors import W4PackError


def size(values: torch.Tensor) -> float:
    """Return the largest size among values; infinity or NaN where one is not finite."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)  # no copy of them all
    return float(torch.maximum(-low, high))


def largest_finite(values: torch.Tensor) -> float:
    """Return the largest finite size among values; 0.0 where none is finite."""
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def not_finite(where: str, found: str, went_in: float, dtype: torch.dtype) -> W4PackError:
    """Return the error.

    Args:
        where: the linear or the layer.
        found: what is no number there.
        went_in: the largest finite input.
        dtype: in which activations are computed.
    """
    wide = dtype == torch.float32
    return W4PackError(
        "activations are not finite, so nothing can be learnt from them",
        code="activations",
        where=where,
        expected=f"numbers that {str(dtype).removeprefix('torch.')} holds",
        found=f"{found}; the largest finite input is {went_in:.4g}",
        hint="`--quantize rtn` looks at the weights alone"
        if wide
        else "on the CPU (`--device cpu`) activations are float32",
    )
