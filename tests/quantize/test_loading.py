"""Quantized outputs in transformers: through our own loader and, where it is there, a stock one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantize import sources
from quantize.test_outputs import quantize
from runner import run

TOKENS = torch.arange(40, 72).unsqueeze(0)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits[0].float()


@pytest.fixture(scope="module")
def outputs(book: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model, quantized to an artifact and to compressed-tensors, and the latter's dense fp32 model."""
    place = tmp_path_factory.mktemp("loading")
    source = sources.save(sources.llama(), place / "source")
    for to in ("marlin", "compressed-tensors"):
        quantize(source, place / to, text=book, to=to).expect(0)
    words = ("--to", "dense", "--dtype", "float32")
    run("convert", place / "compressed-tensors", place / "dense", *words).expect(0)
    return place


def test_our_loader_predicts_what_the_weights_say(outputs: Path) -> None:
    import w4pack

    exact = logits(AutoModelForCausalLM.from_pretrained(outputs / "dense", dtype=torch.float32))
    found = logits(w4pack.load(outputs / "marlin", device="cpu", dtype=torch.float16))
    # float16 arithmetic: about 16 roundings a layer, two layers, each half a unit of 2^-10, random in sign
    assert float((found - exact).abs().max()) < 8 * 2.0**-11 * float(exact.abs().max())


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="needs the package compressed-tensors")
def test_stock_transformers_predicts_what_the_weights_say(outputs: Path) -> None:
    exact = logits(AutoModelForCausalLM.from_pretrained(outputs / "dense", dtype=torch.float32))
    stock = AutoModelForCausalLM.from_pretrained(outputs / "compressed-tensors", dtype=torch.float32)
    assert float((logits(stock) - exact).abs().max()) < 2e-3 * float(exact.abs().max())
