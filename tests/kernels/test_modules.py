"""The packed linear layer on the CPU against the dense one, padded and permuted as the file is."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from w4pack.kernels import layout, modules  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402


def _layer(spec: LinearSpec, seed: int = 0) -> tuple[dict[str, torch.Tensor], np.ndarray]:
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


@pytest.mark.parametrize(
    "spec",
    [
        LinearSpec(128, 64),
        LinearSpec(128, 64, bias=True, sym=False, group_size=32),
        LinearSpec(192, 128, act_order=True, group_size=64),
        LinearSpec(100, 40, stored_in=128, stored_out=64, bias=True, sym=False, group_size=64),
        LinearSpec(100, 72, stored_in=128, stored_out=128, act_order=True, bias=True, group_size=-1),
        LinearSpec(192, 64, bits=8, group_size=128, sym=False),
    ],
    ids=lambda spec: f"{spec.in_features}x{spec.out_features}b{spec.bits}",
)
def test_a_layer_equals_the_dense_one(spec: LinearSpec) -> None:
    tensors, dense = _layer(spec)
    module = modules.PackedLinear(spec)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == spec.shapes()
    module.load_state_dict(tensors, assign=True)
    x = torch.randn(2, 3, spec.in_features).half()
    y = module(x)
    assert y.shape == (2, 3, spec.out_features) and y.dtype == x.dtype
    exact = x.double().numpy() @ dense
    if spec.bias:
        exact = exact + tensors["bias"].double().numpy()
    assert np.linalg.norm(y.double().numpy() - exact) < 4e-4 * np.linalg.norm(exact)


def test_a_file_that_does_not_fit_is_refused() -> None:
    tensors, _ = _layer(LinearSpec(128, 64))
    module = modules.PackedLinear(LinearSpec(128, 64, bias=True))
    with pytest.raises(RuntimeError, match="bias"):
        module.load_state_dict(tensors, assign=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        modules.PackedLinear(LinearSpec(192, 64)).load_state_dict(tensors, assign=True)
