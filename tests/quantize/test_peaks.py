"""What memory a job has taken is told with every layer."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import run
from w4pack.convert.modeljobs import peaks


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(peaks, "STATUS", tmp_path / "status")
    return tmp_path / "status"


def test_the_peak_is_the_kernel_s(status: Path) -> None:
    status.write_text("Name:\tpython\nVmPeak:\t 900 kB\nVmHWM:\t   1536 kB\nVmRSS:\t 1000 kB\n")
    assert peaks.host_peak() == 1536 * 1024
    assert peaks.peak_text(torch.device("cpu")) == "1.50 MiB memory, libraries included"


@pytest.mark.parametrize("text", [None, "Name:\tpython\n"])
def test_elsewhere_it_is_that_of_getrusage(status: Path, text: str | None) -> None:
    if text is not None:
        status.write_text(text)
    unit = 1 if sys.platform == "darwin" else 1024
    assert peaks.host_peak() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def test_a_card_s_peak_stands_beside_it(status: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status.write_text("VmHWM:\t 2048 kB\n")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    assert (
        peaks.peak_text(torch.device("cuda:1")) == "2.00 MiB memory, libraries included, 3.00 GiB of cuda:1"
    )


@pytest.mark.parametrize(("method", "notes"), [("gptq", 2), ("rtn", 1)])
def test_every_layer_tells_it(
    method: str, notes: int, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peaks, "host_peak", lambda: 77 << 20)
    few: tuple[Any, ...] = ("--samples", 2, "--seqlen", 32) if method == "gptq" else ()
    words = ("--quantize", method, "--group-size", 32, *few, "--threads", 1, "--json")
    done = run("convert", llama, tmp_path / "out", *words).expect(0)
    told = [
        e["text"]
        for e in done.events
        if e["event"] == "note" and "at most 77.00 MiB memory, libraries included" in e["text"]
    ]
    assert len(told) == notes, [e for e in done.events if e["event"] == "note"]
