"""Guides of keys where they are held: buffers of attention modules, float32 whatever the model's dtype is.

A pass reads them as they are then, so that what reaches a buffer (``load_state_dict``, assigned too, a move,
a change in place) reaches the cache.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from w4pack.convert.source.online_places import GUIDE
from w4pack.kernels.modules import without_cast


def keep(module: nn.Module) -> None:
    """Let a module's guide follow it from device to device, out of reach of casts."""
    module.__dict__["_apply"] = _Apply(module)


def guides_of(modules: Iterable[nn.Module]) -> tuple[torch.Tensor | None, ...]:
    """Return the guide of each attention module as the kernels read it, float32 (2, heads, size), or None.

    It is the buffer itself, unless somebody assigned one of another dtype.
    """
    return tuple(_readable(module._buffers.get(GUIDE)) for module in modules)


def _readable(guide: torch.Tensor | None) -> torch.Tensor | None:
    if guide is None or (guide.dtype == torch.float32 and guide.is_contiguous()):
        return guide
    return guide.float().contiguous()


class _Apply:
    """Stands in a module for its ``_apply``, through which every cast and move goes. Copied along with it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module, guide = self.module, self.module._buffers.get(GUIDE)
        kept = None if guide is None else without_cast(fn, guide)
        type(module)._apply(module, fn, recurse)  # type: ignore[no-untyped-call]
        module._buffers[GUIDE] = kept
        return module
