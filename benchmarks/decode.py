"""A decode step of a Llama-3-8B-shaped model: 4-bit linears against the same model in 16 bit.

Random weights, the same on both sides (the 16-bit ones are the dequantized ones); q/k/v and gate/up are one
product on both; the embedding and lm_head stay in 16 bit. Each layer is compiled (fullgraph, one compilation
for all layers), the whole step is one CUDA graph, both sides take turns, medians. Logits are compared.

Where the step's time goes is found by leaving parts out: a part's time is what the step is faster without
it. What stands in its place reads nothing and launches nothing, so the rest of the step stays as it is.

    python benchmarks/decode.py [--batch 1,16] [--layers 32] [--tokens 1024] [--quick] [--device cpu --tiny]
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from cards import need
from randoms import GROUP, Linear, linear, relative_error
from torch import nn
from torch.nn import functional

from w4pack.kernels import ops  # noqa: F401 - registers the operators
from w4pack.kernels.bench.timing import Candidate, race
from w4pack.kernels.modules import PackedLinear
from w4pack.kernels.spec import LinearSpec

EPSILON = 1e-5
ROPE_BASE = 500000.0
# Both sides round each product to 16 bit, in other places: 4 products a layer, 2^-11 each at random sign, on
# one residual stream. sqrt(4 * 32) * 2^-11 is 0.6 %; ten times that is a wrong result, not rounding.
MOST_ERROR = 0.06


@dataclass(frozen=True, slots=True)
class Sizes:
    """Channels, heads and layers of a model, and how many tokens its cache holds."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    layers: int = 32
    tokens: int = 1024

    @property
    def head(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Output features of q, k and v side by side."""
        return (self.heads + 2 * self.kv_heads) * self.head

    def linears(self) -> tuple[tuple[int, int], ...]:
        """N, K of a layer: q/k/v, o, gate/up, down."""
        h, i = self.hidden, self.inner
        return ((self.qkv, h), (h, h), (2 * i, h), (h, i))


TINY = Sizes(hidden=256, inner=512, heads=4, kv_heads=2, vocabulary=512, layers=3, tokens=32)

_library = torch.library.Library("w4pack_decode", "DEF")
_library.define("nothing(Tensor[] given, int width) -> Tensor")


def _nothing(given: list[torch.Tensor], width: int) -> torch.Tensor:
    return given[0].new_empty((given[0].shape[0], width))


_library.impl("nothing", _nothing, "CompositeExplicitAutograd")
torch.library.register_fake("w4pack_decode::nothing", _nothing, lib=_library)


class Nothing(nn.Module):
    """In the place of a part that is left out: takes its input, returns memory as it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Return (B, width) of tensors with B rows, not written to."""
        return torch.ops.w4pack_decode.nothing(list(given), self.width)


class Dense(nn.Module):
    """A linear of the other side, in 16 bit: weight (N, K)."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, N) of x (B, K)."""
        return functional.linear(x, self.weight)


class Attention(nn.Module):
    """One new token for each sequence: writes its key and value into the cache, attends to all of it."""

    def __init__(self, sizes: Sizes, batch: int, device: torch.device) -> None:
        super().__init__()
        self.width = sizes.hidden
        shape = (batch, sizes.kv_heads, sizes.tokens, sizes.head)
        self.register_buffer("keys", torch.randn(shape, device=device).half())
        self.register_buffer("values", torch.randn(shape, device=device).half())
        self.register_buffer("last", torch.tensor([sizes.tokens - 1], device=device))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return (B, hidden) of q, k and v (B, heads, 1, head)."""
        self.keys.index_copy_(2, self.last, k)
        self.values.index_copy_(2, self.last, v)
        y = functional.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)
        return y.reshape(q.shape[0], self.width)


class Layer(nn.Module):
    """A decoder layer. The residual stream goes beside its input: addition and norm are compiled as one.

    Args:
        sizes: of the model.
        linears: q/k/v, o, gate/up, down.
        attention: with the cache, or what stands in its place.
        device: of the norms' weights.
    """

    def __init__(
        self, sizes: Sizes, linears: list[nn.Module], attention: nn.Module, device: torch.device
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.qkv, self.o, self.gate_up, self.down = linears
        self.attention = attention
        for name in ("before", "between"):
            weight = torch.ones(sizes.hidden, dtype=torch.float16, device=device)
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and stream (B, hidden) of input, stream and the tables of the position."""
        s = self.sizes
        stream = stream + x
        qkv = self.qkv(norm(stream, self.before)).view(x.shape[0], -1, 1, s.head)
        q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)
        stream = stream + self.o(self.attention(rotate(q, cos, sin), rotate(k, cos, sin), v))
        gate, up = self.gate_up(norm(stream, self.between)).split(s.inner, 1)
        return self.down(functional.silu(gate) * up), stream


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the RMS norm of x (B, K), fp16."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).half() * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x (..., head) after RoPE."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Ends:
    """What both sides share: embedding, last norm, lm_head, rotary tables, the caches."""

    def __init__(self, sizes: Sizes, batch: int, device: torch.device) -> None:
        self.sizes, self.batch, self.device = sizes, batch, device
        shape = (sizes.vocabulary, sizes.hidden)
        self.embedding = torch.randn(shape, dtype=torch.float16, device=device)
        self.weight = torch.ones(sizes.hidden, dtype=torch.float16, device=device)
        self.head = torch.randn(shape, dtype=torch.float16, device=device) * sizes.hidden**-0.5
        powers = torch.arange(0, sizes.head, 2, device=device) / sizes.head
        angles = (sizes.tokens - 1) * ROPE_BASE**-powers
        self.cos, self.sin = (f(torch.cat((angles, angles))).half() for f in (torch.cos, torch.sin))
        self.caches = [Attention(sizes, batch, device) for _ in range(sizes.layers)]

    def finish(self, x: torch.Tensor, stream: torch.Tensor, head: bool) -> torch.Tensor:
        """Return the logits (B, vocabulary), or without ``head`` what lm_head would read."""
        hidden = norm(stream + x, self.weight)
        return functional.linear(hidden, self.head) if head else hidden


class Step:
    """One decode step, compiled; ``logits`` are those of the last run."""

    def __init__(self, ends: Ends, layers: list[Layer], head: bool = True) -> None:
        self.ends, self.layers = ends, layers
        backend = "inductor" if ends.device.type == "cuda" else "aot_eager"  # aot_eager: checks the tracing

        def one(layer: Layer, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return layer(*given)

        def last(x: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = ends.finish(x, stream, head)
            return logits, logits.argmax(-1)

        self._one = torch.compile(one, fullgraph=True, dynamic=False, backend=backend)
        self._last = torch.compile(last, fullgraph=True, dynamic=False, backend=backend)
        self.token = torch.arange(ends.batch, device=ends.device)
        self.next = torch.zeros_like(self.token)
        self.logits = torch.empty(0)

    def __call__(self) -> None:
        x = self.ends.embedding[self.token]
        stream = torch.zeros_like(x)
        for layer in self.layers:
            x, stream = self._one(layer, x, stream, self.ends.cos, self.ends.sin)
        self.logits, token = self._last(x, stream)
        self.next.copy_(token)


Make = Callable[[Linear, LinearSpec], nn.Module]


def packed(weight: Linear, spec: LinearSpec) -> nn.Module:
    """Return our layer of a weight."""
    made = PackedLinear(spec, dtype=torch.float16)
    for name, tensor in (("weight", weight.words), ("weight_scale", weight.scales)):
        setattr(made, name, nn.Parameter(tensor, requires_grad=False))
    return made


def dense(weight: Linear, spec: LinearSpec) -> nn.Module:
    """Return the layer of the other side of a weight."""
    assert weight.dense is not None
    return Dense(weight.dense)


def layers(ends: Ends, weights: list[list[Linear]], make: Make) -> list[Layer]:
    """Return a model's layers: a row of weights and a cache each."""
    specs = [LinearSpec(k, n, 4, GROUP) for n, k in ends.sizes.linears()]
    return [
        Layer(ends.sizes, [make(w, spec) for w, spec in zip(row, specs, strict=True)], cache, ends.device)
        for row, cache in zip(weights, ends.caches, strict=True)
    ]


def without(ends: Ends, attention: bool) -> list[Layer]:
    """Layers without linears; with attention or without."""
    s = ends.sizes
    found = []
    for cache in ends.caches:
        linears: list[nn.Module] = [Nothing(n) for n, _ in s.linears()]
        found.append(Layer(s, linears, cache if attention else Nothing(s.hidden), ends.device))
    return found


def measure(sizes: Sizes, batch: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Return the milliseconds of steps and parts; ``error`` is that of the logits."""
    torch._dynamo.reset()
    ends = Ends(sizes, batch, device)
    weights = [[linear(n, k, device, dense=True) for n, k in sizes.linears()] for _ in range(sizes.layers)]
    steps = {
        "w4pack": Step(ends, layers(ends, weights, packed)),
        "16 bit": Step(ends, layers(ends, weights, dense)),
        "no linears": Step(ends, without(ends, True)),
        "nor lm_head": Step(ends, without(ends, True), head=False),
        "nor attention": Step(ends, without(ends, False), head=False),
    }
    compiled = {name: first_run(step) for name, step in steps.items()}
    error = relative_error(steps["w4pack"].logits, steps["16 bit"].logits)
    if not error <= MOST_ERROR:
        raise SystemExit(f"the logits of both sides differ by {error:.1e}; at most {MOST_ERROR} is rounding")
    times = race([Candidate(name, lambda i, s=step: s(), 1, device) for name, step in steps.items()], repeats)
    ms = {name: us / 1e3 for name, us in times.items()}
    return {**parts(ms), "error": error, "compile_seconds": sum(compiled.values())}


def first_run(step: Step) -> float:
    """Run a step once, which compiles it; return the seconds."""
    start = time.perf_counter()
    step()
    if step.ends.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def parts(ms: dict[str, float]) -> dict[str, float]:
    """Return the milliseconds of a step's parts from those of steps without some."""
    return {
        "w4pack": ms["w4pack"],
        "16 bit": ms["16 bit"],
        "ratio": ms["16 bit"] / ms["w4pack"],
        "linears": ms["w4pack"] - ms["no linears"],
        "linears, 16 bit": ms["16 bit"] - ms["no linears"],
        "lm_head": ms["no linears"] - ms["nor lm_head"],
        "attention": ms["nor lm_head"] - ms["nor attention"],
        "rest": ms["nor attention"],
    }


def told(sizes: Sizes, batch: int, found: dict[str, float]) -> str:
    """Return the lines of a batch size."""
    step, other = found["w4pack"], found["16 bit"]
    linears, others = found["linears"], found["linears, 16 bit"]
    return (
        f"batch {batch}, {sizes.layers} layers, {sizes.tokens} tokens of cache; logits differ by"
        f" {found['error']:.1e}; compiled in {found['compile_seconds']:.0f} s\n"
        f"  step     {step:7.3f} ms against {other:7.3f} ms in 16 bit: {found['ratio']:.2f}x\n"
        f"  linears  {linears:7.3f} ms against {others:7.3f} ms: {others / linears:.2f}x, in the step\n"
        f"  the rest of the step, the same on both sides: lm_head {found['lm_head']:.3f},"
        f" attention {found['attention']:.3f}, norms, rotary, SiLU, embedding {found['rest']:.3f} ms"
    )


def main() -> None:
    """Print each batch size; write JSON to $OUT if set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="4 layers, 3 repeats")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of 256 channels, to try the script")
    options = parser.parse_args()
    device = need(options.device)
    sizes = TINY if options.tiny else Sizes()
    asked = {"layers": options.layers or (4 if options.quick else None), "tokens": options.tokens}
    sizes = replace(sizes, **{name: value for name, value in asked.items() if value})
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}", flush=True)
    found = {}
    with torch.inference_mode():
        for batch in map(int, options.batch.split(",")):
            found[batch] = measure(sizes, batch, device, 3 if options.quick else options.repeats)
            print(told(sizes, batch, found[batch]), flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "decode.json").write_text(json.dumps({"card": name, "batch": found}))


if __name__ == "__main__":
    main()
