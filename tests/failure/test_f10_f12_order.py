"""Activation order: rows F10 to F12 of the failure list, each by its smallest input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import fold_of, folded, order_class, same_numbers, take_columns, take_rows
from failure.decoding import ATTN, EVERY, MLP, PACKED, PORTABLE, accepted, made, refused, small

import builders as b
import oracle
from oracle import Linear
from runner import convert, run

# --- F10: activation order --------------------------------------------------------------------------------


def ordered(down_only: bool = False, **more: Any) -> b.Model:
    """Return a model in groups of 64 with permuted inputs: one order per set that reads the same input."""
    config = small(**more)
    model = b.model(5, config, group=64)
    rng = np.random.default_rng(6)
    orders = {n: rng.permutation(256) for n in ("qkv", "o", "gate_up", "down")}
    sets = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up", "down": "down"}
    for name, linear in model.linears.items():
        part = name.rsplit(".", 1)[1].removesuffix("_proj")
        if not down_only or part == "down":
            linear.gi = (np.arange(256) // 64).astype(np.int32)[orders[sets[part]]]
    return model


def test_f10_ignoring_the_map_would_give_other_weights() -> None:
    for linear in ordered().linears.values():
        plain = Linear(linear.codes, linear.zeros, linear.scales, b.plain_groups(256, 4), 4, "F16")
        assert (plain.weight() != linear.weight()).mean() > 0.5


def test_f10_inspect_and_check_say_act_order(tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", ordered(), b.gptq, b.gptq_config(group=64, desc=True))
    layers = run("inspect", source, "--json").expect(0).data["layers"]
    assert {layer["act_order"] for layer in layers} == {"groups"}
    answer = run("check", source, "--engine", "vllm", "--json").expect(3).data
    assert answer["results"][0]["verdict"] == "refuses"
    assert answer["suggestion"].startswith("w4pack convert")


def test_f10_hidden_order_is_wrong_not_refused(tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", ordered(), b.gptq, b.gptq_config(group=64, desc=False))
    answer = run("check", source, "--engine", "vllm", "--json").expect(3).data
    assert answer["results"][0]["verdict"] == "wrong"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("desc", [True, False])
def test_f10_artifact_keeps_the_order(desc: bool, bits: int, tmp_path: Path) -> None:
    model = ordered()
    if bits == 8:
        for name, linear in model.linears.items():
            wide_codes = b.layer(np.random.default_rng(len(name)), linear.k, linear.n, bits=8, group=64)
            wide_codes.gi = linear.gi
            model.linears[name] = wide_codes
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=64, desc=desc, bits=bits))
    accepted(source, tmp_path / "out", "marlin", model.linears)
    tensors = oracle.read_folder(tmp_path / "out")
    for name, linear in model.linears.items():
        assert np.array_equal(tensors[f"{name}.act_perm"].array(), fold_of(linear)), name
    told = run("verify", tmp_path / "out", "--against", source, "--json").expect(0).data
    assert told["lossless"] is True


@pytest.mark.parametrize("target", PORTABLE)
def test_f10_portable_targets_refuse_and_list_the_layers(target: str, tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", ordered(), b.gptq, b.gptq_config(group=64, desc=True))
    done = refused(source, tmp_path / "out", target, "--regroup", "--to marlin")
    for part in ("q_proj", "o_proj", "gate_proj"):
        assert part in json.dumps(done.error), part
    assert f"{MLP}.down_proj" not in json.dumps(done.error)


def numbers_in(value: Any) -> list[float]:
    """Return every float anywhere in a JSON value."""
    if isinstance(value, dict):
        return [x for v in value.values() for x in numbers_in(v)]
    if isinstance(value, list):
        return [x for v in value for x in numbers_in(v)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("target", PORTABLE)
def test_f10_regroup_touches_only_what_must_and_reports_its_error(target: str, tmp_path: Path) -> None:
    model = ordered()
    for part in "qkv":  # the attention inputs have no order here: they must stay equal
        model.linears[f"{ATTN}.{part}_proj"].gi = b.plain_groups(256, 4)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=64, desc=True))
    done = convert(source, tmp_path / "out", target, "--regroup").expect(0)
    got = oracle.decode_folder(tmp_path / "out")
    order = fold_of(model.linears[f"{MLP}.down_proj"])
    same_numbers(got[f"{MLP}.down_proj"], take_rows(model.linears[f"{MLP}.down_proj"], order))
    for part in "qkv":
        same_numbers(got[f"{ATTN}.{part}_proj"], model.linears[f"{ATTN}.{part}_proj"])
    reported = numbers_in(done.events) + numbers_in(
        json.loads((tmp_path / "out" / "w4pack.json").read_text())
    )
    for name in (f"{ATTN}.o_proj", f"{MLP}.gate_proj", f"{MLP}.up_proj"):
        want = model.linears[name]
        if "mlp" in name:
            want = take_columns(want, order)
        assert order_class(got[name]) == "none"
        assert got[name].scales.shape == want.scales.shape
        error = np.linalg.norm(got[name].weight64() - want.weight64()) / np.linalg.norm(want.weight64())
        assert 0 < error < 0.2
        assert any(abs(x - error) <= 1e-3 * error for x in reported), (name, error)
    told = run("verify", tmp_path / "out", "--against", source, "--json").expect(0).data
    assert told["lossless"] is False


# --- F11: activation order that is none -------------------------------------------------------------------


def trivial_maps(kind: str) -> b.Tensors:
    """Return what replaces the group maps: all -1, or the plain map in 64 bits."""
    out = {}
    for name, linear in made().linears.items():
        if kind == "minus one":
            out[f"{name}.g_idx"] = b.tensor(np.full(linear.k, -1, np.int32), "I32")
        if kind == "int64":
            out[f"{name}.g_idx"] = b.tensor(linear.gi.astype(np.int64), "I64")
    return out


@pytest.mark.parametrize("kind", ["plain", "minus one", "int64"])
@pytest.mark.parametrize("target", EVERY)
def test_f11_order_that_is_none_is_dropped(target: str, kind: str, tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(desc=True), extra=trivial_maps(kind))
    done = accepted(source, tmp_path / "out", target, model.linears)
    assert [e for e in done.events if e["event"] == "warning"]
    if target == "gptq":
        assert oracle.quant_config(tmp_path / "out")["desc_act"] is False
    assert not [n for n in oracle.read_folder(tmp_path / "out") if n.endswith("act_perm")]


def test_f11_missing_maps_are_refused_unless_the_producer_writes_none(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq_bare, b.gptq_config(desc=True))
    refused(source, tmp_path / "out", "marlin", ".g_idx", code=1)
    rounded = {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128,
        "sym": True, "desc_act": True, "autoround_version": "0.16.1", "data_type": "int",
    }  # fmt: skip
    source = b.write(tmp_path / "rounded", model, b.gptq_bare, rounded)
    accepted(source, tmp_path / "accepted", "marlin", model.linears)


@pytest.mark.parametrize("target", PACKED)
def test_f11_permuted_whole_groups_are_no_order(target: str, tmp_path: Path) -> None:
    model = made(group=64)
    for linear in model.linears.values():
        linear.gi = np.repeat(np.array([2, 0, 3, 1], np.int32), 64)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=64, desc=True))
    accepted(source, tmp_path / "out", target, model.linears)
    assert not [n for n in oracle.read_folder(tmp_path / "out") if n.endswith("act_perm")]


# --- F12: the order of down_proj can be folded ------------------------------------------------------------


def mlp_output(x: Any, gate: Any, up: Any, down: Any, biases: tuple[Any, Any] = (0, 0)) -> Any:
    """Return the MLP of Llama in float64."""
    g, u = x @ gate.T + biases[0], x @ up.T + biases[1]
    return (g / (1 + np.exp(-g)) * u) @ down.T


@pytest.mark.parametrize("gate_bits", [4, 8, 16])
@pytest.mark.parametrize("target", ["gptq", "compressed-tensors"])
def test_f12_down_order_moves_into_gate_and_up(target: str, gate_bits: int, tmp_path: Path) -> None:
    model = ordered(down_only=True)
    rng = np.random.default_rng(11)
    settings = b.gptq_config(group=64, desc=True)
    for part in ("gate", "up"):
        name = f"{MLP}.{part}_proj"
        if gate_bits == 8:
            model.linears[name] = b.layer(rng, 256, 256, bits=8, group=64)
            settings["dynamic"] = {r"+:.*\.(gate|up)_proj$": {"bits": 8}}
        if gate_bits == 16:
            del model.linears[name]
            model.dense[f"{name}.weight"] = b.dense(rng, 256, 256)
            settings["dynamic"] = {r"-:.*\.(gate|up)_proj$": {}}
    source = b.write(tmp_path / "src", model, b.gptq, settings)
    convert(source, tmp_path / "out", target).expect(0)
    got, tensors = oracle.decode_folder(tmp_path / "out"), oracle.read_folder(tmp_path / "out")
    assert order_class(got[f"{MLP}.down_proj"]) == "none"
    x = rng.normal(size=(5, 256))
    outputs = []
    for linears, dense in ((model.linears, model.dense), (got, tensors)):
        weights = [
            linears[f"{MLP}.{p}_proj"].weight64()
            if f"{MLP}.{p}_proj" in linears
            else dense[f"{MLP}.{p}_proj.weight"].array().astype(np.float64)
            for p in ("gate", "up", "down")
        ]
        outputs.append(mlp_output(x, *weights))
    # the sums run in another order: 512 terms of float64, relative 512 * 2**-53 at worst
    assert np.abs(outputs[0] - outputs[1]).max() < 1e-12 * np.abs(outputs[0]).max()
    told = run("verify", tmp_path / "out", "--against", source, "--json").expect(0).data
    assert told["ok"] is True


@pytest.mark.parametrize("target", ["marlin-legacy", "gptq"])
def test_f12_down_that_is_folded_and_left_in_16_bit_has_the_right_scales(target: str, tmp_path: Path) -> None:
    config = small(hidden_size=192, num_attention_heads=3, num_key_value_heads=3, intermediate_size=256)
    model = b.model(12, config, group=-1)
    rng = np.random.default_rng(14)
    name = f"{MLP}.down_proj"  # 256 -> 192: not a multiple of 256 columns, so marlin-legacy leaves it dense
    model.linears[name] = b.layer(rng, 256, 192, group=128, order=rng.permutation(256))
    for part in ("gate", "up"):
        model.linears[f"{MLP}.{part}_proj"] = b.layer(rng, 256, 256, group=128)
    model.config["hidden_size"] = 256  # gate and up read 256, so that they stay packed
    settings = b.gptq_config(group=128, desc=True)
    source = b.write(tmp_path / "src", model, b.gptq, settings)
    convert(source, tmp_path / "out", target).expect(0)
    tensors, got = oracle.read_folder(tmp_path / "out"), oracle.decode_folder(tmp_path / "out")
    order = fold_of(model.linears[name])
    want = take_rows(model.linears[name], order)
    if name in got:
        same_numbers(got[name], want, name)
    else:
        assert np.array_equal(tensors[f"{name}.weight"].array(), want.weight("F16"))
    same_numbers(got[f"{MLP}.up_proj"], take_columns(model.linears[f"{MLP}.up_proj"], order))


def test_f12_biases_of_gate_and_up_move_too(tmp_path: Path) -> None:
    model = ordered(down_only=True, mlp_bias=True)
    rng = np.random.default_rng(12)
    for part in ("gate", "up", "down"):
        model.linears[f"{MLP}.{part}_proj"].bias = b.dense(rng, 256)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=64, desc=True))
    convert(source, tmp_path / "out", "awq").expect(0)
    order = fold_of(model.linears[f"{MLP}.down_proj"])
    tensors = oracle.read_folder(tmp_path / "out")
    for part in ("gate", "up"):
        want = model.linears[f"{MLP}.{part}_proj"].bias
        assert want is not None
        assert np.array_equal(tensors[f"{MLP}.{part}_proj.bias"].array(), want.array()[order])
    assert tensors[f"{MLP}.down_proj.bias"] == model.linears[f"{MLP}.down_proj"].bias


def test_f12_every_expert_folds_its_own_order(tmp_path: Path) -> None:
    model = b.model(8, b.qwen3_moe_config(), group=32)
    rng = np.random.default_rng(13)
    for name, linear in model.linears.items():
        if name.endswith("down_proj"):
            linear.gi = linear.gi[rng.permutation(linear.k)]
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=32, desc=True))
    accepted(source, tmp_path / "out", "compressed-tensors", folded(model.linears))


def test_f12_artifact_folds_only_when_asked(tmp_path: Path) -> None:
    model = ordered(down_only=True)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=64, desc=True))
    accepted(source, tmp_path / "kept", "marlin", model.linears)
    accepted(source, tmp_path / "folded", "marlin", folded(model.linears), "--fold-act-order")
    assert not [n for n in oracle.read_folder(tmp_path / "folded") if n.endswith("act_perm")]
    run("unpack", tmp_path / "folded", tmp_path / "back").expect(0)
    assert oracle.read_folder(tmp_path / "back") == oracle.read_folder(source)
