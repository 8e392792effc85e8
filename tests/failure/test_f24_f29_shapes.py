"""Shapes, tiles and tensor parallelism: rows F24 to F29 of the failure list."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import fold_of, same_numbers

import builders as b
import oracle
from oracle import Linear, Tensor
from runner import convert, run

PORTABLE = ("gptq", "awq", "compressed-tensors")
MLP = "model.layers.0.mlp"

# --- F24: K per rank does not meet the rule ---------------------------------------------------------------


def headers(folder: Path, config: dict[str, Any], group: int, shapes: dict[str, tuple[int, int]]) -> Path:
    """Write a checkpoint that is nothing but headers: zeros on disk are holes."""
    folder.mkdir()
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("F16", (config["vocab_size"], config["hidden_size"])),
        "model.norm.weight": ("F16", (config["hidden_size"],)),
        "lm_head.weight": ("F16", (config["vocab_size"], config["hidden_size"])),
    }
    for name, (k, n) in shapes.items():
        found.update(b.gptq_shapes(name, k, n, group))
    b.header_only(folder / "model.safetensors", found)
    b.write_json(folder / "config.json", {**config, "quantization_config": b.gptq_config(group=group)})
    return folder


def llama_headers(folder: Path, inner: int, group: int = 128) -> Path:
    """Write a Llama whose every other linear runs at TP 8."""
    config = b.llama_config(
        hidden_size=2048,
        intermediate_size=inner,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
    )
    names = [f"model.layers.0.{name}" for name in b.block_modules(config)]
    return headers(folder, config, group, {name: b.sizes(config, name) for name in names})


@pytest.mark.parametrize(
    ("inner", "most"), [(11008, 2), (13824, 4), (14336, 8), (27392, 2), (29568, 1), (18944, 4)]
)
def test_f24_inspect_and_check_say_which_tp_fits(inner: int, most: int, tmp_path: Path) -> None:
    source = llama_headers(tmp_path / "src", inner)
    told = run("inspect", source, "--json").expect(0).data
    (down,) = [x for x in told["layers"] if x["name"].endswith("down_proj")]
    fitting = down["max_tp"]
    assert fitting == most or (inner == 14336 and fitting == 16)
    done = run("check", source, "--engine", "vllm", "--tp", "1,2,4,8", "--json")
    answer = done.data
    assert {r["tp"]: r["ok"] for r in answer["results"]} == {tp: tp <= most for tp in (1, 2, 4, 8)}
    done.expect(0 if most == 8 else 3)
    for result in answer["results"]:
        if not result["ok"]:
            text = json.dumps(result["blockers"])
            assert "down_proj" in text
            assert str(inner // result["tp"]) in text.replace(",", "")
    if inner == 29568:
        assert "29696" in done.text.replace(",", "")


# --- F25: padding the MLP for tensor parallelism ----------------------------------------------------------


def mlp_output(x: Any, linears: dict[str, Linear]) -> Any:
    """Return the MLP of Llama in float64."""
    gate, up, down = (linears[f"{MLP}.{p}_proj"].weight64() for p in ("gate", "up", "down"))
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("target", ["marlin", *PORTABLE])
def test_f25_padding_is_exact_and_the_config_follows(
    target: str, sym: bool, ordered: bool, tmp_path: Path
) -> None:
    model = b.model(25, b.llama_config(intermediate_size=448, num_hidden_layers=2), group=64, sym=sym)
    rng = np.random.default_rng(1)
    if ordered:
        for i in range(2):
            down = model.linears[f"model.layers.{i}.mlp.down_proj"]
            down.gi = down.gi[rng.permutation(448)]
    settings = b.gptq_config(sym=sym, group=64, desc=ordered, checkpoint_format="gptq_v2")
    source = b.write(tmp_path / "src", model, b.gptq_v2, settings)
    out = tmp_path / "out"
    convert(source, out, target, "--pad-for-tp", "4").expect(0, 512)
    assert oracle.read_config(out)["intermediate_size"] == 512  # 448 rounded up to 4 * lcm(128, 64)
    got = oracle.decode_folder(out)
    for i in range(2):
        stem = f"model.layers.{i}.mlp"
        order = fold_of(model.linears[f"{stem}.down_proj"]) if ordered else np.arange(448)
        for part in ("gate", "up"):
            padded, plain = got[f"{stem}.{part}_proj"], model.linears[f"{stem}.{part}_proj"]
            assert padded.n == 512
            assert np.array_equal(padded.codes[:, :448], plain.codes[:, order])
            assert not padded.weight64()[448:].any()
        down = got[f"{stem}.down_proj"]
        assert (down.k, down.n) == (512, 256)
        assert not down.weight64()[:, 448:].any()
        assert np.array_equal(
            down.weight64()[:, :448], model.linears[f"{stem}.down_proj"].weight64()[:, order]
        )
    x = rng.normal(size=(4, 256))
    outputs = mlp_output(x, model.linears), mlp_output(x, got)
    assert np.abs(outputs[0] - outputs[1]).max() < 1e-12 * np.abs(outputs[0]).max()
    told = run("verify", out, "--against", source, "--json").expect(0).data
    assert told["ok"] is True
    if target != "awq":
        answer = run(
            "check", out, "--engine", "w4pack" if target == "marlin" else "vllm", "--tp", "4", "--json"
        ).data
        blockers = json.dumps(answer["results"][0]["blockers"])
        assert "down_proj" not in blockers


def test_f25_without_padding_nothing_changes(tmp_path: Path) -> None:
    model = b.model(25, b.llama_config(intermediate_size=448), group=64)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=64))
    convert(source, tmp_path / "out", "gptq").expect(0)
    assert oracle.read_config(tmp_path / "out")["intermediate_size"] == 448
    assert oracle.decode_folder(tmp_path / "out")[f"{MLP}.down_proj"].k == 448


def test_f25_padding_pads_dense_parts_and_biases(tmp_path: Path) -> None:
    model = b.model(25, b.llama_config(intermediate_size=448, mlp_bias=True), group=64)
    rng = np.random.default_rng(2)
    up = f"{MLP}.up_proj"
    for part, n in (("gate", 448), ("up", 448), ("down", 256)):
        model.linears[f"{MLP}.{part}_proj"].bias = b.dense(rng, n)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=64))
    convert(source, tmp_path / "out", "gptq", "--pad-for-tp", "4").expect(0)
    got = oracle.read_folder(tmp_path / "out")
    bias = model.linears[up].bias
    assert bias is not None
    assert got[f"{up}.bias"].shape == (512,)
    assert got[f"{up}.bias"].data[: len(bias.data)] == bias.data
    assert not any(got[f"{up}.bias"].data[len(bias.data) :])


# --- F26: experts and tensor parallelism ------------------------------------------------------------------


@pytest.mark.parametrize(("inner", "most"), [(768, 2), (1408, 1)])
def test_f26_experts_limit_tp(inner: int, most: int, tmp_path: Path) -> None:
    config = b.qwen3_moe_config(
        hidden_size=2048,
        moe_intermediate_size=inner,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
    )
    names = [f"model.layers.0.{name}" for name in b.block_modules(config)]
    source = headers(tmp_path / "src", config, 128, {name: b.sizes(config, name) for name in names})
    told = run("inspect", source, "--json").expect(0).data
    downs = [x["max_tp"] for x in told["layers"] if x["name"].endswith("down_proj")]
    assert downs == [most] * 4
    answer = run("check", source, "--engine", "vllm", "--tp", "1,2,4", "--json").data
    for result in answer["results"]:
        if result["tp"] > most:  # refused, or taken by a slower kernel that halves the group
            assert result["verdict"] in ("refuses", "slow")
            assert "down_proj" in json.dumps(result["blockers"])


def part_of(linear: Linear, rows: slice, columns: slice) -> Linear:
    """Return a slice of a linear, with the groups that its rows use."""
    gi = linear.gi[rows]
    first = int(gi.min())
    groups = slice(first, int(gi.max()) + 1)
    return Linear(
        linear.codes[rows, columns],
        linear.zeros[groups, columns],
        linear.scales[groups, columns],
        (gi - first).astype(np.int32),
        linear.bits,
        linear.tag,
    )


def artifact_of(folder: Path, linear: Linear) -> b.Tensors:
    """Convert one linear alone and return its tensors by their last name."""
    config = b.llama_config()
    name = f"{MLP}.experts.0.down_proj"
    model = b.Model(config, b.skeleton(np.random.default_rng(0), config), {name: linear})
    size = -1 if linear.scales.shape[0] == 1 else -(-linear.k // linear.scales.shape[0])
    settings = b.gptq_config(group=size, sym=linear.sym, bits=linear.bits, checkpoint_format="gptq_v2")
    source = b.write(folder / "src", model, b.gptq_v2, settings)
    convert(source, folder / "out", "marlin").expect(0)
    tensors = oracle.read_folder(folder / "out")
    return {k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")}


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_f26_slices_of_the_artifact_are_artifacts_of_the_slices(
    group: int, bits: int, sym: bool, tmp_path: Path
) -> None:
    k, n, tp = 512, 256, 2
    linear = b.layer(np.random.default_rng(26), k, n, bits=bits, group=group, sym=sym)
    if not sym:
        linear.zeros[:, ::7] = 3  # no slice may be all midpoints
    whole = artifact_of(tmp_path / "whole", linear)
    step = math.lcm(64, group if group > 0 else 1)
    assert k // tp % step == 0
    for rank in range(tp):
        rows = slice(rank * k // tp, (rank + 1) * k // tp)
        columns = slice(rank * n // tp, (rank + 1) * n // tp)
        by_k = artifact_of(tmp_path / f"k{rank}", part_of(linear, rows, slice(None)))
        by_n = artifact_of(tmp_path / f"n{rank}", part_of(linear, slice(None), columns))
        assert set(by_k) == set(by_n) == set(whole)
        for name, value in whole.items():
            cut = value.array()
            width = cut.shape[1] // tp
            down = (
                cut[rank * cut.shape[0] // tp : (rank + 1) * cut.shape[0] // tp] if cut.shape[0] > 1 else cut
            )
            assert np.array_equal(by_k[name].array(), down), (name, "K")
            assert np.array_equal(by_n[name].array(), cut[:, rank * width : (rank + 1) * width]), (name, "N")


# --- F27: group sizes no kernel takes ---------------------------------------------------------------------


def test_f27_the_engine_rule_is_named(tmp_path: Path) -> None:
    source = llama_headers(tmp_path / "src", 8256, group=64)
    answer = run("check", source, "--engine", "sglang", "--json").expect(3).data
    text = json.dumps(answer["results"][0]["blockers"])
    assert "down_proj" in text
    assert "128" in text
    assert "64" in text  # 8256 % 128


@pytest.mark.parametrize("target", ["marlin", "gptq", "awq", "compressed-tensors"])
def test_f27_group_256_is_split_without_loss(target: str, tmp_path: Path) -> None:
    model = b.model(27, group=256, sym=False)
    model.linears = {k: v for k, v in model.linears.items() if v.k == 512}  # where 256 is not one group
    settings = b.gptq_config(group=256, sym=False, checkpoint_format="gptq_v2")
    source = b.write(tmp_path / "src", model, b.gptq_v2, settings)
    done = convert(source, tmp_path / "out", target).expect(0)
    for name, linear in oracle.decode_folder(tmp_path / "out").items():
        same_numbers(linear, model.linears[name], name)
        assert linear.scales.shape[0] == 4
    assert "256" in json.dumps(done.plan)
    told = run("verify", tmp_path / "out", "--against", source, "--json").expect(0).data
    assert told["lossless"] is True


def test_f27_group_16_is_refused_for_marlin_with_what_takes_it(tmp_path: Path) -> None:
    model = b.model(27, group=16)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=16))
    done = convert(source, tmp_path / "out", "marlin").expect(3, 16, 32, 64, 128)
    assert any(done.says(target) for target in PORTABLE)
    for target in PORTABLE:
        convert(source, tmp_path / target, target).expect(0)
        for name, linear in oracle.decode_folder(tmp_path / target).items():
            same_numbers(linear, model.linears[name], name)


def test_f27_one_layer_of_group_16_does_not_lose_the_model(tmp_path: Path) -> None:
    model = b.model(27)
    name = f"{MLP}.down_proj"
    model.linears[name] = b.layer(np.random.default_rng(1), 512, 256, group=16)
    settings = b.gptq_config(dynamic={".*down_proj": {"group_size": 16}})
    source = b.write(tmp_path / "src", model, b.gptq, settings)
    done = convert(source, tmp_path / "out", "marlin").expect(0, name)
    odd = model.linears.pop(name)
    got = oracle.decode_folder(tmp_path / "out")
    assert set(got) == set(model.linears)
    assert np.array_equal(oracle.read_folder(tmp_path / "out")[f"{name}.weight"].array(), odd.weight("F16"))
    assert name in json.dumps(done.plan)
    run("unpack", tmp_path / "out", tmp_path / "back", "--json").expect(3, name)


# --- F28: N off the tile ----------------------------------------------------------------------------------


def off_tile(sym: bool = True) -> b.Model:
    """Return a model with N = 48 (k, v) and 1440 (gate, up); down_proj's padding makes a whole group."""
    config = b.llama_config(head_dim=48, num_key_value_heads=1, intermediate_size=1440)
    return b.model(28, config, group=32, sym=sym)


@pytest.mark.parametrize("sym", [True, False])
def test_f28_artifact_pads_and_unpack_gives_the_real_size_back(sym: bool, tmp_path: Path) -> None:
    model = off_tile(sym)
    settings = b.gptq_config(group=32, sym=sym, checkpoint_format="gptq_v2")
    source = b.write(tmp_path / "src", model, b.gptq_v2, settings)
    out = tmp_path / "out"
    convert(source, out, "marlin").expect(0)
    for name, linear in oracle.decode_folder(out).items():  # the decoder checks that the padding adds nothing
        same_numbers(linear, model.linears[name], name)
    layers = {x["name"]: x for x in run("inspect", out, "--json").expect(0).data["layers"]}
    stored = {name: (x["out_features"], x["stored_out"], x["stored_in"]) for name, x in layers.items()}
    assert stored["model.layers.0.self_attn.k_proj"] == (48, 64, 256)
    assert stored[f"{MLP}.gate_proj"] == (1440, 1472, 256)
    assert stored[f"{MLP}.down_proj"] == (256, 256, 1472)
    run("unpack", out, tmp_path / "back").expect(0)
    assert oracle.read_folder(tmp_path / "back") == oracle.read_folder(source)


@pytest.mark.parametrize("target", PORTABLE)
def test_f28_portable_targets_keep_the_size(target: str, tmp_path: Path) -> None:
    model = off_tile()
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=32))
    convert(source, tmp_path / "out", target).expect(0)
    for name, linear in oracle.decode_folder(tmp_path / "out").items():
        assert linear.n == model.linears[name].n
        same_numbers(linear, model.linears[name], name)


def test_f28_check_names_an_engine_that_refuses(tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", off_tile(), b.gptq, b.gptq_config(group=32))
    answer = run("check", source, "--engine", "sglang", "--json").expect(3).data
    text = json.dumps(answer["results"][0]["blockers"])
    assert "k_proj" in text or "qkv_proj" in text


@pytest.mark.parametrize("n", [56, 63, 65, 72])
def test_f28_any_width_in_compressed_tensors(n: int, tmp_path: Path) -> None:
    model = b.model(28)
    name = "visual.head.proj"
    model.linears[name] = b.layer(np.random.default_rng(n), 256, n, sym=False)
    for linear in model.linears.values():
        linear.zeros[0, 0] = 3
    settings = b.compressed_config(sym=False)
    source = b.write(tmp_path / "src", model, b.compressed, settings)
    for target in ("compressed-tensors", "marlin"):
        convert(source, tmp_path / target, target).expect(0)
        got = oracle.decode_folder(tmp_path / target)
        same_numbers(got[name], model.linears[name], name)


# --- F29: routers and other small linears -----------------------------------------------------------------


@pytest.mark.parametrize("target", ["marlin", *PORTABLE, "dense"])
def test_f29_routers_stay_byte_identical_and_listed(target: str, tmp_path: Path) -> None:
    model = b.model(29, b.mixtral_config())
    rng = np.random.default_rng(29)
    small: dict[str, Tensor] = {
        "model.layers.0.block_sparse_moe.gate.weight": b.dense(rng, 4, 256),
        "model.layers.0.mlp.shared_expert_gate.weight": b.dense(rng, 1, 256),
    }
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(), extra=small)
    convert(source, tmp_path / "out", target).expect(0)
    tensors = oracle.read_folder(tmp_path / "out")
    for name, value in small.items():
        assert tensors[name] == value
    settings = oracle.quant_config(tmp_path / "out")
    names = [name.removesuffix(".weight") for name in small]
    if target == "compressed-tensors":
        import re

        for name in names:
            assert any(
                re.match(e[3:], name) if e.startswith("re:") else e == name for e in settings["ignore"]
            )
    if target in ("awq", "marlin"):
        assert set(names) <= set(settings["modules_to_not_convert"])


# --- layers that the user leaves in 16 bit ----------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["model.layers.0.mlp.down_proj", r"re:.*\.down_proj$"])
@pytest.mark.parametrize("to", ["marlin", "gptq", "compressed-tensors"])
def test_ignored_layers_are_dequantized_and_the_rest_stays_packed(
    pattern: str, to: str, tmp_path: Path
) -> None:
    model = b.model(3, b.llama_config())
    source, out = b.write(tmp_path / "src", model, b.gptq, b.gptq_config()), tmp_path / "out"
    convert(source, out, to, "--ignore", pattern).expect(0, "--ignore")
    got, tensors = oracle.decode_folder(out), oracle.read_folder(out)
    down = "model.layers.0.mlp.down_proj"
    assert down not in got
    assert "model.layers.0.mlp.up_proj" in got
    weight = tensors[f"{down}.weight"]
    assert oracle.same_floats(weight.array(), model.linears[down].weight(weight.tag), weight.tag)


@pytest.mark.parametrize("pattern", ["model.layers.9.mlp.down_proj", "re:(", "re:nothing"])
def test_an_ignore_pattern_that_names_nothing_is_a_usage_error(pattern: str, tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", b.model(3, b.llama_config()), b.gptq, b.gptq_config())
    convert(source, tmp_path / "out", "marlin", "--ignore", pattern).expect(2, pattern.removeprefix("re:"))
    assert not (tmp_path / "out").exists()
