"""Benchmarks where there is no card: a sentence, before anything is made, and no traceback."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SOURCES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.py"))}
TIMED = sorted(n for n, text in SOURCES.items() if re.search(r"^def main", text, re.M) and "cuda" in text)
ELSEWHERE = {"quantize_peers"}  # on the CPU, though a peer asks what card there is
GIVEN = {  # arguments that have no default
    "quantize": ["SRC", "--text", "T", "--calibration", "T", "--work", "W", "--device", "cuda"],
    "w4a4": ["SRC", "--text", "T", "--calibration", "T", "--work", "W", "--device", "cuda"],
    "quantize_speed": ["--work", "W"],
}


@pytest.fixture(autouse=True, scope="module")
def _as_scripts() -> Iterator[None]:
    """Let benchmarks import each other as they do when they are run; tests have folders of the same names."""
    before = {name: sys.modules.pop(name, None) for name in SOURCES}
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch and peers import
@pytest.mark.parametrize("name", [name for name in TIMED if name not in ELSEWHERE])
def test_a_benchmark_without_a_card_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *GIVEN.get(name, [])])
    with pytest.raises(SystemExit) as seen:
        importlib.import_module(name).main()
    said = capfd.readouterr()
    assert (seen.value.code, said.out) == (2, "")
    assert said.err.startswith("error: there is no card to time") and "Traceback" not in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("device", "said"), [("tpu", "no such device"), ("cuda:x", "no card"), ("cpu", "")])
def test_other_devices(device: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    cards = importlib.import_module("cards")
    if not said:
        assert cards.need(device) == torch.device("cpu")
        return
    with pytest.raises(SystemExit):
        cards.need(device)
    assert said in capfd.readouterr().err
