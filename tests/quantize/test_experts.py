"""Mixtures of experts: counted, none left behind, the same arithmetic as the model's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

import oracle
from quantize import sources
from quantize.test_outputs import manifest, quantize
from runner import run
from w4pack.convert.quantize.experts import split_fused


def test_single_experts_compute_what_the_fused_ones_do() -> None:
    model = sources.mixtral()
    tokens = torch.arange(32).unsqueeze(0)
    with torch.no_grad():
        wanted = model(tokens).logits
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.device("meta"):
        split = tf.MixtralForCausalLM(model.config)
    split_fused(split)
    split.to_empty(device="cpu")
    for name, value in state.items():
        if "experts.gate_up_proj" in name:
            for e, part in enumerate(value):
                gate, up = part.chunk(2)
                base = name.removesuffix("gate_up_proj")
                split.get_submodule(f"{base}{e}.gate_proj").weight.data.copy_(gate)
                split.get_submodule(f"{base}{e}.up_proj").weight.data.copy_(up)
        elif "experts.down_proj" in name:
            for e, part in enumerate(value):
                split.get_submodule(f"{name.removesuffix('down_proj')}{e}.down_proj").weight.data.copy_(part)
        else:
            split.get_parameter(name).data.copy_(value)
    split.model.rotary_emb = model.model.rotary_emb
    split.eval()
    with torch.no_grad():
        found = split(tokens).logits
    assert torch.allclose(found, wanted, atol=1e-4 * float(wanted.abs().max()))


@pytest.fixture(scope="module")
def done(mixtral: Path, book: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("moe") / "out"
    quantize(mixtral, out, text=book).expect(0)
    return out


def test_f76_every_token_is_counted_at_every_expert(done: Path) -> None:
    value = manifest(done)
    counts = value["quantization"]["expert_tokens"]
    assert len(counts) == 2
    for found in counts.values():
        assert len(found) == 4 and sum(found) == 8 * 64 * 2  # tokens x top 2, exactly
    for name, entry in value["layers"].items():
        if ".experts." in name:
            layer, expert = int(name.split(".")[2]), int(name.split(".experts.")[1].split(".")[0])
            assert entry["tokens"] == counts[f"model.layers.{layer}.block_sparse_moe.experts"][expert], name


def test_experts_keep_the_names_that_the_class_maps(done: Path) -> None:
    names = set(oracle.decode_folder(done))
    assert "model.layers.0.block_sparse_moe.experts.3.w2" in names
    assert len(names) == 2 * (4 + 4 * 3)
    assert "model.layers.0.block_sparse_moe.gate.weight" in manifest(done)["tensors"]


def test_f75_experts_that_see_few_tokens_are_rounded_listed_and_alike(book: Path, tmp_path: Path) -> None:
    model = sources.mixtral(experts=8)
    with torch.no_grad():
        for layer in model.model.layers:
            router = layer.mlp.gate.weight
            router[5] = 0.0
            router[5, :] = -100 * torch.sign(router.sum(0))
    source = sources.save(model, tmp_path / "src", torch.bfloat16)
    quantize(source, tmp_path / "out", text=book).expect(0)
    value = manifest(tmp_path / "out")
    starved = {n: e for n, e in value["layers"].items() if ".experts." in n and e["tokens"] < 64}
    assert starved
    for name, entry in starved.items():
        assert entry["method"] == "rtn" and "tokens, fewer than" in entry["note"], name
    assert "tokens, fewer than" in (tmp_path / "out" / "README.md").read_text()
    schemes = {e["scheme"] for n, e in value["layers"].items() if ".experts." in n}
    assert schemes == {"4 bit g32 sym"}
    for linear in oracle.decode_folder(tmp_path / "out").values():
        scales = oracle.widen(linear.scales, linear.tag)
        assert np.isfinite(scales).all() and (scales > 0).all()


def test_experts_in_many_batches_are_counted_the_same(
    mixtral: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4pack.convert.quantize import whole

    monkeypatch.setattr(whole, "BATCH_TOKENS", {"cpu": 128, "cuda": 128})
    quantize(mixtral, tmp_path / "out", text=book).expect(0)
    value = manifest(tmp_path / "out")
    for layer in range(2):
        tokens = [
            e["tokens"]
            for n, e in value["layers"].items()
            if n.startswith(f"model.layers.{layer}.") and n.endswith(".w1")
        ]
        assert sum(tokens) == 8 * 64 * 2


def test_a_mixture_is_measured(done: Path, mixtral: Path, book: Path) -> None:
    told = run(
        "eval", done, "--text", book, "--windows", 4, "--seqlen", 64, "--against", mixtral, "--json"
    ).expect(0)
    assert json.loads(told.out)["kl_mean"] < 0.5
