"""Layouts against files of other programs: an engine's repacked bytes, and the checkpoints of the tools.

Expected bytes and hashes come from those files. The engines store one scale row in the per-channel order
where the artifact keeps the grouped one, so scales of such cases are compared after `oracle.channel_order`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import checkpoints
import oracle
from w4pack.convert import formats
from w4pack.convert.core.bitpack import pack_rows, permute_rows, unpack_rows
from w4pack.convert.core.dequant import dequantize
from w4pack.convert.core.order import sorted_rows
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme

UNREADABLE = ("llmcompressor-w4a8-g64-llama",)  # int8 weights with quantized activations: there to be refused
READABLE = [name for name in checkpoints.names() if name not in UNREADABLE]
REPACK = checkpoints.fixtures_root() / "repack"
CASES = sorted(p.stem for p in REPACK.glob("w*.safetensors"))
GOLDEN = checkpoints.fixtures_root() / "golden"
ENGINE_CASES = sorted(
    name.removesuffix(".marlin_qweight")
    for name in (oracle.read_header(GOLDEN / "repack.safetensors")[0] if GOLDEN.is_dir() else {})
    if name.endswith(".marlin_qweight")
)

marlin, gptq, awq = (formats.get(name) for name in ("marlin", "gptq", "awq"))


def cut(tensors: dict[str, oracle.Tensor], prefix: str) -> dict[str, oracle.Tensor]:
    """Return the tensors of one case or module, by the rest of their names."""
    return {k[len(prefix) + 1 :]: v for k, v in tensors.items() if k.startswith(f"{prefix}.")}


@functools.cache
def read(path: str) -> dict[str, oracle.Tensor]:
    return oracle.read_safetensors(checkpoints.fixtures_root() / path)


def case_of(
    given: dict[str, oracle.Tensor], codes: NDArray[np.uint8], bits: int
) -> tuple[QuantScheme, GroupParams]:
    """Build the scheme and the parameters of a repack case from its natural-order inputs."""
    scales, rows = given["scales"], codes.shape[0]
    groups = scales.shape[0]
    zeros = given["zeros"].array() if "zeros" in given else None
    natural = (np.arange(rows) // (rows // groups)).astype(np.int32)
    group = given["g_idx"].array() if "g_idx" in given else natural
    ordered = bool((group != natural).any())
    size = -1 if groups == 1 else rows // groups
    scheme = QuantScheme(
        bits,
        size,
        zeros is None or bool((zeros == 1 << (bits - 1)).all()),
        ordered,
        rows,
        codes.shape[1],
        scales.tag,
    )
    return scheme, GroupParams(scales.array(), None if scheme.sym else zeros, group if ordered else None)


def engine_scales(stored: NDArray[Any]) -> NDArray[Any]:
    """Undo the order of the engines."""
    return (oracle.channel_order if stored.shape[0] == 1 else oracle.grouped_order)(stored)


def check_artifact(
    scheme: QuantScheme, params: GroupParams, words: NDArray[np.uint32], want: dict[str, oracle.Tensor]
) -> None:
    """Compare the artifact of a linear with what the engine made of it."""
    if params.group is not None:
        words = permute_rows(words, scheme.bits, sorted_rows(params.group))
    assert np.array_equal(marlin.pack(words, scheme.bits), want["marlin_qweight"].array())
    assert np.array_equal(marlin.unpack(want["marlin_qweight"].array(), scheme.bits), words)
    made = marlin.encode_params(params, scheme)
    natural = engine_scales(want["marlin_scales"].array())
    assert np.array_equal(oracle.grouped_order(made["weight_scale"])[: scheme.groups], natural)
    if "marlin_qzeros" in want and not scheme.sym:
        assert np.array_equal(made["weight_zero_point"][: scheme.groups], want["marlin_qzeros"].array())
    if params.group is not None:
        assert np.array_equal(made["act_perm"], want["act_perm"].array())


def check_awq(words: NDArray[np.uint32], bits: int, want: dict[str, oracle.Tensor]) -> None:
    """Compare AWQ gemm words. The engine interleaves 8-bit columns as 0 2 1 3, which no checkpoint does."""
    if "awq_qweight" not in want:
        return
    stored = want["awq_qweight"].array()
    if bits == 8:
        stored = oracle.bits_of(stored).view(np.uint8).reshape(stored.shape[0], -1, 4)[:, :, [0, 2, 1, 3]]
        stored = np.ascontiguousarray(stored).view(np.int32)[:, :, 0]
    assert np.array_equal(awq.pack(words, bits), stored)
    assert np.array_equal(awq.unpack(stored, bits), words)


@pytest.mark.parametrize("case", CASES)
def test_artifact_holds_the_bytes_of_the_reference_repack(case: str) -> None:
    given, want = cut(read("repack/inputs.safetensors"), case), read(f"repack/{case}.safetensors")
    bits = int(case[1])
    codes = given["codes"].array()
    scheme, params = case_of(given, codes, bits)
    words = pack_rows(codes, bits)
    check_artifact(scheme, params, words, want)
    if "gptq_qweight" in want:  # cases without zero points
        assert np.array_equal(gptq.pack(words, bits), want["gptq_qweight"].array())
        assert np.array_equal(gptq.unpack(want["gptq_qweight"].array(), bits), words)
    check_awq(words, bits, want)
    if "awq_qzeros" in want and not scheme.sym and bits == 4:
        assert np.array_equal(awq.encode_params(params, scheme)["qzeros"], want["awq_qzeros"].array())
    weights = dequantize(codes, params, scheme, scheme.scale_dtype)
    assert np.array_equal(oracle.bits_of(weights.T), oracle.bits_of(want["W"].array()))


@pytest.mark.shared
@pytest.mark.skipif(not ENGINE_CASES, reason="needs the recorded outputs of an engine's kernels")
@pytest.mark.parametrize("case", ENGINE_CASES or ["none"])
def test_artifact_holds_the_bytes_of_the_engine_kernel(case: str) -> None:
    want = cut(read("golden/repack.safetensors"), case)
    columns, width = want["scales"].shape[1], want["gptq_qweight"].shape
    bits = want["marlin_qweight"].shape[1] * 2 // columns
    words = gptq.unpack(want["gptq_qweight"].array(), bits)
    assert width == words.shape
    codes = unpack_rows(words, bits)
    scheme, params = case_of(want, codes, bits)
    check_artifact(scheme, params, words, want)
    check_awq(words, bits, want)
    identity = cut(read("golden/gemm.safetensors"), case).get("w_identity")
    if identity is not None and params.group is None:
        weights = dequantize(codes, params, scheme, identity.tag)
        assert np.array_equal(plus_zero(weights), plus_zero(identity.array()))


def plus_zero(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the bits with -0.0 as +0.0: the kernel adds to an accumulator of +0.0."""
    bits: NDArray[np.uint16] = values.view(np.uint16)
    return np.where(bits == 0x8000, np.uint16(0), bits)


def layer_of(name: str, module: str) -> tuple[Any, QuantScheme, dict[str, NDArray[Any]], str]:
    """Recognise a module of a checkpoint: its layout, scheme, arrays and the reading of its zeros."""
    folder = checkpoints.fixtures_root() / name
    tensors = {k: v for k, v in cut(oracle.read_folder(folder), module).items() if k != "bias"}
    arrays = {k: v.array() for k, v in tensors.items()}
    found = formats.recognise({k: (v.tag, v.shape) for k, v in tensors.items()}, arrays)
    assert found is not None
    layout, match = found
    settings = oracle.quant_config(folder)
    size = settings.get("group_size", settings.get("q_group_size", -1))
    groups = match.groups or match.in_features // size
    if match.groups and match.in_features % match.groups == 0:
        size = -1 if match.groups == 1 else match.in_features // match.groups
    scales = next(v for k, v in tensors.items() if k in ("scales", "s", "weight_scale"))
    group = arrays.get("g_idx", arrays.get("weight_g_idx"))
    natural = np.zeros(match.in_features, np.int32) if size == -1 else np.arange(match.in_features) // size
    ordered = group is not None and not np.array_equal(group, natural)
    zeros = any(k in arrays for k in ("qzeros", "weight_zero_point"))
    scheme = QuantScheme(
        match.bits, size, not zeros, ordered, match.in_features, match.out_features, scales.tag
    )
    assert scheme.groups == groups
    return formats.get(layout), scheme, arrays, "v2" if oracle.stores_true_zeros(settings) else "v1"


@pytest.mark.parametrize("name", READABLE)
def test_every_module_of_the_tools_decodes_to_the_recorded_hashes_and_back_to_its_bytes(name: str) -> None:
    for module, entry in checkpoints.meta(name)["modules"].items():
        layout, scheme, arrays, kind = layer_of(name, module)
        suffix = layout.grid(scheme.bits).suffix
        words = layout.unpack(arrays[suffix], scheme.bits)
        params = layout.decode_params(arrays, scheme, kind)
        codes = unpack_rows(words, scheme.bits, scheme.in_features)
        tag = oracle.TORCH_TAG[entry.get("dtype", "float16")]
        weights = dequantize(codes, params, scheme, scheme.scale_dtype)
        if tag != scheme.scale_dtype:
            weights = oracle.round_once(oracle.widen(weights, scheme.scale_dtype), tag)
        zeros = (
            np.full(params.scales.shape, scheme.midpoint, np.uint8) if params.zeros is None else params.zeros
        )
        hashes = {
            "codes": oracle.digest(codes),
            "zeros": oracle.digest(zeros),
            "scales": oracle.digest_tagged(params.scales, scheme.scale_dtype),
            "W": oracle.digest_tagged(np.ascontiguousarray(weights.T), tag),
        }
        if params.group is not None:
            hashes["g_idx"] = oracle.digest(params.group)
        for part, value in hashes.items():
            assert entry.get(f"sha256_{part}", value) == value, (module, part)
        check_bytes(layout, scheme, params, words, arrays, kind)


def check_bytes(
    layout: Any,
    scheme: QuantScheme,
    params: GroupParams,
    words: NDArray[np.uint32],
    arrays: dict[str, NDArray[Any]],
    kind: str,
) -> None:
    """Encode what was decoded and compare with the tool's bytes and with the specs."""
    suffix = layout.grid(scheme.bits).suffix
    extra = (kind,) if layout is gptq else ()
    made = {suffix: layout.pack(words, scheme.bits), **layout.encode_params(params, scheme, *extra)}
    for key, (tag, shape) in layout.specs(scheme).items():
        assert made[key].shape == shape
        assert made[key].dtype == np.dtype(oracle.CARRIER[tag])
        if key in arrays:  # AutoRound writes no g_idx
            assert made[key].tobytes() == arrays[key].astype(made[key].dtype).tobytes(), key
