"""What 4-bit activations and a 4-bit cache lose on a real model, rotated and not, in one table.

    python benchmarks/w4a4.py SRC --text TEST --calibration TEXT --work FOLDER [--seeds 0,1,2] [--only ROW]

Rows with weights in 4 bit convert SRC, read the artifact back from the disk and measure it as ``w4pack eval``
does: 40 windows of 512 tokens, activations and cache quantized in transformers' layers, in float32. Rows
with weights in 16 bit measure the rotated model itself. Calibration: 8 windows of 512 tokens; seed s takes
the 4,096 tokens from s * 4,096 on, and other signs. One artifact is measured at several bits of activations:
they are settings of it. Recovered: the share of the nats that the unrotated model loses. Results are kept in
FOLDER/results.jsonl, one line a figure; figures that are there are not made again. Intervals are 95 %, paired
over windows, seeds averaged.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
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
SOURCE, BASE = "16 bit", "not rotated, rtn channel, W4A4KV4"


@dataclass(frozen=True)
class Row:
    """One artifact: how it is made, and the (activation, cache) bits it is measured at.

    method  rtn, gptq, gptaq, or none: weights stay as they are
    bits    of activations and cache while it is calibrated
    """

    name: str
    rotate: str
    method: str
    group: int
    bits: tuple[int, int]
    measured: tuple[tuple[int, int], ...]

    def label(self, measured: tuple[int, int]) -> str:
        """Return the name of one figure."""
        weights = 16 if self.method == "none" else 4
        return f"{self.name}, W{weights}A{measured[0]}KV{measured[1]}"


FOUR = ((4, 4),)
ROWS = (
    Row("not rotated, rtn channel", "none", "rtn", -1, (4, 4), FOUR),
    Row("rotated, gptaq g64", "full", "gptaq", 64, (4, 4), ((4, 4), (8, 4), (16, 4))),
    Row("rotated", "full", "none", 0, (16, 4), ((16, 4), (4, 4))),
    Row("rotated, gptq g64", "full", "gptq", 64, (4, 4), ((4, 4), (8, 4))),
    Row("rotated, gptq channel", "full", "gptq", -1, (4, 4), FOUR),
    Row("rotated, gptaq channel", "full", "gptaq", -1, (4, 4), FOUR),
    Row("rotated, rtn channel", "full", "rtn", -1, (4, 4), FOUR),
    Row("rotated, gptaq g64 calibrated at 16 bit", "full", "gptaq", 64, (16, 16), ((4, 4), (8, 4))),
    Row("rotated, gptaq g64 calibrated at 8 bit", "full", "gptaq", 64, (8, 4), ((8, 4),)),
)


def options_of(row: Row, given: argparse.Namespace, seed: int) -> ConvertOptions:
    """Return how a row's artifact is made."""
    asked = QuantizeOptions(
        method="rtn" if row.method == "rtn" else "gptq",
        gptaq=row.method == "gptaq",
        group_size=row.group or -1,
        calibration=given.calibration,
        samples=SAMPLES,
        seqlen=SEQLEN,
        act_bits=row.bits[0],
        kv_bits=row.bits[1],
    )
    return ConvertOptions(rotate=row.rotate, seed=seed, quantize=asked)


def measure(path: str | Path, given: argparse.Namespace, bits: tuple[int, int] | None = None) -> list[float]:
    """Return the mean nats of each window."""
    act, kv = bits or (None, None)
    value = evaluate(
        path,
        given.text,
        windows=WINDOWS,
        seqlen=SEQLEN,
        act_bits=act,
        kv_bits=kv,
        workers=given.threads,
        device=given.device,
    )
    nats: list[float] = value["window_nats"]
    return nats


def unquantized(row: Row, given: argparse.Namespace, seed: int) -> dict[tuple[int, int], list[float]]:
    """Measure the rotated 16-bit model with what runs online, clip ratios found as for an artifact."""
    import torch

    from w4pack.convert.modeljobs.measuring import measure, settled
    from w4pack.convert.modeljobs.online import runtime_of
    from w4pack.convert.modeljobs.prepared import prepare, tokenizer_of
    from w4pack.convert.opening import Where, opened
    from w4pack.convert.planning.quantizing import linears_of
    from w4pack.convert.quantize import calibration, evaluation
    from w4pack.convert.quantized import threads
    from w4pack.convert.source.detect import read_source
    from w4pack.convert.source.reading import DetectOptions

    running = Running(threads=given.threads, device=given.device)
    with threads(running.workers), opened(given.src, Where(), running.reporter) as (checkpoint, _):
        source = read_source(checkpoint, DetectOptions())
        prepared = prepare(source, options_of(row, given, seed), None, running)
        prepared = settled(prepared, measure(prepared, running.reporter, lambda: None))
        config = {**source.config, **prepared.model.config_changes}
        tokens, _ = calibration.first_tokens(given.text, tokenizer_of(source), WINDOWS * SEQLEN)
        cut = tokens[: WINDOWS * SEQLEN].view(WINDOWS, SEQLEN)
        found = {}
        for bits in row.measured:
            packed = linears_of(prepared.model.infos)
            between = runtime_of(
                config,
                prepared.model.infos,
                prepared.model.online,
                packed,
                act_bits=bits[0],
                kv_bits=bits[1],
                read=prepared.provider.get,
            )
            stream = evaluation.through(
                config,
                prepared.provider,
                cut,
                prepared.device,
                torch.float32,
                per_batch=8,
                between=between,
            )
            found[bits] = evaluation.compare(stream, None)[0].nll
        return found


def clips_of(folder: Path) -> dict[str, Any]:
    """Return the 4-bit clip ratios that an artifact records."""
    online = json.loads((folder / "config.json").read_text())["quantization_config"]["online"]
    found = {r["site"]: r["clip"]["4"] for r in online if r["kind"] == "act_quant"}
    kv = [r["clip"] for r in online if r["kind"] == "kv_quant"]
    return {**found, **({"k": kv[0]["k"]["4"], "v": kv[0]["v"]["4"]} if kv else {})}


def figures(
    row: Row, given: argparse.Namespace, seed: int, out: Path
) -> dict[tuple[int, int], dict[str, Any]]:
    """Make a row's artifact and measure it: bits -> nats, bits per weight, seconds, clip ratios."""
    started = time.monotonic()
    if row.method == "none":
        nats = unquantized(row, given, seed)
        return {bits: {"bits": 16.0, "nats": n, "seconds": 0.0} for bits, n in nats.items()}
    shutil.rmtree(out, ignore_errors=True)
    running = Running(threads=given.threads, device=given.device)
    report = api.convert(given.src, out, options=options_of(row, given, seed), running=running)
    more = {
        "bits": (report.plan.quantization or {})["bits_per_weight"],
        "seconds": time.monotonic() - started,
        "clips": clips_of(out),
    }
    found = {bits: {**more, "nats": measure(out, given, bits)} for bits in row.measured}
    shutil.rmtree(out, ignore_errors=True)
    return found


def run(given: argparse.Namespace, kept: dict[str, Any], file: Path) -> None:
    """Make the figures that are not there yet."""

    def keep(key: str, value: dict[str, Any]) -> None:
        kept[key] = value
        with file.open("a") as stream:
            stream.write(json.dumps({"row": key, **value}) + "\n")
        print(key, f"{mean(value['nats']):.4f}", value.get("clips", ""), file=sys.stderr, flush=True)

    if SOURCE not in kept and (not given.only or SOURCE in given.only):
        keep(SOURCE, {"bits": 16.0, "nats": measure(given.src, given), "seconds": 0.0})
    for seed in given.seeds:
        for row in ROWS:
            wanted = [f"{row.label(bits)} seed {seed}" for bits in row.measured]
            skipped = (given.only and row.name not in given.only) or (seed and row.label((4, 4)) == BASE)
            if skipped or all(key in kept for key in wanted):
                continue
            for bits, value in figures(
                row, given, seed, Path(given.work) / f"out-{row.method}-{seed}"
            ).items():
                keep(f"{row.label(bits)} seed {seed}", value)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def table(kept: dict[str, Any]) -> str:
    """Return the results as a table in Markdown."""
    from w4pack.convert.quantize.evaluation import interval

    base = kept[SOURCE]["nats"]
    without = kept.get(f"{BASE} seed 0")
    whole = None if without is None else mean(without["nats"]) - mean(base)
    lines = [
        "| model | bits a weight | seeds | perplexity (range) | nats lost, 95 % | recovered |",
        "|---|---|---|---|---|---|",
        f"| source, 16 bit | 16 | | {math.exp(mean(base)):.3f} | | |",
    ]
    for label in [row.label(bits) for row in ROWS for bits in row.measured]:
        found = [v for k, v in kept.items() if k.rpartition(" seed ")[0] == label]
        if not found:
            continue
        perplexities = [math.exp(mean(v["nats"])) for v in found]
        paired = [mean([v["nats"][i] for v in found]) - base[i] for i in range(len(base))]
        lost, half = interval(paired)
        spread = f" ({min(perplexities):.2f} to {max(perplexities):.2f})" if len(found) > 1 else ""
        share = "" if whole is None or label == BASE else f"{1 - lost / whole:.1%}"
        lines.append(
            f"| {label} | {found[0]['bits']:.2f} | {len(found)} | {mean(perplexities):.2f}{spread} "
            f"| {lost:.4f} +- {half:.4f} | {share} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("src")
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--seeds", type=lambda s: [int(i) for i in s.split(",")], default=[0, 1, 2])
    parser.add_argument(
        "--only", action="append", default=[], help="a row's name: `16 bit`, `rotated, gptaq g64`"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    need(given.device)
    folder = Path(given.work)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    kept = {line.pop("row"): line for line in lines}
    run(given, kept, file)
    if SOURCE in kept:
        print(table(kept))


if __name__ == "__main__":
    main()
