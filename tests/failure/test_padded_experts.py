"""F25 for mixtures of experts: ``--pad-for-tp`` pads every expert alike, exactly, and the config follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import fold_of
from numpy.typing import NDArray

import builders as b
import oracle
from oracle import Linear
from runner import convert, run

BLOCK = "model.layers.0.mlp"
SPELLINGS = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}
INNER, PADDED, TP = 96, 256, 2  # 96 in groups of 32, rounded up to 2 * lcm(128, 32)
Floats = NDArray[np.float64]


def configured(kind: str, **more: Any) -> dict[str, Any]:
    """Return a config whose experts have 96 channels."""
    if kind == "mixtral":
        return b.mixtral_config(intermediate_size=INNER, vocab_size=64, **more)
    return b.qwen3_moe_config(moe_intermediate_size=INNER, vocab_size=64, **more)


def size_key(kind: str) -> str:
    """Return the config key that holds the experts' size."""
    return "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"


def experts(kind: str, *, sym: bool = True, ordered: bool = False, **more: Any) -> b.Model:
    """Return a model; with ``ordered`` every expert's down projection has an activation order of its own."""
    model = b.model(51, configured(kind, **more), group=32, sym=sym)
    rng = np.random.default_rng(52)
    for name, linear in model.linears.items():
        if not sym:
            linear.zeros[:, ::5] = 3
        if ordered and name.endswith((".down_proj", ".w2")):
            linear.gi = linear.gi[rng.permutation(linear.k)]
    return model


def written(folder: Path, model: b.Model, sym: bool = True, **more: Any) -> Path:
    """Write it as GPTQ v2."""
    return b.write(
        folder, model, b.gptq_v2, b.gptq_config(group=32, sym=sym, checkpoint_format="gptq_v2", **more)
    )


def weight_of(name: str, linears: dict[str, Linear], tensors: b.Tensors) -> Floats:
    """Return a weight in float64, packed or not."""
    if name in linears:
        return linears[name].weight64()
    dense = tensors[f"{name}.weight"]
    return oracle.widen(dense.array(), dense.tag)


def mlp(
    x: Floats, stem: str, leaves: tuple[str, str, str], linears: dict[str, Linear], t: b.Tensors
) -> Floats:
    """Return one expert's output."""
    gate, up, down = (weight_of(f"{stem}.{leaf}", linears, t) for leaf in leaves)
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


def moe(x: Floats, kind: str, linears: dict[str, Linear], t: b.Tensors, shared: str | None = None) -> Floats:
    """Return the output of a whole block: router, the best two of four experts, a shared expert."""
    stem = "model.layers.0.block_sparse_moe" if kind == "mixtral" else BLOCK
    router = t[f"{stem}.gate.weight"]
    scores = x @ oracle.widen(router.array(), router.tag).T
    chosen = np.argsort(-scores, axis=1)[:, :2]
    picked = np.exp(np.take_along_axis(scores, chosen, 1))
    shares = picked / picked.sum(1, keepdims=True)
    out = np.zeros((len(x), 256))
    for e in range(4):
        own = mlp(x, f"{stem}.experts.{e}", SPELLINGS[kind], linears, t)
        out += own * (shares * (chosen == e)).sum(1, keepdims=True)
    if shared is not None:
        out += mlp(x, f"{BLOCK}.{shared}", SPELLINGS["qwen3_moe"], linears, t)
    return out


def check_expert(stem: str, kind: str, want: dict[str, Linear], got: dict[str, Linear]) -> None:
    """Check one expert: the old channels in down's order, then channels of nothing."""
    gate, up, down = (f"{stem}.{leaf}" for leaf in SPELLINGS[kind])
    order = fold_of(want[down])
    for part in (gate, up):
        assert (got[part].k, got[part].n) == (256, PADDED), part
        assert np.array_equal(got[part].weight64()[:INNER], want[part].weight64()[order]), part
        assert not got[part].weight64()[INNER:].any(), part
    assert (got[down].k, got[down].n) == (PADDED, 256), down
    assert np.array_equal(got[down].weight64()[:, :INNER], want[down].weight64()[:, order]), down
    assert not got[down].weight64()[:, INNER:].any(), down
    assert (np.diff(got[down].gi) >= 0).all(), down  # a padded down has no order left


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("target", ["marlin", "gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize("kind", SPELLINGS)
def test_every_expert_is_padded_and_the_block_computes_the_same(
    kind: str, target: str, sym: bool, ordered: bool, tmp_path: Path
) -> None:
    model = experts(kind, sym=sym, ordered=ordered)
    source, out = written(tmp_path / "src", model, sym, desc=ordered), tmp_path / "out"
    convert(source, out, target, "--pad-for-tp", TP).expect(0, PADDED)
    config, before = oracle.read_config(out), oracle.read_config(source)
    assert config[size_key(kind)] == PADDED
    changed = {k for k in before if config.get(k) != before[k]}
    assert changed == {size_key(kind), "quantization_config"}
    got, tensors = oracle.decode_folder(out), oracle.read_folder(out)
    stem = "model.layers.0.block_sparse_moe" if kind == "mixtral" else BLOCK
    for e in range(4):
        check_expert(f"{stem}.experts.{e}", kind, model.linears, got)
    x = np.random.default_rng(3).normal(size=(9, 256))
    outputs = moe(x, kind, model.linears, oracle.read_folder(source)), moe(x, kind, got, tensors)
    # sums of 96 terms and zeros, in another order: far below 1e-12
    assert np.abs(outputs[0] - outputs[1]).max() < 1e-12 * np.abs(outputs[0]).max()
    told = run("verify", out, "--against", source, "--json").expect(0).data
    assert told["ok"] is True


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", SPELLINGS)
def test_unpack_gives_the_unpadded_source_back(kind: str, ordered: bool, tmp_path: Path) -> None:
    model = experts(kind, ordered=ordered)
    source = written(tmp_path / "src", model, desc=ordered)
    convert(source, tmp_path / "out", "marlin", "--pad-for-tp", TP).expect(0)
    run("unpack", tmp_path / "out", tmp_path / "back").expect(0)
    assert oracle.read_folder(tmp_path / "back") == oracle.read_folder(source)
    assert oracle.read_config(tmp_path / "back") == oracle.read_config(source)


def test_the_padded_artifact_is_taken_at_that_tp(tmp_path: Path) -> None:
    source, out = written(tmp_path / "src", experts("qwen3_moe")), tmp_path / "out"
    before = run("check", source, "--engine", "w4pack", "--tp", TP, "--json").data
    convert(source, out, "marlin", "--pad-for-tp", TP).expect(0)
    after = run("check", out, "--engine", "w4pack", "--tp", TP, "--json").data
    assert "experts" in json.dumps(before["results"][0]["blockers"])
    assert "experts" not in json.dumps(after["results"][0]["blockers"])


def with_shared(size: int, leaf: str, **keys: Any) -> b.Model:
    """Return a model with a shared expert of this many channels beside the routed ones."""
    model = experts("qwen3_moe", **keys)
    rng = np.random.default_rng(53)
    for part, (k, n) in (("gate", (256, size)), ("up", (256, size)), ("down", (size, 256))):
        model.linears[f"{BLOCK}.{leaf}.{part}_proj"] = b.layer(rng, k, n, group=32)
    return model


@pytest.mark.parametrize("target", ["marlin", "compressed-tensors"])
def test_a_shared_expert_of_its_own_size_is_padded_by_its_own_key(target: str, tmp_path: Path) -> None:
    model = with_shared(160, "shared_expert", shared_expert_intermediate_size=160)
    model.config.update(architectures=["Qwen2MoeForCausalLM"])
    for part in "qkv":  # this class has them
        linear = model.linears[f"model.layers.0.self_attn.{part}_proj"]
        linear.bias = b.dense(np.random.default_rng(6), linear.n)
    source, out = written(tmp_path / "src", model), tmp_path / "out"
    convert(source, out, target, "--pad-for-tp", TP).expect(0)
    config = oracle.read_config(out)
    assert config["moe_intermediate_size"] == PADDED
    assert config["shared_expert_intermediate_size"] == PADDED  # 160 rounded up to 256 too
    got, tensors = oracle.decode_folder(out), oracle.read_folder(out)
    assert got[f"{BLOCK}.shared_expert.down_proj"].k == PADDED
    x = np.random.default_rng(4).normal(size=(5, 256))
    old = moe(x, "qwen3_moe", model.linears, oracle.read_folder(source), "shared_expert")
    new = moe(x, "qwen3_moe", got, tensors, "shared_expert")
    assert np.abs(old - new).max() < 1e-12 * np.abs(old).max()
    run("verify", out, "--against", source).expect(0)
    if target == "marlin":
        run("unpack", out, tmp_path / "back").expect(0)
        assert oracle.read_folder(tmp_path / "back") == oracle.read_folder(source)


def test_shared_experts_stored_as_one_have_no_key_and_are_refused(tmp_path: Path) -> None:
    """Two shared experts are one MLP of 192 = 2 * 96: padding it would change the size of all experts."""
    model = with_shared(2 * INNER, "shared_experts", n_shared_experts=2)
    source = written(tmp_path / "src", model)
    done = convert(source, tmp_path / "out", "marlin", "--pad-for-tp", TP)
    done.expect(3, f"{BLOCK}.shared_experts.down_proj", 2 * INNER)
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "plain", "marlin").expect(0)


def test_dense_layers_between_are_padded_by_the_other_key(tmp_path: Path) -> None:
    model = experts("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[1], intermediate_size=320)
    for name in [n for n in model.linears if n.startswith("model.layers.1.mlp.")]:
        del model.linears[name]
    del model.dense["model.layers.1.mlp.gate.weight"]
    rng = np.random.default_rng(54)
    for part, (k, n) in (("gate", (256, 320)), ("up", (256, 320)), ("down", (320, 256))):
        model.linears[f"model.layers.1.mlp.{part}_proj"] = b.layer(rng, k, n, group=32)
    source, out = written(tmp_path / "src", model), tmp_path / "out"
    convert(source, out, "gptq", "--pad-for-tp", TP).expect(0)
    config = oracle.read_config(out)
    assert (config["intermediate_size"], config["moe_intermediate_size"]) == (512, PADDED)
    got = oracle.decode_folder(out)
    assert got["model.layers.1.mlp.down_proj"].k == 512
    check_expert(f"{BLOCK}.experts.3", "qwen3_moe", model.linears, got)


def test_experts_in_16_bit_are_padded_with_the_rest(tmp_path: Path) -> None:
    model = experts("qwen3_moe")
    rng = np.random.default_rng(55)
    for part, shape in (("gate", (INNER, 256)), ("up", (INNER, 256)), ("down", (256, INNER))):
        name = f"{BLOCK}.experts.2.{part}_proj"
        del model.linears[name]
        model.dense[f"{name}.weight"] = b.dense(rng, *shape)
    source, out = written(tmp_path / "src", model, dynamic={r"-:.*experts\.2\..*": {}}), tmp_path / "out"
    convert(source, out, "compressed-tensors", "--pad-for-tp", TP).expect(0)
    got, tensors = oracle.decode_folder(out), oracle.read_folder(out)
    assert tensors[f"{BLOCK}.experts.2.gate_proj.weight"].shape == (PADDED, 256)
    assert tensors[f"{BLOCK}.experts.2.down_proj.weight"].shape == (256, PADDED)
    x = np.random.default_rng(5).normal(size=(9, 256))
    old = moe(x, "qwen3_moe", model.linears, oracle.read_folder(source))
    new = moe(x, "qwen3_moe", got, tensors)
    assert np.abs(old - new).max() < 1e-12 * np.abs(old).max()
