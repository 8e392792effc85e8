"""The container file and the Kubernetes manifest: the script of the job runs, the rest has the right form."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from w4pack.convert.engines.plugin import TESTED

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
    ready = tmp_path / "models" / "ready"
    first = run_job(manifest, tmp_path, demo, "1")
    assert first.returncode == 0, first.stderr
    assert ready.exists()
    written = (tmp_path / "models" / "artifact" / "w4pack.json").stat().st_mtime_ns
    assert run_job(manifest, tmp_path, demo, "1").returncode == 0
    assert (tmp_path / "models" / "artifact" / "w4pack.json").stat().st_mtime_ns == written
    assert run_job(manifest, tmp_path, demo, "2").returncode == 3  # the demo's act-order ties it to one rank
    assert not ready.exists()


@pytest.mark.slow
def test_the_job_fails_on_a_broken_source(manifest: dict[str, Any], tmp_path: Path, demo: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in demo.iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: -1 if file.suffix == ".safetensors" else None])
    assert run_job(manifest, tmp_path, broken, "1").returncode == 1
    assert not (tmp_path / "models" / "artifact").exists()
    assert not (tmp_path / "models" / "ready").exists()


def test_pods_wait_for_the_artifact_and_are_ready_when_the_server_is(manifest: dict[str, Any]) -> None:
    spec = pod(manifest["Deployment"])
    (server,) = spec["containers"]
    assert server["readinessProbe"]["httpGet"] == {"path": "/health", "port": 8000}
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    assert server["command"] == ["vllm", "serve", "/models/artifact"]
    assert "/models/ready" in spec["initContainers"][0]["command"][-1]


def test_the_job_gates_on_as_many_ranks_as_serve(manifest: dict[str, Any]) -> None:
    (job,) = pod(manifest["Job"])["containers"]
    (server,) = pod(manifest["Deployment"])["containers"]
    (ranks,) = [entry["value"] for entry in job["env"] if entry["name"] == "TP"]
    assert server["args"][server["args"].index("--tensor-parallel-size") + 1] == ranks
    assert server["resources"]["limits"]["nvidia.com/gpu"] == ranks


# Keys that the cluster's API knows, of those that may stand at these places: an unknown one is a slip.
GROUPS = {"PersistentVolumeClaim": "v1", "Service": "v1", "Job": "batch/v1", "Deployment": "apps/v1"}
POD = {"containers", "initContainers", "restartPolicy", "volumes"}
CONTAINER = {"name", "image", "command", "args", "env", "ports", "resources", "volumeMounts"}
PROBES = {"readinessProbe", "startupProbe", "livenessProbe"}
PROBE = {"httpGet", "periodSeconds", "failureThreshold", "timeoutSeconds", "initialDelaySeconds"}
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
QUANTITY = re.compile(r"[1-9][0-9]*(m|Ki|Mi|Gi|Ti)?")


def quantities(part: Any) -> Iterator[str]:
    """Yield what is asked for of memory, CPUs, cards and disk."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key in ("requests", "limits"):
                yield from value.values()
            elif key == "sizeLimit":
                yield value
            else:
                yield from quantities(value)
    elif isinstance(part, list):
        for value in part:
            yield from quantities(value)


def test_the_manifest_has_the_form_that_the_api_takes(manifest: dict[str, Any]) -> None:
    for kind, part in manifest.items():
        assert part["apiVersion"] == GROUPS[kind]
        assert NAME.fullmatch(part["metadata"]["name"])
        assert all(QUANTITY.fullmatch(value) for value in quantities(part)), kind
    assert len(list(quantities(manifest))) == 5
    for kind in ("Job", "Deployment"):
        spec = pod(manifest[kind])
        assert spec.keys() <= POD
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert NAME.fullmatch(container["name"])
            assert container.keys() <= CONTAINER | PROBES
            assert all(container[probe].keys() <= PROBE for probe in PROBES & container.keys())
            words = [*container.get("command", ()), *container.get("args", ())]
            assert all(isinstance(word, str) for word in words)
            assert all(isinstance(entry.get("value", ""), str) for entry in container.get("env", ()))


def test_every_script_is_one_that_a_shell_can_read(manifest: dict[str, Any]) -> None:
    scripts = [pod(manifest["Job"])["containers"][0]["args"][0]]
    scripts += [pod(manifest["Deployment"])["initContainers"][0]["command"][-1]]
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        # one word or none, on purpose
        bare = re.sub(r'"[^"]*"', "", script).replace("--to marlin $resume", "")
        assert "$" not in bare, "an expansion without quotes"


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
    assert f"ARG VLLM=v{TESTED[-1]}" in text
    assert [line.split()[0] for line in text.splitlines() if line and line[0] != "#"] == [
        "ARG",
        "FROM",
        "RUN",
    ]
