"""Numbers, dtypes and what changes the forward pass: rows F20 to F23 of the failure list."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failure.decoding import ATTN, EVERY, MLP, accepted, made, refused, warnings_of

import builders as b
import oracle
from oracle import Tensor
from runner import convert, run

# --- F20: non-finite numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "value"), [("F16", np.nan), ("F16", np.inf), ("BF16", np.nan), ("F32", -np.inf)]
)
@pytest.mark.parametrize("target", EVERY)
def test_f20_bad_scale_stops_with_tensor_index_and_count(
    tag: str, value: float, target: str, tmp_path: Path
) -> None:
    model = made(tag=tag)
    scales = model.linears[f"{MLP}.down_proj"].scales
    bad = b.floats(np.array([value], np.float32), tag)[0]
    scales[1, 37] = bad
    scales[1, 90] = bad
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    done = refused(source, tmp_path / "out", target, f"{MLP}.down_proj.scales", code=1)
    assert done.says("[1, 37]") or done.says("1, 37")
    assert done.says("2")


@pytest.mark.parametrize("tag", ["I16", "U16"])
@pytest.mark.parametrize("target", EVERY)
def test_f20_scales_that_are_no_floats_are_refused(tag: str, target: str, tmp_path: Path) -> None:
    name = f"{MLP}.down_proj.scales"
    source = b.write(tmp_path / "src", made(), b.gptq, b.gptq_config())
    (file,) = source.glob("*.safetensors")
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header[name]["dtype"] = tag
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    done = refused(source, tmp_path / "out", target, name, code=3)
    assert done.says(tag) and done.says("F16, BF16, F32")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("target", EVERY)
def test_f20_bad_norm_passes_with_a_warning_and_fails_the_proof(
    target: str, value: float, tmp_path: Path
) -> None:
    model = made()
    values = model.dense["model.norm.weight"].array().copy()
    values[[9, 200]] = value
    model.dense["model.norm.weight"] = b.tensor(values, "F16")
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    done = convert(source, tmp_path / "out", target).expect(0)
    (warning,) = [e for e in done.events if e["event"] == "warning"]
    assert (warning["code"], warning["where"]) == ("nonfinite", "model.norm.weight")
    assert "2" in warning["found"]
    assert oracle.read_folder(tmp_path / "out")["model.norm.weight"] == model.dense["model.norm.weight"]
    for more in ((), ("--against", source)):
        told = run("verify", tmp_path / "out", *more, "--json").expect(4).data
        (failure,) = told["failures"]
        assert (failure["tensor"], failure["kind"]) == ("model.norm.weight", "nonfinite")
        assert "[9]" in failure["found"]
    options = ("--verify",)
    convert(source, tmp_path / "again", target, *options).expect(4, "model.norm.weight")


@pytest.mark.parametrize("target", EVERY)
def test_f20_negative_scales_survive(target: str, tmp_path: Path) -> None:
    model = made()
    for linear in model.linears.values():
        linear.scales[:, ::3] *= np.float16(-1)
        linear.scales[0, 5] = 0
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    accepted(source, tmp_path / "out", target, model.linears)


# --- F21: scale dtype -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["F16", "BF16"])
@pytest.mark.parametrize("target", EVERY)
def test_f21_16_bit_scales_keep_their_dtype(tag: str, target: str, tmp_path: Path) -> None:
    model = made(tag=tag, dense_tag=tag)
    model.config["torch_dtype"] = {"F16": "float16", "BF16": "bfloat16"}[tag]
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    accepted(source, tmp_path / "out", target, model.linears)


@pytest.mark.parametrize("holder", ["F16", "BF16"])
def test_f21_fp32_scales_that_fit_are_stored_exactly(holder: str, tmp_path: Path) -> None:
    model = made(tag="F32")
    for linear in model.linears.values():
        narrow = b.floats(linear.scales, holder)
        linear.scales = oracle.widen(narrow, holder).astype(np.float32)
        if holder == "BF16":
            linear.scales[0, 0] = 2.0**-40  # far below anything fp16 can hold
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    accepted(source, tmp_path / "out", "marlin", model.linears)
    assert {x.tag for x in oracle.decode_folder(tmp_path / "out").values()} == {holder}
    told = run("verify", tmp_path / "out", "--against", source, "--json").expect(0).data
    assert told["lossless"] is True


def test_f21_fp32_scales_that_fit_nothing_are_refused_with_the_ways(tmp_path: Path) -> None:
    model = made(tag="F32")  # random fp32: no 16-bit type holds them
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    refused(source, tmp_path / "out", "marlin", ".scales", "--round-scales", "--to dense")
    accepted(source, tmp_path / "dense", "dense", model.linears)
    done = convert(source, tmp_path / "rounded", "marlin", "--round-scales").expect(0)
    assert "scales" in done.text
    for name, linear in oracle.decode_folder(tmp_path / "rounded").items():
        want = oracle.round_once(model.linears[name].scales.astype(np.float64), linear.tag)
        assert np.array_equal(linear.scales, want), name
        assert np.array_equal(linear.codes, model.linears[name].codes), name
    told = run("verify", tmp_path / "rounded", "--against", source, "--json").expect(0).data
    assert told["lossless"] is False


def test_f21_rounding_that_would_make_inf_is_still_refused(tmp_path: Path) -> None:
    model = made(tag="F32")
    model.linears[f"{ATTN}.k_proj"].scales[0, 0] = np.float32(3.4028e38)  # rounds to Inf in both 16-bit types
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    refused(source, tmp_path / "out", "marlin", f"{ATTN}.k_proj", options=["--round-scales"])


# --- F22: settings that change the forward pass -----------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        {"rotation": "hadamard"}, {"rotation_config": {"r1": True}}, {"spinquant_config": {"r1": True}},
        {"activation": {"bits": 8}}, {"adapter": {"rank": 8}}, {"act_bits": 8},
        {"smooth_factors": {"x": 1}}, {"my_hadamard": {"n": 64}}, {"lora_rank": 8},
    ],
    ids=lambda key: next(iter(key)),
)  # fmt: skip
def test_f22_keys_that_change_the_forward_pass_are_refused(key: dict[str, Any], tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(**key))
    (name,) = key
    for target in EVERY:
        refused(source, tmp_path / target, target, name)
    accepted(source, tmp_path / "out", "marlin", model.linears, "--ignore-key", name)


def test_f22_empty_and_unknown_harmless_keys_pass(tmp_path: Path) -> None:
    model = made()
    settings = b.gptq_config(foo_scheme={"a": 1}, rotation=None, adapter=None, my_transform={})
    source = b.write(tmp_path / "src", model, b.gptq, settings)
    done = accepted(source, tmp_path / "out", "marlin", model.linears)
    assert "foo_scheme" in warnings_of(done)


TRANSFORM = {
    "config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": ""}]}}
}


@pytest.mark.parametrize(
    ("location", "carried"),
    [("input", False), ("output", False), ("q_attn", False), ("k_cache", False),
     ("weight_input", True), ("weight_output", True)],
)  # fmt: skip
def test_f22_transforms_are_judged_by_their_location(location: str, carried: bool, tmp_path: Path) -> None:
    model = made()
    transform = json.loads(json.dumps(TRANSFORM))
    transform["config_groups"]["R1"]["apply"][0]["location"] = location
    source = b.write(tmp_path / "src", model, b.compressed, b.compressed_config(transform_config=transform))
    for target in ("marlin", "gptq"):
        if carried:
            accepted(source, tmp_path / target, target, model.linears)
        else:
            refused(source, tmp_path / target, target, "transform_config")


@pytest.mark.parametrize("key", ["input_activations", "output_activations"])
def test_f22_quantized_activations_are_refused(key: str, tmp_path: Path) -> None:
    settings = b.compressed_config()
    settings["config_groups"]["group_0"][key] = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "dynamic": True,
    }
    source = b.write(tmp_path / "src", made(), b.compressed, settings)
    for target in ("marlin", "compressed-tensors", "dense"):
        refused(source, tmp_path / target, target, key)


def test_f22_kv_cache_scheme_is_kept_or_dropped_with_a_line(tmp_path: Path) -> None:
    model = made()
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    source = b.write(tmp_path / "src", model, b.compressed, b.compressed_config(kv_cache_scheme=scheme))
    accepted(source, tmp_path / "ct", "compressed-tensors", model.linears)
    assert oracle.quant_config(tmp_path / "ct")["kv_cache_scheme"] == scheme
    done = accepted(source, tmp_path / "gptq", "gptq", model.linears)
    assert "kv_cache_scheme" in warnings_of(done)


# --- F23: other precisions --------------------------------------------------------------------------------


@pytest.mark.parametrize("labelled", [True, False])
def test_f23_block_fp8_is_not_taken_for_16_bit(labelled: bool, tmp_path: Path) -> None:
    model = made()
    tensors = dict(model.dense)
    for name in model.linears:
        tensors[f"{name}.weight"] = Tensor("F8_E4M3", (256, 256), bytes(256 * 256))
        tensors[f"{name}.weight_scale_inv"] = b.tensor(np.ones((2, 2), np.float32), "F32")
    source = tmp_path / "src"
    b.write_tensors(source, tensors)
    settings = (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}} if labelled else {}
    )
    b.write_json(source / "config.json", {**model.config, **settings})
    said = ("fp8",) if labelled else ("weight_scale_inv", "F8_E4M3")
    refused(source, tmp_path / "out", "marlin", *said)
