"""Synthetic checkpoints of a given size: real shapes, random bytes, valid headers; without the product."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Tensor = tuple[str, str, tuple[int, ...], bytes]
HIDDEN, INTERMEDIATE, KV = 4096, 14336, 1024
DTYPES = {"I32": 4, "F16": 2, "I64": 8}


def linears(
    layers: int, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, kv: int = KV
) -> Iterator[tuple[str, int, int]]:
    for i in range(layers):
        p = f"model.layers.{i}"
        for name, k, n in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", hidden, kv),
            ("self_attn.v_proj", hidden, kv),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", hidden, intermediate),
            ("mlp.up_proj", hidden, intermediate),
            ("mlp.down_proj", intermediate, hidden),
        ):
            yield f"{p}.{name}", k, n


def words(rng: np.random.Generator, rows: int, cols: int) -> bytes:
    return rng.integers(0, 2**32, size=(rows, cols), dtype=np.uint32).tobytes()


def scales(rng: np.random.Generator, rows: int, cols: int) -> bytes:
    return (rng.random((rows, cols), dtype=np.float32) * 0.01 + 0.001).astype(np.float16).tobytes()


def gptq(rng: np.random.Generator, p: str, k: int, n: int, g: int) -> list[Tensor]:
    groups = k // g
    return [
        (f"{p}.qweight", "I32", (k // 8, n), words(rng, k // 8, n)),
        (f"{p}.qzeros", "I32", (groups, n // 8), np.full((groups, n // 8), 0x77777777, np.uint32).tobytes()),
        (f"{p}.scales", "F16", (groups, n), scales(rng, groups, n)),
        (f"{p}.g_idx", "I32", (k,), (np.arange(k, dtype=np.int32) // g).tobytes()),
    ]


def awq(rng: np.random.Generator, p: str, k: int, n: int, g: int) -> list[Tensor]:
    groups = k // g
    return [
        (f"{p}.qweight", "I32", (k, n // 8), words(rng, k, n // 8)),
        (f"{p}.qzeros", "I32", (groups, n // 8), words(rng, groups, n // 8)),
        (f"{p}.scales", "F16", (groups, n), scales(rng, groups, n)),
    ]


def compressed_tensors(rng: np.random.Generator, p: str, k: int, n: int, g: int) -> list[Tensor]:
    groups = k // g
    return [
        (f"{p}.weight_packed", "I32", (n, k // 8), words(rng, n, k // 8)),
        (f"{p}.weight_scale", "F16", (n, groups), scales(rng, n, groups)),
        (f"{p}.weight_shape", "I64", (2,), np.array([n, k], np.int64).tobytes()),
    ]


MAKERS = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed_tensors}
GROUP_SCHEME = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
CONFIGS = {
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP_SCHEME}},
    },
}


def write_shard(path: Path, tensors: list[Tensor]) -> None:
    header, at = {}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for *_, data in tensors:
            file.write(data)


def make(
    folder: Path,
    kind: str,
    total: int,
    *,
    group: int = 128,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
) -> int:
    """Write about ``total`` bytes in shards of one decoder layer; returns the bytes written."""
    folder.mkdir(parents=True)
    rng, size, layer = np.random.default_rng(0), 0, 0
    index: dict[str, str] = {}
    while size < total:
        tensors: list[Tensor] = []
        for name, k, n in linears(1, hidden, intermediate):
            tensors += MAKERS[kind](rng, name.replace("layers.0", f"layers.{layer}"), k, n, group)
        shard = f"model-part{layer}.safetensors"
        write_shard(folder / shard, tensors)
        index.update({t[0]: shard for t in tensors})
        size += sum(len(t[3]) for t in tensors)
        layer += 1
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": 8,
        "num_hidden_layers": layer,
        "torch_dtype": "float16",
        "quantization_config": CONFIGS[kind],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    return size
