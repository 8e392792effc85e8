"""Every architecture goes through calibration by transformers' own code, with nothing written for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rotate import tiny

from quantize import sources
from quantize.test_outputs import manifest, quantize, weights
from w4pack.convert.quantize.hessian import Statistics


@pytest.mark.parametrize("name", sorted(tiny.CONFIGS))
def test_f78_each_linear_of_each_architecture_sees_its_tokens(
    name: str, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: set[str] = set()
    original = Statistics.add

    def seen(
        self: Statistics, x: torch.Tensor, reference: torch.Tensor | None = None, **more: object
    ) -> None:
        places.update({x.device.type, self.sum.device.type})
        original(self, x, reference, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Statistics, "add", seen)
    model = tiny.model(name, vocab_size=256)
    for parameter in model.parameters():
        parameter.data *= 0.3 if parameter.dim() > 1 else 1.0
    source = sources.save(model, tmp_path / "src", torch.bfloat16)
    quantize(source, tmp_path / "out", "--samples", 4, "--seqlen", 32, text=book).expect(0)
    value = manifest(tmp_path / "out")
    assert places == {"cpu"} and value["quantization"]["left_in_16_bit"] == {}
    for linear, entry in value["layers"].items():
        routed = ".experts." in linear
        assert routed or entry["tokens"] == 4 * 32, linear
        assert (entry["method"] == "gptq") is (entry["tokens"] >= 64), linear
    assert np.isfinite(value["quantization"]["kl"]) and value["quantization"]["kl"] < 0.05
    assert all(np.isfinite(w).all() and w.any() for w in weights(tmp_path / "out").values())
