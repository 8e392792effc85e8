"""Bits per weight have one definition: the plan, `inspect`, the manifest and the file give one number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import oracle
from quantize import sources
from quantize.test_outputs import manifest
from runner import run


def counted(folder: Path) -> float:
    """Return bits of all tensors of packed linears, per weight, from the headers alone."""
    linears = oracle.decode_folder(folder)
    nbytes = sum(
        tensor.array().nbytes
        for name, tensor in oracle.read_folder(folder).items()
        if name.rpartition(".")[0] in linears and not name.endswith(".bias")
    )
    return 8 * nbytes / sum(lin.codes.size for lin in linears.values())


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 48, "intermediate_size": 80, "head_dim": 24}], ids=str)
@pytest.mark.parametrize("to", ["marlin", "gptq", "compressed-tensors", "awq"])
def test_plan_inspect_and_file_agree(to: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """Off the tile an artifact is padded, and the padding is in the file."""
    if sizes and to != "marlin":
        sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
    source = sources.save(sources.llama(num_hidden_layers=1, **sizes), tmp_path / "src")
    sym = ("--asym",) if to == "awq" else ()
    words = ("--to", to, "--quantize", "rtn", "--group-size", 32, *sym, "--json")
    done = run("convert", source, tmp_path / "out", *words).expect(0)
    told = run("inspect", tmp_path / "out", "--json").expect(0).data["bits_per_weight"]
    planned = done.plan["plan"]["quantization"]["bits_per_weight"]
    assert planned == told == manifest(tmp_path / "out")["quantization"]["bits_per_weight"]
    assert told == pytest.approx(counted(tmp_path / "out"), abs=5e-5)
    assert (told > 6) == (to == "marlin" and bool(sizes))


def test_a_plain_model_has_none(llama: Path) -> None:
    assert json.loads(run("inspect", llama, "--json").expect(0).out)["bits_per_weight"] is None


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 10**400, "1", None, 1e-3])
def test_what_a_manifest_says_was_chosen_is_taken_only_as_numbers(error: object) -> None:
    from w4pack.convert.core.scheme import QuantScheme
    from w4pack.convert.modeljobs import mixed

    scheme = QuantScheme(
        4, 128, sym=True, act_order=False, in_features=256, out_features=64, scale_dtype="F16"
    )
    entry = {"error": 1e-3, "cheapest": scheme.label(), "error_cheapest": error}
    manifest = {
        "quantization": {"chosen": {"a": entry}},
        "layers": {"a": {"source": "a", "scheme": scheme.label()}},
    }
    assert (mixed.recorded(manifest, {"a": scheme}) is not None) is (error in (1e-3, "1"))
