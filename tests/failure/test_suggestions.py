"""A command that `check` prints must work: it is run on the real checkpoint, and the result does better."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import checkpoints
import runner

WORTH = {"ok": 2, "slow": 1, "wrong": 0, "refuses": 0}
ENGINES = ("vllm", "sglang", "transformers", "w4pack")


def verdicts(folder: Path, engine: str, sizes: str) -> tuple[int, dict[str, Any]]:
    """Ask `check`; return the worth of all sizes and the answer."""
    answer = runner.run("check", folder, "--engine", engine, "--tp", sizes, "--json").data
    return sum(WORTH[r["verdict"]] for r in answer["results"]), answer


@pytest.mark.shared
@pytest.mark.parametrize("name", [n for n in checkpoints.names() if checkpoints.meta(n).get("modules")])
def test_suggested_command_does_better(name: str, tmp_path: Path) -> None:
    source = checkpoints.lay_out(name, tmp_path / "source")
    done: dict[tuple[str, ...], Path] = {}
    for engine in ENGINES:
        for sizes in ("1", "1,2"):
            before, answer = verdicts(source, engine, sizes)
            command = answer["suggestion"]
            if command is None:
                continue
            program, verb, src, out, *options = shlex.split(command)
            assert (program, verb, src, out) == ("w4pack", "convert", str(source), "OUT")
            place = done.setdefault(tuple(options), tmp_path / f"out-{len(done)}")
            if not place.exists():
                runner.run("convert", source, place, *options).expect(0)
            after, then = verdicts(place, engine, sizes)
            assert after > before, f"{engine} {sizes} {options}: {json.dumps(then['results'])}"
