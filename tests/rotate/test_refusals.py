"""What is not rotated: refused with the tensor's name, or left out with a reason; the nearest case passes."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from rotate import tiny

from w4pack.convert.errors import Refused, SourceError, W4PackError
from w4pack.convert.files.provider import CheckpointProvider
from w4pack.convert.rotate.plan import RotationPlan
from w4pack.convert.rotate.rotated import Rotated

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors, dict[str, Any]], None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"root": tmp_path_factory.mktemp("refusals")}


def edited(folders: dict[str, Path], name: str, place: Path, edit: Edit) -> Path:
    """Copy a model with tensors and config changed."""
    if name not in folders:
        folders[name] = tiny.save(name, folders["root"] / name, torch.float32)
    tensors = safetensors.torch.load_file(folders[name] / "model.safetensors")
    config = json.loads((folders[name] / "config.json").read_text())
    edit(tensors, config)
    place.mkdir()
    safetensors.torch.save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_text(json.dumps(config))
    return place


def plan_of(folder: Path, mode: str = "offline", **options: Any) -> RotationPlan:
    with tiny.opened(folder) as checkpoint:
        return tiny.planned(checkpoint, mode, **options)


def refused(folder: Path, mode: str = "offline", **options: Any) -> W4PackError:
    with pytest.raises(W4PackError) as caught:
        plan_of(folder, mode, **options)
    return caught.value


def add(name: str, *shape: int) -> Edit:
    return lambda tensors, config: tensors.update({name: torch.ones(*shape)})


# ---- what nobody accounts for ----


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.adapter.weight",
        "multi_modal_projector.linear_2.weight",
        "mtp.fc.weight",
        "score.weight",
        "model.layers.1.mlp.gate_up_proj.weight",
        "model.layers.0.self_attn.q_proj.lora_A",
        "model.layers.00.mlp.up_proj.weight",
        "model.norm.scale",
    ],
)
def test_an_unlisted_tensor_is_refused_by_name(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    error = refused(edited(folders, "llama", tmp_path / "src", add(name, 48, 48)))
    assert isinstance(error, Refused)
    assert (error.code, error.where) == ("unknown-tensor", f"model.safetensors, {name}")
    assert error.found == "F32 [48, 48]"


def test_all_of_them_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors |= {"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2, 2)}

    error = refused(edited(folders, "llama", tmp_path / "src", edit))
    assert [p.where for p in error.problems] == ["model.safetensors, a.weight", "model.safetensors, b.weight"]


def test_stored_frequencies_of_old_checkpoints_are_known(folders: dict[str, Path], tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    plan = plan_of(edited(folders, "llama", tmp_path / "src", add(name, 8)))
    assert name not in plan.steps


def test_where_the_stream_stays_attention_must_be_known(folders: dict[str, Path], tmp_path: Path) -> None:
    """R2 changes nothing outside attention; a norm between v and o would see rotated heads."""
    plan = plan_of(edited(folders, "gemma2", tmp_path / "far", add("model.extra.weight", 48, 48)))
    assert plan.stream is None
    name = "model.layers.0.self_attn.sub_norm.weight"
    error = refused(edited(folders, "gemma2", tmp_path / "near", add(name, 48)))
    assert (error.code, error.where) == ("unknown-tensor", f"model.safetensors, {name}")


def test_an_unknown_class_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        config["architectures"] = ["BloomForCausalLM"]

    error = refused(edited(folders, "llama", tmp_path / "src", edit))
    assert (error.code, error.found, error.exit_code) == ("unknown-architecture", "BloomForCausalLM", 3)
    assert error.expected is not None and "LlamaForCausalLM" in error.expected


# ---- what is missing or of another shape ----


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("llama", "model.layers.0.input_layernorm.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("llama", "lm_head.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
    ],
)
def test_a_missing_tensor_is_named(folders: dict[str, Path], tmp_path: Path, model: str, name: str) -> None:
    error = refused(edited(folders, model, tmp_path / "src", lambda tensors, config: tensors.pop(name)))
    assert isinstance(error, SourceError)
    assert (error.code, error.where) == ("missing-tensor", name)


def test_a_missing_layer(folders: dict[str, Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.0.")]:
            del tensors[name]

    error = refused(edited(folders, "llama", tmp_path / "src", edit))
    assert (error.code, error.found) == ("layer-count", "1 layers, up to 1")


@pytest.mark.parametrize(
    ("key", "code", "where"),
    [
        ("num_hidden_layers", "layer-count", "model.layers"),
        ("num_local_experts", "missing-tensor", "model.layers.0.block_sparse_moe.experts.4.w1.weight"),
    ],
)
def test_counts_that_no_file_has_cost_no_memory(
    key: str, code: str, where: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = edited(folders, "mixtral", tmp_path / "src", lambda tensors, config: config.update({key: 10**6}))
    tracemalloc.start()
    error = refused(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (error.code, error.where) == (code, where)
    assert peak < 10 << 20, "bytes; a name or number for each of a million has 30 MB and more"


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", (96, 47), "48 columns"),
        ("model.layers.0.mlp.down_proj.weight", (47, 96), "48 rows"),
        ("model.layers.0.self_attn.v_proj.weight", (48, 48), "32 rows"),
        ("model.layers.0.self_attn.o_proj.weight", (48, 63), "a multiple of 4 columns, one part a head"),
        ("model.norm.weight", (47,), "48 rows"),
    ],
)
def test_another_shape_is_named(
    folders: dict[str, Path], tmp_path: Path, name: str, shape: tuple[int, ...], expected: str
) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name] = torch.ones(*shape)

    error = refused(edited(folders, "llama", tmp_path / "src", edit))
    assert (error.code, error.expected) == ("shape-mismatch", expected)
    assert error.where == f"model.safetensors, {name}"


@pytest.mark.parametrize("value", [None, 0, -1, True, "4", 2.0])
def test_a_number_of_heads_that_is_none(folders: dict[str, Path], tmp_path: Path, value: Any) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        config["num_attention_heads"] = value

    error = refused(edited(folders, "llama", tmp_path / "src", edit))
    assert (error.code, error.where) == ("config-size", "config.json: num_attention_heads")


def test_a_quantized_source(folders: dict[str, Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)

    error = refused(edited(folders, "llama", tmp_path / "src", edit))
    assert (error.code, error.found) == ("already-quantized", "F8_E4M3")


# ---- what the mathematics does not allow ----


def test_norms_after_the_addition_leave_the_stream_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        config["do_layer_norm_before"] = False
        for leaf in ("weight", "bias"):
            del tensors[f"model.decoder.final_layer_norm.{leaf}"]
        tensors["model.decoder.project_in.weight"] = torch.ones(48, 48)

    plan = plan_of(edited(folders, "opt", tmp_path / "src", edit))
    assert {r.kind for r in plan.rotations} == {"r2"}
    ((site, reason),) = plan.left_out
    assert site == "r1"
    assert reason.startswith("config.json: do_layer_norm_before is False")
    assert dict(plan.added) == {}


def test_odd_numbers_of_heads_have_no_transform_across_them(tmp_path: Path) -> None:
    folder = tiny.save(
        "llama", tmp_path / "src", hidden_size=72, num_attention_heads=9, num_key_value_heads=3
    )
    plan = plan_of(folder, "full")
    assert dict(plan.left_out) == {"heads": "no Hadamard matrix of order 9 or of a divisor above 1"}
    assert {record["site"] for record in plan.online} == {"qk", "mlp_mid"}


def test_sizes_without_a_plan_go_in_blocks_and_are_told(tmp_path: Path) -> None:
    sizes = {"hidden_size": 90, "intermediate_size": 6, "num_attention_heads": 6, "num_key_value_heads": 3}
    plan = plan_of(tiny.save("llama", tmp_path / "src", **sizes), "full")
    blocks = {r.kind: (r.n, r.block) for r in plan.rotations}
    assert (blocks["r1"], blocks["r4"], blocks["heads"]) == ((90, 2), (6, 2), (6, 2))
    told = {w.where: w.found for w in plan.warnings if w.code == "rotation-blocks"}
    assert told == dict.fromkeys(("r1", "r4", "heads"), "blocks of 2")
    with tiny.opened(tmp_path / "src") as checkpoint:
        from w4pack.convert.modeljobs.gate import run_gate

        provider = CheckpointProvider(checkpoint)
        run_gate(checkpoint.config, provider, Rotated(provider, plan), plan)


def test_tensor_parallel_parts_are_blocks(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = edited(folders, "llama", tmp_path / "src", lambda tensors, config: None)
    plan = plan_of(folder, "full", parts=2)
    records = {record["site"]: (record["order"], record["block"]) for record in plan.online}
    assert records == {"qk": (16, 16), "attn_out": (4, 2), "mlp_mid": (96, 48)}
    assert plan.stream is not None and plan.stream.block == 48
    with tiny.opened(folder) as checkpoint:
        from w4pack.convert.modeljobs.gate import run_gate

        provider = CheckpointProvider(checkpoint)
        run_gate(checkpoint.config, provider, Rotated(provider, plan), plan)


def test_parts_that_divide_nothing_are_refused_once(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = edited(folders, "llama", tmp_path / "src", lambda tensors, config: None)
    error = refused(folder, "full", parts=5)
    assert not error.problems
    assert (error.code, error.where, error.found) == ("tp-parts", "--tp 5", "5")
    assert error.expected == "a divisor of 4 (attn_out) and 96 (mlp_mid)"
    assert error.hint == "--tp: 1, 2, 4"


def test_parts_that_divide_one_of_two_name_what_divides_both(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = edited(folders, "llama", tmp_path / "src", lambda tensors, config: None)
    error = refused(folder, "full", parts=3)  # 96 / 3 comes out even
    assert error.expected == "a divisor of 4 (attn_out)"
    assert error.hint == "--tp: 1, 2, 4"


def test_a_head_on_each_rank_has_nothing_to_mix(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = edited(folders, "llama", tmp_path / "src", lambda tensors, config: None)
    plan = plan_of(folder, "full", parts=4)
    assert dict(plan.left_out) == {"heads": "one of 4 on each of 4 ranks: nothing to mix"}
    assert {record["site"]: record["block"] for record in plan.online} == {"qk": 16, "mlp_mid": 24}


def test_a_bias_behind_a_gain_of_zero_cannot_be_kept(folders: dict[str, Path], tmp_path: Path) -> None:
    """OPT's head has no bias, so the final norm keeps one, divided by its gain."""
    norm = "model.decoder.final_layer_norm"

    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"{norm}.weight"][7] = 0

    with tiny.opened(edited(folders, "opt", tmp_path / "bad", edit)) as checkpoint:
        provider = Rotated(CheckpointProvider(checkpoint), tiny.planned(checkpoint))
        with pytest.raises(Refused) as caught:
            provider.get(f"{norm}.bias")
    assert (caught.value.code, caught.value.where) == ("norm-bias", f"{norm}.bias[7]")

    def both(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"{norm}.weight"][7] = tensors[f"{norm}.bias"][7] = 0

    with tiny.opened(edited(folders, "opt", tmp_path / "good", both)) as checkpoint:
        from w4pack.convert.modeljobs.gate import run_gate

        plain, plan = CheckpointProvider(checkpoint), tiny.planned(checkpoint)
        run_gate(checkpoint.config, plain, Rotated(plain, plan), plan)


def test_a_weight_that_is_no_number(folders: dict[str, Path], tmp_path: Path) -> None:
    """One NaN would become a whole row of them."""
    name = "model.layers.0.mlp.down_proj.weight"

    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name][3, 5] = float("nan")

    with tiny.opened(edited(folders, "llama", tmp_path / "src", edit)) as checkpoint:
        provider = Rotated(CheckpointProvider(checkpoint), tiny.planned(checkpoint))
        with pytest.raises(SourceError) as caught:
            provider.get(name)
    assert (caught.value.code, caught.value.where) == ("nonfinite", f"{name}[3, 5]")


def test_a_weight_that_float16_cannot_hold(folders: dict[str, Path], tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"

    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name][3] = 6e4  # each fits, their sum over the root of 48 may not

    with tiny.opened(edited(folders, "llama", tmp_path / "src", edit)) as checkpoint:
        provider = Rotated(CheckpointProvider(checkpoint), tiny.planned(checkpoint))
        provider.get(name, torch.bfloat16)
        with pytest.raises(Refused) as caught:
            provider.get(name, torch.float16)
    assert caught.value.code == "overflow"
    assert caught.value.where is not None and caught.value.where.startswith(f"{name}[3, ")
    assert caught.value.found is not None and abs(float(caught.value.found.split(";")[0])) > 65504
