"""The OpenAI server of vLLM on an artifact that vLLM refuses in its source form: completions, and a stream.

    .venv-vllm-plugin/bin/python tests/engines/serve.py [--hub] ARTIFACT

``--hub``: the engine is given the name of a repository, which a Hub on loopback has, and an empty cache.

Prints a list in JSON for each check (ok or failed, claim, what was seen) and exits 1 at the first that fails.
The server is a process of its own, started as a user starts it; what it answers is compared with what the
engine says of the same prompt without a stream.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

LIMIT_S = 900  # on a busy machine; a free one needs half a minute
PROMPT = "She was a woman of mean understanding"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

REPOSITORY = "ORG/ARTIFACT"
HUB = Path(__file__).resolve().parents[1] / "hub" / "server.py"


def hub_module() -> ModuleType:
    """Return the Hub of tests/hub, under a name that is not this folder's ``server``."""
    spec = spec_from_file_location("loopback_hub", HUB)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def on_a_hub(folder: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """Yield a Hub that has the artifact, and the environment of a process that asks it."""
    with hub_module().running() as hub, tempfile.TemporaryDirectory() as home:
        hub.add(REPOSITORY, {path.name: path.read_bytes() for path in folder.iterdir()})
        names = {"HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        yield hub, names


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def asked(url: str, body: dict[str, Any] | None = None) -> bytes:
    """Send a request; returns the whole answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: bytes = answer.read()
        return found


def wait(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait for the probe that a pod would ask."""
    start = time.monotonic()
    while time.monotonic() - start < LIMIT_S:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            asked(f"{url}/health")
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"not ready within {LIMIT_S} s")


def chunks(answer: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream."""
    for line in answer.decode().splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def check(claim: str, holds: bool, found: object) -> None:
    """Print a claim; exit if it does not hold."""
    print(json.dumps(["ok" if holds else "failed", claim, str(found)]), flush=True)
    if not holds:
        raise SystemExit(1)


def questions(url: str, name: str) -> None:
    """Ask for a completion twice, whole and as a stream."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    whole = json.loads(asked(f"{url}/v1/completions", body))["choices"][0]
    tokens = whole["logprobs"]["tokens"]
    check("a completion has as many tokens as asked for", len(tokens) == 8, tokens)
    finite = all(-1000 < value <= 0 for value in whole["logprobs"]["token_logprobs"])
    check("its log-probabilities are finite", finite, whole["logprobs"]["token_logprobs"][:2])
    events = list(chunks(asked(f"{url}/v1/completions", {**body, "stream": True})))
    text = "".join(event["choices"][0]["text"] for event in events)
    check("the stream comes in pieces", len(events) > 1, len(events))
    check("and says the same", text == whole["text"], ascii(text))


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server; one that is still starting may not hear the first signal."""
    server.terminate()
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        server.kill()


def serve(model: str, env: dict[str, str]) -> None:
    """Start, ask, stop."""
    port = free_port()
    # `vllm serve` of vllm-cpu stops: it asks for the version of a package `vllm`. It would start this.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    options = ["--served-model-name", "artifact", "--port", str(port), "--max-model-len", "64"]
    # From its own folder: an old `*.egg-info` of a checkout one stands in would hide the installed plugin.
    place = Path(__file__).parent
    how = {"env": {**os.environ, **SETTINGS, **env}, "cwd": place, "stdout": sys.stderr}
    with subprocess.Popen([*command, *options], **how) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            wait(url, server)
            check(
                f"the server is ready, with {'a repository' if env else 'a folder'}", True, "/health answers"
            )
            questions(url, "artifact")
        finally:
            stop(server)


def main() -> int:
    """Serve a folder, or a repository."""
    *options, folder = sys.argv[1:]
    artifact = Path(folder).resolve()
    if "--hub" not in options:
        serve(str(artifact), {})
        return 0
    with on_a_hub(artifact) as (hub, env):
        serve(REPOSITORY, env)
        sent = sum(call.method == "GET" and "model.safetensors" in call.path for call in hub.calls)
        check("the weights came from the Hub", sent > 0, f"{len(hub.calls)} requests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
