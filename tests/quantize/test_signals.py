"""A signal while a model is measured, or within a layer: nothing more is computed, nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quantize.test_outputs import FEW, quantize, tree

# The command gets SIGTERM before a call of a function, and says on stderr how often it is called after that.
STOPPED = """
import os, signal, sys
from importlib import import_module
module, owner, name, when = sys.argv.pop(1).split(",")
owner = getattr(import_module(module), owner) if owner else import_module(module)
original, calls = getattr(owner, name), []
def counted(*args, **kwargs):
    calls.append(name)
    if len(calls) == int(when):
        os.kill(os.getpid(), signal.SIGTERM)
    return original(*args, **kwargs)
setattr(owner, name, counted)
from w4pack.cli import main
try:
    main()
finally:
    print(f"{len(calls) - int(when)} more", file=sys.stderr)
"""
ONLINE = ("--kv-bits", 4)


def stopped(place: str, source: Path, out: Path, book: Path, *options: str | int) -> str:
    """Run a quantization that is stopped at a place. Returns its stderr."""
    words = ["convert", source, out, "--quantize", "gptq", "--group-size", 32, "--calibration", book, *FEW]
    words += [*ONLINE, *options, "-q"]
    command = [sys.executable, "-c", STOPPED, place, *map(str, words)]
    done = subprocess.run(command, timeout=600, check=False, capture_output=True, text=True)
    assert done.returncode == 143, done.stderr
    assert "error: stopped by a signal" in done.stderr
    assert not out.exists()
    return done.stderr


def test_sigterm_while_clip_ratios_are_measured_ends_the_command_there(
    llama: Path, book: Path, tmp_path: Path
) -> None:
    said = stopped("w4pack.convert.quantize.stream,Stream,run,20", llama, tmp_path / "out", book)
    assert "0 more" in said
    assert "--resume" not in said  # there is nothing yet
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("samples", [8, 80], ids=["one batch", "two batches"])
def test_sigterm_within_a_layer_is_obeyed_before_the_next_linear_and_resume_gives_the_same_bytes(
    samples: int, llama: Path, book: Path, tmp_path: Path
) -> None:
    many = ("--samples", samples)
    quantize(llama, tmp_path / "one", *ONLINE, *many, text=book).expect(0)
    place = "w4pack.convert.quantize.layer,,quantize_set,6"  # each layer has four sets of linears
    said = stopped(place, llama, tmp_path / "two", book, *many)
    assert "0 more" in said
    assert "--resume" in said
    resumed = quantize(llama, tmp_path / "two", *ONLINE, *many, "--resume", text=book).expect(0)
    assert any("layer 1 of 2 kept" in str(event.get("text")) for event in resumed.events)
    assert tree(tmp_path / "two") == tree(tmp_path / "one")
