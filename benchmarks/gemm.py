"""W4A16 beside cuBLAS fp16, in one run: share of the floor, speed-up, error, tile.

Method: CUDA graphs of many launches, weights rotated over more than the L2, repeats of all candidates
interleaved, median; random codes, the dense weight dequantized from them; error against fp64 on 128 columns.

    python benchmarks/gemm.py [--shapes 8192x8192,...] [--m 1,16,...] [--tune FILE] [--humming]
"""

import argparse
import json
import os
from pathlib import Path

import torch
from cards import MATRIX_RATE, READ_RATE, environment, need
from randoms import uniform

from w4pack.kernels import gemm_launch, launch, ops, reference, tiles
from w4pack.kernels.arguments import Packed
from w4pack.kernels.bench.timing import Candidate, Launcher, race, rotation, warm_up

SHAPES = (
    "57344x8192",
    "8192x28672",
    "10240x8192",
    "8192x8192",
    "28672x4096",
    "4096x14336",
    "6144x4096",
    "4096x4096",
)
MS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


def skip(candidate: Candidate, error: Exception) -> None:
    """Report a candidate that cannot run; the others go on."""
    print(f"  ! {candidate.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


class Layer:
    """Random packed weights of one shape, with copies to rotate over, and the dense weight for cuBLAS."""

    def __init__(self, n: int, k: int, dense: bool = True) -> None:
        self.n, self.k = n, k
        self.packed = [uniform(n, k)]
        self.bytes = n * k // 2 + 2 * n * k // 128
        for _ in range(rotation(self.bytes) - 1):
            words, scales = self.packed[0]
            self.packed.append((words.clone(), scales.clone()))
        self.columns = torch.randperm(n, device="cuda")[:128]
        first = ops.dequantize(*self.packed[0], None, 4, 128, torch.float16)
        self.dense = [first] + [first.clone() for _ in range(rotation(2 * n * k) - 1)] if dense else []

    def exact_columns(self) -> torch.Tensor:
        """(K, 128): the sampled columns in fp64, from codes."""
        words, scales = self.packed[0]
        chunks = self.columns // 64
        picked = words.view(self.k // 16, self.n // 64, 128)[:, chunks]  # whole chunks, one for each column
        s = scales.view(-1, self.n // 64, 64)[:, chunks]
        whole = reference.dense(
            picked.reshape(self.k // 16, -1), s.reshape(s.shape[0], -1), None, 4, 128, torch.float64
        )
        at = torch.arange(128, device="cuda") * 64 + self.columns % 64
        return whole[:, at]


def ours(layer: Layer, x: torch.Tensor, out: torch.Tensor, chosen: tiles.Launch | None) -> Launcher:
    """Return the launcher of our kernel on one tile."""

    def run(i: int) -> None:
        words, scales = layer.packed[i]
        packed = Packed(words, scales, None, 4, 128)
        gemm_launch.run_gemm(x, packed, None, out, layer.k, layer.n, chosen)

    return run


def humming(layer: Layer, x: torch.Tensor, out: torch.Tensor) -> Launcher:
    """Return the launcher of the package humming-kernels on the same codes and scales."""
    from humming.forward import humming_forward
    from humming.layer import HummingLayer

    words, scales = layer.packed[0]
    made = HummingLayer(
        shape_n=layer.n,
        shape_k=layer.k,
        weight_config={"dtype": "int4", "group_size": 128},
        torch_dtype=torch.float16,
        input_config=None,
    ).cuda()
    made.load_from_tensors({"weight": rows_of_codes(words), "weight_scale": natural(scales)})
    made.transform()
    weight, scale, locks = made.weight.data, made.weight_scale.data, made.locks
    sets = [(weight.clone(), scale.clone(), torch.zeros_like(locks)) for _ in layer.packed]
    meta = made.humming_metas[""]

    def run(i: int) -> None:
        w, s, zeroed = sets[i]
        humming_forward(meta, inputs=x, weight=w, weight_scale=s, locks=zeroed, outputs=out)

    return run


def rows_of_codes(words: torch.Tensor) -> torch.Tensor:
    """Return packed words as (N, K/8): a row of codes, low nibble first."""
    codes = reference.codes(words, 4).t().contiguous()
    out = torch.zeros((codes.shape[0], codes.shape[1] // 8), dtype=torch.int32, device=codes.device)
    for i in range(8):
        out |= codes[:, i::8] << (4 * i)
    return out


def natural(scales: torch.Tensor) -> torch.Tensor:
    """Return grouped scales as (N, groups)."""
    return reference.natural_scales(scales).t().contiguous()


def point(
    layer: Layer, m: int, candidates: list[tiles.Launch | None], repeats: int, peer: bool = False
) -> dict[str, object]:
    """Measure one M of one shape."""
    x = torch.randn(m, layer.k, device="cuda", dtype=torch.float16)
    exact = x.double() @ layer.exact_columns()
    outs: dict[str, torch.Tensor] = {}
    columns = []
    for chosen in (None, *candidates) if None not in candidates else candidates:
        name = "w4pack" if chosen is None else f"{chosen.tile.text}/{chosen.grid}"
        outs[name] = torch.full((m, layer.n), float("nan"), dtype=torch.float16, device="cuda")
        columns.append(Candidate(name, ours(layer, x, outs[name], chosen), len(layer.packed)))
    if peer:
        theirs = outs["humming"] = torch.full((m, layer.n), float("nan"), dtype=torch.float16, device="cuda")
        columns.append(Candidate("humming", humming(layer, x, theirs), len(layer.packed)))
    if m >= 256:
        w = outs["dense"] = torch.full((m, layer.n), float("nan"), dtype=torch.float16, device="cuda")

        def dense(i: int) -> None:
            words, scales = layer.packed[i]
            torch.mm(x, ops.dequantize(words, scales, None, 4, 128, torch.float16).t(), out=w)

        columns.append(Candidate("dense", dense, len(layer.packed)))
    if layer.dense:
        y = outs["cublas"] = torch.empty((m, layer.n), dtype=torch.float16, device="cuda")
        columns.append(
            Candidate("cublas", lambda i: torch.mm(x, layer.dense[i].t(), out=y), len(layer.dense))
        )
    times = race(columns, repeats, on_error=skip)
    byte = (layer.bytes + 2 * m * (layer.k + layer.n)) / READ_RATE
    operation = 2 * m * layer.n * layer.k / MATRIX_RATE
    errors = {
        name: float((out[:, layer.columns].double() - exact).norm() / exact.norm())
        for name, out in outs.items()
    }
    return {"m": m, "n": layer.n, "k": layer.k, "floor": max(byte, operation), "us": times, "error": errors}


def line(row: dict[str, object]) -> str:
    """Return a row's line: share of the floor first."""
    times: dict[str, float] = row["us"]  # type: ignore[assignment]
    errors: dict[str, float] = row["error"]  # type: ignore[assignment]
    text = f"{row['n']}x{row['k']} M={row['m']:<5}"
    base = times.get("cublas")
    for name, us in sorted(times.items(), key=lambda item: item[1]):
        speed = f" {base / us:5.2f}x" if base else ""
        text += (
            f" | {name} {us:8.2f} us {100 * float(str(row['floor'])) / us:4.0f}%{speed} e{errors[name]:.0e}"
        )
    return text


def candidates_for(path: str | None, m: int, n: int, k: int, multiprocessors: int) -> list[tiles.Launch]:
    """Return the tuning candidates that make sense for an M."""
    if path is None:
        return []
    rows = [tiles.Tile(str(r[0]), *map(int, r[1:])) for r in json.loads(Path(path).read_text())]
    fit = [t for t in rows if t.tokens <= max(8, 2 * m) and m <= 8 * t.tokens]
    fit = [t for t in fit if tiles.can_cut(t, multiprocessors, m, n, k)]
    return [tiles.Launch(t, g) for t in fit for g in grids(t, multiprocessors, m, n, k)]


def grids(tile: tiles.Tile, multiprocessors: int, m: int, n: int, k: int) -> list[int]:
    """Return the grids worth trying: all blocks, and the most that cut every tile alike."""
    whole = tiles.grid(tile, multiprocessors, m, n, k)
    count = -(-m // tile.tokens) * -(-n // tile.columns)
    if tile.evenly:
        return [whole]
    even = [count * s for s in range(1, 9) if count * s <= multiprocessors * tile.blocks]
    return list(dict.fromkeys([whole, *even[-2:]]))


VARIANTS = {
    "fp16 g128": (4, 128, False, torch.float16),
    "bf16 g128": (4, 128, False, torch.bfloat16),
    "zero points": (4, 128, True, torch.float16),
    "g64": (4, 64, False, torch.float16),
    "g32": (4, 32, False, torch.float16),
    "one group": (4, -1, False, torch.float16),
    "8 bit": (8, 128, False, torch.float16),
}


def variant(
    n: int, k: int, m: int, bits: int, group: int, zeros: bool, dtype: torch.dtype, perm: torch.Tensor | None
) -> Candidate:
    """Return the candidate of one kind of weight, through the operators as a layer calls them."""
    groups = 1 if group == -1 else k // group
    size = n * k * bits // 8
    weight = [
        torch.randint(-(2**31), 2**31 - 1, (k // 16, n * bits // 2), device="cuda", dtype=torch.int32)
        for _ in range(rotation(size))
    ]
    scales = (torch.rand((groups, n), device="cuda") * 0.01 + 0.005).to(dtype)
    z = torch.randint(0, 2**31 - 1, (groups, n * bits // 32), device="cuda", dtype=torch.int32)
    x = torch.randn(m, k, device="cuda", dtype=dtype)

    def run(i: int) -> None:
        given = x if perm is None else ops.gather(x, perm, k)
        ops.gemm(given, weight[i], scales, z if zeros else None, None, bits, group)

    return Candidate("", run, len(weight))


def variants(repeats: int) -> None:
    """Print the time of each kind of weight beside the first one's."""
    for n, k in ((57344, 8192), (4096, 14336)):
        perm = torch.randperm(k, device="cuda").int()
        kinds = {
            **{name: (*kind, None) for name, kind in VARIANTS.items()},
            "act_perm": (*VARIANTS["fp16 g128"], perm),
        }
        for m in (1, 16, 64, 1024):
            found = []
            for name, kind in kinds.items():
                found.append(variant(n, k, m, *kind))
                found[-1].name = name
            times = race(found, repeats, on_error=skip)
            base = times["fp16 g128"]
            print(f"{n}x{k} M={m:<5} fp16 g128 {base:8.2f} us", end="")
            print(
                "".join(f" | {name} {us / base:.2f}" for name, us in times.items() if name != "fp16 g128"),
                flush=True,
            )
            del found
            torch.cuda.empty_cache()


def main() -> None:
    """Print a line for each point; write JSON to $OUT if set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--m", default=",".join(map(str, MS)))
    parser.add_argument("--tune", help="JSON list of candidate tiles")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-cublas", action="store_true")
    parser.add_argument("--humming", action="store_true", help="a column of humming-kernels, if installed")
    parser.add_argument(
        "--variants", action="store_true", help="other dtypes, groups, widths beside fp16 g128"
    )
    options = parser.parse_args()
    card = launch.device(need().index)
    print(environment(), flush=True)
    if options.variants:
        variants(options.repeats)
        return
    rows = []
    for shape in options.shapes.split(","):
        n, k = map(int, shape.split("x"))
        layer = Layer(n, k, dense=not options.no_cublas)
        x = torch.randn(16, k, device="cuda", dtype=torch.float16)
        warm_up(
            ours(layer, x, torch.empty(16, n, device="cuda", dtype=torch.float16), None), len(layer.packed)
        )
        for m in map(int, options.m.split(",")):
            chosen = candidates_for(options.tune, m, n, k, card.multiprocessors)
            rows.append(point(layer, m, [None, *chosen], options.repeats, options.humming))
            print(line(rows[-1]), flush=True)
        del layer
        torch.cuda.empty_cache()
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "gemm.json").write_text(json.dumps({"card": environment(), "rows": rows}))


if __name__ == "__main__":
    main()
