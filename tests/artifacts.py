"""Artifacts of random bytes, written byte for byte: config, tensors and manifest as the loader meets them."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from w4pack.convert.files.shards import index_json, new_tensor, plan_shards
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.kernels.spec import LinearSpec

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def quant_block(specs: Mapping[str, LinearSpec], **more: Any) -> dict[str, Any]:
    """Return quantization_config with every module listed."""
    modules = {
        name: {
            "bits": s.bits, "group_size": s.group_size, "sym": s.sym, "act_order": s.act_order,
            "in_features": s.in_features, "out_features": s.out_features, "stored_in": s.k, "stored_out": s.n,
        }
        for name, s in specs.items()
    }  # fmt: skip
    block = {
        "quant_method": "w4pack", "artifact_version": 1, "layout": "marlin-16x64", "bits": 4,
        "group_size": 128, "sym": True, "act_order": False, "modules_to_not_convert": ["lm_head"],
        "modules": modules, "online": [], "producer": {"name": "w4pack", "version": "0"},
    }  # fmt: skip
    return block | more


def shapes_of(specs: Mapping[str, LinearSpec], dense: Shapes | None = None) -> Shapes:
    """Return name -> (dtype, shape) of every tensor of the artifact."""
    tags = {"weight_scale": "F16", "bias": "F16"}
    packed: Shapes = {
        f"{name}.{suffix}": (tags.get(suffix, "I32"), shape)
        for name, spec in specs.items()
        for suffix, shape in spec.shapes().items()
    }
    return packed | (dense or {"model.norm.weight": ("F16", (64,))})


def write_artifact(
    folder: Path,
    specs: Mapping[str, LinearSpec],
    *,
    dense: Shapes | None = None,
    shapes: Shapes | None = None,
    quant: dict[str, Any] | None = None,
    shard: int = 1 << 40,
    seed: int = 0,
) -> dict[str, bytes]:
    """Write an artifact of random bytes. Returns the bytes of every tensor.

    shapes  replaces what follows from the specs; shard: bytes of data in one file
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = shapes_of(specs, dense) if shapes is None else shapes
    shards = plan_shards([new_tensor(n, dtype, shape) for n, (dtype, shape) in wanted.items()], shard)
    data: dict[str, bytes] = {}
    for part in shards:
        data |= {info.name: rng.bytes(info.nbytes) for info in part.tensors}
        content = part.header + b"".join(data[info.name] for info in part.tensors)
        (folder / part.name).write_bytes(content)
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_bytes(index_json(shards))
    config = {"model_type": "llama", "quantization_config": quant or quant_block(specs)}
    (folder / "config.json").write_text(json.dumps(config))
    entries = {info.name: _entry(info, data[info.name]) for part in shards for info in part.tensors}
    (folder / "w4pack.json").write_text(json.dumps(manifest(folder, entries)))
    return data


def manifest(folder: Path, entries: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the manifest of an artifact whose config.json is written."""
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    value = {
        "schema": 1, "tool": {"name": "w4pack", "version": "0", "format": 1}, "target": "marlin",
        "options": {"to": "marlin"}, "lossless": True, "source": {}, "files": {"config.json": config},
        "tensors": dict(entries), "layers": {},
    }  # fmt: skip
    return value | more


def _entry(info: TensorInfo, data: bytes) -> dict[str, Any]:
    middle = data[max(0, len(data) // 2 - 256) :][:512]
    sha = hashlib.sha256(data).hexdigest()
    return {
        "dtype": info.dtype,
        "shape": list(info.shape),
        "sha256": sha,
        "sample": hashlib.sha256(middle).hexdigest()[:16],
    }


def relabel(folder: Path, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Change entries of the header of an artifact's only file, no byte of its tensors: name -> new fields."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    for name, fields in changes.items():
        header[name].update(fields)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
