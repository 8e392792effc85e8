"""Devices by name: the one check that a device is there, before anything is read or written."""

import torch

from w4pack.convert.errors import UsageError


def find(device: torch.device | str | int) -> torch.device:
    """Return the CPU, or a GPU with its index: one value for each device, whatever it is called.

    A number alone is a GPU's, as in a device map.

    Raises:
        UsageError: no such device, or none that torch sees.
    """
    name = f"cuda:{device}" if str(device).isdecimal() else str(device)
    try:
        found = torch.device(name)
    except RuntimeError as err:
        raise _none(name, "the name of no device") from err
    if found.type == "cpu":
        if found.index:
            raise _none(name, "one CPU, whose number is 0")
        return torch.device("cpu")
    if found.type != "cuda":
        raise _none(name, "a device that the kernels do not run on")
    if not torch.cuda.is_available():
        raise _none(name, "no GPU that torch sees")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= count:
        raise _none(name, f"{count} GPUs")
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
