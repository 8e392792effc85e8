"""The grouped product of a mixture of experts beside humming-kernels' and the library's, in one run.

Method of ``gemm.py``: CUDA graphs, interleaved repeats, medians; launches rotate over copies of the weights
and over routings, random ones (for one token: disjoint ones), so that no expert is found in the L2. Each
candidate gets the same routings; the peer gets its rows already gathered. Error against fp64 on 64 columns.
``--integers``: the product on 8-bit codes of the activations too, which are quantized before.

    python benchmarks/moe.py [--models mixtral,qwen3] [--m 1,16,256] [--tune FILE] [--group 128|-1]
                             [--humming] [--dense] [--integers]
"""

import argparse
import itertools
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import torch
from cards import MATRIX_RATE, READ_RATE, environment, need
from gemm import natural, rows_of_codes, skip
from randoms import uniform

from w4pack.kernels import launch, moe_launch, moe_tiles, ops, reference, tiles
from w4pack.kernels.arguments import Packed
from w4pack.kernels.bench.timing import ROTATED, Candidate, race
from w4pack.kernels.quarot import int_moe_launch, orders_int, quantize_ops
from w4pack.kernels.quarot.calls import GroupedProduct

MODELS = {  # experts, experts of a token, (N, K) of gate and up and of down
    "mixtral": (8, 2, ((28672, 4096), (4096, 14336))),
    "qwen3": (128, 8, ((1536, 2048), (2048, 768))),
}
MS = (1, 16, 256)
ROUTINGS = 8

Launcher = Callable[[int], None]


class Layer:
    """Random packed experts of one shape, and copies to rotate over; ``group`` -1: one scale a column."""

    def __init__(self, experts: int, n: int, k: int, group: int) -> None:
        self.experts, self.n, self.k, self.group = experts, n, k, group
        words, scales = uniform(n, k, group, experts=(experts,))
        self.bytes = (words.nbytes + scales.nbytes) // experts  # of one
        copies = max(1, math.ceil(ROTATED / (self.bytes * experts)))
        self.packed = [(words, scales)] + [(words.clone(), scales.clone()) for _ in range(copies - 1)]
        chunk = n // 128
        picked = words.view(experts, k // 16, n // 64, 128)[:, :, chunk].contiguous()
        s = scales.view(experts, -1, n // 64, 64)[:, :, chunk].contiguous()
        self.columns = slice(64 * chunk, 64 * chunk + 64)
        self.exact = [
            reference.dense(picked[e], s[e], None, 4, group, torch.float64).cpu() for e in range(experts)
        ]


class Routing:
    """Who goes where: ``counts`` per expert on the host, rows and borders on the card."""

    def __init__(self, experts: int, top: int, chosen: list[list[int]]) -> None:
        pairs = sorted((e, token) for token, picked in enumerate(chosen) for e in picked)
        self.counts = [0] * experts
        for e, _ in pairs:
            self.counts[e] += 1
        self.rows = torch.tensor([token for _, token in pairs], dtype=torch.int32, device="cuda")
        self.offsets = torch.tensor([0, *itertools.accumulate(self.counts)], dtype=torch.int32, device="cuda")
        self.busy = sum(c > 0 for c in self.counts)


def routings(experts: int, top: int, m: int) -> list[Routing]:
    """Return the routings to rotate over."""
    rng = random.Random(m)
    if m == 1:
        order = rng.sample(range(experts), experts)
        return [Routing(experts, top, [order[i : i + top]]) for i in range(0, experts, top)]
    return [
        Routing(experts, top, [rng.sample(range(experts), top) for _ in range(m)]) for _ in range(ROUTINGS)
    ]


class Point:
    """One M of one layer: activations, routings, and what each candidate writes."""

    def __init__(self, layer: Layer, top: int, m: int) -> None:
        self.layer, self.m, self.top = layer, m, top
        self.x = torch.randn(m, layer.k, device="cuda", dtype=torch.float16)
        self.routings = routings(layer.experts, top, m)
        self.sets = len(self.routings) * len(layer.packed)
        self.gathered = [self.x[r.rows.long()].contiguous() for r in self.routings]

    def at(self, i: int) -> tuple[tuple[torch.Tensor, torch.Tensor], Routing, torch.Tensor]:
        """Return weights, routing and gathered rows of rotation set i."""
        which = i % len(self.routings)
        return (
            self.layer.packed[i // len(self.routings) % len(self.layer.packed)],
            self.routings[which],
            self.gathered[which],
        )

    def output(self) -> torch.Tensor:
        """Return a poisoned output."""
        shape = (self.m * self.top, self.layer.n)
        return torch.full(shape, float("nan"), dtype=torch.float16, device="cuda")

    def error(self, run: Launcher, out: torch.Tensor) -> float:
        """Return the error of a candidate on rotation set 0."""
        out.fill_(float("nan"))
        run(0)
        routing, begin, difference, size = self.routings[0], 0, 0.0, 0.0
        found, x = out[:, self.layer.columns].double().cpu(), self.gathered[0].double().cpu()
        for e, count in enumerate(routing.counts):
            exact = x[begin : begin + count] @ self.layer.exact[e]
            difference += float((found[begin : begin + count] - exact).square().sum())
            size += float(exact.square().sum())
            begin += count
        return math.sqrt(difference / size)

    @property
    def floor(self) -> float:
        """Microseconds that the bytes of the busy experts, or the operations, take at least."""
        busy = sum(r.busy for r in self.routings) / len(self.routings)
        pairs = self.m * self.top
        moved = busy * self.layer.bytes + 2 * pairs * (self.layer.k + self.layer.n)
        return max(moved / READ_RATE, 2 * pairs * self.layer.n * self.layer.k / MATRIX_RATE)


def ours(point: Point, out: torch.Tensor, chosen: tiles.Launch | None) -> Launcher:
    """Return the launcher of our kernel."""

    def run(i: int) -> None:
        (words, scales), routing, _ = point.at(i)
        packed = Packed(words, scales, None, 4, point.layer.group)
        moe_launch.run_gemm(point.x, packed, routing.rows, routing.offsets, out, chosen)

    return run


def integers(point: Point, out: torch.Tensor) -> Launcher:
    """Return the launcher of our product on 8-bit codes."""
    k, order = point.layer.k, orders_int.P32
    codes, scales = quantize_ops.act_quantize(point.x, "none", "", 8, 1.0, order, k)

    def run(i: int) -> None:
        weight, routing, _ = point.at(i)
        pairs = (routing.rows, routing.offsets)
        product = GroupedProduct(
            codes, scales, *weight, *pairs, 4, 8, point.layer.group, order, k, torch.float16
        )
        int_moe_launch.gemm(product, out)

    return run


class Peer:
    """The package humming-kernels' grouped product on the same codes and scales."""

    def __init__(self, layer: Layer) -> None:
        from humming.layer import HummingLayer

        words, scales = layer.packed[0]
        made = HummingLayer(
            shape_n=layer.n,
            shape_k=layer.k,
            num_experts=layer.experts,
            weight_config={"dtype": "int4", "group_size": 128},
            torch_dtype=torch.float16,
            input_config=None,
        ).cuda()
        codes = torch.stack([rows_of_codes(w) for w in words])
        made.load_from_tensors({"weight": codes, "weight_scale": torch.stack([natural(s) for s in scales])})
        made.transform()
        self.meta, self.locks = made.humming_metas[""], made.locks
        self.packed = [(made.weight.data.clone(), made.weight_scale.data.clone()) for _ in layer.packed]

    def launcher(self, point: Point, out: torch.Tensor) -> Launcher:
        """Return the launcher for one M; its table's tile is compiled here."""
        from humming.forward import humming_forward
        from humming.tune import get_heuristics_config

        pairs = point.m * point.top
        config = get_heuristics_config(self.meta, shape_m=pairs, gemm_type="grouped_contiguous")
        print("  humming:", {k: config[k] for k in ("mma_type", "block_shape", "num_stages") if k in config})

        def run(i: int) -> None:
            _, routing, x = point.at(i)
            weight, scale = self.packed[i // len(point.routings) % len(self.packed)]
            humming_forward(
                self.meta,
                inputs=x,
                weight=weight,
                weight_scale=scale,
                expert_layout=routing.offsets,
                locks=self.locks,
                outputs=out,
                compute_config={"gemm_type": "grouped_contiguous"},
                tuning_config=config,
            )

        return run


def library(point: Point, out: torch.Tensor, dense: list[torch.Tensor]) -> Launcher:
    """Return a loop of cuBLAS over busy experts: what one gets if the host knows the routing."""

    def run(i: int) -> None:
        _, routing, x = point.at(i)
        begin = 0
        for e, count in enumerate(routing.counts):
            if count:
                torch.mm(x[begin : begin + count], dense[e].t(), out=out[begin : begin + count])
            begin += count

    return run


def candidates_for(path: str | None, point: Point, multiprocessors: int) -> list[tiles.Launch]:
    """Return the tuning candidates that make sense for a point."""
    if path is None:
        return []
    rows = [tiles.Tile(str(r[0]), *map(int, r[1:])) for r in json.loads(Path(path).read_text())]
    layer, pairs = point.layer, point.m * point.top
    each = max(1.0, pairs / layer.experts)
    fit = [
        t for t in rows if t.tokens <= max(16, 4 * each) and each <= 4 * t.tokens and layer.k % t.unit == 0
    ]
    return [
        tiles.Launch(t, moe_tiles.grid(t, multiprocessors, pairs, layer.experts, layer.n, layer.k))
        for t in fit
    ]


def measure(
    point: Point,
    repeats: int,
    tuned: list[tiles.Launch],
    peer: Peer | None,
    dense: list[torch.Tensor],
    codes: bool,
) -> dict[str, object]:
    """Measure one point; return its row."""
    runs: dict[str, tuple[Launcher, torch.Tensor]] = {}
    for chosen in (None, *tuned):
        out = point.output()
        runs["w4pack" if chosen is None else f"{chosen.tile.text}/{chosen.grid}"] = (
            ours(point, out, chosen),
            out,
        )
    if peer is not None:
        out = point.output()
        runs["humming"] = peer.launcher(point, out), out
    if codes:
        out = point.output()
        runs["integers"] = integers(point, out), out
    if dense:
        out = point.output()
        runs["cublas"] = library(point, out, dense), out
    errors = {}
    for name, (run, out) in runs.items():
        errors[name] = point.error(run, out)
    times = race(
        [Candidate(name, run, point.sets) for name, (run, _) in runs.items()], repeats, on_error=skip
    )
    layer = point.layer
    return {
        "m": point.m,
        "experts": layer.experts,
        "n": layer.n,
        "k": layer.k,
        "floor": point.floor,
        "us": times,
        "error": errors,
    }


def line(row: dict[str, object]) -> str:
    """Return a row's line: share of the floor, and the time over ours."""
    times: dict[str, float] = row["us"]  # type: ignore[assignment]
    errors: dict[str, float] = row["error"]  # type: ignore[assignment]
    text = f"{row['experts']} x {row['n']}x{row['k']} M={row['m']:<4}"
    for name, us in sorted(times.items(), key=lambda item: item[1]):
        share = 100 * float(str(row["floor"])) / us
        text += f" | {name} {us:.2f} us {share:.0f}% {us / times['w4pack']:.2f} e{errors[name]:.0e}"
    return text


def main() -> None:
    """Print a line for each point; write JSON to $OUT if set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--m", default=",".join(map(str, MS)))
    parser.add_argument("--tune", help="JSON list of candidate tiles")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--humming", action="store_true", help="a column of humming-kernels, if installed")
    parser.add_argument("--dense", action="store_true", help="a column of cuBLAS fp16, expert after expert")
    parser.add_argument("--integers", action="store_true", help="a column of the product on 8-bit codes")
    parser.add_argument(
        "--group", type=int, default=128, choices=(128, -1), help="of scales; the peer has 128"
    )
    options = parser.parse_args()
    card, rows = launch.device(need().index), []
    print(environment(), flush=True)
    for model in options.models.split(","):
        experts, top, shapes = MODELS[model]
        for n, k in shapes:
            layer = Layer(experts, n, k, options.group)
            peer = Peer(layer) if options.humming else None
            words, scales = layer.packed[0]
            dense = (
                [
                    ops.dequantize(words[e], scales[e], None, 4, options.group, torch.float16)
                    for e in range(experts)
                ]
                if options.dense
                else []
            )
            for m in map(int, options.m.split(",")):
                point = Point(layer, top, m)
                tuned = candidates_for(options.tune, point, card.multiprocessors)
                rows.append(measure(point, options.repeats, tuned, peer, dense, options.integers))
                print(line(rows[-1]), flush=True)
            del layer, peer, dense, words, scales
            torch.cuda.empty_cache()
    ratios = [r["us"]["humming"] / r["us"]["w4pack"] for r in rows if "humming" in r["us"]]  # type: ignore[index,operator]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"humming over ours: geometric mean {mean:.3f}, least {min(ratios):.3f}")
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "moe.json").write_text(json.dumps({"card": environment(), "rows": rows}))


if __name__ == "__main__":
    main()
