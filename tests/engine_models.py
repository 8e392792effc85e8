"""Models as facts, without a file: what engine rules are tried on.

The plain model is a Llama of one block (hidden 256, intermediate 512, 4 heads, 2 KV heads of 64) in symmetric
4 bit g128, which every engine takes in every portable form.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from w4pack.convert.core.facts import DenseFacts, LayerFacts, ModelFacts

HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 256, 512, 4, 2, 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "dtype": "float16",
}
MIXTRAL = CONFIG | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD),
    "self_attn.o_proj": (HEADS * HEAD, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
}
FILES = ("config.json", "model.safetensors")


def compressed(group: int = 128, *, bits: int = 4, sym: bool = True, **weights: Any) -> dict[str, Any]:
    """Return a compressed-tensors block with one group of schemes for every Linear."""
    scheme = {"num_bits": bits, "type": "int", "symmetric": sym, "group_size": None if group == -1 else group}
    scheme["strategy"] = "channel" if group == -1 else "group"
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme | weights}},
        "ignore": ["lm_head"],
    }


def layer(name: str, k: int, n: int, **values: Any) -> LayerFacts:
    """Return one linear; by default GPTQ, symmetric 4 bit g128 with a trivial g_idx."""
    base: dict[str, Any] = {
        "layout": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "act_order": "trivial",
        "scale_dtype": "F16",
        "bias": False,
        "zero_kind": "v1",
    }
    return LayerFacts(name=name, in_features=k, out_features=n, stored_in=k, stored_out=n, **(base | values))


def block(layout: str = "gptq", index: int = 0, **values: Any) -> tuple[LayerFacts, ...]:
    """Return the seven linears of a decoder block."""
    values.setdefault("act_order", "trivial" if layout == "gptq" else "none")
    prefix = f"model.layers.{index}."
    return tuple(layer(prefix + name, k, n, layout=layout, **values) for name, (k, n) in SHAPES.items())


def experts(
    layout: str = "gptq", hidden: int = 256, inner: int = 512, **values: Any
) -> tuple[LayerFacts, ...]:
    """Return two experts of a Mixtral block under the names that its class maps."""
    values.setdefault("act_order", "trivial" if layout == "gptq" else "none")
    found = []
    for index in range(2):
        prefix = f"model.layers.0.block_sparse_moe.experts.{index}."
        for part, (k, n) in {"w1": (hidden, inner), "w3": (hidden, inner), "w2": (inner, hidden)}.items():
            found.append(layer(prefix + part, k, n, layout=layout, **values))
    return tuple(found)


def changed(layers: tuple[LayerFacts, ...], leaf: str, **values: Any) -> tuple[LayerFacts, ...]:
    """Change the modules whose name ends in ``leaf``."""
    return tuple(replace(x, **values) if x.name.endswith(leaf) else x for x in layers)


def without(layers: tuple[LayerFacts, ...], leaf: str) -> tuple[LayerFacts, ...]:
    """Leave out the modules whose name ends in ``leaf``."""
    return tuple(x for x in layers if not x.name.endswith(leaf))


def dense(*modules: str, shape: tuple[int, int] = (256, 256)) -> tuple[DenseFacts, ...]:
    """Return 16-bit weights."""
    return tuple(DenseFacts(f"{name}.weight", "F16", shape) for name in modules)


def facts(
    layers: tuple[LayerFacts, ...],
    quant: dict[str, Any] | None,
    config: dict[str, Any] = CONFIG,
    dense_facts: tuple[DenseFacts, ...] = (),
    **values: Any,
) -> ModelFacts:
    """Return a model; the embedding and the head are dense."""
    fixed = dense("model.embed_tokens", "lm_head", shape=(320, 256))
    head = tuple(d for d in fixed if d.name.removesuffix(".weight") not in {x.name for x in layers})
    base: dict[str, Any] = {"quant_file": "config.json" if quant is not None else None, "files": FILES}
    base["weight_files"] = ("model.safetensors",)
    return ModelFacts(
        config=config, quant_config=quant, layers=layers, dense=head + dense_facts, **(base | values)
    )


def gptq(
    layers: tuple[LayerFacts, ...] | None = None, config: dict[str, Any] = CONFIG, **quant: Any
) -> ModelFacts:
    """Return a GPTQ model."""
    return facts(layers or block(), GPTQ | quant, config)


def awq(
    layers: tuple[LayerFacts, ...] | None = None, config: dict[str, Any] = CONFIG, **quant: Any
) -> ModelFacts:
    """Return an AWQ model, asymmetric as they usually are."""
    return facts(layers or block("awq", sym=False), AWQ | quant, config)


def ct(
    layers: tuple[LayerFacts, ...] | None = None,
    config: dict[str, Any] = CONFIG,
    quant: dict[str, Any] | None = None,
) -> ModelFacts:
    """Return a compressed-tensors model."""
    return facts(layers or block("compressed-tensors"), quant or compressed(), config)


def auto_round(layers: tuple[LayerFacts, ...] | None = None, **quant: Any) -> ModelFacts:
    """Return an AutoRound model."""
    return facts(layers or block(act_order="none"), AUTO_ROUND | quant)


def artifact(layers: tuple[LayerFacts, ...] | None = None, config: dict[str, Any] = CONFIG) -> ModelFacts:
    """Return our artifact."""
    return facts(layers or block("marlin"), {"quant_method": "w4pack", "version": 1}, config)


# ---- layers that several tests change

HEAD = layer("lm_head", 256, 320)
NARROW = {"num_attention_heads": 6, "num_key_value_heads": 2}


def online(**changes: object) -> ModelFacts:
    """Return an artifact with a transform in front of down_proj."""
    record = {"kind": "hadamard", "site": "mlp_mid", "order": 512, **changes}
    return replace(artifact(), quant_config={"quant_method": "w4pack", "online": [record]})


ORDERED = changed(block("marlin"), "down_proj", act_order="groups")
EXPERTS = experts("marlin")
PACKED_HEAD = replace(HEAD, layout="marlin", act_order="none")
