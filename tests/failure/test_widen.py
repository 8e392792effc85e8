"""``--widen``: asymmetric 4 bit written as symmetric 8 bit, every weight the same to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import fold_of, folded, order_class

import builders as b
import oracle
from oracle import Linear
from runner import convert, run

ATTN = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"
CARRIERS = ("gptq", "compressed-tensors", "marlin")


def small(**more: Any) -> dict[str, Any]:
    """Return a config of few weights; k and v are narrower than q."""
    return b.llama_config(**{"intermediate_size": 256, "num_key_value_heads": 1, "vocab_size": 64, **more})


def asymmetric(orders: tuple[str, ...] = (), *, group: int = 64, tag: str = "F16") -> b.Model:
    """Return a model of 4-bit layers with zero points, those named by ``orders`` with an activation order."""
    model = b.model(41, small(), group=group, sym=False, tag=tag)
    rng = np.random.default_rng(42)
    shared = rng.permutation(256)
    for name, linear in model.linears.items():
        linear.zeros[0, :16] = np.arange(16)  # every zero point there is, 0 and 15 among them
        linear.codes[:16, 0] = np.arange(16)
        if name.endswith(orders):
            own = shared if name.startswith(ATTN) else rng.permutation(256)
            linear.gi = linear.gi[own]
    return model


def written(folder: Path, model: b.Model, group: int = 64, **more: Any) -> Path:
    """Write it as GPTQ v2, where every zero point has one reading."""
    settings = b.gptq_config(sym=False, group=group, checkpoint_format="gptq_v2", **more)
    return b.write(folder, model, b.gptq_v2, settings)


def same_weights(got: Linear, want: Linear, where: str) -> None:
    """Check that a widened layer holds the weights of the narrow one, and is what its config says."""
    assert (got.bits, got.sym) == (8, True), where
    assert np.array_equal(got.weight64(), want.weight64()), where
    assert got.tag == want.tag, where
    assert np.array_equal(got.per_row()[2], want.per_row()[2]), (where, "scale bits")
    steps = want.codes.astype(int) - want.zeros.astype(int)[want.gi]
    assert np.array_equal(got.codes, steps + 128), where  # -15 .. 15 around the midpoint of 8 bit


def all_widened(out: Path, want: dict[str, Linear]) -> None:
    """Check every module of an output."""
    got = oracle.decode_folder(out)
    assert set(got) == set(want)
    for name, linear in want.items():
        same_weights(got[name], linear, name)


@pytest.mark.parametrize("tag", ["F16", "BF16"])
@pytest.mark.parametrize("group", [-1, 32, 64])
@pytest.mark.parametrize("to", CARRIERS)
def test_every_weight_is_the_same_to_the_last_bit(to: str, group: int, tag: str, tmp_path: Path) -> None:
    model = asymmetric(group=group, tag=tag)
    source, out = written(tmp_path / "src", model, group), tmp_path / "out"
    convert(source, out, to, "--widen").expect(0, "8 bit")
    all_widened(out, model.linears)
    told = run("verify", out, "--against", source, "--json").expect(0).data
    assert (told["ok"], told["lossless"]) == (True, True)
    layers = run("inspect", out, "--json").expect(0).data["layers"]
    assert {(x["bits"], x["sym"]) for x in layers} == {(8, True)}


@pytest.mark.parametrize("to", CARRIERS)
def test_the_written_config_says_8_bit_and_symmetric(to: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(written(tmp_path / "src", asymmetric()), out, to, "--widen").expect(0)
    q = oracle.quant_config(out)
    scheme = q["config_groups"]["group_0"]["weights"] if to == "compressed-tensors" else q
    assert (scheme["num_bits" if to == "compressed-tensors" else "bits"]) == 8
    assert scheme["symmetric" if to == "compressed-tensors" else "sym"] is True
    assert not [n for n in oracle.read_folder(out) if n.endswith("zero_point")]


@pytest.mark.parametrize("to", CARRIERS)
def test_without_the_option_nothing_is_widened(to: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(written(tmp_path / "src", asymmetric()), out, to).expect(0)
    assert {(x.bits, x.sym) for x in oracle.decode_folder(out).values()} == {(4, False)}


@pytest.mark.parametrize("to", CARRIERS)
@pytest.mark.parametrize("sibling", ["q_proj", "k_proj", "v_proj"])
def test_a_symmetric_sibling_is_widened_with_its_set(sibling: str, to: str, tmp_path: Path) -> None:
    model = asymmetric()
    odd = model.linears[f"{ATTN}.{sibling}"]
    odd.zeros = b.midpoint(odd.zeros.shape, 4)
    source, out = written(tmp_path / "src", model), tmp_path / "out"
    convert(source, out, to, "--widen").expect(0)
    all_widened(out, model.linears)
    run("verify", out, "--against", source).expect(0)


@pytest.mark.parametrize("to", ["compressed-tensors", "marlin"])
def test_a_set_that_is_symmetric_stays_in_4_bit(to: str, tmp_path: Path) -> None:
    model = asymmetric()
    for part in "qkv":
        linear = model.linears[f"{ATTN}.{part}_proj"]
        linear.zeros = b.midpoint(linear.zeros.shape, 4)
    source, out = written(tmp_path / "src", model), tmp_path / "out"
    convert(source, out, to, "--widen").expect(0)
    got = oracle.decode_folder(out)
    for name, linear in got.items():
        narrow = name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj")
        assert (linear.bits, linear.sym) == (4 if narrow else 8, True), name
        assert np.array_equal(linear.weight64(), model.linears[name].weight64()), name
    run("verify", out, "--against", source).expect(0)


EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("orders", [EVERY, ("q_proj", "k_proj", "v_proj"), ("down_proj",)])
def test_act_order_in_the_artifact(orders: tuple[str, ...], tmp_path: Path) -> None:
    model = asymmetric(orders)
    source, out = written(tmp_path / "src", model, desc=True), tmp_path / "out"
    convert(source, out, "marlin", "--widen").expect(0)
    all_widened(out, model.linears)
    tensors = oracle.read_folder(out)
    for name, linear in model.linears.items():
        assert (f"{name}.act_perm" in tensors) is name.endswith(orders)
        if name.endswith(orders):
            assert np.array_equal(tensors[f"{name}.act_perm"].array(), fold_of(linear)), name
    told = run("verify", out, "--against", source, "--json").expect(0).data
    assert (told["ok"], told["lossless"]) == (True, True)


@pytest.mark.parametrize("to", ["gptq", "compressed-tensors"])
def test_down_order_is_folded_and_widened(to: str, tmp_path: Path) -> None:
    model = asymmetric(("down_proj",))
    source, out = written(tmp_path / "src", model, desc=True), tmp_path / "out"
    convert(source, out, to, "--widen").expect(0)
    all_widened(out, folded(model.linears))
    assert {order_class(x) for x in oracle.decode_folder(out).values()} == {"none"}
    run("verify", out, "--against", source).expect(0)


@pytest.mark.parametrize("to", ["gptq", "compressed-tensors"])
def test_other_orders_are_refused_with_it_too(to: str, tmp_path: Path) -> None:
    source = written(tmp_path / "src", asymmetric(("o_proj",)), desc=True)
    convert(source, tmp_path / "out", to, "--widen").expect(3, f"{ATTN}.o_proj", "--regroup")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("orders", [(), EVERY])
def test_unpack_gives_the_4_bit_source_back(orders: tuple[str, ...], tmp_path: Path) -> None:
    model = asymmetric(orders)
    odd = model.linears[f"{ATTN}.k_proj"]
    odd.zeros = b.midpoint(odd.zeros.shape, 4)
    source = written(tmp_path / "src", model, desc=bool(orders))
    convert(source, tmp_path / "out", "marlin", "--widen").expect(0)
    run("unpack", tmp_path / "out", tmp_path / "back").expect(0)
    assert oracle.read_folder(tmp_path / "back") == oracle.read_folder(source)
    assert oracle.read_config(tmp_path / "back") == oracle.read_config(source)


def test_the_widened_artifact_is_a_source_like_any_other(tmp_path: Path) -> None:
    model = asymmetric()
    source = written(tmp_path / "src", model)
    convert(source, tmp_path / "one", "marlin", "--widen").expect(0)
    for to in CARRIERS:
        convert(tmp_path / "one", tmp_path / to, to).expect(0)
        all_widened(tmp_path / to, model.linears)


def with_8_bit(zeros: dict[str, bool]) -> tuple[b.Model, dict[str, Any]]:
    """Return a model whose named modules are in 8 bit, symmetric or not, and the rules that say so."""
    model = asymmetric()
    rules: dict[str, Any] = {}
    for leaf, sym in zeros.items():
        (name,) = [n for n in model.linears if n.endswith(f".{leaf}")]
        old = model.linears[name]
        model.linears[name] = b.layer(np.random.default_rng(8), old.k, old.n, bits=8, group=64, sym=sym)
        rules[f"+:.*{leaf}$"] = {"bits": 8, "sym": sym}
    return model, rules


@pytest.mark.parametrize("to", ["compressed-tensors", "marlin"])
def test_8_bit_with_zero_points_stays_as_it_is(to: str, tmp_path: Path) -> None:
    model, rules = with_8_bit({"o_proj": False, "down_proj": False})
    source, out = written(tmp_path / "src", model, dynamic=rules), tmp_path / "out"
    convert(source, out, to, "--widen").expect(0)
    for name, linear in oracle.decode_folder(out).items():
        want = model.linears[name]
        if want.bits == 8:
            assert (linear.bits, linear.sym) == (8, False), name
            for mine, theirs in zip(linear.per_row(), want.per_row(), strict=True):
                assert np.array_equal(mine, theirs), name
        else:
            same_weights(linear, want, name)
    run("verify", out, "--against", source).expect(0)


@pytest.mark.parametrize("to", ["compressed-tensors", "marlin"])
def test_8_bit_parts_of_one_set_are_still_alike(to: str, tmp_path: Path) -> None:
    """q has zero points in 8 bit, k has none: with the option as without it both are written with them."""
    for option in ((), ("--widen",)):
        model, rules = with_8_bit({"q_proj": False, "k_proj": True, "v_proj": True})
        source = written(tmp_path / f"src{len(option)}", model, dynamic=rules)
        out = tmp_path / f"out{len(option)}"
        convert(source, out, to, *option).expect(0)
        tensors = oracle.read_folder(out)
        for part in "qkv":
            assert f"{ATTN}.{part}_proj.weight_zero_point" in tensors, (part, option)
            got = oracle.decode_folder(out)[f"{ATTN}.{part}_proj"]
            assert np.array_equal(got.weight64(), model.linears[f"{ATTN}.{part}_proj"].weight64()), part
        run("verify", out, "--against", source).expect(0)


def test_gptq_with_an_8_bit_layer_that_keeps_its_zeros_is_v2_as_a_whole(tmp_path: Path) -> None:
    """One file has one version: symmetric layers are then written with their midpoint."""
    model, rules = with_8_bit({"o_proj": False})
    source, out = written(tmp_path / "src", model, dynamic=rules), tmp_path / "out"
    convert(source, out, "gptq", "--widen").expect(0)
    q = oracle.quant_config(out)
    assert (q["bits"], q["sym"], q["checkpoint_format"]) == (8, False, "gptq_v2")
    got = oracle.decode_folder(out)
    for name, linear in model.linears.items():
        assert got[name].bits == 8, name
        assert np.array_equal(got[name].weight64(), linear.weight64()), name
    run("verify", out, "--against", source).expect(0)


@pytest.mark.parametrize("to", ["awq", "marlin-legacy"])
def test_targets_without_8_bit_refuse(to: str, tmp_path: Path) -> None:
    model = b.model(41, small(num_key_value_heads=4), group=128, sym=False)
    source = written(tmp_path / "src", model, 128)
    done = convert(source, tmp_path / "out", to, "--widen").expect(3, "q_proj")
    assert "8" in json.dumps(done.error)
    assert not (tmp_path / "out").exists()
    if to == "awq":  # it holds the zero points themselves
        convert(source, tmp_path / "plain", to).expect(0)


def test_a_column_whose_scale_is_0_stays_0(tmp_path: Path) -> None:
    model = asymmetric()
    linear = model.linears[f"{MLP}.up_proj"]
    linear.scales[1, 9] = 0
    source, out = written(tmp_path / "src", model), tmp_path / "out"
    convert(source, out, "marlin", "--widen").expect(0)
    got = oracle.decode_folder(out)[f"{MLP}.up_proj"]
    assert not got.weight64()[9, 64:128].any()
    all_widened(out, model.linears)
