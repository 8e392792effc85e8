"""Many batches: how often a layer runs, and that its results are those of one run after another."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from quantize.test_outputs import quantize
from w4pack.convert.quantize import layer as layer_module
from w4pack.convert.quantize import whole

Runs = Counter[tuple[int, str, str]]  # (layer, model, linear)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """How often linears of the source's and of the quantized layers were computed."""
    found: Runs = Counter()
    original = layer_module.LayerWork.run

    def counting(self: layer_module.LayerWork, stream: Any) -> Any:
        assert self.source is not None
        for model, module in (("source", self.source[0]), ("quantized", self.layer)):
            for path in self.schemes:

                def count(*_: Any, key: tuple[int, str, str] = (self.index, model, path)) -> None:
                    found[key] += 1

                module.get_submodule(path).register_forward_hook(count)
        return original(self, stream)

    monkeypatch.setattr(layer_module.LayerWork, "run", counting)
    return found


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_the_source_goes_to_the_end_of_a_layer_in_its_last_stage(
    model: str,
    request: pytest.FixtureRequest,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs: Runs,
) -> None:
    """Stages: q/k/v, o, gate/up, down. Each but the first runs what lies before it; four batches."""
    monkeypatch.setattr(whole, "BATCH_TOKENS", {"cpu": 128, "cuda": 128})
    quantize(request.getfixturevalue(model), tmp_path / "out", text=book).expect(0)
    dense = {
        "llama": {"q_proj": 3, "o_proj": 2, "up_proj": 1, "down_proj": 1},
        "mixtral": {"q_proj": 2, "o_proj": 1},
    }
    for index in (0, 1):
        for path, wanted in dense[model].items():
            (count,) = (
                n for (i, m, p), n in runs.items() if (i, m) == (index, "source") and p.endswith(path)
            )
            assert count == 4 * wanted, path


def test_the_source_behind_a_layer_is_what_one_run_gives(
    llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "BATCH_TOKENS", {"cpu": 128, "cuda": 128})
    original = layer_module.LayerWork.run
    checked: list[int] = []

    def checking(self: layer_module.LayerWork, stream: Any) -> Any:
        assert self.source is not None
        layer, source = self.source
        with torch.no_grad():
            wanted = [source.run(layer, self.index, hidden) for hidden in source.hidden]
        made = original(self, stream)
        assert all(torch.equal(a, b) for a, b in zip(source.hidden, wanted, strict=True))
        checked.append(self.index)
        return made

    monkeypatch.setattr(layer_module.LayerWork, "run", checking)
    quantize(llama, tmp_path / "out", text=book).expect(0)
    assert checked == [0, 1]
