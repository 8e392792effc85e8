"""Runs one engine on many folders. The engine is imported once; under vLLM each folder gets a forked
process of its own (one of its engines leaves a process unfit for the next), the others take turns in one
process.

    python -m server --engine vllm < cases.json > results.jsonl

A case is ``{"id", "folder", "tokens", "vocabulary", "dtype", "ranks", "loader"}``. A result adds either
``logprobs`` (one row of the whole vocabulary per position: position t holds the distribution of token t + 1),
with what the engine reported about keys, or ``error``: what the innermost exception says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

Runner = Callable[[dict[str, Any]], dict[str, Any]]
LIMIT_S = 600
RUNNERS = {
    "vllm": "run_vllm",
    "stock": "run_vllm",
    "plugin": "run_plugin",
    "older": "run_plugin",
    "hf": "run_hf",
    "dense": "run_dense",
}
FORKED = ("vllm", "stock", "plugin", "older")
RUNNER = "W4PACK_TEST_RUNNER"
if (
    RUNNER in os.environ
):  # an engine's worker: it has imported this file anew, and needs what the runner changes
    import_module(os.environ[RUNNER])


def attempt(run: Runner, case: dict[str, Any], out: Path) -> None:
    """Run one case in this process and write its result."""
    try:
        result = run(case)
    except BaseException as err:  # an engine may also raise SystemExit
        text = "".join(traceback.format_exception(err))
        result = {"error": cause(err), "trace": text[-6000:]}
    out.write_text(json.dumps(result))


def cause(err: BaseException) -> str:
    """Return what the innermost exception says, on one line; of ours it is what the user is told."""
    while err.__cause__ is not None and not type(err).__module__.startswith("w4pack."):
        err = err.__cause__
    return f"{type(err).__name__}: {' '.join(str(err).split())}"[:400]


def forked(run: Runner, case: dict[str, Any], out: Path, log: Path) -> None:
    """Run a case in a child whose output goes to a log file."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        to_log(log)
        with contextlib.suppress(BaseException):
            attempt(run, case, out)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not out.exists():
        out.write_text(json.dumps({"error": f"the process ended with status {status}"}))


def to_log(log: Path) -> None:
    """Send what the engine prints to a file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def too_long(*_: object) -> None:
    """End a case that hangs."""
    raise TimeoutError(f"no answer within {LIMIT_S} s")


def main() -> None:
    """Read cases, print one result a line."""
    options = argparse.ArgumentParser()
    options.add_argument("--engine", choices=tuple(RUNNERS), required=True)
    options.add_argument("--logs", type=Path, required=True)
    args = options.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    results = os.fdopen(os.dup(1), "w")
    cases = json.load(sys.stdin)
    os.environ[RUNNER] = RUNNERS[args.engine]
    run: Runner = import_module(RUNNERS[args.engine]).run
    signal.signal(signal.SIGALRM, too_long)
    for case in cases:
        log = args.logs / f"{case['id'].replace('/', '_')}.{args.engine}.log"
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "result.json"
            if args.engine in FORKED:
                forked(run, case, out, log)
            else:
                to_log(log)
                signal.alarm(LIMIT_S)
                attempt(run, case, out)
                signal.alarm(0)
            print(json.dumps({"id": case["id"], **json.loads(out.read_text())}), file=results, flush=True)


if __name__ == "__main__":
    main()
