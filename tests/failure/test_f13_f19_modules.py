"""Modules, lists and experts: rows F13 to F19 of the failure list, each by its smallest input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failure.decoding import ATTN, EVERY, MLP, PACKED, PORTABLE, accepted, made, refused, small, warnings_of

import builders as b
import oracle
from oracle import Tensor
from runner import convert, run

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
