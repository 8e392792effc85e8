"""The most memory that a job has taken so far: of the host by the process, of a card by torch's tensors.

Of the host it is what the plan gives the limit of (``planning.memory``): the largest resident set of the
process, interpreter and libraries among it.
"""

import resource
import sys
from pathlib import Path

import torch

from w4pack.convert.events import size_text

STATUS = Path("/proc/self/status")


def host_peak() -> int:
    """Return the largest resident set of this process so far, in bytes.

    As the kernel tells it, where it does: that of ``getrusage`` begins with the peak of the parent process.
    """
    try:
        lines = STATUS.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_text(device: torch.device) -> str:
    """Return what to tell: ``1.01 GiB memory, libraries included``, and ``14.82 GiB of cuda:0`` of a card."""
    found = f"{size_text(host_peak())} memory, libraries included"
    if device.type == "cuda":
        found += f", {size_text(torch.cuda.max_memory_allocated(device))} of {device}"
    return found
