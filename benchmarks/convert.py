"""Conversion speed and memory, as ratios within one run. ``make bench``.

The floor is what any careful copy costs: ``cp`` of the source, then one single-threaded sha256 (hashlib) of
source and copy. Printed: wall time of ``convert --to marlin`` over that floor; peak RSS over the RSS after
import.

    python benchmarks/convert.py [--gb 4] [--where FOLDER ...] [--kinds gptq,awq,compressed-tensors]
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import synthetic

PROBE = """
import json, re, sys
from w4pack.convert import api
import w4pack.convert.jobs.conversion, w4pack.convert.jobs.rebuild, numpy, hashlib
# not ru_maxrss: a child inherits its parent's
rss = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = rss()
report = api.convert(sys.argv[1], sys.argv[2], to="marlin")
print(json.dumps({"before": before, "peak": rss(), "seconds": report.seconds}))
"""


def sha256_of(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        sha = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(4 << 20):
                sha.update(chunk)


def floor(source: Path, copy: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(copy)], check=True)
    sha256_of(source)
    sha256_of(copy)
    taken = time.perf_counter() - start
    shutil.rmtree(copy)
    return taken


def convert(source: Path, out: Path) -> tuple[float, float]:
    """Return (wall seconds of the whole command, MiB of RSS above the RSS after import)."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(source), str(out)], check=True, stdout=subprocess.PIPE, text=True
    )
    taken = time.perf_counter() - start
    found = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(out)
    return taken, (found["peak"] - found["before"]) / 1024


def one(where: Path, kind: str, gb: float, runs: int, **shape: int) -> None:
    with tempfile.TemporaryDirectory(dir=where, prefix="w4pack-bench-") as name:
        base = Path(name)
        size = synthetic.make(base / "src", kind, int(gb * 1e9), **shape)
        floors, times, memory = [], [], 0.0
        for _ in range(runs):
            floors.append(floor(base / "src", base / "copy"))
            taken, rss = convert(base / "src", base / "out")
            times.append(taken)
            memory = max(memory, rss)
        best, least = min(times), min(floors)
        print(
            f"{where!s:<12} {kind:<20} {size / 1e9:5.2f} GB  floor {least:6.2f} s  convert {best:6.2f} s  "
            f"ratio {best / least:4.2f}  peak +{memory:4.0f} MiB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4)
    parser.add_argument("--where", nargs="*", default=["/dev/shm", tempfile.gettempdir()])
    parser.add_argument("--kinds", default="gptq,awq,compressed-tensors")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument(
        "--memory", action="store_true", help="1, 4 and 8 GB and a 70B-sized layer, for the peak RSS"
    )
    args = parser.parse_args()
    print(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
        f"numpy {synthetic.np.__version__}"
    )
    for where in args.where:
        for kind in args.kinds.split(","):
            one(Path(where), kind, args.gb, args.runs)
    if args.memory:
        for gb in (1, 4, 8):
            one(Path(args.where[0]), "gptq", gb, 1)
        one(Path(args.where[0]), "gptq", 1, 1, hidden=8192, intermediate=28672)


if __name__ == "__main__":
    main()
