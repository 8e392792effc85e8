"""The tests' own decoder and makers against the files of the real tools: no product code here.

If these fail, no other golden test means anything.
"""

from __future__ import annotations

import numpy as np
import pytest

import builders
import checkpoints
import oracle

UNREADABLE = ("llmcompressor-w4a8-g64-llama",)  # int8 weights with quantized activations: there to be refused
READABLE = [name for name in checkpoints.names() if name not in UNREADABLE]
REPACK = sorted(p.stem for p in (checkpoints.fixtures_root() / "repack").glob("w*.safetensors"))


@pytest.mark.parametrize("name", READABLE)
def test_oracle_decodes_every_module_to_the_recorded_hashes(name: str) -> None:
    decoded = oracle.decode_folder(checkpoints.fixtures_root() / name)
    record = checkpoints.meta(name)["modules"]
    assert set(decoded) == set(record)
    for module, entry in record.items():
        got = decoded[module]
        tag = oracle.TORCH_TAG[entry.get("dtype", "float16")]
        hashes = {
            "W": oracle.digest_tagged(got.recorded(tag), tag),
            "codes": oracle.digest(got.codes),
            "zeros": oracle.digest(got.zeros),
            "scales": oracle.digest_tagged(got.scales, got.tag),
            "g_idx": oracle.digest(got.gi),
        }
        for part, value in hashes.items():
            assert entry.get(f"sha256_{part}", value) == value, (module, part)


def writer_of(tensors: builders.Tensors, module: str, settings: dict[str, object]) -> builders.Writer:
    """Choose the maker for what a tool wrote."""
    if f"{module}.B" in tensors:
        return builders.legacy
    if f"{module}.weight_packed" in tensors:
        return builders.compressed
    if tensors[f"{module}.qweight"].tag == "I16":
        return builders.awq_gemv_fast
    if f"{module}.qzeros" not in tensors:
        return builders.awq_marlin
    if settings.get("quant_method") == "awq" and settings.get("version") == "gemv":
        return builders.awq_gemv
    if tensors[f"{module}.qweight"].shape[1] * 8 == tensors[f"{module}.scales"].shape[1]:
        return builders.awq_gemm
    return builders.gptq_v2 if oracle.stores_true_zeros(settings) else builders.gptq


@pytest.mark.parametrize("name", READABLE)
def test_makers_write_the_very_bytes_of_the_tools(name: str) -> None:
    folder = checkpoints.fixtures_root() / name
    tensors, settings = oracle.read_folder(folder), oracle.quant_config(folder)
    for module, linear in oracle.decode_folder(folder).items():
        for key, made in writer_of(tensors, module, settings)(module, linear).items():
            if key.endswith(".g_idx") and key not in tensors:
                continue  # AutoRound writes none
            assert tensors[key] == made, key


@pytest.mark.parametrize("case", REPACK)
def test_tile_layout_reads_the_engine_reference(case: str) -> None:
    root = checkpoints.fixtures_root() / "repack"
    given = {
        k.split(".", 1)[1]: v
        for k, v in oracle.read_safetensors(root / "inputs.safetensors").items()
        if k.startswith(f"{case}.")
    }
    packed = oracle.read_safetensors(root / f"{case}.safetensors")
    bits = 8 if case.startswith("w8") else 4
    codes = given["codes"].array()
    order = packed["act_perm"].array()
    assert np.array_equal(oracle.marlin_codes(packed["marlin_qweight"].array(), bits), codes[order])
    assert packed["marlin_qweight"].data == builders.marlin_words(codes[order], bits).tobytes()
    scales = packed["marlin_scales"].array()
    natural = (oracle.channel_order if scales.shape[0] == 1 else oracle.grouped_order)(scales)
    assert np.array_equal(oracle.bits_of(natural), oracle.bits_of(given["scales"].array()))
    if "marlin_qzeros" in packed:
        assert np.array_equal(
            oracle.marlin_zeros(packed["marlin_qzeros"].array(), bits), given["zeros"].array()
        )
