"""A process that is killed while it writes a layer, and the same command with --resume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quantize.test_outputs import FEW, quantize, tree

# The second layer's fourth linear is on the disk and in no journal when the process dies.
KILLED = """
import os, signal
from w4pack.convert.modeljobs import layerfiles
original, seen = layerfiles.LayerFiles.write, []
def written(self, op, made):
    found = original(self, op, made)
    seen.append(op.source)
    if len(seen) == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
layerfiles.LayerFiles.write = written
from w4pack.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [("none",), ("offline",), ("full", "--act-bits", 4, "--kv-bits", 4)],
    ids=["plain", "rotated", "4-bit activations and cache"],
)
def test_kill_9_while_a_layer_is_written_then_resume_gives_the_same_bytes(
    options: tuple[str | int, ...], llama: Path, book: Path, tmp_path: Path
) -> None:
    quantize(llama, tmp_path / "one", "--rotate", *options, text=book).expect(0)
    words = ["convert", llama, tmp_path / "two", "--quantize", "gptq", "--group-size", 32]
    words += ["--rotate", *options, "--calibration", book, *FEW, "-q"]
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], timeout=600, check=False)
    assert done.returncode == -9
    assert not (tmp_path / "two").exists()
    (staging,) = tmp_path.glob("*.w4pack-staging")
    journal = next(p for p in staging.rglob("*") if "journal" in p.name).read_text()
    assert "layers.0.mlp.down_proj" in journal and "layers.1.self_attn.q_proj" not in journal
    quantize(llama, tmp_path / "two", "--rotate", *options, "--resume", text=book).expect(0)
    assert tree(tmp_path / "two") == tree(tmp_path / "one")
