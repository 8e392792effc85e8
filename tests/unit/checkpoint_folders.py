"""Checkpoints as folders, for the tests of what is read of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from w4pack.convert.errors import W4PackError
from w4pack.convert.files.checkpoint import Checkpoint, open_checkpoint
from w4pack.convert.files.local import LocalStore

RNG = np.random.default_rng(7)


def numbers(*shape: int, dtype: str = "int32") -> Any:
    return RNG.integers(0, 100, shape).astype(dtype)


def write(folder: Path, files: Mapping[str, Mapping[str, Any]], config: Any = None, **others: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        safetensors.numpy.save_file(dict(tensors), folder / name, metadata={"from": name})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    for name, data in others.items():
        (folder / name).write_bytes(data)
    return folder


def write_index(folder: Path, files: Mapping[str, Mapping[str, Any]], **more: Any) -> None:
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    total = sum(array.nbytes for tensors in files.values() for array in tensors.values())
    value = {"metadata": {"total_size": total}, "weight_map": weight_map} | more
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(LocalStore(folder))


def sharded(folder: Path) -> dict[str, dict[str, Any]]:
    files = {
        "model-00001-of-00002.safetensors": {"a.2": numbers(4, 6), "a.10": numbers(3)},
        "model-00002-of-00002.safetensors": {"b": numbers(5, 2, dtype="float16")},
    }
    write(folder, files, {"x": 1})
    write_index(folder, files)
    return files


def refusal(folder: Path) -> W4PackError:
    """Broken sources exit with 1; two sets of weights are ambiguous and exit with 3."""
    with pytest.raises(W4PackError) as caught:
        opened(folder)
    assert caught.value.exit_code == (3 if caught.value.code == "two-weight-sets" else 1)
    return caught.value
