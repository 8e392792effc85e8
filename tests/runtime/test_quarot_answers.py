"""`inspect`, the plan and `check` say the same of a model that was quantized here, whatever runs online."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from answers import agree, plan_of  # noqa: E402

from runner import run  # noqa: E402
from runtime import quarot_models as models  # noqa: E402
from w4pack.convert import convert  # noqa: E402
from w4pack.convert.planning.quantize_options import QuantizeOptions  # noqa: E402

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FOUR: dict[str, Any] = {"act_bits": 4, "kv_bits": 4}

# model, changes of its config, rotation and ranks, bits and symmetry, max TP
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "offline": ("llama", {}, {"rotate": "offline"}, {}, 4),
    "full": ("llama", {}, {"rotate": "full"}, FOUR, 1),
    "full for 2": ("llama", {}, {"rotate": "full", "tp": 2}, FOUR, 2),
    "full for 4, a head on each": ("llama", {}, {"rotate": "full", "tp": 4}, FOUR, 4),
    "full, 16-bit cache": ("llama", {"head_dim": 72}, {"rotate": "full"}, {"act_bits": 4, "kv_bits": 16}, 1),
    "full, zero points": ("llama", {}, {"rotate": "full"}, {"kv_bits": 4, "sym": False}, 1),
    "head of 32": ("llama", {"head_dim": 32}, {"rotate": "full"}, FOUR, 0),
    "head of 72, plain": ("llama", {"head_dim": 72}, {}, {"kv_bits": 4}, 0),
    "head of 128": ("llama", {"head_dim": 128}, {"rotate": "full", "tp": 2}, FOUR, 2),
    "padded": ("llama", {"intermediate_size": 160}, {"rotate": "offline"}, FOUR, 1),
    "experts": ("mixtral", {}, {"rotate": "full", "tp": 2}, FOUR, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_one_answer(case: str, tmp_path: Path) -> None:
    name, changes, rotation, bits, most = CASES[case]
    source = models.source(name, tmp_path / "source", **{**SMALL, **changes})
    quantize = QuantizeOptions(method="rtn", group_size=-1, **bits)
    planned = plan_of(source, tmp_path / "out", quantize=quantize, **rotation)
    told = agree(tmp_path / "out", planned, "marlin")
    assert told["max_tp"] == most
    if not most:
        assert {limit["where"] for limit in told["tp_limits"]} >= {"config.json: head_dim"}


def test_every_no_names_the_way_on(tmp_path: Path) -> None:
    """A head without kernel: in the plan, in `check`, and by the loader that the way on leads past."""
    source = models.source("llama", tmp_path / "source", **SMALL, head_dim=32)
    asked = ("--quantize", "rtn", "--kv-bits")
    dry = run("convert", source, tmp_path / "out", *asked, "4", "--dry-run").expect(0)
    assert "engines   w4pack no" in dry.out
    assert "[head-size]" in dry.err and "--kv-bits 16" in dry.err
    run("convert", source, tmp_path / "out", *asked, "4", "--quiet").expect(0)
    said = run("check", tmp_path / "out", "--engine", "w4pack").expect(3)
    assert "way on: w4pack generate, or w4pack.load, with --kv-bits 16" in said.out
    assert "max TP    none (limited by head_dim)" in run("inspect", tmp_path / "out").expect(0).out
    again = run("convert", source, tmp_path / "wide", *asked, "16", "--dry-run").expect(0)
    assert "engines   w4pack TP 1" in again.out and "[head-size]" not in again.err


def test_ranks_that_are_not_reached_are_told(tmp_path: Path) -> None:
    source = models.source("llama", tmp_path / "source", **{**SMALL, "intermediate_size": 128})
    quantize = QuantizeOptions(method="rtn", group_size=-1, act_bits=4, kv_bits=4)
    report = convert(source, tmp_path / "out", quantize=quantize, rotate="full", tp=4)
    (told,) = (w for w in report.warnings if w.code == "tp-not-reached")
    assert "as `--tp 4` asks" in told.expected and told.found.endswith("the largest that fits is TP 2")
    reached = convert(source, tmp_path / "two", quantize=quantize, rotate="full", tp=2)
    assert not [w for w in reached.warnings if w.code == "tp-not-reached"]
