"""The examples do what they say: each is run as a user would run it, in a scratch folder."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tmp_path: Path, repo: Path) -> Path:
    """A folder with a copy of ``examples`` and a ``bin`` whose ``w4pack`` is this checkout's."""
    shutil.copytree(repo / "examples", tmp_path / "examples")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "w4pack"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m w4pack "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return tmp_path


def run(
    *args: str | Path, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    path = f"{cwd / 'bin'}{os.pathsep}{os.environ['PATH']}"
    full = {**os.environ, **(env or {}), "PATH": path}
    return subprocess.run(
        [*map(str, args)], cwd=cwd, env=full, capture_output=True, text=True, timeout=300, check=False
    )


def tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Every tensor's dtype and bytes, read by safetensors itself."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                value = opened.get_tensor(name)
                found[name] = (f"{value.dtype}{value.shape}", value.tobytes())
    return found


def test_the_demo_tells_its_story_twice(bench: Path) -> None:
    """Twice: each run starts from an empty folder."""
    for _ in range(2):
        done = run("sh", "examples/demo.sh", "bin/w4pack", "examples/demo-gptq", ".demo", cwd=bench)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "== Done" in done.stdout
    assert tensors(bench / ".demo" / "back") == tensors(bench / "examples" / "demo-gptq")
    assert (bench / ".demo" / "artifact" / "w4pack.json").is_file()


def test_the_demo_stops_at_the_first_wrong_answer(bench: Path) -> None:
    weights = bench / "examples" / "demo-gptq" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    done = run("sh", "examples/demo.sh", "bin/w4pack", "examples/demo-gptq", ".demo", cwd=bench)
    assert done.returncode == 1
    assert "expected 0" in done.stderr
    assert "== Done" not in done.stdout


def test_the_python_script_converts_proves_and_unpacks(bench: Path) -> None:
    done = run(sys.executable, "examples/python_api.py", "examples/demo-gptq", "out", cwd=bench)
    assert done.returncode == 0, done.stderr
    assert "14 quantized linears" in done.stdout
    assert "lossless True" in done.stdout
    assert ", 0 differ" in done.stdout
    assert tensors(bench / "out" / "back") == tensors(bench / "examples" / "demo-gptq")


def test_the_python_script_reports_errors_as_the_command_does(bench: Path) -> None:
    done = run(sys.executable, "examples/python_api.py", "./nothing-here", "out", cwd=bench)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


# ---- the CI workflow --------------------------------------------------------------------------------------


SETTINGS = {"OUT": "artifact", "TP": "1", "REPO": ""}


def steps(workflow: Path) -> list[tuple[str, str]]:
    """Name and commands of each ``run`` step but the installation."""
    loaded: Any = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    (job,) = loaded["jobs"].values()
    return [
        (step["name"], step["run"])
        for step in job["steps"]
        if "run" in step and "pip install" not in step["run"]
    ]


def run_workflow(bench: Path, **env: str) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run the steps as CI does (``bash -e -o pipefail``) until one fails."""
    done: dict[str, subprocess.CompletedProcess[str]] = {}
    for name, commands in steps(bench / "examples" / "ci" / "convert.yml"):
        done[name] = run("bash", "-e", "-o", "pipefail", "-c", commands, cwd=bench, env=env)
        if done[name].returncode:
            break
    return done


def test_the_workflow_builds_a_proved_artifact(bench: Path) -> None:
    done = run_workflow(bench, SRC="examples/demo-gptq", **SETTINGS)
    codes = {name: step.returncode for name, step in done.items()}
    assert list(codes.values()) == [0] * 6, [step.stderr for step in done.values()]
    (convert,) = [step for name, step in done.items() if name.startswith("Convert")]
    assert json.loads(convert.stdout)["event"] == "done"
    assert (bench / "artifact" / "w4pack.json").is_file()


def test_the_workflow_stops_on_a_broken_source(bench: Path) -> None:
    weights = bench / "examples" / "demo-gptq" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    last = list(run_workflow(bench, SRC="examples/demo-gptq", **SETTINGS).values())[-1]
    assert last.returncode == 1
    assert not (bench / "artifact").exists()


def test_the_workflow_stops_on_a_bad_artifact(bench: Path) -> None:
    """A byte of the artifact changes between the conversion and the proof."""
    workflow = bench / "examples" / "ci" / "convert.yml"
    text = workflow.read_text(encoding="utf-8")
    spoil = (
        "      - name: Spoil\n"
        "        run: printf '\\377' | dd of=$OUT/model.safetensors bs=1 seek=100000 conv=notrunc\n\n"
    )
    prove = "      - name: Prove"
    workflow.write_text(text.replace(prove, spoil + prove), encoding="utf-8")
    done = run_workflow(bench, SRC="examples/demo-gptq", **SETTINGS)
    assert list(done)[-1].startswith("Prove")
    assert list(done.values())[-1].returncode == 4


def test_the_workflow_stops_where_the_artifact_cannot_serve(bench: Path) -> None:
    """The demo's act-order ties it to one rank."""
    done = run_workflow(bench, SRC="examples/demo-gptq", **{**SETTINGS, "TP": "2"})
    assert list(done)[-1].startswith("Gate")
    assert list(done.values())[-1].returncode == 3


def test_the_workflow_names_only_known_commands_and_options(bench: Path) -> None:
    """Steps that need the Hub do not run here; what they call must exist."""
    for name, commands in steps(bench / "examples" / "ci" / "convert.yml"):
        for verb, options in re.findall(r"w4pack (\w+)((?: (?:--[\w-]+|\S+))*)", commands):
            said = run("w4pack", verb, "--help", cwd=bench)
            assert said.returncode == 0, name
            for option in re.findall(r"--[\w-]+", options):
                assert option in said.stdout, f"{name}: {option}"
