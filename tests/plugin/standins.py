"""Stand-ins of the engine's classes, for machines without vLLM: what our methods use of them, no more.

Where vLLM is installed they are not used: ``classes`` then returns nothing to put in place.
"""

import enum
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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


class Config:
    """As ``QuantizationConfig``."""

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class Unquantized:
    """As ``UnquantizedLinearMethod``."""


class Head(nn.Module):
    """As ``ParallelLMHead``."""


class Loader:
    """As ``DefaultModelLoader``: a folder, or a repository that a test has put into a cache."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    def _prepare_weights(self, name: str, *_: Any) -> tuple[str]:
        folder = Path(CACHED.get(name, name))
        if not any(folder.glob("*.safetensors")):
            raise RuntimeError("Cannot find any model weights")
        return (str(folder),)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor)."""
        origin = SimpleNamespace(model_or_path=model_config.model, revision=None, subfolder=None, prefix="")
        yield from self._get_weights_iterator(origin)  # type: ignore[attr-defined]

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Let the model's code take all tensors."""
        model.load_weights(self.get_all_weights(model_config, model))


CACHED: dict[str, Path] = {}  # repository -> folder of its weights, without settings
FILES: dict[str, bytes] = {}  # what else the repositories hold
ASKED: list[tuple[str, str | None, str]] = []  # repository, cache, file: downloads


def download_weights_from_hf(
    name: str, cache: str | None, patterns: list[str], revision: str | None = None
) -> str:
    """As the engine's: brings what there is to the folder of the weights."""
    for path in patterns:
        ASKED.append((name, cache, path))
        if path in FILES:
            (CACHED[name] / path).write_bytes(FILES[path])
    return str(CACHED[name])


METHODS: list[str] = []
REGISTERED: dict[str, type] = {}
LOADERS: dict[str, type] = {}


def register_quantization_config(name: str) -> Callable[[type], type]:
    """As the engine's."""

    def register(cls: type) -> type:
        METHODS.append(name)
        REGISTERED[name] = cls
        return cls

    return register


def register_model_loader(name: str) -> Callable[[type], type]:
    """As the engine's."""

    def register(cls: type) -> type:
        LOADERS[name] = cls
        return cls

    return register


SETTINGS = SimpleNamespace(
    load_config=SimpleNamespace(load_format="auto"),
    parallel_config=SimpleNamespace(enable_expert_parallel=False),
    model_config=SimpleNamespace(runner_type="generate"),
    lora_config=None,
)
PLATFORM = SimpleNamespace(device_type="cpu", is_cuda=lambda: False, is_cpu=lambda: True)
LAYERS = "vllm.model_executor.layers"
MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.config": {"get_current_vllm_config": lambda: SETTINGS},
    "vllm.platforms": {"current_platform": PLATFORM},
    "vllm.distributed": {
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_pp_group": lambda: SimpleNamespace(world_size=1),
    },
    "vllm.model_executor": {},
    "vllm.model_executor.utils": {"is_weights_pre_processed": lambda: False},
    "vllm.model_executor.model_loader": {
        "DefaultModelLoader": Loader,
        "register_model_loader": register_model_loader,
        "_LOAD_FORMAT_TO_MODEL_LOADER": LOADERS,
    },
    "vllm.model_executor.model_loader.weight_utils": {"download_weights_from_hf": download_weights_from_hf},
    LAYERS: {},
    f"{LAYERS}.linear": {
        "LinearMethodBase": object,
        "LinearBase": Linear,
        "UnquantizedLinearMethod": Unquantized,
    },
    f"{LAYERS}.quantization": {
        "QUANTIZATION_METHODS": METHODS,
        "register_quantization_config": register_quantization_config,
    },
    f"{LAYERS}.quantization.base_config": {"QuantizationConfig": Config, "QuantizeMethodBase": object},
    f"{LAYERS}.vocab_parallel_embedding": {"ParallelLMHead": Head},
    f"{LAYERS}.fused_moe": {
        "FusedMoEMethodBase": MoEMethod,
        "MoEActivation": Activation,
        "RoutedExperts": Experts,
    },
    f"{LAYERS}.fused_moe.activation": {"apply_moe_activation": apply_moe_activation},
}


def is_installed() -> bool:
    """Tell whether the engine itself is here."""
    return importlib.util.find_spec("vllm") is not None


@contextmanager
def engine(*, without: str | None = None, version: str = "0.32.0") -> Iterator[None]:
    """Put the stand-ins in the place of vLLM's modules, and take our modules that saw them away again.

    without  a class that this release does not have
    """
    if is_installed():
        yield
        return
    before = set(sys.modules)
    for table in (METHODS, REGISTERED, LOADERS, CACHED, FILES, ASKED):
        table.clear()
    if without != "auto":
        LOADERS["auto"] = Loader
    for name, content in MODULES.items():
        module = ModuleType(name)
        vars(module).update({key: value for key, value in content.items() if key != without})
        sys.modules[name] = module
    sys.modules["vllm"].__version__ = version  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.startswith(("vllm", "w4pack.kernels.vllm")):
                del sys.modules[name]
                parent, _, leaf = name.rpartition(".")
                vars(sys.modules.get(parent, sys)).pop(leaf if parent else "", None)
