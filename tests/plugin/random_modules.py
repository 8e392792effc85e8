"""Packed modules of random words, and the matrix that each is."""

import numpy as np
import torch

from w4pack.convert.files.tensorfile import TensorInfo, tensor_nbytes
from w4pack.kernels import reference
from w4pack.kernels.spec import LinearSpec

TAGS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32"}
Files = dict[str, dict[str, torch.Tensor]]


def tensors_of(spec: LinearSpec, seed: int, scales: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    """Random tensors of a whole module; every bit pattern of a packed word is a valid one."""
    rng = np.random.default_rng(seed)
    found = {}
    for suffix, shape in spec.shapes().items():
        if suffix == "weight_scale":
            found[suffix] = torch.from_numpy(rng.uniform(0.01, 0.02, shape).astype(np.float32)).to(scales)
        elif suffix == "act_perm":
            found[suffix] = torch.from_numpy(rng.permutation(spec.in_features).astype(np.int32))
        elif suffix != "bias":
            words = rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)
            found[suffix] = torch.from_numpy(words)
    return found


def matrix(spec: LinearSpec, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The module's weight (in, out) in fp32, rows in the order of the inputs."""
    zeros = tensors.get("weight_zero_point")
    packed = reference.dense(
        tensors["weight"], tensors["weight_scale"], zeros, spec.bits, spec.group_size, torch.float32
    )
    rows = packed[: spec.in_features, : spec.out_features]
    if "act_perm" in tensors:
        natural = torch.empty_like(rows)
        natural[tensors["act_perm"].long()] = rows
        return natural
    return rows


def source(specs: dict[str, LinearSpec], files: Files):  # noqa: ANN201
    """What the plugin knows of files that hold these tensors."""
    from w4pack.kernels.vllm.source import Source

    tensors = {}
    for module, found in files.items():
        for suffix, tensor in found.items():
            name, tag, shape = f"{module}.{suffix}", TAGS[tensor.dtype], tuple(tensor.shape)
            tensors[name] = TensorInfo(name, tag, shape, "", 0, tensor_nbytes(tag, shape))
    return Source({}, specs, tensors)


def bound(exact: torch.Tensor, k: int) -> float:
    """One rounding to fp16 of a sum of ``k`` products in fp32, whose inputs were rounded to fp16."""
    return (2**-10 + k * 2**-22) * float(exact.abs().max())
