"""Integer products beside cuBLAS fp16, in one run: the product alone, or the whole step of each site.

Method: as gemm.py. Weights of one scale a column (or --group), random codes; the dense weight of cuBLAS is
dequantized from them. ``--step``: qkv and gate_up are RMSNorm + quantize + product against RMSNorm + cuBLAS;
o_proj head Hadamard + quantize + product against cuBLAS; down SiLU-multiply + Hadamard + quantize + product
against SiLU-multiply + cuBLAS. humming-kernels, where installed, quantizes without norm or Hadamard.

    python benchmarks/int_gemm.py [--shapes ...] [--m ...] [--step] [--tune FILE] [--humming] [--group 128]
"""

import argparse
import json
import math
import os
from pathlib import Path

import torch
from cards import INT8_RATE, READ_RATE, environment, need
from gemm import natural, rows_of_codes, skip
from randoms import uniform

from w4pack.kernels import launch, ops, reference, tiles
from w4pack.kernels.bench.timing import Candidate, Launcher, race, rotation, warm_up
from w4pack.kernels.quarot import int_launch, int_ops, int_tiles, orders_int, quantize_ops
from w4pack.kernels.quarot.calls import Product
from w4pack.kernels.quarot.transform import Transform

SITES = {
    "10240x8192": ("70B", "qkv"),
    "8192x8192": ("70B", "o_proj"),
    "57344x8192": ("70B", "gate_up"),
    "8192x28672": ("70B", "down"),
    "6144x4096": ("8B", "qkv"),
    "4096x4096": ("8B", "o_proj"),
    "28672x4096": ("8B", "gate_up"),
    "4096x14336": ("8B", "down"),
}
MS = (2048, 4096, 8192)
HEADS = {8192: 64, 4096: 32}  # of o_proj's input
ORDER, EPS, CLIP = orders_int.P32, 1e-5, 0.9


class Layer:
    """Random packed weights of one shape, with copies to rotate over, and the dense weight for cuBLAS."""

    def __init__(self, n: int, k: int, group: int) -> None:
        self.n, self.k, self.group = n, k, group
        words, scales = uniform(n, k, group)
        self.bytes = words.nbytes + scales.nbytes
        self.packed = [(words, scales)]
        self.packed += [(words.clone(), scales.clone()) for _ in range(rotation(self.bytes) - 1)]
        first = ops.dequantize(words, scales, None, 4, group, torch.float16)
        self.dense = [first] + [first.clone() for _ in range(rotation(2 * n * k) - 1)]

    def product(
        self, codes: torch.Tensor, scales: torch.Tensor, i: int, out: torch.Tensor, chosen: object = None
    ) -> None:
        """Launch the integer product on rotation set ``i``."""
        words, s = self.packed[i]
        given = Product(codes, scales, words, s, None, 4, 8, self.group, ORDER, self.k, out.dtype)
        int_launch.gemm(given, out, chosen)  # type: ignore[arg-type]


class Humming:
    """The package humming-kernels on the same codes, int8 activations, one scale a column."""

    def __init__(self, layer: Layer) -> None:
        from humming.layer import HummingLayer

        words, scales = layer.packed[0]
        config = {"dtype": "int4", **({} if layer.group == -1 else {"group_size": layer.group})}
        made = HummingLayer(
            shape_n=layer.n,
            shape_k=layer.k,
            weight_config=config,
            torch_dtype=torch.float16,
            input_config={"dtype": "int8"},
        ).cuda()
        made.load_from_tensors({"weight": rows_of_codes(words), "weight_scale": natural(scales)})
        made.transform()
        self.sets = [
            (made.weight.data.clone(), made.weight_scale.data.clone(), torch.zeros_like(made.locks))
            for _ in layer.packed
        ]
        self.meta = made.humming_metas[""]

    def launcher(self, x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None = None) -> Launcher:
        """Return the launcher of quantization and product, or of the product on int8 ``x`` alone."""
        from humming.forward import humming_forward

        def run(i: int) -> None:
            w, s, locks = self.sets[i]
            humming_forward(
                self.meta, inputs=x, weight=w, weight_scale=s, locks=locks, outputs=out, input_scale=scale
            )

        return run

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return its int8 codes and scales of x."""
        from humming.forward import may_quant_input

        codes, scales = may_quant_input(self.meta, x)
        return codes, scales


def products(layer: Layer, m: int, candidates: list[tiles.Launch], peer: Humming | None) -> list[Candidate]:
    """Return the candidates of the product alone: codes of 4 bit are given."""
    codes = torch.randint(-8, 8, (m, layer.k), device="cuda", dtype=torch.int32).to(torch.int8)
    scales = torch.rand(m, device="cuda") * 0.01
    x, y = _activations(m, layer.k), torch.empty(m, layer.n, device="cuda", dtype=torch.float16)
    sets = len(layer.packed)
    found = [Candidate("w4pack", lambda i: layer.product(codes, scales, i, y), sets)]
    for chosen in candidates:
        name = f"{chosen.tile.text}/{chosen.grid}"
        found.append(Candidate(name, lambda i, c=chosen: layer.product(codes, scales, i, y, c), sets))
    if peer is not None:
        found.append(Candidate("humming+q", peer.launcher(x, y), sets))
        theirs = peer.quantize(x)
        found.append(Candidate("humming", peer.launcher(theirs[0], y, theirs[1]), sets))
        four = torch.randint(-8, 8, (m, layer.k), device="cuda", dtype=torch.int32).to(torch.int8)
        found.append(Candidate("humming4", peer.launcher(four, y, theirs[1]), sets))
    found.append(Candidate("cublas", lambda i: torch.mm(x, layer.dense[i].t(), out=y), len(layer.dense)))
    return found


def _activations(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, device="cuda", dtype=torch.float16)


def steps(layer: Layer, m: int, site: str, peer: Humming | None) -> list[Candidate]:
    """Return the candidates of a site's whole step, in 4-bit and 8-bit codes."""
    n, k, sets = layer.n, layer.k, len(layer.packed)
    x = _activations(m, 2 * k if site == "down" else k)
    y = torch.empty(m, n, device="cuda", dtype=torch.float16)
    gain = torch.ones(k, device="cuda", dtype=torch.float16)
    found = []
    for bits in (4, 8):

        def ours(i: int, bits: int = bits) -> None:
            layer.product(*_quantized(x, site, bits, k), i, y)

        found.append(Candidate(f"w4a{bits}", ours, sets))
        found.append(Candidate(f"quantize{bits}", lambda i, b=bits: _quantized(x, site, b, k), 1))

    def plain(i: int) -> None:
        given = x
        if site in ("qkv", "gate_up"):
            given = torch.nn.functional.rms_norm(x, (k,), gain, EPS)
        elif site == "down":
            given = _silu_mul(x)
        torch.mm(given, layer.dense[i].t(), out=y)

    found.append(Candidate("cublas", plain, len(layer.dense)))
    if peer is not None:
        dense = x[:, :k].contiguous()
        found.append(Candidate("humming+q", peer.launcher(dense, y), sets))
    return found


def _quantized(x: torch.Tensor, site: str, bits: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    clip = CLIP if bits == 4 else 1.0
    if site == "o_proj":
        heads = HEADS[k]
        return quantize_ops.heads_quantize(x, heads, Transform.planned(heads).key, bits, clip, ORDER, k)
    if site == "down":
        return quantize_ops.act_quantize(x, "silu", Transform.planned(k).key, bits, clip, ORDER, k)
    return quantize_ops.norm_quantize(x, None, EPS, "", bits, clip, ORDER, k)


def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up as one compiled kernel."""
    return _compiled(x)


def _silu_mul_plain(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


_compiled = torch.compile(_silu_mul_plain, dynamic=False)


def line(n: int, k: int, m: int, floor: float, times: dict[str, float]) -> str:
    """Return a row's line: share of the floor, and how many times faster than cuBLAS."""
    base = times.get("cublas", math.nan)
    text = f"{n}x{k} M={m:<5}"
    for name, us in sorted(times.items(), key=lambda item: item[1]):
        text += f" | {name} {us:.1f} us {100 * floor / us:.0f}% {base / us:.2f}x"
    return text


def check(layer: Layer) -> None:
    """Compare one product of 300 tokens with exact sums."""
    codes = torch.randint(-8, 8, (300, layer.k), device="cuda", dtype=torch.int32).to(torch.int8)
    scales = torch.rand(300, device="cuda") * 0.01
    words, s = layer.packed[0]
    k, chunk = layer.k, 64 * (layer.n // 128)
    placed = orders_int.arrange(codes, ORDER)
    y = int_ops.int_gemm(placed, scales, words, s, None, 4, 4, layer.group, ORDER, k, torch.float16)
    exact = reference.dense(
        words[:, 2 * chunk : 2 * chunk + 128].contiguous(),
        s[:, chunk : chunk + 64].contiguous(),
        None,
        4,
        layer.group,
        torch.float64,
    )
    wanted = (codes.double() * scales[:, None].double()) @ exact
    found = y[:, chunk : chunk + 64].double()
    error = float((found - wanted).norm() / wanted.norm())
    if not error < 1e-3:
        raise SystemExit(f"wrong product: relative error {error:.1e} at {layer.n}x{layer.k}")


def main() -> None:
    """Print a line for each point; write JSON to $OUT if set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", default=",".join(SITES))
    parser.add_argument("--m", default=",".join(map(str, MS)))
    parser.add_argument("--group", type=int, default=-1)
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--tune", help="JSON list of candidate tiles")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--humming", action="store_true", help="columns of humming-kernels, if installed")
    options = parser.parse_args()
    card, rows = launch.device(need().index), []
    print(environment(), flush=True)
    for shape in options.shapes.split(","):
        n, k = map(int, shape.split("x"))
        layer = Layer(n, k, options.group)
        check(layer)
        peer = Humming(layer) if options.humming else None
        x, out = _activations(1024, k), torch.empty(1024, n, device="cuda", dtype=torch.float16)
        warm_up(lambda i, x=x, w=layer.dense, y=out: torch.mm(x, w[i].t(), out=y), len(layer.dense))
        for m in map(int, options.m.split(",")):
            if options.step:
                found = steps(layer, m, SITES[shape][1], peer)
            else:
                found = products(layer, m, _candidates(options.tune, card, layer, m), peer)
            times = race(found, options.repeats, on_error=skip)
            floor = max((layer.bytes + m * (k + 2 * n)) / READ_RATE, 2 * m * n * k / INT8_RATE)
            rows.append({"n": n, "k": k, "m": m, "floor": floor, "us": times})
            print(line(n, k, m, floor, times), flush=True)
            del found
            torch.cuda.empty_cache()
        del layer, peer
        torch.cuda.empty_cache()
    for family in ("70B", "8B"):
        _summary(family, rows)
    if "OUT" in os.environ:
        found_rows = {"card": environment(), "group": options.group, "step": options.step, "rows": rows}
        (Path(os.environ["OUT"]) / "int_gemm.json").write_text(json.dumps(found_rows))


def _candidates(path: str | None, card: launch.Device, layer: Layer, m: int) -> list[tiles.Launch]:
    if path is None:
        return []
    found = [tiles.tile_of(fields) for fields in json.loads(Path(path).read_text())]
    fit = [t for t in found if (t.tokens <= max(8, 2 * m) and m <= 8 * t.tokens) or t.tokens >= 96]
    sms, n, k = card.multiprocessors, layer.n, layer.k
    return [tiles.Launch(t, int_tiles.grid(t, sms, m, n, k, ORDER)) for t in fit]


def _summary(family: str, rows: list[dict[str, object]]) -> None:
    """Print the geometric means of a family's speed-ups over cuBLAS."""
    ours = [r["us"] for r in rows if SITES.get(f"{r['n']}x{r['k']}", ("",))[0] == family]
    for name in ("w4pack", "w4a4", "w4a8", "humming+q"):
        ratios = [us["cublas"] / us[name] for us in ours if name in us and "cublas" in us]  # type: ignore[index, operator]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{family} {name}: geometric mean {mean:.3f}x, least {min(ratios):.2f}x", flush=True)


if __name__ == "__main__":
    main()
