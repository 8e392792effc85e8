"""What was quantized from 16 bit has no packed checkpoint to go back to: the reason and the way on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from runner import run

RTN = ("--quantize", "rtn", "--group-size", 32)
ROTATED = (*RTN, "--rotate", "full", "--kv-bits", 4)


def refused(out: Path, back: Path) -> dict[str, Any]:
    """Return the error of ``unpack``, which touches nothing."""
    error = run("unpack", out, back, "--json").expect(3).error
    assert not back.exists() and not back.with_name("back.w4pack-staging").exists()
    return error


@pytest.mark.parametrize("to", ["marlin", "gptq"])
def test_an_output_quantized_from_16_bit_names_the_way_to_16_bit(
    to: str, llama: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run("convert", llama, out, "--to", to, *RTN).expect(0)
    error = refused(out, tmp_path / "back")
    assert (error["code"], error["where"]) == ("not-invertible", str(out))
    assert error["expected"] not in error["found"] and "--to" not in error["expected"]
    (command,) = re.findall(r"`w4pack (.+?)`", error["hint"])
    words = command.replace("OUT", str(tmp_path / "dense")).split()
    assert words[:3] == ["convert", str(out), str(tmp_path / "dense")]
    run(*words).expect(0)


def test_an_output_with_a_runtime_of_its_own_is_told_that_the_source_is_all_there_is(
    llama: Path, tmp_path: Path
) -> None:
    run("convert", llama, tmp_path / "out", *ROTATED).expect(0)
    error = refused(tmp_path / "out", tmp_path / "back")
    assert error["code"] == "not-invertible" and "convert" not in error["hint"]
    assert "the model that it was made from: keep that one" in error["hint"]


def test_the_model_on_the_hub_is_named(llama: Path, tmp_path: Path) -> None:
    run("convert", llama, tmp_path / "out", *RTN).expect(0)
    path = tmp_path / "out" / "w4pack.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | {"source": {**value["source"], "origin": {"id": "ORG/NAME"}}}))
    assert "the 16-bit model ORG/NAME" in refused(tmp_path / "out", tmp_path / "back")["found"]


def test_a_portable_output_is_told_that_it_is_a_checkpoint(tmp_path: Path) -> None:
    demo, out = Path(__file__).parents[2] / "examples" / "demo-gptq", tmp_path / "out"
    run("convert", demo, out, "--to", "gptq", "--regroup").expect(0)
    error = refused(out, tmp_path / "back")
    assert error["code"] == "not-an-artifact" and error["found"] == "an output of `--to gptq`"
    for command in re.findall(r"`w4pack (.+?)`", error["hint"]):
        run(*command.replace("SRC", str(demo)).split()).expect(0)
