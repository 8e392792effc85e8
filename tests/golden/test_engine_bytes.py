"""The artifact's bytes against an engine's own: its Python reference, and its CUDA kernels where recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import builders
import checkpoints
import oracle
from builders import Tensors
from oracle import Linear
from runner import convert

ROOT = checkpoints.fixtures_root()
MODULE = "model.layers.0.mlp.down_proj"
REFERENCE = sorted(p.stem for p in (ROOT / "repack").glob("w*.safetensors"))
KERNEL_FILE = ROOT / "golden" / "repack.safetensors"  # only in the full set
KERNEL = (
    sorted({k.split(".")[0] for k in oracle.read_safetensors(KERNEL_FILE)}) if KERNEL_FILE.exists() else []
)
GEMM_FILE = ROOT / "golden" / "gemm.safetensors"
GEMM = oracle.read_header(GEMM_FILE)[0] if GEMM_FILE.exists() else {}
IDENTITY = sorted(name.removesuffix(".w_identity") for name in GEMM if name.endswith(".w_identity"))


def part(tensors: Tensors, case: str) -> Tensors:
    """Return the tensors of one case by their last name."""
    return {k.split(".", 1)[1]: v for k, v in tensors.items() if k.startswith(f"{case}.")}


def linear_of(case: str, given: Tensors) -> Linear:
    """Build the layer that the engine was given."""
    bits = 8 if "w8" in case else 4
    scales = given["scales"]
    if "codes" in given:
        codes = given["codes"].array()
    else:
        codes = oracle.unpack_words(given["gptq_qweight"].array(), bits, 0)
    zeros = given["zeros"].array() if "zeros" in given else oracle.midpoint(scales.shape, bits)
    gi = given["g_idx"].array() if "g_idx" in given else oracle.plain_groups(codes.shape[0], scales.shape[0])
    return Linear(codes, zeros, scales.array(), gi, bits, scales.tag)


def source_of(folder: Path, linear: Linear) -> Path:
    """Write a checkpoint with this one layer."""
    size = -1 if linear.scales.shape[0] == 1 else linear.k // linear.scales.shape[0]
    config = builders.llama_config(torch_dtype="float16" if linear.tag == "F16" else "bfloat16")
    made = builders.Model(config, builders.skeleton(np.random.default_rng(0), config), {MODULE: linear})
    settings = builders.gptq_config(bits=linear.bits, group=size, sym=linear.sym, checkpoint_format="gptq_v2")
    settings["desc_act"] = bool((np.diff(linear.gi) < 0).any())
    return builders.write(folder, made, builders.gptq_v2, settings)


def artifact_order(scales: np.ndarray) -> np.ndarray:
    """Turn the engine's scale order into the artifact's, which differs where there is one group."""
    if scales.shape[0] > 1:
        return scales
    natural = oracle.channel_order(scales)
    out = np.zeros_like(natural)
    for n in range(64):
        out[:, 8 * (n % 8) + n // 8 :: 64] = natural[:, n::64]
    return out


def check_bytes(linear: Linear, want: Tensors, folder: Path) -> None:
    """Convert the layer and compare all its tensors with the engine's."""
    convert(source_of(folder / "src", linear), folder / "out", "marlin").expect(0)
    got = oracle.read_folder(folder / "out")
    assert got[f"{MODULE}.weight"] == want["marlin_qweight"]
    assert got[f"{MODULE}.weight_scale"].data == artifact_order(want["marlin_scales"].array()).tobytes()
    assert (f"{MODULE}.weight_zero_point" in got) == (not linear.sym)
    if not linear.sym:
        assert got[f"{MODULE}.weight_zero_point"] == want["marlin_qzeros"]
    if (np.diff(linear.gi) < 0).any():
        assert got[f"{MODULE}.act_perm"] == want["act_perm"]


@pytest.mark.parametrize("case", REFERENCE)
def test_artifact_holds_the_bytes_of_the_python_reference(case: str, tmp_path: Path) -> None:
    given = part(oracle.read_safetensors(ROOT / "repack" / "inputs.safetensors"), case)
    want = oracle.read_safetensors(ROOT / "repack" / f"{case}.safetensors")
    check_bytes(linear_of(case, given), want, tmp_path)


@pytest.mark.shared
@pytest.mark.parametrize("case", KERNEL or ["none recorded here"])
def test_artifact_holds_the_bytes_of_the_cuda_repack_kernel(case: str, tmp_path: Path) -> None:
    want = part(oracle.read_safetensors(KERNEL_FILE), case)
    check_bytes(linear_of(case, want), want, tmp_path)


@pytest.mark.shared
@pytest.mark.parametrize("case", IDENTITY or ["none recorded here"])
def test_dense_output_is_what_the_engine_multiplies_by(case: str, tmp_path: Path) -> None:
    want = oracle.read_safetensors(GEMM_FILE)[f"{case}.w_identity"]
    linear = linear_of(case, part(oracle.read_safetensors(KERNEL_FILE), case))
    convert(source_of(tmp_path / "src", linear), tmp_path / "out", "dense").expect(0)
    weight = oracle.read_folder(tmp_path / "out")[f"{MODULE}.weight"]
    assert weight.tag == want.tag
    assert oracle.same_floats(weight.array().T, want.array(), want.tag)
