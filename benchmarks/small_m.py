"""Few tokens, three ways: a prefetch that only helps behind our own kernels would be a benchmark's effect.

For the four products of one layer (q/k/v, o, gate/up, down), ours and the library's in 16 bit, in one run:

    alone    each product behind launches of itself; the sum of the four
    chained  the four behind each other, each on what the last one wrote
    behind   each behind an elementwise kernel of torch, which releases nothing early; the pair, and what is
             left when the elementwise kernels' own time is taken off
    step     in a whole decode step (``decode.py``; --step)

    python benchmarks/small_m.py [--m 1] [--models 8B,70B] [--step] [--quick] [--device cpu --tiny]
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import decode
import torch
from cards import need
from randoms import Linear, linear, relative_error

from w4pack.kernels.bench.timing import Candidate, race, rotation, warm_up

MODELS = {  # N, K of q/k/v, o, gate/up, down
    "8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "70B": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "tiny": ((384, 256), (256, 256), (1024, 256), (256, 512)),
}
WAYS = ("alone", "chained", "behind")
# Two roundings on either side of each of four products in a row, 2^-11 each: 0.14 % at random sign.
MOST_ERROR = 0.01

Run = Callable[[int], object]
Product = Callable[[Linear, torch.Tensor, torch.Tensor], torch.Tensor]


class Chain:
    """The four products of a layer, with weights to rotate over, for one side."""

    def __init__(
        self, shapes: tuple[tuple[int, int], ...], m: int, device: torch.device, product: Product
    ) -> None:
        self.shapes, self.product = shapes, product
        self.x = torch.empty(m, shapes[0][1], dtype=torch.float16, device=device)
        self.outs = [torch.full((m, n), float("nan"), dtype=torch.float16, device=device) for n, _ in shapes]
        self.inputs = [torch.empty(m, k, dtype=torch.float16, device=device) for _, k in shapes]

    def alone(self, weights: list[list[Linear]], which: int) -> Run:
        """Return launches of one product on a given input."""
        row, given, out = weights[which], self.inputs[which], self.outs[which]
        return lambda i: self.product(row[i % len(row)], given, out)

    def chained(self, weights: list[list[Linear]]) -> Run:
        """Return launches of all four, each on the first columns of the last one's output."""

        def run(i: int) -> None:
            x = self.x
            for row, (_, k), out in zip(weights, self.shapes, self.outs, strict=True):
                x = self.product(row[i % len(row)], x[:, :k], out)

        return run

    def behind(self, weights: list[list[Linear]]) -> Run:
        """Return launches of all four, each behind an elementwise kernel that writes its input."""

        def run(i: int) -> None:
            x = self.x
            for row, (_, k), given, out in zip(weights, self.shapes, self.inputs, self.outs, strict=True):
                torch.mul(x[:, :k], 1.0, out=given)
                x = self.product(row[i % len(row)], given, out)

        return run

    def elementwise(self) -> Run:
        """Return the same elementwise kernels without the products."""

        def run(i: int) -> None:
            x = self.x
            for (_, k), given, out in zip(self.shapes, self.inputs, self.outs, strict=True):
                torch.mul(x[:, :k], 1.0, out=given)
                x = out

        return run


def draw(n: int, k: int, device: torch.device) -> tuple[list[Linear], list[Linear]]:
    """Return weights for our side and for the library's, each enough to rotate over."""
    first = linear(n, k, device, dense=True)
    assert first.dense is not None
    packed = [first] + [
        Linear(n, k, first.words.clone(), first.scales.clone(), None)
        for _ in range(rotation(n * k // 2 + n * k // 64) - 1)
    ]
    dense = [first] + [
        Linear(n, k, first.words, first.scales, first.dense.clone()) for _ in range(rotation(2 * n * k) - 1)
    ]
    return packed, dense


def measure(model: str, m: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Return the microseconds of every way and side."""
    shapes = MODELS[model]
    drawn = [draw(n, k, device) for n, k in shapes]
    sides = {"w4pack": [packed for packed, _ in drawn], "16 bit": [dense for _, dense in drawn]}
    x = torch.randn(m, shapes[0][1], device=device).half()
    chains, columns = {}, []
    for side, weights in sides.items():
        chain = chains[side] = Chain(shapes, m, device, Linear.packed if side == "w4pack" else Linear.library)
        chain.x.copy_(x)
        for given, (_, k) in zip(chain.inputs, shapes, strict=True):
            given.copy_(torch.randn(m, k, device=device))
        sets = max(len(row) for row in weights)
        runs = {"chained": chain.chained(weights), "behind": chain.behind(weights)}
        for i, row in enumerate(weights):
            columns.append(Candidate(f"{side} alone {i}", chain.alone(weights, i), len(row), device))
        columns += [Candidate(f"{side} {way}", run, sets, device) for way, run in runs.items()]
    columns.append(Candidate("elementwise", chains["w4pack"].elementwise(), 1, device))
    check(chains, sides)
    if device.type == "cuda":
        warm_up(chains["w4pack"].chained(sides["w4pack"]), len(sides["w4pack"][0]))
    times = race(columns, repeats)
    for side in sides:
        times[f"{side} alone"] = sum(times[f"{side} alone {i}"] for i in range(len(shapes)))
    return times


def check(chains: dict[str, Chain], sides: dict[str, list[list[Linear]]]) -> None:
    """Compare the chains' outputs, product for product."""
    for way in ("chained", "behind"):
        for side, chain in chains.items():
            for out in chain.outs:
                out.fill_(float("nan"))
            getattr(chain, way)(sides[side])(0)
        for i, (ours, theirs) in enumerate(zip(*(chain.outs for chain in chains.values()), strict=True)):
            error = relative_error(ours, theirs)
            if not error <= MOST_ERROR:
                raise SystemExit(f"{way}, product {i}: the two sides differ by {error:.1e}")


def told(model: str, m: int, us: dict[str, float]) -> str:
    """Return the lines of a model and an M."""
    lines = [f"{model}, M = {m}: the four products of a layer, us"]
    for i, (n, k) in enumerate(MODELS[model]):
        ours, theirs = us[f"w4pack alone {i}"], us[f"16 bit alone {i}"]
        lines.append(f"  {f'{n}x{k}':>12}  {ours:8.2f} against {theirs:8.2f}  {theirs / ours:5.2f}x")
    for way in WAYS:
        ours, theirs = us[f"w4pack {way}"], us[f"16 bit {way}"]
        lines.append(f"  {way:>12}  {ours:8.2f} against {theirs:8.2f}  {theirs / ours:5.2f}x")
    taken = us["elementwise"]
    ours, theirs = us["w4pack behind"] - taken, us["16 bit behind"] - taken
    less = f"less {taken:.2f} of the elementwise kernels"
    lines.append(f"  {'':>12}  {ours:8.2f} against {theirs:8.2f}  {theirs / ours:5.2f}x  {less}")
    return "\n".join(lines)


def main() -> None:
    """Print each model and M; write JSON to $OUT if set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--m", default="1")
    parser.add_argument("--models", default="8B,70B")
    parser.add_argument("--step", action="store_true", help="also a decode step of the 8B model")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="3 repeats")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    options = parser.parse_args()
    device = need(options.device)
    repeats = 3 if options.quick else options.repeats
    rows = []
    with torch.inference_mode():
        for model in ["tiny"] if options.tiny else options.models.split(","):
            for m in map(int, options.m.split(",")):
                us = measure(model, m, device, repeats)
                rows.append({"model": model, "m": m, "us": us})
                print(told(model, m, us), flush=True)
        if options.step:
            sizes = decode.TINY if options.tiny else decode.Sizes()
            for m in map(int, options.m.split(",")):
                found = decode.measure(sizes, m, device, repeats)
                rows.append({"model": "step", "m": m, "ms": found})
                print(decode.told(sizes, m, found), flush=True)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "small_m.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
