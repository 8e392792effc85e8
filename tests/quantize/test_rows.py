"""Rows of public failures that no other file here holds: head shapes, honest reports, 16-bit ranges."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from quantize import sources
from quantize.test_outputs import manifest, quantize
from runner import Run, run


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_f65_heads_that_are_not_the_hidden_size_pass_the_gate(
    kv_heads: int, book: Path, tmp_path: Path
) -> None:
    """8 heads of 32 beside a hidden size of 192, with biases: R2 is one for all query heads of a KV head."""
    sizes = {**sources.SIZES, "hidden_size": 192, "num_attention_heads": 8, "num_key_value_heads": kv_heads}
    model = sources.randomised(tf.Qwen2ForCausalLM(tf.Qwen2Config(**{**sizes, "head_dim": 32})))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.bias.fill_(5.0)
    source = sources.save(model, tmp_path / "src")
    done = quantize(source, tmp_path / "out", "--rotate", "offline", text=book).expect(0)
    (gate,) = [e for e in done.events if e["event"] == "gate"]
    assert gate["layers"] == 2 and gate["worst"] < 1e-5
    rotations = manifest(tmp_path / "out")["rotation"]["rotations"]
    assert [r["n"] for r in rotations if r["kind"] == "r2"] == [32, 32]


def test_f70_what_a_rotation_does_is_told_with_its_interval_and_no_claim(
    llama: Path, book: Path, tmp_path: Path
) -> None:
    quantize(llama, tmp_path / "plain", text=book).expect(0)
    quantize(llama, tmp_path / "rotated", "--rotate", "offline", text=book).expect(0)
    other = sources.text(tmp_path / "other.txt", seed=9)
    words = ("--text", other, "--windows", 8, "--seqlen", 64, "--threads", 1)
    plain, rotated = tmp_path / "plain", tmp_path / "rotated"
    told = run("eval", rotated, *words, "--against", plain, "--json").expect(0)
    assert told.data["nats_interval"] > 0
    assert told.data["perplexity"] > 1 and told.data["perplexity_against"] > 1
    shown = run("eval", rotated, *words, "--against", plain).expect(0).text
    assert f"{told.data['perplexity']:.2f}"[:4] in shown and "+-" in shown
    for folder in (plain, rotated):
        card = (folder / "README.md").read_text()
        assert not re.search(r"\b(improve[sd]?|better|gain[s]?)\b", card.partition("## Quantization")[2])
        assert "lm_head" not in "".join(manifest(folder)["layers"])


def test_f74_bfloat16_values_outside_float16_stay_where_nothing_forces_them(
    book: Path, tmp_path: Path
) -> None:
    model = sources.llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[3, :3] = torch.tensor([1e-30, 1e-6, 7e4])
    source = sources.save(model, tmp_path / "src", torch.bfloat16)
    quantize(source, tmp_path / "out", text=book).expect(0)
    kept = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert kept.dtype == torch.bfloat16
    assert torch.equal(kept, load_file(source / "model.safetensors")["model.embed_tokens.weight"])
    assert {e["scheme"] for e in manifest(tmp_path / "out")["layers"].values()} != set()


def flushed(done: Run) -> dict[str, str]:
    """Return what is told of values that became 0: tensor -> how many."""
    return {e["where"]: e["found"] for e in done.events if e.get("code") == "flushed"}


def test_f74_weights_that_float16_flushes_to_zero_are_counted(book: Path, tmp_path: Path) -> None:
    model = sources.llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[2:4] = 1e-9  # two outputs of 64 inputs, one scale each
        model.model.layers[0].mlp.up_proj.weight[3, ::2] = 0
    source = sources.save(model, tmp_path / "src", torch.bfloat16)
    words = ("--quantize", "rtn", "--group-size", -1, "--threads", 1)
    run("convert", source, tmp_path / "out", *words).expect(0)
    dense = ("--to", "dense", "--json", "--dtype")
    kept = run("convert", tmp_path / "out", tmp_path / "kept", *dense, "bfloat16").expect(0)
    done = run("convert", tmp_path / "out", tmp_path / "dense", *dense, "float16").expect(0)
    name = "model.layers.0.mlp.up_proj"
    there, lost = (load_file(tmp_path / f / "model.safetensors")[f"{name}.weight"] for f in ("kept", "dense"))
    count = int(((there != 0) & (lost == 0)).sum())
    inputs = there.shape[1]
    assert count == inputs + inputs // 2 and flushed(kept) == {}
    assert flushed(done) == {name: f"{count} smaller ones"}


def test_f74_tensors_that_are_only_cast_to_float16_are_counted(tmp_path: Path) -> None:
    model = sources.llama(attention_bias=True)
    source = sources.save(model, tmp_path / "src", torch.bfloat16)
    words = ("--to", "dense", "--rotate", "offline", "--json", "--dtype")
    run("convert", source, tmp_path / "turned", *words, "bfloat16").expect(0)
    still = untouched(tmp_path / "turned", source)
    shard = load_file(source / "model.safetensors")
    shard[still].view(-1)[:3] = torch.tensor([1e-30, -1e-9, 1e-6])
    save_file(shard, source / "model.safetensors", {"format": "pt"})
    done = run("convert", source, tmp_path / "dense", *words, "float16").expect(0)
    assert flushed(done) == {still: "2 smaller ones"}
    first = load_file(tmp_path / "dense" / "model.safetensors")[still].view(-1)[:3]
    assert first.tolist() == [0.0, 0.0, torch.tensor(1e-6, dtype=torch.bfloat16).half().item()]


def untouched(turned: Path, source: Path) -> str:
    """Return a tensor that a rotation leaves alone."""
    before, after = (load_file(folder / "model.safetensors") for folder in (source, turned))
    return next(n for n in before if n in after and "norm" not in n and torch.equal(before[n], after[n]))


def test_f74_a_weight_that_no_float16_scale_reaches_is_refused_by_name(tmp_path: Path) -> None:
    """Legacy Marlin has float16 scales, whatever the model is in."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = sources.llama(**sizes, head_dim=64)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 7] = 2e6
    source = sources.save(model, tmp_path / "src", torch.bfloat16)
    words = ("--quantize", "rtn", "--group-size", 128, "--to", "marlin-legacy", "--json", "--threads", 1)
    done = run("convert", source, tmp_path / "out", *words).expect(3)
    assert "model.layers.1.mlp.up_proj" in json.dumps(done.error)
    assert done.error["found"] == "1.999e+06"
    assert not (tmp_path / "out").exists()
