"""Sizes of models without a large power of two: full size where there is a plan, else told (F61)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rotate import tiny
from transformers import AutoModelForCausalLM

from quantize import sources
from runner import run
from w4pack.convert.files.provider import CheckpointProvider
from w4pack.convert.modeljobs.online import NOTHING, runtime_of
from w4pack.convert.quantize import evaluation
from w4pack.convert.rotate.rotated import Rotated

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 251, 8).reshape(1, -1)
GOETHALS_SEIDEL = {
    13696: [[428, "goethals_seidel"], [32, "sylvester"]],
    27392: [[428, "goethals_seidel"], [64, "sylvester"]],
}


def wide(hidden: int, folder: Path) -> Path:
    """Write a model of one layer, its weights such that sums over the stream do not grow with its width."""
    model = sources.llama(hidden_size=hidden, intermediate_size=32, num_hidden_layers=1, vocab_size=128)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2 and parameter.shape[1] == hidden:
                parameter.mul_((64 / hidden) ** 0.5)
    return sources.save(model, folder)


@pytest.mark.parametrize("hidden", [13696, 27392])
def test_a_stream_of_428_times_a_power_of_two_is_rotated_at_full_size(hidden: int, tmp_path: Path) -> None:
    source, out = wide(hidden, tmp_path / "src"), tmp_path / "out"
    done = run("convert", source, out, "--to", "dense", "--rotate", "offline", "--threads", 1).expect(0)
    assert f"R1 {hidden} = 428 x {hidden // 428}, the whole model\n" in done.err + done.out
    r1 = json.loads((out / "w4pack.json").read_text())["rotation"]["rotations"][0]
    assert (r1["kind"], r1["n"], r1["block"], r1["factors"]) == (
        "r1",
        hidden,
        hidden,
        GOETHALS_SEIDEL[hidden],
    )
    logits = []
    for folder in (source, out):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(model(TOKENS % 128).logits)
    assert 0 < tiny.relative(logits[1], logits[0]) < 3 * 2.0**-10  # each weight is rounded once


# sizes of a Llama -> (what the plan says, site -> (order, block, factors) of what runs online)
CASES: dict[str, tuple[dict[str, int], list[str], dict[str, Any]]] = {
    "13696": (
        {"intermediate_size": 13696},
        ["R4 13696 = 428 x 32, the whole model"],
        {"mlp_mid": (13696, 13696, GOETHALS_SEIDEL[13696]), "attn_out": (2, 2, [[2, "sylvester"]])},
    ),
    "27392": (
        {"intermediate_size": 27392},
        ["R4 27392 = 428 x 64, the whole model"],
        {"mlp_mid": (27392, 27392, GOETHALS_SEIDEL[27392]), "attn_out": (2, 2, [[2, "sylvester"]])},
    ),
    "9 heads": (
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16},
        [
            "no HEADS: no Hadamard matrix of order 9 or of a divisor above 1",
            "warning: heads: expected a rotation, found none: no Hadamard matrix of order 9",
        ],
        {"mlp_mid": (128, 128, [[128, "sylvester"]])},
    ),
    "6 heads, 536 inputs": (
        {
            "hidden_size": 96,
            "intermediate_size": 536,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 16,
        },
        [
            "R1 96 = 12 x 8, the whole model",
            "HEADS 6 = 2 (3 blocks), the whole model",
            "R4 536 = 8 (67 blocks), the whole model",
            "warning: heads: expected one Hadamard matrix of order 6, found blocks of 2",
            "warning: r4: expected one Hadamard matrix of order 536, found blocks of 8",
        ],
        {"mlp_mid": (536, 8, [[8, "sylvester"]]), "attn_out": (6, 2, [[2, "sylvester"]])},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_runs_online_has_that_size_or_is_told_and_the_logits_are_the_sources(
    name: str, tmp_path: Path
) -> None:
    sizes, lines, online = CASES[name]
    source = sources.save(sources.llama(**sizes), tmp_path / "src", torch.float32)
    words = ("--rotate", "full", "--quantize", "rtn", "--bits", 8, "--group-size", -1, "--threads", 1)
    done = run("convert", source, tmp_path / "out", *words).expect(0)
    assert [line for line in lines if line not in done.text] == []
    records = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["online"]
    hadamards = [r for r in records if r["kind"] == "hadamard" and r["site"] != "qk"]
    assert {r["site"]: (r["order"], r["block"], r["factors"]) for r in hadamards} == online
    with tiny.opened(source) as checkpoint:
        plain, plan = CheckpointProvider(checkpoint), tiny.planned(checkpoint, "full")
        rotated, config = Rotated(plain, plan), {**checkpoint.config, **plan.config_changes}
        between = runtime_of(config, {n: rotated.info(n) for n in rotated.names()}, hadamards, [])
        logits = [
            evaluation.through(c, p, TOKENS, CPU, torch.float32, per_batch=1, between=b).logits(0)
            for c, p, b in ((checkpoint.config, plain, NOTHING), (config, rotated, between))
        ]
    assert tiny.relative(logits[1], logits[0]) < 2e-4
