"""A few products of every tile, small enough for compute-sanitizer (``run_all.sh sanitizer``).

python tests/gpu/sanitize.py [PART ...]    (all parts where none is named; --parts: print their names)
"""

import functools
import itertools
import sys
from unittest import mock

import cases
import torch

from w4pack.kernels import gemm_launch, launch, moe_launch, moe_tiles, ops, reference, tiles
from w4pack.kernels.arguments import Packed
from w4pack.kernels.quarot import (
    flat_plan,
    int_launch,
    int_moe_launch,
    int_moe_tiles,
    int_reference,
    int_tiles,
    kv,
    kv_layout,
    kv_reference,
    orders_int,
    quantize_ops,
    quantize_reference,
)
from w4pack.kernels.quarot.calls import Attention, GroupedProduct, Product
from w4pack.kernels.quarot.transform import Transform


def main(names: list[str]) -> None:
    """Run the named parts, or all."""
    if names == ["--parts"]:
        print(*PARTS, sep="\n")
        return
    for name in names or PARTS:
        PARTS[name]()
        torch.cuda.synchronize()
        print(name, "done", flush=True)


def products() -> None:
    """Run each tile on shapes with odd ends; repack and gather once."""
    card = launch.device(0)
    for bits in (4, 8):
        for tile in tiles.all_tiles(launch.table_arch(card.arch), bits):
            for m, k, n, group in ((3, 5 * tile.unit, 192, 32), (tile.tokens + 1, 1024, 320, 128)):
                words = torch.randint(
                    -(2**31), 2**31 - 1, (k // 16, n * bits // 2), device="cuda", dtype=torch.int32
                )
                scales = torch.rand((-(-k // group), n), device="cuda").half()
                zeros = torch.randint(
                    0, 2**31 - 1, (scales.shape[0], n * bits // 32), device="cuda", dtype=torch.int32
                )
                x = torch.randn(m, k, device="cuda").half()
                out = torch.empty(m, n, device="cuda", dtype=torch.float16)
                grid = tiles.grid(tile, card.multiprocessors, m, n, k)
                few = grid if tile.evenly else min(8, grid)
                chosen = tiles.Launch(tile, few)
                packed = Packed(words, scales, zeros, bits, group)
                gemm_launch.run_gemm(x, packed, None, out, k, n, chosen)
                exact = x.double() @ reference.dense(words, scales, zeros, bits, group, torch.float64)
                assert float((out.double() - exact).norm() / exact.norm()) < 1e-3, (tile, m, k, n)
        words = torch.randint(-(2**31), 2**31 - 1, (320 * bits // 32, 192), device="cuda", dtype=torch.int32)
        ops.repack(words, torch.randperm(320, device="cuda").int(), bits)
    ops.gather(torch.randn(3, 200, device="cuda").half(), torch.randperm(200, device="cuda").int(), 256)


def experts() -> None:
    """Run each tile of the grouped product on uneven routings, and the grouped gather once."""
    card = launch.device(0)
    arch = launch.table_arch(card.arch)
    for bits, zeros in ((4, False), (4, True), (8, True)):
        for tile in moe_tiles.all_tiles(arch, bits, zeros):
            for k, n, counts in (
                (2 * tile.unit, 192, (0, 3, 0, 17)),
                (1024, 320, (tile.tokens + 1, 0, 1, 9)),
            ):
                layer = [cases.make(1, k, n, bits, 128, zeros=zeros, seed=e) for e in range(4)]
                stacks = [torch.stack([getattr(c, name) for c in layer]) for name in ("weight", "scales")]
                z = torch.stack([c.zeros for c in layer if c.zeros is not None]) if zeros else None
                offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
                rows = torch.randint(8, (sum(counts) + 2,), device="cuda", dtype=torch.int32)
                x = torch.randn(8, k, device="cuda").half()
                out = torch.full((rows.numel(), n), float("nan"), device="cuda", dtype=torch.float16)
                most = moe_tiles.grid(tile, card.multiprocessors, rows.numel(), 4, n, k)
                chosen = tiles.Launch(tile, min(8, most))
                moe_launch.run_gemm(x, Packed(*stacks, z, bits, 128), rows, offsets, out, chosen)
                expert = torch.arange(4, device="cuda").repeat_interleave(torch.tensor(counts, device="cuda"))
                dense = torch.stack([c.dense for c in layer])
                taken = x[rows[: sum(counts)].long()].double()
                exact = torch.einsum("rk,rkn->rn", taken, dense[expert])
                assert cases.error(out[: sum(counts)], exact) < 1e-3, (tile, k, n)
                assert not out[sum(counts) :].any()
    perm = torch.stack([torch.randperm(203, device="cuda") for _ in range(4)]).int()
    moe_launch.gather(torch.randn(8, 203, device="cuda").half(), rows[:20], offsets, perm, 256)
    torch.cuda.synchronize()


def integers() -> None:
    """Run each tile of the integer products on shapes with odd ends, cut between few blocks."""
    card = launch.device(0)
    arch = launch.table_arch(card.arch)
    for (order, kind), group in itertools.product(int_tiles.KINDS.items(), (-1, 64)):
        bits = 8 if order == orders_int.Q32 else 4
        for tile in int_tiles.all_tiles(arch, order, group != -1):
            for m, k, n in ((3, 320, 192), (tile.tokens + 1, 1088, 320)):
                codes = torch.randint(-8, 8, (m, k), device="cuda", dtype=torch.int32).to(torch.int8)
                weight = cases.random_words((k // 16, n * bits // 2), "cuda", torch.Generator("cuda"))
                scales = torch.rand((1 if group == -1 else -(-k // group), n), device="cuda").half()
                given = (orders_int.arrange(codes, order), torch.rand(m, device="cuda"), weight, scales, None)
                out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
                chosen = tiles.Launch(
                    tile, min(5, int_tiles.grid(tile, card.multiprocessors, m, n, k, order))
                )
                product = Product(*given, bits, 4 if kind == "s4w4" else 8, group, order, k, out.dtype)
                int_launch.gemm(product, out, chosen)
                exact = int_reference.gemm(product)
                assert cases.error(out, exact.double()) < 1e-3, (kind, tile, m, k, n, group)


def integer_experts() -> None:
    """Run each tile of the grouped integer product on uneven routings, cut between few blocks."""
    card = launch.device(0)
    for (order, kind), group in itertools.product(int_tiles.KINDS.items(), (-1, 64)):
        bits, act_bits = 8 if order == orders_int.Q32 else 4, 4 if kind == "s4w4" else 8
        for tile in int_moe_tiles.all_tiles(launch.table_arch(card.arch), order, group != -1):
            for k, n, counts in ((320, 192, (0, 3, 0, 17)), (1088, 320, (tile.tokens + 1, 0, 1, 9))):
                codes = torch.randint(-8, 8, (8, k), device="cuda", dtype=torch.int32).to(torch.int8)
                tokens = (orders_int.arrange(codes, order), torch.rand(8, device="cuda"))
                weight = cases.random_words((4, k // 16, n * bits // 2), "cuda", torch.Generator("cuda"))
                scales = torch.rand((4, 1 if group == -1 else -(-k // group), n), device="cuda").half()
                rows = torch.randint(8, (sum(counts) + 2,), device="cuda", dtype=torch.int32)
                offsets = torch.tensor([0, *itertools.accumulate(counts)], device="cuda").int()
                out = torch.full((len(rows), n), float("nan"), device="cuda", dtype=torch.bfloat16)
                scheme = (bits, act_bits, group, order, k, out.dtype)
                grid = int_moe_tiles.grid(tile, card.multiprocessors, len(rows), 4, n, k, order)
                product = GroupedProduct(*tokens, weight, scales, rows, offsets, *scheme)
                int_moe_launch.gemm(product, out, tiles.Launch(tile, min(5, grid)))
                for e, (a, b) in enumerate(itertools.pairwise(offsets.tolist())):
                    taken = rows[a:b].long()
                    one = Product(*(t[taken] for t in tokens), weight[e], scales[e], None, *scheme)
                    if b > a:
                        assert cases.error(out[a:b], int_reference.gemm(one).double()) < 1e-3, (
                            kind,
                            tile,
                            k,
                            n,
                        )
                assert not out[sum(counts) :].any()


def caches() -> None:
    """Append to a quantized cache and attend to it, each head size and width: one token, chunks."""
    for size, bits in itertools.product(kv_layout.HEAD_DIMS, kv_layout.BITS):
        codes, params = kv_layout.empty(7, 2, size, bits, "cuda")
        table = torch.tensor([[5, 0, 3], [1, 6, 2]], device="cuda").int()
        k, v = (torch.randn(2, 130, 2, size, device="cuda").half().transpose(1, 2) for _ in range(2))
        start, lengths = (torch.tensor(x, device="cuda").int() for x in ((0, 0), (130, 77)))
        key, scale = Transform.planned(size).key, size**-0.5
        guide = torch.randn(2, 2, size, device="cuda")
        for given in (guide, None):
            kv.kv_append(k, v, codes, params, table, start, key, 0.95, 0.95, bits, given)
        for tokens, heads in ((1, 10), (70, 10), (70, 2)):  # the last ones' K and V have one reader
            q = torch.randn(2, tokens, heads, size, device="cuda").half().transpose(1, 2)
            arguments = (codes, params, table, lengths, None, scale, 0, 0.0, key, bits)
            found = kv.kv_attention(q, *arguments)
            assert (
                cases.error(found, kv_reference.attention(Attention(q.float(), *arguments)).double()) < 2e-3
            ), (
                size,
                bits,
            )


def quantizers() -> None:
    """Quantize rows without a transform, of every form."""
    for k in (72, 5120, 8192, 14336, 16384):
        x, width = torch.randn(5, 2 * k, device="cuda").half(), -(-k // 64) * 64
        quantize_ops.norm_quantize(x[:, :k], torch.ones(k, device="cuda"), 1e-5, "", 4, 0.9, 2, width)
        quantize_ops.act_quantize(x, "silu", "", 8, 1.0, 1, width)


def transforms(row: flat_plan.Flat) -> None:
    """Transform rows of one form, as many as blocks take in several turns."""
    key = Transform.planned(row.size).key
    n = row.size * (1 if row.steps else row.columns)
    # Few blocks take several rows each: synccheck has room for some thousand barriers.
    few = mock.patch.object(launch.device(0), "multiprocessors", 8)
    with mock.patch.object(flat_plan, "MANY", 1), few:
        for m in (1, 41):
            x = torch.randn(m, n, device="cuda").half()
            if row.acts:
                quantize_ops.act_quantize(torch.cat((x, x), 1), "gelu_tanh", key, 4, 0.9, 2, n)
            if row.apart:
                continue
            if row.steps:
                found = quantize_ops.act_quantize(x, "none", key, 8, 1.0, 1, n)
                y = quantize_reference.apply(x.cpu().double(), Transform.of(key))
            else:
                found = quantize_ops.heads_quantize(x, row.size, key, 8, 1.0, 1, n)
                y = quantize_reference.across_heads(x.cpu(), row.size, Transform.of(key))
            # On the CPU: the library's products upset synccheck.
            wanted = quantize_reference.codes(y.float(), x.dtype, 8, 1.0, 1, n)
            assert int((found[0].cpu().int() - wanted[0].int()).abs().max()) <= 1, (row, m)


PARTS = {part.__name__: part for part in (products, experts, integers, integer_experts, caches, quantizers)}
PARTS |= {
    f"transforms_{row.size}{'_acts' if row.apart else ''}": functools.partial(transforms, row)
    for row in flat_plan.FLATS
}

if __name__ == "__main__":
    main(sys.argv[1:])
