"""Packed layers with random numbers, and the dense weight of each, by the slow definition of the layout."""

from __future__ import annotations

import numpy as np
import torch

from w4pack.kernels import layout
from w4pack.kernels.spec import LinearSpec


def layer(spec: LinearSpec, seed: int = 0) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """A file's tensors for a layer, and the dense (in, out) weight in natural order, fp64."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**spec.bits, (spec.k, spec.n), dtype=np.uint8)
    scales = (rng.random((spec.groups, spec.n)) * 0.01 + 0.005).astype(np.float16)
    mid = 2 ** (spec.bits - 1)
    zeros = np.full((spec.groups, spec.n), mid, np.uint8)
    if not spec.sym:
        zeros = rng.integers(0, 2**spec.bits, zeros.shape, dtype=np.uint8)
    group = np.zeros(spec.k, int) if spec.group_size == -1 else np.arange(spec.k) // spec.group_size
    scales[:, spec.out_features :], zeros[:, spec.out_features :] = 0, mid
    codes[spec.in_features :], codes[:, spec.out_features :] = zeros[group][spec.in_features :], mid
    tensors = {
        "weight": torch.from_numpy(layout.pack_codes(codes, spec.bits)),
        "weight_scale": torch.from_numpy(np.ascontiguousarray(scales[:, layout.grouped_order(spec.n)])),
    }
    if not spec.sym:
        tensors["weight_zero_point"] = torch.from_numpy(layout.pack_zeros(zeros, spec.bits))
    packed = (codes.astype(float) - zeros[group]) * scales.astype(float)[group]
    dense = packed[: spec.in_features, : spec.out_features].copy()
    if spec.act_order:
        perm = rng.permutation(spec.in_features)
        tensors["act_perm"] = torch.from_numpy(perm.astype(np.int32))
        natural = np.empty_like(dense)
        natural[perm] = dense  # packed row r is source row perm[r]
        dense = natural
    if spec.bias:
        tensors["bias"] = torch.from_numpy(rng.standard_normal(spec.out_features).astype(np.float16))
    return tensors, dense
