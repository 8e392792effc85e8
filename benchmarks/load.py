"""Loading to a card from a warm page cache, beside ``safetensors.torch.load_file(device="cuda")`` in one run.

Makes a model-like set of files of random bytes (packed words, scales, norms, an embedding), reads it once,
then loads it in turns: the library, ours with 1, 2, 4 and 8 threads, tensors as they are and with q/k/v and
gate/up fused; then one rank's slices. Each figure is the median of the interleaved repeats; the first
repeat is not counted, but printed, because it pays for page-locked memory. What is loaded is compared with
the files once.

    python benchmarks/load.py [--gb 4] [--where FOLDER] [--threads 1,2,4,8] [--tp 8] [--repeats 5]
"""

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from cards import need
from safetensors.torch import load_file

from w4pack.convert.files.shards import index_json, new_tensor, plan_shards
from w4pack.kernels import linears, transfer
from w4pack.kernels.artifact import Artifact, open_artifact
from w4pack.kernels.chunks import GAP
from w4pack.kernels.linears import Cut
from w4pack.kernels.placement import Plan, Target, make_plan, rest, take
from w4pack.kernels.spec import LinearSpec

HIDDEN, INTER, KV, VOCAB = 8192, 28672, 1024, 32000  # a 70B model's layer
SHARD = 2_000_000_000
FUSED = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
EMBEDDING = "model.embed_tokens.weight"
NORMS = ("input_layernorm", "post_attention_layernorm")
QUANT = {
    "quant_method": "w4pack", "artifact_version": 1, "layout": "marlin-16x64", "bits": 4, "group_size": 128,
    "sym": True, "act_order": False, "modules_to_not_convert": [], "modules": {}, "online": [],
    "producer": {"name": "w4pack", "version": "benchmark"},
}  # fmt: skip
SIZES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTER),
    "mlp.up_proj": (HIDDEN, INTER),
    "mlp.down_proj": (INTER, HIDDEN),
}


def make_files(folder: Path, nbytes: float) -> None:
    """Write whole layers, about ``nbytes``: config, index, files of random bytes."""
    tensors = [new_tensor(EMBEDDING, "F16", (VOCAB, HIDDEN))]
    layer_bytes = sum(k * n // 2 * (1 + 4 / 128) for k, n in SIZES.values())
    for layer in range(max(1, round((nbytes - VOCAB * HIDDEN * 2) / layer_bytes))):
        base = f"model.layers.{layer}"
        for name, (k, n) in SIZES.items():
            shapes = LinearSpec(k, n).shapes()
            tensors.append(new_tensor(f"{base}.{name}.weight", "I32", shapes["weight"]))
            tensors.append(new_tensor(f"{base}.{name}.weight_scale", "F16", shapes["weight_scale"]))
        tensors += [new_tensor(f"{base}.{norm}.weight", "F16", (HIDDEN,)) for norm in NORMS]
    shards = plan_shards(tensors, SHARD)
    noise = np.random.default_rng(0).bytes(64 << 20)
    for shard in shards:
        with (folder / shard.name).open("wb") as file:
            file.write(shard.header)
            left, turn = shard.size - len(shard.header), 0
            while left:
                start = 4096 * turn * 7919 % len(noise)  # another part of the noise each time
                part = noise[start : start + left]
                file.write(part)
                left, turn = left - len(part), turn + 1
            os.fsync(file.fileno())  # reads shall not meet the writing back
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_bytes(index_json(shards))
    (folder / "config.json").write_text(json.dumps({"quantization_config": QUANT}))


def fused_targets(artifact: Artifact, cut: tuple[int, int] | None = None) -> dict[str, Target]:
    """Return targets of all tensors with q/k/v and gate/up fused; with ``cut``, those of one rank."""
    out = Cut("out", *cut) if cut else None
    into = Cut("in", *cut) if cut else None
    targets: dict[str, Target] = {}
    for base in dict.fromkeys(".".join(name.split(".")[:3]) for name in artifact.specs):
        for name, parts in FUSED.items():
            block = name.partition(".")[0]
            modules = [f"{base}.{block}.{part}_proj" for part in parts]
            targets |= linears.named(f"{base}.{name}", linears.side_by_side(artifact, modules, out))
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            targets |= linears.named(f"{base}.{name}", linears.alone(artifact, f"{base}.{name}", into))
    if cut:
        rows = VOCAB // cut[1]
        targets[EMBEDDING] = take(artifact.tensors[EMBEDDING], {0: (cut[0] * rows, (cut[0] + 1) * rows)})
    return targets | linears.others(artifact, artifact.specs, targets)


def timed(load: Callable[[], object]) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    start = time.perf_counter()
    kept = load()
    torch.cuda.synchronize()
    taken = time.perf_counter() - start
    del kept
    return taken


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


def check(artifact: Artifact) -> str:
    """Compare every loaded tensor with the library's, byte for byte, whole and fused."""
    wanted = library(artifact)
    whole = transfer.load_tensors(artifact, rest(artifact.tensors, ()), "cuda")
    bad = [name for name, tensor in wanted.items() if not same(whole[name], tensor)]
    del whole
    fused = transfer.load_tensors(artifact, fused_targets(artifact), "cuda")
    for key, tensor in fused.items():
        base, _, suffix = key.rpartition(".")
        parts = next((p for name, p in FUSED.items() if base.endswith(name)), None)
        if parts is None:
            bad += [] if same(tensor, wanted[key]) else [key]
            continue
        block = base.rpartition(".")[0]
        joined = torch.cat([wanted[f"{block}.{part}_proj.{suffix}"] for part in parts], 1)
        bad += [] if same(tensor, joined) else [key]
    return (
        f"BYTES DIFFER: {bad[:3]}" if bad else f"all bytes equal ({len(wanted)} tensors, {len(fused)} fused)"
    )


def library(artifact: Artifact) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path, _ in artifact.files.values():
        tensors |= load_file(path, device="cuda")
    return tensors


def interleaved(loads: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in loads}
    for _ in range(repeats + 1):
        for name, load in loads.items():
            times[name].append(timed(load))
    return times


def report(times: dict[str, list[float]], sizes: dict[str, tuple[int, int]]) -> None:
    base = statistics.median(times["safetensors load_file"][1:])
    print(f"{'':34} {'median':>8} {'first':>8} {'GB/s':>7} {'ratio':>7}")
    for name, all_times in times.items():
        needed, read = sizes[name]
        median = statistics.median(all_times[1:])
        more = f"  needs {needed / 1e9:.3f} GB, reads {read / 1e9:.3f} GB" if needed != read else ""
        line = f"{name:34} {median:7.3f}s {all_times[0]:7.3f}s {needed / median / 1e9:7.2f}"
        print(f"{line} {base / median:6.2f}x{more}", flush=True)


def run(artifact: Artifact, threads: list[int], tp: int, repeats: int) -> None:
    whole, fused = rest(artifact.tensors, ()), fused_targets(artifact)
    total = sum(info.nbytes for info in artifact.tensors.values())
    loads: dict[str, Callable[[], object]] = {"safetensors load_file": lambda: library(artifact)}
    sizes = {"safetensors load_file": (total, total)}

    def add(name: str, plan: Plan, count: int) -> None:
        loads[name] = lambda: transfer.execute(plan, artifact.files, "cuda", threads=count)
        sizes[name] = plan.bytes_needed, plan.bytes_read

    for count in threads:
        add(f"whole, {count} threads", make_plan(whole), count)
        add(f"fused, {count} threads", make_plan(fused), count)
    # With the plan made anew each time, as a real load does.
    loads["fused, plan included"] = lambda: transfer.load_tensors(artifact, fused_targets(artifact), "cuda")
    sizes["fused, plan included"] = total, total
    rank = fused_targets(artifact, (tp - 1, tp))
    for gap, told in (
        (GAP, f"gaps over {GAP >> 10} KiB skipped"),
        (1 << 40, "bands read"),
        (0, "gaps skipped"),
    ):
        add(f"TP {tp} rank, {told}", make_plan(rank, gap=gap), max(threads))
    report(interleaved(loads, repeats), sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--where", type=Path, default=None, help="folder for the files (default: temporary)")
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    need()
    folder = Path(tempfile.mkdtemp(prefix="w4pack-load-", dir=args.where))
    try:
        make_files(folder, args.gb * 1e9)
        artifact = open_artifact(folder)
        total = sum(info.nbytes for info in artifact.tensors.values())
        cores = len(os.sched_getaffinity(0))
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {platform.machine()}, {cores} cores"
        )
        counts = f"{len(artifact.tensors)} tensors, {len(artifact.files)} files"
        print(f"{total / 1e9:.2f} GB, {counts}, warm page cache")
        print(check(artifact), flush=True)
        run(artifact, [int(n) for n in args.threads.split(",")], args.tp, args.repeats)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
