"""Mixtures of experts: counted, none left behind, the same arithmetic as the model's own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import oracle
from quantize import sources
from quantize.test_outputs import manifest, quantize
from runner import run
from w4pack.convert.quantize.experts import most_experts, split_fused


def test_single_experts_compute_what_the_fused_ones_do() -> None:
    model = sources.mixtral()
    tokens = torch.arange(32).unsqueeze(0)
    with torch.no_grad():
        wanted = model(tokens).logits
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.device("meta"):
        split = tf.MixtralForCausalLM(model.config)
    split_fused(split, most=4)
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


@pytest.mark.parametrize(
    ("shapes", "most"),
    [
        ({"mlp.experts.0.w1.weight": (96, 64), "mlp.experts.1.w1.weight": (96, 64)}, 2),
        ({"mlp.experts.gate_up_proj": (6, 64, 96), "mlp.shared_experts.up_proj.weight": (1408, 64)}, 6),
        ({"block_sparse_moe.input_linear.weight": (5, 96, 64), "embed.weight": (320, 64)}, 5),
        ({"embed.weight": (320, 64), "experts.empty": (10**9, 0, 4)}, 0),
    ],
)
def test_experts_are_counted_by_names_or_by_the_first_of_three_sides(
    shapes: dict[str, tuple[int, ...]], most: int
) -> None:
    provider: Any = SimpleNamespace(
        names=lambda: iter(shapes), info=lambda name: SimpleNamespace(shape=shapes[name])
    )
    assert most_experts(provider) == most


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


def routed(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a model of 8 experts: only the letter Q goes to expert 6, and only Z to expert 5.

    What attention adds is 0, so that a router sees tokens alone. Of their 64 numbers, one is the same for
    all of them, one is Q's and one Z's.
    """
    model = sources.mixtral(experts=8, num_hidden_layers=1)
    with torch.no_grad():
        table, layer = model.model.embed_tokens.weight, model.model.layers[0]
        table[:, 61:] = torch.tensor([1.0, 0.0, 0.0])
        table[token("Q"), 62] = table[token("Z"), 63] = 1.0
        layer.self_attn.o_proj.weight.zero_()
        router = layer.mlp.gate.weight
        router[5:7] = 0.0
        router[5:7, 61] = -4.0
        router[5, 63] = router[6, 62] = 6.0  # more, and the others are equal after a softmax
    return sources.save(model, folder, dtype)


def token(letter: str) -> int:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter)


@pytest.mark.parametrize(("batch", "shift"), [(4096, "--no-gptaq"), (128, "--gptaq")])
def test_f75_an_expert_of_no_token_and_one_of_three_are_rounded_listed_and_alike(
    batch: int, shift: str, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4pack.convert.quantize import whole

    monkeypatch.setattr(whole, "BATCH_TOKENS", {"cpu": batch, "cuda": batch})
    source, letters = routed(tmp_path / "src"), list(book.read_text())
    assert not {"Q", "Z"} & set(letters)
    for place in (7, 200, 401):
        letters[place] = "Q"
    (tmp_path / "text.txt").write_text("".join(letters))
    quantize(source, tmp_path / "out", shift, text=tmp_path / "text.txt").expect(0)
    value, card = manifest(tmp_path / "out"), (tmp_path / "out" / "README.md").read_text()
    prefix = "model.layers.0.block_sparse_moe.experts"
    counts = value["quantization"]["expert_tokens"][prefix]
    assert counts[5:7] == [0, 3] and sum(counts) == 8 * 64 * 2 and max(counts) >= 64
    assert f"| `{prefix}` | 8 | 0 | {max(counts)} | {8 * 64 * 2} |" in card
    for expert, count in enumerate(counts):
        for part in ("w1", "w2", "w3"):
            name = f"{prefix}.{expert}.{part}"
            entry, few = value["layers"][name], f"{count} tokens, fewer than 64"
            assert (entry["tokens"], entry["scheme"]) == (count, "4 bit g32 sym"), name
            assert (entry["method"], entry.get("note")) == (("rtn", few) if count < 64 else ("gptq", None)), (
                name
            )
            (line,) = [x for x in card.splitlines() if x.startswith(f"- {few}: ")] or [""]
            assert (f"`{name}`" in line) is (count < 64), name
    for linear in oracle.decode_folder(tmp_path / "out").values():
        scales = oracle.widen(linear.scales, linear.tag)
        assert np.isfinite(scales).all() and (scales > 0).all()
    for prompt in ("Z" * 40, "Q" * 40):  # every token goes there
        (tmp_path / "prompt.txt").write_text(prompt)
        words = ("--text", tmp_path / "prompt.txt", "--seqlen", 32, "--against", source, "--json")
        told = run("eval", tmp_path / "out", *words).expect(0).data
        assert np.isfinite(told["perplexity"]) and 0 < told["kl_mean"] < 0.5, prompt


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
