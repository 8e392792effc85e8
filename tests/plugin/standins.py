"""Stand-ins of the engine's classes, for machines without vLLM: what our methods use of them, no more.

Where vLLM is installed they are not used: ``classes`` then returns nothing to put in place.
"""

import enum
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Activation(enum.Enum):
    """As ``MoEActivation``."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


class MoEMethod:
    """As ``FusedMoEMethodBase``."""

    def __init__(self, moe: Any) -> None:
        self.moe = moe


class Experts(nn.Module):
    """As ``RoutedExperts``: what a method reads of it."""

    expert_map: torch.Tensor | None = None
    apply_router_weight_on_input = False
    activation = Activation.SILU
    ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name = "w1", "w2", "w3"

    def __init__(self, name: str, count: int, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.layer_name = name
        parallel = SimpleNamespace(tp_rank=rank, tp_size=size)
        self.moe_config = SimpleNamespace(num_logical_experts=count, moe_parallel_config=parallel)

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return expert if self.expert_map is None else int(self.expert_map[expert])


class Linear(nn.Module):
    """As ``LinearBase``: what a method reads of it."""

    def __init__(self, prefix: str, rank: int = 0, size: int = 1, *, bias: bool = False) -> None:
        super().__init__()
        self.prefix, self.tp_rank, self.tp_size, self.has_bias = prefix, rank, size, bias


def apply_moe_activation(activation: Activation, out: torch.Tensor, both: torch.Tensor) -> None:
    """As the engine's, for SiLU: in fp32, rounded once."""
    gate, up = both.float().chunk(2, -1)
    out.copy_(functional.silu(gate) * up)


@contextmanager
def engine() -> Iterator[None]:
    """Put the stand-ins in the place of vLLM's modules, and take our modules that saw them away again."""
    if importlib.util.find_spec("vllm") is not None:
        yield
        return
    before = set(sys.modules)
    base = "vllm.model_executor.layers"
    made = {name: ModuleType(name) for name in ("vllm", "vllm.model_executor", base, f"{base}.linear")}
    made |= {name: ModuleType(name) for name in (f"{base}.fused_moe", f"{base}.fused_moe.activation")}
    made |= {name: ModuleType(name) for name in ("vllm.model_executor.utils",)}
    made[f"{base}.linear"].LinearMethodBase = object  # type: ignore[attr-defined]
    made["vllm.model_executor.utils"].is_weights_pre_processed = lambda: False  # type: ignore[attr-defined]
    moe = {"FusedMoEMethodBase": MoEMethod, "MoEActivation": Activation, "RoutedExperts": Experts}
    vars(made[f"{base}.fused_moe"]).update(moe)
    made[f"{base}.fused_moe.activation"].apply_moe_activation = apply_moe_activation  # type: ignore[attr-defined]
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.startswith(("vllm", "w4pack.kernels.vllm")):
                del sys.modules[name]
