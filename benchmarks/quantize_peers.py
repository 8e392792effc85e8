"""GPTQ of a small model on a CPU beside GPTQModel and llm-compressor, each alone, in one run.

    python benchmarks/quantize_peers.py SRC --calibration TEXT --work FOLDER \\
        --gptqmodel PYTHON --llmcompressor PYTHON [--repeats 2] [--json FILE]

SRC is a model stored in float32, and all of them compute in it. Calibration: the first 8 windows of 512
tokens; 4 bit in groups of 64, symmetric, every linear of the decoder layers. GPTQModel without act-order and
without its group-aware order; llm-compressor with static act-order; ours with its defaults (GPTQ with the
shift), plain and rotated, and without the shift.

Every row is a process of its own, on as many cores as it has threads, one after the other; repeats go round
all rows, and the least of each column counts: by the clock, and of the processor, which other work on the
machine disturbs less. Quantizing is everything between loading the model and saving it; of ours that is also
the rotation and its equality gate. Peers live in environments of their own:

    python -m venv A && A/bin/pip install torch==2.13.0
    A/bin/pip install -r tests/engines/requirements-gptqmodel.txt transformers accelerate
    A/bin/pip install --no-deps gptqmodel==7.7.0
    python -m venv B && B/bin/pip install torch==2.13.0 && B/bin/pip install llmcompressor==0.14.0.1
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SAMPLES, SEQLEN, BITS, GROUP = 8, 512, 4, 64
PEERS = ("gptqmodel", "llmcompressor")


@dataclass(frozen=True)
class Row:
    """One line of the table. tool: ours or a peer; shift, rotate: of ours alone."""

    name: str
    tool: str
    threads: int = 1
    shift: bool = True
    rotate: str = "none"


ROWS = (
    Row("GPTQModel 7.7.0", "gptqmodel"),
    Row("llm-compressor 0.14.0.1", "llmcompressor"),
    Row("w4pack", "ours"),
    Row("w4pack, rotated", "ours", rotate="offline"),
    Row("w4pack, without the shift", "ours", shift=False),
    Row("w4pack, 2 threads", "ours", threads=2),
    Row("w4pack, rotated, 2 threads", "ours", threads=2, rotate="offline"),
)


class Watch:
    """Seconds by the clock and of the processor (user and system, all threads) of each part."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._parts = ["import"]
        self._since = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.monotonic(), used.ru_utime + used.ru_stime

    def turn(self, part: str) -> None:
        """End a part, and begin another one."""
        now, before = self._now(), self._parts[-1]
        for name, old, new in zip((before, f"{before}_cpu"), self._since, now, strict=True):
            self.found[name] = self.found.get(name, 0.0) + new - old
        self._parts[-1], self._since = part, now

    def around(self, owner: Any, name: str, part: str) -> None:
        """Book every call of a function under a part of its own, within the one that runs."""
        original: Callable[..., Any] = getattr(owner, name)

        def booked(*args: Any, **more: Any) -> Any:
            outer = self._parts[-1]
            self.turn(part)
            try:
                return original(*args, **more)
            finally:
                self.turn(outer)

        setattr(owner, name, booked)


# ---- one row, in a process of its own ----------------------------------------------------------------------


def calibration(src: str, text: str) -> list[list[int]]:
    """Return the windows of tokens."""
    from transformers import AutoTokenizer

    raw = Path(text).read_bytes().decode("utf-8")
    ids = AutoTokenizer.from_pretrained(src)(raw, add_special_tokens=False)["input_ids"]
    return [ids[i * SEQLEN : (i + 1) * SEQLEN] for i in range(SAMPLES)]


def run_gptqmodel(row: Row, given: argparse.Namespace, watch: Watch) -> None:
    """Load, quantize, save."""
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    settings = QuantizeConfig(
        bits=BITS, group_size=GROUP, sym=True, desc_act=False, act_group_aware=False, offload_to_disk=False
    )
    windows = calibration(given.src, given.calibration)
    batch = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in windows]
    watch.turn("load")
    model = GPTQModel.load(given.src, settings, device="cpu", dtype=torch.float32)
    watch.turn("quantize")
    model.quantize(batch, batch_size=given.batch)
    watch.turn("save")
    model.save(str(given.out))


def run_llmcompressor(row: Row, given: argparse.Namespace, watch: Watch) -> None:
    """Load, quantize, save."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoModelForCausalLM

    weights = {
        "num_bits": BITS,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "actorder": "static",
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    windows = calibration(given.src, given.calibration)
    data = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * SEQLEN] * SAMPLES})
    watch.turn("load")
    model = AutoModelForCausalLM.from_pretrained(given.src, dtype=torch.float32)
    watch.turn("quantize")
    oneshot(
        model=model,
        dataset=data,
        max_seq_length=SEQLEN,
        num_calibration_samples=SAMPLES,
        batch_size=given.batch,
        recipe=[GPTQModifier(config_groups=groups, ignore=["lm_head"])],
    )
    watch.turn("save")
    model.save_pretrained(str(given.out), save_compressed=True)


def run_ours(row: Row, given: argparse.Namespace, watch: Watch) -> None:
    """Convert; what reads or writes files, and building the model, is booked as loading and saving."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    from w4pack.convert import api
    from w4pack.convert.jobs.running import Running
    from w4pack.convert.modeljobs import layerfiles, prepared, quantized, quantizerun
    from w4pack.convert.planning.options import ConvertOptions
    from w4pack.convert.planning.quantize_options import QuantizeOptions
    from w4pack.convert.quantize.skeleton import Skeleton
    from w4pack.convert.rotate.rotated import Rotated

    watch.around(prepared, "prepare", "load")
    watch.around(quantizerun, "model_run", "load")
    watch.around(Skeleton, "fill", "load")
    watch.around(Rotated, "get", "quantize")
    for name in ("copy", "write", "finished"):
        watch.around(layerfiles.LayerFiles, name, "save")
    watch.around(quantizerun.QuantizeRun, "_journal", "save")
    watch.around(quantized, "write_rest", "save")
    asked = QuantizeOptions(
        method="gptq",
        gptaq=row.shift,
        bits=BITS,
        group_size=GROUP,
        calibration=given.calibration,
        samples=SAMPLES,
        seqlen=SEQLEN,
    )
    options = ConvertOptions(to="gptq", rotate=row.rotate, quantize=asked)
    watch.turn("quantize")
    api.convert(given.src, given.out, options=options, running=Running(threads=row.threads))


def work(row: Row, given: argparse.Namespace) -> None:
    """Run one row, and write its figures to the file that was named."""
    watch = Watch()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-row.threads :])
    import torch

    torch.set_num_threads(row.threads)
    {"gptqmodel": run_gptqmodel, "llmcompressor": run_llmcompressor, "ours": run_ours}[row.tool](
        row, given, watch
    )
    watch.turn("end")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path(given.result).write_text(json.dumps({**watch.found, "peak_mib": peak}))


# ---- all of them -------------------------------------------------------------------------------------------


def start(row: Row, given: argparse.Namespace) -> dict[str, Any]:
    """Run a row in its environment. Returns its figures, and the load of the machine before and after."""
    out, result = Path(given.work) / "out", Path(given.work) / "row.json"
    shutil.rmtree(out, ignore_errors=True)
    result.unlink(missing_ok=True)
    python = sys.executable if row.tool == "ours" else getattr(given, row.tool)
    count = str(row.threads)
    environment = {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "GPTQMODEL_CPU_WORKERS": "2",  # with the 1 that it takes on two cores its loader stops
    }
    arguments = [given.src, "--calibration", given.calibration, "--work", given.work, "--batch", given.batch]
    arguments += ["--row", row.name, "--out", str(out), "--result", str(result)]
    before = os.getloadavg()[0]
    with (Path(given.work) / "row.log").open("w") as log:
        done = subprocess.run(
            [python, str(Path(__file__).resolve()), *map(str, arguments)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    if done.returncode or not result.exists():
        raise SystemExit(f"{row.name} ended with {done.returncode}; see {given.work}/row.log")
    shutil.rmtree(out, ignore_errors=True)
    return {**json.loads(result.read_text()), "machine_load": [before, os.getloadavg()[0]]}


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the best run of every row as a table in Markdown; ratios are to the faster peer."""
    best = {name: min(runs, key=lambda r: float(r["quantize"])) for name, runs in found.items()}
    least = {name: min(float(r["quantize_cpu"]) for r in runs) for name, runs in found.items()}
    peers = [row.name for row in ROWS if row.tool in PEERS and row.name in best]
    floor = min((best[name]["quantize"] for name in peers), default=None)
    floor_cpu = min((least[name] for name in peers), default=None)
    lines = [
        "| | quantizing, s | to the faster peer | processor, s | to the faster peer | loading, s | saving, s "
        "| peak RSS, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, run in best.items():
        ratio = "" if floor is None else f"{run['quantize'] / floor:.2f}"
        ratio_cpu = "" if floor_cpu is None else f"{least[name] / floor_cpu:.2f}"
        lines.append(
            f"| {name} | {run['quantize']:.1f} | {ratio} | {least[name]:.1f} | {ratio_cpu} "
            f"| {run['load']:.1f} | {run['save']:.1f} "
            f"| {run['peak_mib']:.0f} |"
        )
    return "\n".join(lines)


def run(given: argparse.Namespace) -> None:
    """Go round all rows, and print what was found so far after each round."""
    rows = [r for r in ROWS if (not given.only or r.name in given.only)]
    rows = [r for r in rows if r.tool == "ours" or getattr(given, r.tool)]
    found: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(given.repeats):
        for row in rows:
            value = start(row, given)
            found.setdefault(row.name, []).append(value)
            line = {"row": row.name, "repeat": repeat, **asdict(row), **value}
            if given.json:
                with Path(given.json).open("a") as stream:
                    stream.write(json.dumps(line) + "\n")
            print(
                f"{row.name}: {value['quantize']:.1f} s, {value['quantize_cpu']:.1f} s of the processor",
                file=sys.stderr,
                flush=True,
            )
        print(table(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("src")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--gptqmodel", metavar="PYTHON", help="of an environment that has it")
    parser.add_argument("--llmcompressor", metavar="PYTHON", help="of an environment that has it")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1, help="windows that a peer runs at a time")
    parser.add_argument("--only", action="append", default=[], help="a row's name")
    parser.add_argument("--json", help="also append every run to this file, one line each")
    for name in ("--row", "--out", "--result"):  # of the processes that this one starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        work(next(row for row in ROWS if row.name == given.row), given)
    else:
        Path(given.work).mkdir(parents=True, exist_ok=True)
        run(given)


if __name__ == "__main__":
    main()
