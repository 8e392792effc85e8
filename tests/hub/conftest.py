"""A Hub on loopback for every test of this folder, and the real client pointed at it."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


def _load_server() -> ModuleType:
    """Load the neighbour by path: in importlib mode test folders are not on the import path."""
    spec = importlib.util.spec_from_file_location("w4pack_fake_hub", HERE / "server.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fake = _load_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.hub)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A running server, the client's endpoint, token and caches set to it, in this process."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    with fake.running() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", fake.TOKEN)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        _http.close_session()
        yield server
        _http.close_session()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No waiting: sleeps of the client and of ours are noted, not slept."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    return slept


def child(hub: Any, code: str, home: Path, *args: str, env: Mapping[str, str] | None = None) -> Any:
    """Run Python code in a process of its own whose environment points the client at ``hub``."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")}
    there = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HOME": str(home), "HF_TOKEN": fake.TOKEN}
    extra = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.Popen(
        command,
        env={**kept, **there, **extra, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def run_child(hub: Any, tmp_path: Path) -> Any:
    """Start ``child`` against the running server."""

    def start(code: str, *args: str, env: Mapping[str, str] | None = None) -> Any:
        return child(hub, code, tmp_path / "home", *args, env=env)

    return start
