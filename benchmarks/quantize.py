"""What quantization loses on a real model: perplexity of every method, plain and rotated, in one table.

    python benchmarks/quantize.py SRC --text TEST --calibration TEXT --work FOLDER [--seeds 0,1,2]

Each row converts SRC, reads the output back from the disk and measures it by ``w4pack eval``'s protocol: 40
windows of 512 tokens. Calibration: 8 windows of 512 tokens; seed s takes the 4,096 tokens from s * 4,096 on,
and other signs. Results are kept in FOLDER/results.jsonl, one line a row; rows that are there are not run
again, so a run that was stopped goes on. Intervals are 95 %, paired over windows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cards import need

from w4pack.convert import api
from w4pack.convert.jobs.running import Running
from w4pack.convert.measure import evaluate
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.quantize_options import QuantizeOptions

SAMPLES, SEQLEN, WINDOWS = 8, 512, 40
METHODS = {"rtn": ("rtn", False), "gptq": ("gptq", False), "gptaq": ("gptq", True)}
GROUPS = {"g64": 64, "channel": -1}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    method: str
    rotate: str
    group: str
    seed: int

    @property
    def name(self) -> str:
        rotated = "" if self.rotate == "none" else "rotated "
        return f"{rotated}{self.method} {self.group}"

    @property
    def key(self) -> str:
        return f"{self.name} seed {self.seed}"


def rows(seeds: Iterable[int], only: list[str]) -> list[Row]:
    """All rows; round to nearest without rotation has no seed."""
    found = [
        Row(method, rotate, group, seed)
        for seed in seeds
        for group in GROUPS
        for method in METHODS
        for rotate in ("none", "offline")
        if seed == 0 or method != "rtn" or rotate != "none"
    ]
    return [r for r in found if not only or r.name in only]


def convert(row: Row, given: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Convert, and return bits per weight and seconds."""
    method, shift = METHODS[row.method]
    asked = QuantizeOptions(
        method=method,
        gptaq=shift,
        group_size=GROUPS[row.group],
        calibration=given.calibration,
        samples=SAMPLES,
        seqlen=SEQLEN,
    )
    options = ConvertOptions(rotate=row.rotate, seed=row.seed, quantize=asked)
    started, used = time.monotonic(), time.process_time()
    report = api.convert(
        given.src, out, options=options, running=Running(threads=given.threads, device=given.device)
    )
    bits = (report.plan.quantization or {})["bits_per_weight"]
    return {"bits": bits, "seconds": time.monotonic() - started, "cpu": time.process_time() - used}


def measure(path: str | Path, given: argparse.Namespace) -> list[float]:
    """Return the mean nats of each window."""
    value = evaluate(
        path, given.text, windows=WINDOWS, seqlen=SEQLEN, workers=given.threads, device=given.device
    )
    nats: list[float] = value["window_nats"]
    return nats


def run(given: argparse.Namespace, kept: dict[str, Any]) -> None:
    """Do the rows that are not there yet."""
    work = Path(given.work)
    file = work / "results.jsonl"

    def keep(key: str, value: dict[str, Any]) -> None:
        kept[key] = value
        with file.open("a") as stream:
            stream.write(json.dumps({"row": key, **value}) + "\n")

    if "source" not in kept:
        keep("source", {"bits": 16.0, "nats": measure(given.src, given), "seconds": 0.0, "cpu": 0.0})
    for row in rows(given.seeds, given.only):
        if row.key in kept:
            continue
        out = work / "out"
        shutil.rmtree(out, ignore_errors=True)
        value = convert(row, given, out)
        keep(row.key, {**value, "nats": measure(out, given)})
        print(row.key, f"{perplexity(kept[row.key]['nats']):.3f}", file=sys.stderr, flush=True)
        shutil.rmtree(out, ignore_errors=True)


def perplexity(nats: list[float]) -> float:
    import math

    return math.exp(sum(nats) / len(nats))


def table(kept: dict[str, Any], given: argparse.Namespace) -> str:
    """Return the results as a table in Markdown."""
    from w4pack.convert.quantize.evaluation import interval

    base = kept["source"]["nats"]
    lines = [
        "| weights | bits | seeds | perplexity (mean, range) | nats lost, 95 % | seconds |",
        "|---|---|---|---|---|---|",
        f"| source, 16 bit | 16 | | {perplexity(base):.3f} | | |",
    ]
    names = dict.fromkeys(r.name for r in rows(given.seeds, []))
    for name in names:
        found = [v for k, v in kept.items() if k.startswith(f"{name} seed")]
        if not found:
            continue
        values = [perplexity(v["nats"]) for v in found]
        paired = [
            sum(v["nats"][i] for v in found) / len(found) - base[i] for i in range(len(base))
        ]  # seeds averaged window by window
        mean, half = interval(paired)
        spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
        lines.append(
            f"| {name} | {found[0]['bits']:.2f} | {len(found)} | {sum(values) / len(values):.2f}{spread} "
            f"| {mean:.4f} +- {half:.4f} | {sum(v['seconds'] for v in found) / len(found):.0f} |"
        )
    lines += ["", *_pairs(kept, interval)]
    return "\n".join(lines)


def _pairs(kept: dict[str, Any], interval: Any) -> list[str]:
    """Say what rotation and the shift gain, each against the same row without."""
    found = []
    for group in GROUPS:
        for one, other in (("rotated gptq", "gptq"), ("gptaq", "gptq"), ("rotated gptaq", "gptaq")):
            seeds = [
                s
                for s in range(9)
                if f"{one} {group} seed {s}" in kept and f"{other} {group} seed {s}" in kept
            ]
            if not seeds:
                continue
            a, b = ([kept[f"{name} {group} seed {s}"]["nats"] for s in seeds] for name in (one, other))
            paired = [
                sum(x[i] - y[i] for x, y in zip(a, b, strict=True)) / len(seeds) for i in range(len(a[0]))
            ]
            mean, half = interval(paired)
            found.append(
                f"- {one} against {other}, {group}: {mean:+.4f} +- {half:.4f} nats, {len(seeds)} seeds"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("src")
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--seeds", type=lambda s: [int(i) for i in s.split(",")], default=[0, 1, 2])
    parser.add_argument("--only", action="append", default=[], help="a row's name, e.g. `rotated gptaq g64`")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    given = parser.parse_args()
    need(given.device)
    folder = Path(given.work)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    kept = {line.pop("row"): line for line in lines}
    run(given, kept)
    print(table(kept, given))


if __name__ == "__main__":
    main()
