"""What an artifact with ``online`` records computes, in fp32, said without the runtime.

transformers' own modules run on the dequantized weights. In front of each linear a hook multiplies by the
dense Hadamard matrix of its site and rounds to codes and back; keys and values go through a cache that does
the same. Matrices are built from their definition, element by element products of the factors.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers as tf
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from w4pack.convert.rotate.constructions import matrix
from w4pack.kernels import reference
from w4pack.kernels.artifact import Artifact, open_artifact

READERS = {"q_proj": "attn_in", "k_proj": "attn_in", "v_proj": "attn_in", "qkv_proj": "attn_in"}
LEAVES = {
    **READERS,
    "o_proj": "attn_out",
    "gate_proj": "mlp_in",
    "up_proj": "mlp_in",
    "gate_up_proj": "mlp_in",
    "down_proj": "mlp_mid",
}
# What models call their cache: it has another name since 5.2x.
PARAMETERS = inspect.signature(inspect.unwrap(tf.LlamaModel.forward)).parameters
CACHE = "cache" if "cache" in PARAMETERS else "past_key_values"
ROUTERS = ("gate", "shared_expert_gate")  # read the stream in 16 bit


def hadamard(record: dict[str, Any]) -> torch.Tensor:
    """Return (order, order) of a record, float64: ``x @ it`` is the transform."""
    block = reduce(np.kron, [matrix(m, kind) for m, kind in record["factors"]], np.ones((1, 1)))
    whole = np.kron(np.eye(record["order"] // record["block"]), block) / np.sqrt(record["block"])
    return torch.from_numpy(whole)


def rounded(x: torch.Tensor, bits: int, clip: float) -> torch.Tensor:
    """Return x (..., K) as symmetric codes and one scale for each row have it."""
    if bits == 16:
        return x
    most = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True) * clip / most
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (x / scale).round().clamp(-most - 1, most) * scale


def cached(x: torch.Tensor, bits: int, clip: float) -> torch.Tensor:
    """Return x (..., head size) as the cache has it: asymmetric, a half for the scale, zero in the range."""
    if bits == 16:
        return x
    levels = 2**bits - 1
    low, high = x.amin(-1, keepdim=True).clamp(max=0) * clip, x.amax(-1, keepdim=True).clamp(min=0) * clip
    scale = ((high - low) / levels).half().float().clamp(min=2.0**-14)
    zero = (-low / scale).round().clamp(0, levels)
    return ((x / scale).round() + zero).clamp(0, levels).sub(zero) * scale


def guided(x: torch.Tensor, bits: int, clip: float, guide: torch.Tensor) -> torch.Tensor:
    """Return keys (B, heads, T, head size) as the cache has them with a guide, the offset given back.

    Twice the one code is moved, to its other neighbour, after which |e|^2 + (w e)^2 is least: all are tried.
    """
    offset, w = guide[:, :, None].double()
    y = (x.double() - offset).float()
    levels = 2**bits - 1
    low, high = y.amin(-1, keepdim=True).clamp(max=0) * clip, y.amax(-1, keepdim=True).clamp(min=0) * clip
    scale = ((high - low) / levels).half().float().clamp(min=2.0**-14)
    zero = (-low / scale).round().clamp(0, levels)
    codes = ((y / scale).round() + zero).clamp(0, levels).double()
    for _ in range(2):
        e = codes - zero - y.double() / scale
        move = torch.where(e > 0, -1.0, 1.0).double()
        tried = e[..., None, :] + torch.diag_embed(move)  # a row for each code that is moved
        costs = tried.square().sum(-1) + (tried @ w[..., None]).squeeze(-1).square()
        costs = costs.where((codes + move >= 0) & (codes + move <= levels), torch.inf)
        least, place = costs.min(-1, keepdim=True)
        gains = least < e.square().sum(-1, keepdim=True) + (e * w).sum(-1, keepdim=True).square()
        codes = codes.scatter_add(-1, place, move.gather(-1, place) * gains)
    return ((codes - zero) * scale + offset).float()


class FakeModel:
    """The fp32 model of an artifact.

    Args:
        out: the artifact.
        place: an empty folder to work in.
        act_bits: of activations.
        kv_bits: of the cache.
    """

    def __init__(self, out: Path, place: Path, act_bits: int, kv_bits: int) -> None:
        self.artifact = open_artifact(out, online=True)
        self.act_bits, self.kv_bits = act_bits, kv_bits
        online = self.artifact.quant["online"]
        self.records = {(r["site"], r["order"]): r for r in online if r["kind"] == "hadamard"}
        self.clips = {r["site"]: r["clip"] for r in online if r["kind"] == "act_quant"}
        self.kv = next(r for r in online if r["kind"] == "kv_quant")
        self.heads = self.artifact.config["num_attention_heads"]
        self.guides = _guides(self.artifact)
        self.model = dense(self.artifact, place)
        for name, module in self.model.named_modules():
            site = LEAVES.get(name.rpartition(".")[2])
            if isinstance(module, nn.Linear) and site and ".layers." in name:
                module.register_forward_pre_hook(self._hook(site))
            elif name.rpartition(".")[2] in ROUTERS and ".mlp." in f"{name}.":
                module.register_forward_pre_hook(lambda m, args: (self.turned("mlp_in", args[0]), *args[1:]))
            elif hasattr(module, "gate_up_proj") and hasattr(module, "down_proj") and not _is_mlp(module):
                module.forward = self._experts(module)

    def _hook(self, site: str) -> Callable[..., Any]:
        return lambda module, args: (self.given(site, args[0]),)

    def given(self, site: str, x: torch.Tensor) -> torch.Tensor:
        """Return what a linear of a site reads of x."""
        clip = self.clips[site].get(str(self.act_bits), 1.0)
        return rounded(self.turned(site, x), self.act_bits, clip)

    def turned(self, site: str, x: torch.Tensor) -> torch.Tensor:
        """Return x after the transform of its site."""
        if site == "attn_out":
            record = self.records.get(("attn_out", self.heads))
            if record is None:
                return x
            apart = x.double().unflatten(-1, (self.heads, -1)).transpose(-1, -2)
            return (apart @ hadamard(record)).transpose(-1, -2).flatten(-2).float()
        kind = "mlp_mid" if site == "mlp_mid" else "residual_read"
        record = self.records.get((kind, x.shape[-1]))
        return x if record is None else (x.double() @ hadamard(record)).float()

    def _experts(self, own: Any) -> Callable[..., torch.Tensor]:
        def forward(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            read, out = self.given("mlp_in", x), torch.zeros_like(x)
            for expert in range(own.gate_up_proj.shape[0]):
                token, choice = torch.where(chosen == expert)
                gate, up = (read[token] @ own.gate_up_proj[expert].T).chunk(2, -1)
                mid = self.given("mlp_mid", own.act_fn(gate) * up)
                out.index_add_(0, token, mid @ own.down_proj[expert].T * weights[token, choice, None])
            return out

        return forward

    def cache(self) -> DynamicCache:
        """Return an empty cache that rounds what it is given."""
        made = DynamicCache()
        made.layer_class_to_replicate = lambda: _Rounding(self, len(made.layers))
        return made

    def logits(self, tokens: torch.Tensor, **more: Any) -> torch.Tensor:
        """Return (B, T, vocabulary) logits."""
        with torch.no_grad():
            found: torch.Tensor = self.model(tokens, **{CACHE: self.cache()}, **more).logits
        return found


class _Rounding(DynamicLayer):
    def __init__(self, owner: FakeModel, index: int) -> None:
        super().__init__()
        self.owner, self.guide = owner, owner.guides.get(index)

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        owner, bits = self.owner, self.owner.kv_bits
        clip_k, clip_v = (owner.kv["clip"][side].get(str(bits), 1.0) for side in "kv")
        record = owner.records.get(("qk", keys.shape[-1]))
        if bits != 16:
            turn = torch.eye(keys.shape[-1]).double() if record is None else hadamard(record)
            held = (keys.double() @ turn).float()
            plain = self.guide is None
            held = cached(held, bits, clip_k) if plain else guided(held, bits, clip_k, self.guide)
            keys, values = (held.double() @ turn.T).float(), cached(values, bits, clip_v)
        return super().update(keys, values)


def _guides(artifact: Artifact) -> dict[int, torch.Tensor]:
    """Return the guides of keys by layer."""
    found: dict[int, torch.Tensor] = {}
    for name in artifact.dense:
        if name.endswith(".k_guide"):
            path, _ = artifact.files[artifact.tensors[name].file]
            with safetensors.safe_open(path, "pt") as file:
                found[int(name.split(".")[2])] = file.get_tensor(name)
    return found


def _is_mlp(module: nn.Module) -> bool:
    return isinstance(module.down_proj, nn.Module)


def dense(artifact: Artifact, place: Path) -> tf.PreTrainedModel:
    """Return transformers' model of the dequantized weights, fp32."""
    stored: dict[str, torch.Tensor] = {}
    for path, _ in artifact.files.values():
        stored |= safetensors.torch.load_file(path)
    tensors = {name: stored[name].float() for name in artifact.dense if not name.endswith(".k_guide")}
    for module, spec in artifact.specs.items():
        packed, scales = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
        whole = reference.dense(packed, scales, None, spec.bits, spec.group_size, torch.float32)
        tensors[f"{module}.weight"] = whole[: spec.in_features, : spec.out_features].t().contiguous()
        if spec.bias:
            tensors[f"{module}.bias"] = stored[f"{module}.bias"].float()
    place.mkdir(parents=True)
    safetensors.torch.save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in artifact.config.items() if k != "quantization_config"}
    (place / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    model = tf.AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()
