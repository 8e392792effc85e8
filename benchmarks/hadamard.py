"""Transform and quantize against a copy of as many bytes, in one run, on buffers beyond the L2 cache.

    python benchmarks/hadamard.py [--sites none,silu,norm,heads] [--m 2048,8192] [--n 4096,...] [--bits 8]

    none    x -> Hadamard -> codes                             3 bytes a value (int8)
    silu    silu(gate) * up -> Hadamard -> codes               5
    norm    norm(x) * gain -> codes, no transform              3
    heads   x -> Hadamard across heads of 128 -> codes         3

Columns: microseconds, the rate, its share of the largest copy's rate (read and write counted, as torch copies
it), and its share of the rate of a copy of as many bytes.
"""

import argparse
import json
from pathlib import Path

import torch
from cards import need

from w4pack.kernels.bench.timing import Candidate, race, rotation, warm_up
from w4pack.kernels.quarot import quantize_ops as ops
from w4pack.kernels.quarot.transform import Transform

WIDTHS = (1536, 4096, 5120, 8192, 14336, 28672, 11008, 13824, 18944)
HEAD = 128
LARGE = 1 << 29  # bytes of the copy whose rate is the measure


def copier(size: int, name: str) -> Candidate:
    """Return a copy that reads and writes ``size`` bytes together."""
    sets = rotation(size)
    half = size // 4
    sources = [torch.zeros(half, dtype=torch.float16, device="cuda") for _ in range(sets)]
    targets = [torch.empty_like(s) for s in sources]
    return Candidate(name, lambda i: targets[i].copy_(sources[i]), sets)


def operator(site: str, m: int, n: int, bits: int) -> tuple[Candidate, int]:
    """Return the launches of a site, outputs kept so that they rotate too, and the bytes of one."""
    columns = 2 * n if site == "silu" else n
    size = m * (2 * columns + n)
    sets = rotation(size)
    inputs = [torch.randn(m, columns, device="cuda").half() for _ in range(min(sets, 4))]
    inputs += [inputs[i % 4].clone() for i in range(sets - len(inputs))]
    kept: list[object] = [None] * sets
    clip = 0.9 if bits == 4 else 1.0
    key = "" if site == "norm" else Transform.planned(n // HEAD if site == "heads" else n).key
    gain = torch.ones(n, dtype=torch.float16, device="cuda")

    def run(i: int) -> None:
        x = inputs[i]
        if site == "norm":
            kept[i] = ops.norm_quantize(x, gain, 1e-5, "", bits, clip, 1, n)
        elif site == "heads":
            kept[i] = ops.heads_quantize(x, n // HEAD, key, bits, clip, 1, n)
        else:
            kept[i] = ops.act_quantize(x, site, key, bits, clip, 1, n)

    return Candidate(site, run, sets), size


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sites", default="none,silu,norm,heads")
    parser.add_argument("--m", type=numbers, default=[16, 2048, 8192])
    parser.add_argument("--n", type=numbers, default=list(WIDTHS))
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need()
    large = copier(LARGE, "copy")
    warm_up(large.run, large.sets)
    best = LARGE / race([large], options.repeats)["copy"]
    print(f"{torch.cuda.get_device_name()}: copy of {LARGE >> 20} MiB at {best / 1e6:.2f} TB/s")
    print(f"{'site':6} {'M':>6} {'n':>6} {'us':>9} {'TB/s':>6} {'of copy':>8} {'of equal copy':>14}")
    rows = []
    for site in options.sites.split(","):
        for m in options.m:
            for n in options.n:
                if site == "heads" and n not in (4096, 5120, 8192):
                    continue
                candidate, size = operator(site, m, n, options.bits)
                times = race([candidate, copier(size, "copy")], options.repeats)
                us, equal = times[site], times["copy"]
                row = {"site": site, "m": m, "n": n, "us": us, "share": size / us / best, "equal": equal / us}
                rows.append(row)
                shares = f"{row['share']:8.1%} {row['equal']:14.1%}"
                print(f"{site:6} {m:6} {n:6} {us:9.2f} {size / us / 1e6:6.2f} {shares}", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"card": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
