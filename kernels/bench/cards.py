"""The card that is timed: found before anything is made or printed."""

import torch

from w4pack.convert.errors import UsageError
from w4pack.kernels import devices, launch


def find(device: str = "cuda") -> torch.device:
    """Return a card with its index, ready for launches.

    Raises:
        UsageError: there is none, or the kernels do not run on it.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "there is no card to time",
            code="device",
            expected="a card that torch sees, of compute capability 8.0 or later",
            found=f"torch {torch.__version__} sees none",
        )
    found = devices.find(device)
    launch.device(found.index)
    return found
