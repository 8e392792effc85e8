"""Detecting and decoding the source: rows F1 to F23 and F93 of the failure list, each by its smallest input.

Beside every refusal stands the nearest case that must be accepted. Values come from the tests' own decoder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import fold_of, folded, order_class, same_numbers, take_columns, take_rows

import builders as b
import oracle
from oracle import Linear, Tensor
from runner import Run, convert, run

PORTABLE = ("gptq", "awq", "compressed-tensors")
PACKED = ("marlin", *PORTABLE)
EVERY = (*PACKED, "dense")
ATTN = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"


def small(**more: Any) -> dict[str, Any]:
    """Return the config with the fewest weights: k and v are 256 -> 64, the rest 256 -> 256."""
    return b.llama_config(**{"intermediate_size": 256, "num_key_value_heads": 1, "vocab_size": 64, **more})


def made(seed: int = 7, config: dict[str, Any] | None = None, **scheme: Any) -> b.Model:
    """Draw the small model."""
    return b.model(seed, config or small(), **scheme)


def accepted(source: Path, out: Path, to: str, want: dict[str, Linear], *options: str) -> Run:
    """Convert, and compare every module with what it should be."""
    done = convert(source, out, to, *options).expect(0)
    if to == "dense":
        tensors = oracle.read_folder(out)
        for name, linear in want.items():
            weight = tensors[f"{name}.weight"]
            assert oracle.same_floats(weight.array(), linear.weight(weight.tag), weight.tag), name
        return done
    got = oracle.decode_folder(out)
    assert set(got) == set(want)
    for name, linear in want.items():
        same_numbers(got[name], linear, name)
    return done


def refused(
    source: Path, out: Path, to: str, *said: object, code: int | tuple[int, ...] = 3, options: Any = ()
) -> Run:
    """Convert, and check that it stops before OUT exists, with the names and numbers that must be said."""
    done = convert(source, out, to, *options)
    codes = (code,) if isinstance(code, int) else code
    assert done.code in codes, done
    done.expect(done.code, *said)
    assert not out.exists()
    return done


def warnings_of(done: Run) -> str:
    """Return everything that warnings and plan say, as text."""
    return json.dumps([e for e in done.events if e["event"] in ("plan", "warning")])


def words_of(folder: Path, ending: str) -> set[int]:
    """Return the distinct 32-bit words of all tensors with this ending."""
    found: set[int] = set()
    for name, value in oracle.read_folder(folder).items():
        if name.endswith(ending):
            found |= set(np.frombuffer(value.data, "<u4").tolist())
    return found


# --- F1: zero points of the other version than the label says ---------------------------------------------


@pytest.mark.parametrize(("writer", "label"), [(b.gptq_v2, "gptq"), (b.gptq, "gptq_v2")])
@pytest.mark.parametrize("target", EVERY)
def test_f01_symmetric_zeros_decide_the_version(
    target: str, writer: b.Writer, label: str, tmp_path: Path
) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, writer, b.gptq_config(checkpoint_format=label))
    done = accepted(source, tmp_path / "out", target, model.linears)
    told = warnings_of(done)
    assert "checkpoint_format" in told or "v1" in told
    assert [e for e in done.events if e["event"] == "warning"]
    if target == "gptq":
        assert words_of(tmp_path / "out", ".qzeros") == {0x77777777}
        assert oracle.quant_config(tmp_path / "out")["checkpoint_format"] == "gptq"


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
def test_f01_asymmetric_zeros_cannot_decide_so_the_config_does(label: str, tmp_path: Path) -> None:
    model = made(sym=False)
    for linear in model.linears.values():
        linear.zeros = np.clip(linear.zeros, 1, 14).astype(np.uint8)  # no stored 15 under either reading
    source = b.write(tmp_path / "src", model, b.gptq_v2, b.gptq_config(sym=False, checkpoint_format=label))
    if label == "gptq":
        for linear in model.linears.values():
            linear.zeros = (linear.zeros + 1).astype(np.uint8)
    accepted(source, tmp_path / "out", "marlin", model.linears)


def test_f01_matching_label_is_no_warning(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    done = accepted(source, tmp_path / "out", "gptq", model.linears)
    assert not [e for e in done.events if e["event"] == "warning"]


# --- F2: `sym` in the config is wrong ---------------------------------------------------------------------


def one_odd_zero() -> b.Model:
    """Return a symmetric model but for one zero of k_proj: its first word of group 1 becomes 0x77777776."""
    model = made()
    model.linears[f"{ATTN}.k_proj"].zeros[1, 0] = 7
    return model


@pytest.mark.parametrize("target", ["marlin", "awq", "compressed-tensors", "dense"])
def test_f02_labelled_symmetric_but_one_zero_differs(target: str, tmp_path: Path) -> None:
    model = one_odd_zero()
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(sym=True))
    assert 0x77777776 in words_of(source, ".qzeros")
    done = accepted(source, tmp_path / "out", target, model.linears)
    told = warnings_of(done)
    assert "sym" in told
    (warning,) = [e for e in done.events if e["event"] == "warning"]
    assert f"{ATTN}.k_proj.qzeros" in warning["where"]
    assert "group 1" in warning["where"]


def test_f02_odd_zero_is_refused_where_symmetry_is_needed(tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", made(config=wide(), group=128), b.gptq, b.gptq_config())
    convert(source, tmp_path / "accepted", "marlin-legacy").expect(0)
    model = made(config=wide())
    model.linears[f"{ATTN}.k_proj"].zeros[1, 0] = 7
    odd = b.write(tmp_path / "odd", model, b.gptq, b.gptq_config())
    done = refused(odd, tmp_path / "out", "marlin-legacy", f"{ATTN}.k_proj")
    assert done.says("awq") or done.says("marlin")


def test_f02_engines_that_need_symmetry_refuse_gptq_and_the_way_is_named(tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", one_odd_zero(), b.gptq, b.gptq_config(sym=True))
    convert(source, tmp_path / "out", "gptq").expect(0)
    assert oracle.quant_config(tmp_path / "out")["sym"] is False
    answer = run("check", tmp_path / "out", "--engine", "vllm", "--json").expect(3).data
    assert answer["ok"] is False
    assert re.search(r"w4pack convert .*--to (awq|compressed-tensors|marlin)", answer["suggestion"])


def test_f02_labelled_asymmetric_but_all_zeros_are_the_midpoint(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(sym=False))
    done = accepted(source, tmp_path / "out", "gptq", model.linears)
    assert "sym" in warnings_of(done)
    assert oracle.quant_config(tmp_path / "out")["sym"] is True
    assert words_of(tmp_path / "out", ".qzeros") == {0x77777777}


# --- F3: where the settings live --------------------------------------------------------------------------


def test_f03_settings_only_in_quantize_config(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, None)
    b.write_json(source / "quantize_config.json", b.gptq_config())
    accepted(source, tmp_path / "out", "gptq", model.linears)
    assert oracle.read_config(tmp_path / "out")["quantization_config"]["bits"] == 4


def test_f03_two_files_differ_and_the_tensors_decide(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=128))
    b.write_json(source / "quantize_config.json", b.gptq_config(group=64))
    done = accepted(source, tmp_path / "out", "gptq", model.linears)
    told = warnings_of(done)
    for part in ("config.json", "quantize_config.json", "64", "128"):
        assert part in told
    assert oracle.quant_config(tmp_path / "out")["group_size"] == 128
    second = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert second == oracle.read_config(tmp_path / "out")["quantization_config"]


def test_f03_settings_nowhere_but_the_tensors_tell(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, None)
    done = accepted(source, tmp_path / "out", "marlin", model.linears)
    assert [e for e in done.events if e["event"] == "warning"]


def test_f03_asymmetric_without_settings_needs_the_format_named(tmp_path: Path) -> None:
    model = made(sym=False)
    for linear in model.linears.values():
        linear.zeros = np.clip(linear.zeros, 1, 14).astype(np.uint8)
    source = b.write(tmp_path / "src", model, b.gptq_v2, None)
    refused(source, tmp_path / "out", "marlin", "--source-format")
    accepted(source, tmp_path / "out", "marlin", model.linears, "--source-format", "gptq_v2")


# --- F4: close to GPTQ but not it -------------------------------------------------------------------------


def test_f04_unknown_checkpoint_format_is_named(tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", made(), b.gptq, b.gptq_config(checkpoint_format="qqq"))
    refused(source, tmp_path / "out", "marlin", "qqq", "gptq_v2")


def test_f04_zeros_with_the_shape_of_scales(tmp_path: Path) -> None:
    model = made()
    name = f"{ATTN}.k_proj"
    zeros = b.tensor(model.linears[name].zeros.astype(np.float16), "F16")
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(), extra={f"{name}.qzeros": zeros})
    done = refused(source, tmp_path / "out", "marlin", f"{name}.qzeros")  # a layout that is not known
    assert done.says("F16") or done.says("float16")
    assert done.says("[2, 64]")
    assert done.says("[2, 8]")


# --- F5: serialized Marlin, labelled three ways -----------------------------------------------------------


def wide(**more: Any) -> dict[str, Any]:
    """Return a config whose linears are all 256 -> 256, which the first Marlin kernels took."""
    return small(num_key_value_heads=4, **more)


LEGACY_LABELS: dict[str, dict[str, Any] | None] = {
    "checkpoint_format": b.gptq_config(checkpoint_format="marlin"),
    "is_marlin_format": {
        k: v for k, v in b.gptq_config(is_marlin_format=True).items() if k != "checkpoint_format"
    },
    "quant_method": {"quant_method": "marlin", "group_size": 128},
    "none": None,
}


@pytest.mark.parametrize("label", LEGACY_LABELS)
def test_f05_legacy_tensors_are_known_under_every_label(label: str, tmp_path: Path) -> None:
    model = made(config=wide())
    source = b.write(tmp_path / "src", model, b.legacy, LEGACY_LABELS[label])
    for target in ("marlin", "gptq"):
        accepted(source, tmp_path / target, target, model.linears)


@pytest.mark.parametrize("group", [128, -1])
def test_f05_marlin_legacy_holds_b_and_s_and_nothing_else(group: int, tmp_path: Path) -> None:
    model = made(config=wide(), group=group)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=group))
    convert(source, tmp_path / "legacy", "marlin-legacy").expect(0)
    tensors = oracle.read_folder(tmp_path / "legacy")
    for name, linear in model.linears.items():
        assert {k: v for k, v in tensors.items() if k.startswith(f"{name}.")} == b.legacy(name, linear)
    settings = oracle.read_config(tmp_path / "legacy")["quantization_config"]
    assert settings["checkpoint_format"] == "marlin"
    assert settings["is_marlin_format"] is True
    convert(tmp_path / "legacy", tmp_path / "back", "gptq").expect(0)
    assert oracle.read_folder(tmp_path / "back") == oracle.read_folder(source)


def test_f05_other_group_sizes_are_refused_for_marlin_legacy(tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", made(config=wide(), group=64), b.gptq, b.gptq_config(group=64))
    refused(source, tmp_path / "out", "marlin-legacy", "128", "-1", "64")


# --- F6: AWQ variants -------------------------------------------------------------------------------------

AWQ_FORMS: dict[str, b.Writer] = {"gemm": b.awq_gemm, "gemv": b.awq_gemv, "gemv_fast": b.awq_gemv_fast}


@pytest.mark.parametrize("target", EVERY)
@pytest.mark.parametrize("version", AWQ_FORMS)
def test_f06_every_awq_form_decodes_to_the_same_codes(version: str, target: str, tmp_path: Path) -> None:
    model = made(sym=False)
    source = b.write(tmp_path / "src", model, AWQ_FORMS[version], b.awq_config(version=version))
    accepted(source, tmp_path / "out", target, model.linears)
    if target == "awq":
        assert oracle.quant_config(tmp_path / "out")["version"].lower() == "gemm"
        want = b.all_tensors(model, b.awq_gemm)
        assert oracle.read_folder(tmp_path / "out") == want


def test_f06_awq_marlin_has_zero_eight_and_gets_words_of_eights(tmp_path: Path) -> None:
    model = made(config=wide())
    source = b.write(tmp_path / "src", model, b.awq_marlin, b.awq_config(version="marlin", zero_point=False))
    accepted(source, tmp_path / "out", "awq", model.linears)
    assert words_of(tmp_path / "out", ".qzeros") == {0x88888888}


@pytest.mark.parametrize("label", ["gemm", "gemv_fast"])
def test_f06_gemv_tensors_under_another_label(label: str, tmp_path: Path) -> None:
    model = made(sym=False)  # q_proj is 256 -> 256: qweight alone cannot tell, scales and zeros do
    source = b.write(tmp_path / "src", model, b.awq_gemv, b.awq_config(version=label))
    done = accepted(source, tmp_path / "out", "awq", model.linears)
    assert "gemv" in warnings_of(done)


def test_f06_awq_label_on_gptq_tensors(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, b.awq_config())
    done = accepted(source, tmp_path / "out", "marlin", model.linears)
    assert [e for e in done.events if e["event"] == "warning"]


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


# --- F13: mixed schemes inside one fused module -----------------------------------------------------------


def test_f13_dynamic_group_size_of_one_part(tmp_path: Path) -> None:
    model = made()
    q = f"{ATTN}.q_proj"
    model.linears[q] = b.layer(np.random.default_rng(1), 256, 256, group=32)
    settings = b.gptq_config(dynamic={".*q_proj": {"group_size": 32}})
    source = b.write(tmp_path / "src", model, b.gptq, settings)
    accepted(source, tmp_path / "out", "marlin", model.linears)
    uneven = fused_blocker(source, f"{ATTN}.qkv_proj")
    for part in ("q_proj", "k_proj", "v_proj", "32", "128"):
        assert part in uneven["found"], part


def fused_blocker(source: Path, name: str) -> dict[str, Any]:
    """Ask vLLM; return what stands in the way of a fused module."""
    (result,) = run("check", source, "--engine", "vllm", "--json").expect(3).data["results"]
    assert result["verdict"] == "refuses"
    (found,) = [x for x in result["blockers"] if x["layer"] == name]
    return found


def test_f13_one_scheme_for_all_parts_is_no_obstacle(tmp_path: Path) -> None:
    model = made()
    rng = np.random.default_rng(1)
    for part in "qkv":
        old = model.linears[f"{ATTN}.{part}_proj"]
        model.linears[f"{ATTN}.{part}_proj"] = b.layer(rng, old.k, old.n, group=32)
    rules = {r"+:.*\.[qkv]_proj$": {"group_size": 32}}
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(dynamic=rules))
    answer = run("check", source, "--engine", "vllm", "--json").data
    assert "qkv_proj" not in json.dumps(answer["results"][0]["blockers"])


def test_f13_first_rule_wins_and_shapes_win_over_rules(tmp_path: Path) -> None:
    model = made()
    q = f"{ATTN}.q_proj"
    model.linears[q] = b.layer(np.random.default_rng(1), 256, 256, group=32)
    rules = {".*q_proj": {"group_size": 32}, ".*_proj": {"group_size": 128}}
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(dynamic=rules))
    done = accepted(source, tmp_path / "out", "marlin", model.linears)
    assert not [e for e in done.events if e["event"] == "warning"]
    source = b.write(tmp_path / "lie", model, b.gptq, b.gptq_config(dynamic={".*q_proj": {"group_size": 64}}))
    done = accepted(source, tmp_path / "out2", "marlin", model.linears)
    told = warnings_of(done)
    assert "64" in told
    assert "32" in told


def test_f13_gate_in_8_bit_and_up_in_4(tmp_path: Path) -> None:
    model = made()
    model.linears[f"{MLP}.gate_proj"] = b.layer(np.random.default_rng(1), 256, 256, bits=8)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(dynamic={"+:.*gate_proj": {"bits": 8}}))
    accepted(source, tmp_path / "out", "marlin", model.linears)
    uneven = fused_blocker(source, f"{MLP}.gate_up_proj")
    for part in ("gate_proj 8 bit", "up_proj 4 bit"):
        assert part in uneven["found"], part


def test_f13_a_rule_that_leaves_a_module_in_16_bit(tmp_path: Path) -> None:
    model = made()
    name = f"{MLP}.down_proj"
    del model.linears[name]
    model.dense[f"{name}.weight"] = b.dense(np.random.default_rng(4), 256, 256)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(dynamic={"-:.*down_proj": {}}))
    for target in PACKED:
        accepted(source, tmp_path / target, target, model.linears)
        assert oracle.read_folder(tmp_path / target)[f"{name}.weight"] == model.dense[f"{name}.weight"]
        settings = oracle.quant_config(tmp_path / target)
        listed = {
            "marlin": lambda s: name in s["modules_to_not_convert"],
            "gptq": lambda s: skipped_by_dynamic(name, s),
            "awq": lambda s: any(entry in name for entry in s["modules_to_not_convert"]),
            "compressed-tensors": lambda s: skipped_by_ignore(name, s),
        }[target]
        assert listed(settings), (target, settings)


# --- F14: exclude lists -----------------------------------------------------------------------------------


def skipped_by_dynamic(name: str, settings: dict[str, Any]) -> bool:
    """Apply GPTQ's rules: the first pattern that matches decides."""
    for rule in settings.get("dynamic", {}):
        if re.match(rule.removeprefix("-:").removeprefix("+:"), name):
            return rule.startswith("-:")
    return False


def skipped_by_ignore(name: str, settings: dict[str, Any]) -> bool:
    """Apply compressed-tensors' rule: an exact name, or a pattern after ``re:``."""
    entries = settings["ignore"]
    return any(re.match(e[3:], name) if e.startswith("re:") else e == name for e in entries)


SKIPS: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    "gptq": skipped_by_dynamic,
    "awq": lambda name, settings: any(entry in name for entry in settings["modules_to_not_convert"] or ()),
    "compressed-tensors": skipped_by_ignore,
}


def moe_with_a_dense_layer() -> b.Model:
    """Return a Qwen3-MoE whose first layer has an ordinary MLP; routers are dense tensors."""
    config = b.qwen3_moe_config(num_hidden_layers=2, mlp_only_layers=[0], intermediate_size=256)
    model = b.model(2, config)
    for name in [n for n in model.linears if n.startswith("model.layers.0.mlp.experts")]:
        del model.linears[name]
    del model.dense["model.layers.0.mlp.gate.weight"]
    rng = np.random.default_rng(3)
    for part in ("gate", "up", "down"):
        model.linears[f"model.layers.0.mlp.{part}_proj"] = b.layer(rng, 256, 256)
    return model


@pytest.mark.parametrize("target", PORTABLE)
def test_f14_the_written_list_selects_exactly_what_is_dense(target: str, tmp_path: Path) -> None:
    model = moe_with_a_dense_layer()
    settings = b.awq_config(modules_to_not_convert=["gate"])
    source = b.write(tmp_path / "src", model, b.awq_gemm, settings)
    accepted(source, tmp_path / "out", target, model.linears)
    written = oracle.quant_config(tmp_path / "out")
    for name in model.linears:
        assert not SKIPS[target](name, written), (name, written)
    dense = ["model.layers.1.mlp.gate"] + (["lm_head"] if target != "gptq" else [])
    for name in dense:
        assert SKIPS[target](name, written), (name, written)


# --- F15: tied embeddings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", EVERY)
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_f15_tied_head_travels_as_it_is(head: str, target: str, tmp_path: Path) -> None:
    model = made(config=small(tie_word_embeddings=True))
    embedding = model.dense["model.embed_tokens.weight"]
    if head != "absent":
        values = embedding.array().copy()
        values[3, 5] += np.float16(head == "different")
        model.dense["lm_head.weight"] = b.tensor(values, "F16")
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    done = accepted(source, tmp_path / "out", target, model.linears)
    tensors = oracle.read_folder(tmp_path / "out")
    assert tensors.get("lm_head.weight") == model.dense.get("lm_head.weight")
    assert tensors["model.embed_tokens.weight"] == embedding
    assert oracle.read_config(tmp_path / "out")["tie_word_embeddings"] is True
    if head == "equal":
        assert "tied" in warnings_of(done)
        assert str(len(embedding.data)) in warnings_of(done).replace(",", "")  # the bytes it costs
    if head == "different":
        (warning,) = [e for e in done.events if e["event"] == "warning"]
        assert "lm_head" in json.dumps(warning)


# --- F16: tensors that share memory in a pickle -----------------------------------------------------------


def save_bin(folder: Path, model: b.Model, more: Callable[[Any, dict[str, Any]], None]) -> Path:
    """Write pytorch_model.bin with extra entries."""
    torch = pytest.importorskip("torch")
    folder.mkdir()
    state = {
        name: torch.from_numpy(value.array().copy()) for name, value in b.all_tensors(model, b.gptq).items()
    }
    more(torch, state)
    torch.save(state, folder / "pytorch_model.bin")
    b.write_json(folder / "config.json", {**model.config, "quantization_config": b.gptq_config()})
    return folder


def test_f16_aliases_and_views_become_tensors_of_their_own(tmp_path: Path) -> None:
    model = made(config=small(tie_word_embeddings=True))

    def more(torch: Any, state: dict[str, Any]) -> None:
        state["a"] = torch.arange(24, dtype=torch.float16).reshape(4, 6)
        state["b"] = state["a"]
        state["c"] = state["a"][:, ::2]
        state["lm_head.weight"] = state["model.embed_tokens.weight"]

    source = save_bin(tmp_path / "src", model, more)
    accepted(source, tmp_path / "out", "marlin", model.linears)
    tensors = oracle.read_folder(tmp_path / "out")
    whole = np.arange(24, dtype=np.float16).reshape(4, 6)
    assert np.array_equal(tensors["a"].array(), whole)
    assert np.array_equal(tensors["b"].array(), whole)
    assert np.array_equal(tensors["c"].array(), whole[:, ::2])
    assert "lm_head.weight" not in tensors  # the tie that the config names is written once


def test_f16_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("unpickled code ran",))

    def more(torch: Any, state: dict[str, Any]) -> None:
        state["x"] = Bomb()

    source = save_bin(tmp_path / "src", made(), more)
    done = refused(source, tmp_path / "out", "marlin", "pytorch_model.bin", code=1)
    assert "unpickled code ran" not in done.text


# --- F17: tensors the model class does not know -----------------------------------------------------------


def strangers() -> b.Tensors:
    """Return tensors of four dtypes that no model class here has."""
    rng = np.random.default_rng(17)
    return {
        "mtp.fc.weight": b.dense(rng, 256, 512, tag="BF16"),
        "mtp.layers.0.table": b.tensor(rng.integers(-128, 128, (4, 8)).astype(np.int8), "I8"),
        "mtp.layers.0.small": Tensor("F8_E4M3", (3, 5), bytes(range(15))),
        "mtp.step": b.tensor(np.array(41, np.int64), "I64"),
    }


@pytest.mark.parametrize("target", EVERY)
def test_f17_strangers_travel_byte_for_byte(target: str, tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(), extra=strangers())
    accepted(source, tmp_path / "out", target, model.linears)
    tensors = oracle.read_folder(tmp_path / "out")
    for name, value in strangers().items():
        assert tensors[name] == value
    assert run("verify", tmp_path / "out", "--against", source, "--json").expect(0).data["ok"] is True


@pytest.mark.parametrize("gone", ["mtp.fc.weight", "mtp.step", f"{ATTN}.k_proj.weight_scale"])
def test_f17_verify_names_a_tensor_that_was_removed(gone: str, tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", made(), b.gptq, b.gptq_config(), extra=strangers())
    out = tmp_path / "out"
    convert(source, out, "marlin").expect(0)
    tensors = oracle.read_folder(out)
    del tensors[gone]
    (out / "model.safetensors").write_bytes(b.safetensors_bytes(tensors))
    told = run("verify", out, "--against", source, "--json").expect(4)
    assert gone in json.dumps(told.data["failures"])


# --- F18: expert tensors fused or renamed -----------------------------------------------------------------


def test_f18_fused_quantized_experts_are_refused_by_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(18)
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    extra = {
        f"{stem}_packed": b.tensor(rng.integers(0, 2**31, (4, 128, 32)).astype(np.int32), "I32"),
        f"{stem}_scale": b.dense(rng, 4, 128, 2),
        f"{stem}_shape": b.tensor(np.array([4, 128, 256]), "I64"),
    }
    source = b.write(tmp_path / "src", made(), b.compressed, b.compressed_config(), extra=extra)
    refused(source, tmp_path / "out", "marlin", f"{stem}_packed")


def test_f18_fused_16_bit_experts_pass(tmp_path: Path) -> None:
    model = made()
    extra = {"model.layers.0.mlp.experts.gate_up_proj": b.dense(np.random.default_rng(1), 4, 256, 64)}
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(), extra=extra)
    for target in EVERY:
        accepted(source, tmp_path / target, target, model.linears)
        (name,) = extra
        assert oracle.read_folder(tmp_path / target)[name] == extra[name]


@pytest.mark.parametrize("target", EVERY)
def test_f18_names_under_a_language_model_prefix_are_kept(target: str, tmp_path: Path) -> None:
    inner = b.model(2, b.qwen3_moe_config())
    rename = lambda n: n.replace("model.", "model.language_model.", 1)  # noqa: E731
    model = b.Model(inner.config, {rename(k): v for k, v in inner.dense.items()})
    model.linears = {rename(k): v for k, v in inner.linears.items()}
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    accepted(source, tmp_path / "out", target, model.linears)


@pytest.mark.parametrize("target", EVERY)
@pytest.mark.parametrize("spelling", [None, "block_sparse_moe.experts", "mlp.experts"])
def test_f18_three_spellings_of_mixtral_become_the_one_that_loads(
    spelling: str | None, target: str, tmp_path: Path
) -> None:
    model = b.model(4, b.mixtral_config(), experts=spelling)
    if spelling == "mlp.experts":
        router = model.dense.pop("model.layers.0.block_sparse_moe.gate.weight")
        model.dense["model.layers.0.mlp.gate.weight"] = router
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    plain = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    want = {}
    for name, linear in model.linears.items():
        stem, last = name.rsplit(".", 1)
        if ".experts." in name:
            stem = stem.replace(".mlp.", ".block_sparse_moe.")
            last = plain.get(last, last)
        want[f"{stem}.{last}"] = linear
    accepted(source, tmp_path / "out", target, want)
    assert "model.layers.0.block_sparse_moe.gate.weight" in oracle.read_folder(tmp_path / "out")
    told = run("verify", tmp_path / "out", "--against", source, "--json").expect(0).data
    assert told["ok"] is True
    if target == "marlin":
        run("unpack", tmp_path / "out", tmp_path / "back").expect(0)
        assert oracle.read_folder(tmp_path / "back") == oracle.read_folder(source)


# --- F19: one expert lacks a tensor -----------------------------------------------------------------------


@pytest.mark.parametrize("part", ["scales", "qzeros", "qweight"])
def test_f19_the_missing_tensor_of_one_expert_is_named(part: str, tmp_path: Path) -> None:
    model = b.model(4, b.qwen3_moe_config(), sym=False)
    gone = f"model.layers.0.mlp.experts.2.down_proj.{part}"
    settings = b.gptq_config(sym=False, checkpoint_format="gptq_v2")
    source = b.write(tmp_path / "src", model, b.gptq_v2, settings, drop=[gone])
    refused(source, tmp_path / "out", "marlin", gone, code=1)


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


# --- F93: two ways to store z - 1 -------------------------------------------------------------------------

ZEROS = [0, 8, 8, 3, 15, 8, 0, 1]
STORED = {"word": 0xFF7E276F, "nibble": 0x0F7E277F}
READ = {  # (how it was stored, how it is read) -> zeros
    ("word", "nibble"): [16, 7, 8, 3, 15, 8, 16, 16],
    ("nibble", "nibble"): [16, 8, 8, 3, 15, 8, 16, 1],
    ("word", "word"): [0, 8, 8, 3, 15, 8, 0, 1],
    ("nibble", "word"): [0, 9, 8, 3, 15, 8, 0, 2],
}


def zero_words(folder: Path, stored: int, **more: Any) -> tuple[Path, b.Model]:
    """Write the small model with one word of k_proj's zeros replaced."""
    model = made(sym=False)
    for linear in model.linears.values():
        linear.zeros = np.clip(linear.zeros, 1, 15).astype(np.uint8)
    name = f"{ATTN}.k_proj"
    words = (
        np.frombuffer(b.gptq(name, model.linears[name])[f"{name}.qzeros"].data, "<u4").reshape(2, 8).copy()
    )
    words[0, 0] = stored
    extra = {f"{name}.qzeros": b.tensor(words.view(np.int32), "I32")}
    return b.write(folder, model, b.gptq, b.gptq_config(sym=False, **more), extra=extra), model


def k_weight(model: b.Model, zeros: list[int]) -> Any:
    """Return k_proj's weight with these zeros in the first eight columns of group 0, z = 16 included."""
    linear = model.linears[f"{ATTN}.k_proj"]
    z = linear.zeros.astype(np.float64)
    z[0, :8] = zeros
    steps = linear.codes.astype(np.float64) - z[linear.gi]
    return oracle.round_once((steps * oracle.widen(linear.scales, "F16")[linear.gi]).T, "F16")


@pytest.mark.parametrize("stored", STORED)
def test_f93_a_stored_15_of_an_unknown_producer_is_refused_with_both_readings(
    stored: str, tmp_path: Path
) -> None:
    source, _ = zero_words(tmp_path / "src", STORED[stored])
    for target in ("marlin", "dense"):
        refused(source, tmp_path / target, target, f"{ATTN}.k_proj", "--zero-reading", "word", "nibble")


@pytest.mark.parametrize("reading", ["word", "nibble"])
@pytest.mark.parametrize("stored", STORED)
def test_f93_the_explicit_reading_gives_these_zeros(stored: str, reading: str, tmp_path: Path) -> None:
    source, model = zero_words(tmp_path / "src", STORED[stored])
    convert(source, tmp_path / "out", "dense", "--zero-reading", reading).expect(0)
    got = oracle.read_folder(tmp_path / "out")[f"{ATTN}.k_proj.weight"].array()
    assert np.array_equal(got, k_weight(model, READ[stored, reading]))


def test_f93_zero_16_fits_no_packed_target(tmp_path: Path) -> None:
    source, _ = zero_words(tmp_path / "src", STORED["nibble"])
    options = ["--zero-reading", "nibble"]
    refused(source, tmp_path / "out", "marlin", f"{ATTN}.k_proj", "16", "dense", options=options)


@pytest.mark.parametrize("target", PACKED)
def test_f93_gptqmodel_subtracts_from_the_word(target: str, tmp_path: Path) -> None:
    meta = {"quantizer": ["gptqmodel:7.7.0"]}
    source, model = zero_words(tmp_path / "src", STORED["word"], meta=meta)
    model.linears[f"{ATTN}.k_proj"].zeros[0, :8] = ZEROS
    accepted(source, tmp_path / "out", target, model.linears)
    if target == "gptq":
        assert oracle.quant_config(tmp_path / "out")["checkpoint_format"] == "gptq_v2"


def test_f93_without_a_stored_15_there_is_no_question(tmp_path: Path) -> None:
    model = made(sym=False)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(sym=False))
    assert model.linears[f"{ATTN}.k_proj"].zeros.min() >= 1
    accepted(source, tmp_path / "out", "marlin", model.linears)


def test_f93_the_same_in_8_bit(tmp_path: Path) -> None:
    model = made(sym=False, bits=8)
    model.linears[f"{ATTN}.k_proj"].zeros[0, :4] = [0, 5, 128, 255]
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(sym=False, bits=8))
    refused(source, tmp_path / "out", "marlin", f"{ATTN}.k_proj", "--zero-reading")
    accepted(source, tmp_path / "word", "marlin", model.linears, "--zero-reading", "word")
    known = b.write(
        tmp_path / "known",
        model,
        b.gptq,
        b.gptq_config(sym=False, bits=8, meta={"quantizer": "gptqmodel:7.7.0"}),
    )
    accepted(known, tmp_path / "known-out", "marlin", model.linears)
