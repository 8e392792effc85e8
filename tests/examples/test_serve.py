"""The container file and the Kubernetes manifest: the script of the job runs, the rest has the right form."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

KINDS = ["PersistentVolumeClaim", "Job", "Deployment", "Service"]


@pytest.fixture
def manifest(repo: Path) -> dict[str, Any]:
    text = (repo / "examples" / "serve" / "deployment.yaml").read_text(encoding="utf-8")
    parts = list(yaml.safe_load_all(text))
    assert [part["kind"] for part in parts] == KINDS
    return {part["kind"]: part for part in parts}


def pod(part: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = part["spec"]["template"]["spec"]
    return found


def run_job(
    manifest: dict[str, Any], tmp_path: Path, source: Path, ranks: str
) -> subprocess.CompletedProcess[str]:
    """Run what the job runs, with its volume in a scratch folder."""
    (container,) = pod(manifest["Job"])["containers"]
    models = tmp_path / "models"
    models.mkdir(exist_ok=True)
    (tmp_path / "bin").mkdir(exist_ok=True)
    command = tmp_path / "bin" / "w4pack"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m w4pack "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    script = container["args"][0].replace("/models", str(models))
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "SRC": str(source), "TP": ranks}
    return subprocess.run(
        [*container["command"], script],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_the_job_converts_once_and_gates(manifest: dict[str, Any], tmp_path: Path, demo: Path) -> None:
    first = run_job(manifest, tmp_path, demo, "1")
    assert first.returncode == 0, first.stderr
    written = (tmp_path / "models" / "artifact" / "w4pack.json").stat().st_mtime_ns
    assert run_job(manifest, tmp_path, demo, "1").returncode == 0
    assert (tmp_path / "models" / "artifact" / "w4pack.json").stat().st_mtime_ns == written
    assert run_job(manifest, tmp_path, demo, "2").returncode == 3  # the demo's act-order ties it to one rank


@pytest.mark.slow
def test_the_job_fails_on_a_broken_source(manifest: dict[str, Any], tmp_path: Path, demo: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in demo.iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: -1 if file.suffix == ".safetensors" else None])
    assert run_job(manifest, tmp_path, broken, "1").returncode == 1
    assert not (tmp_path / "models" / "artifact").exists()


def test_pods_wait_for_the_artifact_and_are_ready_when_the_server_is(manifest: dict[str, Any]) -> None:
    spec = pod(manifest["Deployment"])
    (server,) = spec["containers"]
    assert server["readinessProbe"]["httpGet"] == {"path": "/health", "port": 8000}
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    assert server["command"][:3] == ["vllm", "serve", "/models/artifact"]
    assert "/models/artifact/config.json" in spec["initContainers"][0]["command"][-1]


def test_names_and_volumes_fit_each_other(manifest: dict[str, Any]) -> None:
    claim = manifest["PersistentVolumeClaim"]["metadata"]["name"]
    for kind in ("Job", "Deployment"):
        spec = pod(manifest[kind])
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["models"]["persistentVolumeClaim"] == {"claimName": claim}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
            assert container["image"] == "vllm-w4pack"
    labels = manifest["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifest["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert manifest["Service"]["spec"]["selector"] == labels
    (port,) = manifest["Service"]["spec"]["ports"]
    (open_port,) = pod(manifest["Deployment"])["containers"][0]["ports"]
    assert port["targetPort"] == open_port["containerPort"]


def test_the_container_file_installs_what_the_package_offers(repo: Path) -> None:
    text = (repo / "examples" / "serve" / "Containerfile").read_text(encoding="utf-8")
    (extra,) = re.findall(r'pip install --no-cache-dir "w4pack\[(\w+)\]"', text)
    assert re.search(rf"^{extra} = \[", (repo / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert [line.split()[0] for line in text.splitlines() if line and line[0] != "#"] == [
        "ARG",
        "FROM",
        "RUN",
    ]
