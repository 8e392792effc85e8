"""Biases and groups: rows F7 to F9 of the failure list, each by its smallest input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from failure.decoding import ATTN, EVERY, MLP, PACKED, PORTABLE, accepted, made, refused, warnings_of

import builders as b
import oracle
from runner import convert, run

# --- F7: biases that exist only in the file ---------------------------------------------------------------


def with_o_bias(value: float) -> b.Model:
    """Return a model whose o_proj has a bias, though the architecture has none."""
    model = made()
    bias = np.zeros(256, np.float16)
    bias[17] = value
    model.linears[f"{ATTN}.o_proj"].bias = b.tensor(bias, "F16")
    return model


@pytest.mark.parametrize("target", PACKED)
def test_f07_zero_bias_is_left_out_and_unpack_restores_it(target: str, tmp_path: Path) -> None:
    model = with_o_bias(0.0)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    done = accepted(source, tmp_path / "out", target, model.linears)
    assert f"{ATTN}.o_proj.bias" not in oracle.read_folder(tmp_path / "out")
    assert "bias" in warnings_of(done)
    run("verify", tmp_path / "out", "--against", source, "--json").expect(0)
    if target == "marlin":
        run("unpack", tmp_path / "out", tmp_path / "back").expect(0)
        assert oracle.read_folder(tmp_path / "back") == oracle.read_folder(source)


def test_f07_other_bias_is_kept_in_the_artifact_and_refused_elsewhere(tmp_path: Path) -> None:
    model = with_o_bias(0.5)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    accepted(source, tmp_path / "out", "marlin", model.linears)
    kept = oracle.read_folder(tmp_path / "out")[f"{ATTN}.o_proj.bias"]
    assert kept == model.linears[f"{ATTN}.o_proj"].bias
    for target in PORTABLE:
        refused(source, tmp_path / target, target, f"{ATTN}.o_proj.bias")


def test_f07_missing_bias_is_named(tmp_path: Path) -> None:
    model = b.model(3, b.qwen2_config(intermediate_size=256, num_key_value_heads=1))
    source = b.write(tmp_path / "ok", model, b.gptq, b.gptq_config())
    accepted(source, tmp_path / "accepted", "marlin", model.linears)
    gone = f"{ATTN}.k_proj.bias"
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(), drop=[gone])
    refused(source, tmp_path / "out", "marlin", gone, code=1)


# --- F8: group size -1 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [-1, 256])
@pytest.mark.parametrize("target", EVERY)
def test_f08_one_group_in_both_spellings(target: str, written: int, tmp_path: Path) -> None:
    model = made(group=-1)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=written, desc=True))
    accepted(source, tmp_path / "out", target, model.linears)
    assert not [n for n in oracle.read_folder(tmp_path / "out") if n.endswith(("act_perm", "weight_g_idx"))]


def test_f08_one_group_does_not_limit_tensor_parallel(tmp_path: Path) -> None:
    most = {}
    for group in (-1, 128):
        model = made(config=b.llama_config(num_key_value_heads=4), group=group)
        source = b.write(tmp_path / f"g{group}", model, b.gptq, b.gptq_config(group=group))
        layers = run("inspect", source, "--json").expect(0).data["layers"]
        most[group] = {layer["name"]: layer["max_tp"] for layer in layers}
    down = f"{MLP}.down_proj"  # 512 inputs: four groups of 128
    assert most[128][down] == 4
    assert most[-1][down] >= most[128][down]
    assert {layer["group_size"] for layer in layers} == {128}


# --- F9: K is not a multiple of the group -----------------------------------------------------------------


def ragged(k: int) -> b.Model:
    """Return the small model beside a vision linear of k -> 64 in groups of 128."""
    model = made()
    model.linears["visual.blocks.0.mlp.fc1"] = b.layer(np.random.default_rng(9), k, 64, group=128)
    return model


def test_f09_short_last_group_in_the_artifact(tmp_path: Path) -> None:
    model = ragged(192)
    linear = model.linears["visual.blocks.0.mlp.fc1"]
    assert linear.gi.tolist() == [0] * 128 + [1] * 64
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    accepted(source, tmp_path / "out", "marlin", model.linears)
    told = run("inspect", tmp_path / "out", "--json").expect(0).data
    (layer,) = [x for x in told["layers"] if x["name"].endswith("fc1")]
    assert (layer["in_features"], layer["stored_in"]) == (192, 192)
    run("verify", tmp_path / "out", "--against", source).expect(0)


@pytest.mark.parametrize("target", PORTABLE)
def test_f09_groups_are_split_where_that_divides_k(target: str, tmp_path: Path) -> None:
    model = ragged(192)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    accepted(source, tmp_path / "out", target, model.linears)
    assert oracle.decode_folder(tmp_path / "out")["visual.blocks.0.mlp.fc1"].scales.shape == (3, 64)


@pytest.mark.parametrize("target", PORTABLE)
def test_f09_else_that_layer_alone_stays_in_16_bit(target: str, tmp_path: Path) -> None:
    model = ragged(208)
    name = "visual.blocks.0.mlp.fc1"
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    done = convert(source, tmp_path / "out", target).expect(0, name)
    assert name in warnings_of(done)
    got, tensors = oracle.decode_folder(tmp_path / "out"), oracle.read_folder(tmp_path / "out")
    linear = model.linears.pop(name)
    assert set(got) == set(model.linears)
    assert np.array_equal(tensors[f"{name}.weight"].array(), linear.weight("F16"))
    told = run("verify", tmp_path / "out", "--against", source, "--json").expect(0).data
    assert told["lossless"] is False
