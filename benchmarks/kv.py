"""Attention over the quantized KV cache beside the fastest fp16 attention of torch, in one run.

Method of ``gemm.py``: CUDA graphs, interleaved repeats, medians. fp16 gets K and V contiguous, as it likes
them; ours reads pages in a random order. Every backend of ``scaled_dot_product_attention`` that takes the
shape runs, the fastest is the baseline. Error against fp32 attention over the same codes.

    python benchmarks/kv.py [--bits 4] [--only decode,prefill,chunk,append] [--repeats 7]
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cards import READ_RATE, environment, need
from gemm import skip
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from w4pack.kernels.bench.timing import Candidate, race, warm_up
from w4pack.kernels.quarot import kv, kv_layout, kv_reference, kv_tiles
from w4pack.kernels.quarot.calls import Attention
from w4pack.kernels.quarot.transform import Transform

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# batch, query heads, KV heads, head size, tokens in the cache
DECODE = (
    (16, 64, 8, 128, 16384),
    (16, 64, 8, 128, 2048),
    (1, 32, 8, 128, 16384),
    (4, 32, 32, 128, 16384),
    (16, 32, 8, 64, 16384),
    (16, 16, 8, 256, 8192),
)
PREFILL = ((1, 64, 8, 128, 2048), (1, 64, 8, 128, 16384), (1, 32, 8, 64, 8192), (1, 16, 8, 256, 4096))
CHUNKS = ((16, 64, 8, 128, 32768), (16, 64, 8, 128, 131072))  # of CHUNK queries behind so long a context
CHUNK = 16
APPEND = ((1, 64, 8, 128, 16384), (16, 64, 8, 128, 1))


@dataclass(frozen=True, slots=True)
class Point:
    """One shape with a filled cache and its K and V in fp16."""

    batch: int
    heads: int
    kv_heads: int
    size: int
    tokens: int
    bits: int
    codes: torch.Tensor
    params: torch.Tensor
    table: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def key(self) -> str:
        """R3."""
        return Transform.planned(self.size).key

    @property
    def name(self) -> str:
        """The shape as a line begins."""
        return f"B{self.batch} {self.heads}/{self.kv_heads} d{self.size} L{self.tokens}"

    @property
    def bytes(self) -> int:
        """Of the cache: codes and parameters."""
        return self.codes.nbytes + self.params.nbytes

    def append(self, guide: torch.Tensor | None = None) -> None:
        """Quantize all of K and V."""
        start = torch.zeros(self.batch, dtype=torch.int32, device="cuda")
        pages = (self.codes, self.params, self.table)
        kv.kv_append(self.k, self.v, *pages, start, self.key, 0.95, 0.95, self.bits, guide)

    def arguments(self, lengths: torch.Tensor) -> tuple[object, ...]:
        """What follows the queries."""
        pages = (self.codes, self.params, self.table, lengths)
        return (*pages, None, self.size**-0.5, 0, 0.0, self.key, self.bits)

    def error(self, q: torch.Tensor, found: torch.Tensor, lengths: torch.Tensor) -> float:
        """Return the relative error of the last sequence, its first and last KV head's first query heads."""
        few = q[-1:, :: self.heads // self.kv_heads].float()
        pages = (self.codes, self.params, self.table[-1:], lengths[-1:])
        if few.shape[2] * self.tokens > 1 << 26:  # scores would not fit
            few, found = few[:, :, -128:], found[:, -128:]
        exact = kv_reference.attention(
            Attention(few, *pages, None, self.size**-0.5, 0, 0.0, self.key, self.bits)
        )
        mine = found[-1:, :, :: self.heads // self.kv_heads].float()
        return float((mine - exact).norm() / exact.norm())


def make(batch: int, heads: int, kv_heads: int, size: int, tokens: int, bits: int) -> Point:
    """Return a point with random K and V in its cache."""
    pages = batch * kv_layout.pages_of(tokens)
    codes, params = kv_layout.empty(pages, kv_heads, size, bits, "cuda")
    table = torch.randperm(pages, device="cuda").int().view(batch, -1)
    shape = (batch, tokens, kv_heads, size)
    k, v = (torch.randn(shape, dtype=torch.float16, device="cuda").transpose(1, 2) for _ in range(2))
    point = Point(batch, heads, kv_heads, size, tokens, bits, codes, params, table, k, v)
    point.append()
    return point


def baselines(point: Point, q: torch.Tensor, causal: bool) -> list[Candidate]:
    """Return the library's backends on fp16 K and V."""
    k, v = point.k.contiguous(), point.v.contiguous()

    def attend(backend: SDPBackend) -> Callable[[int], object]:
        def run(i: int) -> object:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

        return run

    return [Candidate(name, attend(backend), 1) for name, backend in BACKENDS.items()]


def attention(point: Point, queries: int, repeats: int) -> None:
    """Print one line: time, rate, speed-up over each backend, error, bytes."""
    q = torch.randn(
        point.batch, queries, point.heads, point.size, dtype=torch.float16, device="cuda"
    ).transpose(1, 2)
    lengths = torch.full((point.batch,), point.tokens, dtype=torch.int32, device="cuda")
    arguments = point.arguments(lengths)
    ours = Candidate(f"int{point.bits}", lambda i: kv.kv_attention(q, *arguments), 1)
    error = point.error(q, kv.kv_attention(q, *arguments), lengths)
    warm_up(ours.run, 1, 0.1)
    times = race([ours, *baselines(point, q, queries > 1)], repeats, on_error=skip)
    mine = times.pop(ours.name)
    if queries == 1:
        rate = f"{100 * point.bytes / READ_RATE / mine:.0f} % of the read rate"
    else:
        rate = f"{2 * point.batch * point.heads * point.tokens**2 * point.size / mine / 1e6:.0f} TFLOP/s"
    best = min(times.values(), default=float("nan"))
    others = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
    smaller = (point.k.nbytes + point.v.nbytes) / point.bytes
    kind = "decode" if queries == 1 else "prefill"
    print(
        f"{kind} {point.name}: {mine:.1f} us, {rate} | {best / mine:.2f}x the fastest fp16 ({others}) "
        f"| error {error:.1e} | cache {smaller:.2f}x smaller",
        flush=True,
    )


def chunk(point: Point, repeats: int) -> None:
    """Print one line: a short chunk of a prompt by the ways that there are, the one that is taken first."""
    q = torch.randn(point.batch, CHUNK, point.heads, point.size, dtype=torch.float16, device="cuda")
    q, lengths = q.transpose(1, 2), torch.full((point.batch,), point.tokens, dtype=torch.int32, device="cuda")
    arguments, taken = point.arguments(lengths), (kv_tiles.MOST_FILLING, kv_tiles.LEAST_READERS)

    def way(filling: int, readers: int) -> Callable[[int], object]:
        def run(i: int) -> object:
            kv_tiles.MOST_FILLING, kv_tiles.LEAST_READERS = filling, readers
            return kv.kv_attention(q, *arguments)

        return run

    ways = {"as it is": taken, "unpacked by 256 MiB": (0, taken[1]), "from codes": (0, 1 << 30)}
    times = race([Candidate(name, way(*bounds), 1) for name, bounds in ways.items()], repeats)
    kv_tiles.MOST_FILLING, kv_tiles.LEAST_READERS = taken
    shown = ", ".join(f"{name} {time:.1f} us" for name, time in times.items())
    print(f"chunk of {CHUNK} {point.name}: {shown}", flush=True)


def append(point: Point, repeats: int) -> None:
    """Print the time to quantize K and V, without and with a guide of the keys."""
    guide = torch.randn((2, point.kv_heads, point.size), device="cuda")
    ways = {"append": None, "append with a guide": guide}
    times = race([Candidate(name, lambda i, g=g: point.append(g), 1) for name, g in ways.items()], repeats)
    moved = point.k.nbytes + point.v.nbytes + point.bytes
    for name, time in times.items():
        share = 100 * moved / READ_RATE / time
        print(f"{name} {point.name}: {time:.1f} us, {share:.0f} % of the read rate", flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bits", type=int, default=4, choices=kv_layout.BITS)
    parser.add_argument("--only", default="decode,prefill,chunk,append")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    need()
    print(environment())
    kinds = {"decode": DECODE, "prefill": PREFILL, "chunk": CHUNKS, "append": APPEND}
    for kind, shapes in kinds.items():
        if kind not in options.only.split(","):
            continue
        for shape in shapes:
            point = make(*shape, options.bits)
            if kind == "append":
                append(point, options.repeats)
            elif kind == "chunk":
                chunk(point, options.repeats)
            else:
                attention(point, 1 if kind == "decode" else point.tokens, options.repeats)


if __name__ == "__main__":
    main()
