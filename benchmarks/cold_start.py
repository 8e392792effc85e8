"""From files to the first product: reading, to the device, repack, first product; the usual way and ours.

    python benchmarks/cold_start.py [--sizes 8B,70B] [--layers 8] [--repeats 3] [--where FOLDER]
    (--device cpu --sizes tiny: to try the script)

For each size, decoder layers of that model's shapes are written once as GPTQ words and as an artifact (random
words; the same bytes on disk). Then each way in a process of its own with a warm page cache, in turns, the
first turn not counted. *usual*: safetensors' ``load_file`` to main memory, ``.to(device)``, every layer
repacked there by our own kernel (the engines' costs about the same: docs/benchmarks.md). *w4pack*: the
loader of ``--load-format w4pack``, which reads straight to the device; there is nothing to repack. The model
has a few layers of the real one, so times scale with ``--layers``; memory is what one such file needs at its
peak: of the process above an empty one (pages of a mapped file count, though they can be given up), and on
the device.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cards import need_in_children

SHAPES = {  # N x K of one decoder layer
    "8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "70B": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "tiny": ((384, 256), (256, 256), (1024, 256), (256, 512)),
}
GROUP = 128
STEPS = ("read", "to device", "repack", "first product")


def write(place: Path, size: str, layers: int) -> None:
    """Write both files of a size."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    gptq, artifact = {}, {}
    for layer in range(layers):
        for number, (n, k) in enumerate(SHAPES[size]):
            words = rng.integers(-(2**31), 2**31, n * k // 8, dtype=np.int32)
            scales = np.full((k // GROUP, n), 0.01, np.float16)
            name = f"layers.{layer}.{number}"
            gptq |= {f"{name}.qweight": words.reshape(k // 8, n), f"{name}.scales": scales}
            artifact |= {f"{name}.weight": words.reshape(k // 16, 2 * n), f"{name}.weight_scale": scales}
    save_file(gptq, place / f"{size}.gptq.safetensors")
    save_file(artifact, place / f"{size}.w4pack.safetensors")


def child(way: str, file: str, device: str) -> dict[str, Any]:
    """Go one way; returns seconds of each step and peaks in bytes."""
    import torch
    from safetensors.torch import load_file

    from w4pack.kernels import ops, transfer

    if device == "cuda":
        ops.prepare(0)
        torch.zeros(1, device=device)
    seconds = dict.fromkeys(STEPS, 0.0)
    before, last = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()

    def done(step: str) -> None:
        nonlocal last
        if device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds[step] += now - last
        last = now

    if way == "w4pack":
        tensors = transfer.load_file(file, device)
        done("read")
        weights = {n: t for n, t in tensors.items() if n.endswith(".weight")}
        scales = {n.removesuffix("_scale"): t for n, t in tensors.items() if n.endswith("_scale")}
    else:
        held = load_file(file)
        for tensor in held.values():  # the file is mapped: only now it is read
            tensor.view(torch.uint8)[..., ::4096].sum()
        done("read")
        tensors = {name: tensor.to(device) for name, tensor in held.items()}
        done("to device")
        weights, scales = {}, {}
        for name in [n for n in tensors if n.endswith(".qweight")]:
            module = name.removesuffix(".qweight")
            weights[f"{module}.weight"] = ops.repack(tensors.pop(name), None, 4)
            scales[f"{module}.weight"] = tensors.pop(f"{module}.scales")
        done("repack")
    name, weight = next(iter(weights.items()))
    x = torch.ones(1, weight.shape[0] * 16, dtype=torch.float16, device=device)
    ops.gemm(x, weight, scales[name], None, None, 4, GROUP)
    done("first product")
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    host = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"seconds": seconds, "host": host, "device": peak}


def measured(way: str, file: Path, device: str) -> dict[str, Any]:
    """Run a child and read its one line."""
    command = [sys.executable, __file__, "--child", way, "--file", str(file), "--device", device]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(size: str, way: str, runs: list[dict[str, Any]]) -> str:
    """Return one line: medians of the steps, the whole, peaks."""
    steps = [statistics.median(run["seconds"][step] for run in runs) for step in STEPS]
    whole = statistics.median(sum(run["seconds"].values()) for run in runs)
    host, device = (max(run[where] for run in runs) / 2**30 for where in ("host", "device"))
    times = " ".join(f"{value:13.3f}" for value in (*steps, whole))
    return f"{size:6} {way:8} {times} {host:10.2f} {device:10.2f}"


def main() -> None:
    """Write, run both ways in turns, print one table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--sizes", default="8B,70B")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--device", default="cuda")
    options.add_argument("--where", type=Path)
    options.add_argument("--child", choices=("usual", "w4pack"))
    options.add_argument("--file")
    args = options.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.file, args.device)))
        return
    need_in_children(args.device)
    print(f"{'size':6} {'way':8} " + " ".join(f"{s + ' s':>13}" for s in (*STEPS, "whole")), end=" ")
    print(f"{'host GiB':>10} {'dev. GiB':>10}", flush=True)
    with tempfile.TemporaryDirectory(dir=args.where) as place:
        for size in args.sizes.split(","):
            write(Path(place), size, args.layers)
            runs: dict[str, list[dict[str, Any]]] = {"usual": [], "w4pack": []}
            for turn in range(args.repeats + 1):
                for way, found in runs.items():
                    kind = "gptq" if way == "usual" else "w4pack"
                    result = measured(way, Path(place) / f"{size}.{kind}.safetensors", args.device)
                    found += [result] * (turn > 0)
            for way, found in runs.items():
                print(row(size, way, found), flush=True)


if __name__ == "__main__":
    main()
