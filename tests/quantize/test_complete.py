"""A checkpoint that lacks tensors is refused from its headers, before a byte is written, by every method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quantize import sources
from quantize.test_hostile import changed
from runner import Run, run
from w4pack.convert.modeljobs import quantized

METHODS = {"rtn": ("--quantize", "rtn"), "gptq": ("--quantize", "gptq", "--samples", 2, "--seqlen", 32)}


def convert(source: Path, out: Path, method: str, *options: Any) -> Run:
    words = (*METHODS[method], "--group-size", 32, "--threads", 1, "--json", *options)
    return run("convert", source, out, *words)


def without(source: Path, folder: Path, *names: str) -> Path:
    """Copy a model but for some tensors."""

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            del tensors[name]

    return changed(source, folder, drop)


LACKING = [
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.1.post_attention_layernorm.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "plan"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LACKING)
def test_a_missing_tensor_is_named_before_anything_is_written(
    name: str,
    method: str,
    dry: tuple[str, ...],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized, "QuantizeRun", lambda *_: pytest.fail("it was begun"))
    source = without(llama, tmp_path / "src", name)
    error = convert(source, tmp_path / "out", method, *dry).expect(1).error
    assert (error["code"], error["where"]) == ("tensor-missing", name)
    assert "fetch" in error["hint"]
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_all_of_them_are_named(llama: Path, tmp_path: Path) -> None:
    error = convert(without(llama, tmp_path / "src", *LACKING), tmp_path / "out", "rtn").expect(1).error
    assert sorted(p["where"] for p in error["problems"]) == sorted(LACKING)


def test_an_expert_that_is_missing_is_named(mixtral: Path, tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    error = convert(without(mixtral, tmp_path / "src", name), tmp_path / "out", "rtn").expect(1).error
    assert error["code"] == "tensor-missing" and "layers.1.mlp.experts.3.down_proj" in error["where"]


def test_a_rotated_model_is_checked_too(llama: Path, tmp_path: Path) -> None:
    source = without(llama, tmp_path / "src", "model.layers.0.mlp.gate_proj.weight")
    error = convert(source, tmp_path / "out", "rtn", "--rotate", "offline").expect(1).error
    assert "model.layers.0.mlp.gate_proj.weight" in error["where"]


@pytest.mark.parametrize("model", ["llama", "mixtral", "tied"])
def test_whole_models_are_whole(model: str, llama: Path, mixtral: Path, tmp_path: Path) -> None:
    tied = sources.save(sources.llama(tie_word_embeddings=True), tmp_path / "tied")
    convert({"llama": llama, "mixtral": mixtral, "tied": tied}[model], tmp_path / "out", "rtn").expect(0)


def test_rounding_needs_no_class_that_transformers_has(llama: Path, tmp_path: Path) -> None:
    source = without(llama, tmp_path / "src")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))
    error = convert(source, tmp_path / "no", "gptq").expect(3).error
    assert error["code"] == "model-unknown" and "`--quantize rtn`" in error["hint"]
    convert(source, tmp_path / "out", "rtn").expect(0)


def test_rounding_takes_names_that_are_not_the_class_s_own(llama: Path, tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    convert(changed(llama, tmp_path / "src", rename), tmp_path / "out", "rtn").expect(0)


def test_rounding_leaves_stacked_experts_as_they_are(mixtral: Path, tmp_path: Path) -> None:
    """One tensor for all experts of a layer, as some checkpoints have them."""

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            start = f"model.layers.{layer}.block_sparse_moe.experts."
            parts = {w: [tensors.pop(f"{start}{n}.{w}.weight") for n in range(4)] for w in ("w1", "w2", "w3")}
            both = [torch.cat(pair) for pair in zip(parts["w1"], parts["w3"], strict=True)]
            place = f"model.layers.{layer}.mlp.experts."
            tensors[f"{place}gate_up_proj"] = torch.stack(both)
            tensors[f"{place}down_proj"] = torch.stack(parts["w2"])

    convert(changed(mixtral, tmp_path / "src", stack), tmp_path / "out", "rtn").expect(0)
