"""Devices by name: the one check that a device is there, before anything is read or written."""

import torch

from w4pack.convert.errors import UsageError


def find(device: torch.device | str) -> torch.device:
    """Return the CPU, or a GPU with its index.

    Raises:
        UsageError: no such device, or none that torch sees.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as err:
        raise _none(str(device), "the name of no device") from err
    if found.type == "cpu":
        return torch.device("cpu")  # of which there is one, whatever number it was given
    if found.type != "cuda":
        raise _none(str(device), "a device that the kernels do not run on")
    if not torch.cuda.is_available():
        raise _none(str(device), "no GPU that torch sees")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= count:
        raise _none(str(device), f"{count} GPUs")
    return torch.device("cuda", index)


def _none(device: str, found: str) -> UsageError:
    return UsageError(
        "no such device",
        code="no-device",
        where=device,
        expected="cpu, cuda or cuda:N",
        found=found,
        hint="the device `cpu` is always there",
    )
