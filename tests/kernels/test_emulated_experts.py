"""Grouped products of experts run on a CPU from their own source: each tile of each card's table."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import emulated  # noqa: E402

from w4pack.kernels import moe_launch, moe_tiles, reference, tiles  # noqa: E402
from w4pack.kernels.arguments import Packed  # noqa: E402
from w4pack.kernels.quarot import (  # noqa: E402
    int_moe_launch,
    int_moe_tiles,
    int_reference,
    int_tiles,
    orders_int,
)
from w4pack.kernels.quarot.calls import GroupedProduct, Product  # noqa: E402

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs a C++ compiler")

TOKENS = 11


def routing(tile: tiles.Tile, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows, offsets): experts without pairs, with few, with more than a tile; two of nobody."""
    counts = ((3, 0, tile.tokens + 2), (0, tile.tokens, 1))[seed]
    offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    rows = torch.randint(0, TOKENS, (int(offsets[-1]) + 2,), generator=torch.Generator().manual_seed(seed))
    return emulated.aligned(rows.int()), emulated.aligned(offsets)


def with_zeros(arch: str, bits: int) -> list[tiles.Tile]:
    """Return the tiles of weights with zero points: those of a host all serve symmetric ones too."""
    return list(moe_tiles.all_tiles(arch, bits, True))


@pytest.mark.parametrize(("tile", "bits", "arch"), emulated.of_all_cards(with_zeros, [4, 8]))
def test_grouped_products(tile: tiles.Tile, bits: int, arch: str) -> None:
    """Within the rounding of weights and results; pairs of nobody are zeros."""
    for seed, dtype in enumerate(emulated.EPSILON):
        g = torch.Generator().manual_seed(seed)
        k, n, group = tile.unit * (tile.slots + 1), tile.columns + 64, (64, -1)[seed]
        groups = 1 if group == -1 else k // group
        words = torch.randint(-(2**31), 2**31, (3, k // 16, n * bits // 2), generator=g).to(torch.int32)
        zeros = torch.randint(-(2**31), 2**31, (3, groups, n * bits // 32), generator=g).to(torch.int32)
        scales = torch.rand((3, groups, n), generator=g).mul(0.01).add(0.005).to(dtype)
        x = emulated.aligned(torch.randn((TOKENS, k), generator=g).to(dtype))
        given = [emulated.aligned(t) for t in (words, scales, zeros)]
        packed = Packed(*given[:2], given[2] if (bits == 4) != bool(seed) else None, bits, group)
        rows, offsets = routing(tile, seed)
        out = torch.full((rows.numel(), n), float("nan"), dtype=dtype)
        with emulated.machine(arch, late=bool(seed), seed=seed):
            moe_launch.run_gemm(x, packed, rows, offsets, out, tiles.Launch(tile, 3))
        wanted, room = (
            torch.zeros(out.shape, dtype=torch.float64),
            torch.full(out.shape, 1e-6, dtype=torch.float64),
        )
        for e, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
            expert = (t if t is None else t[e] for t in packed[:3])
            weight = reference.dense(*expert, bits, group, torch.float64)
            of_x = x[rows[begin:end].long()].double()
            wanted[begin:end] = of_x @ weight
            room[begin:end] += emulated.EPSILON[dtype] * (
                wanted[begin:end].abs() + 1.1 * of_x.abs() @ weight.abs()
            )
        off = (out.double() - wanted).abs()
        assert bool((off <= room).all()), (seed, float((off - room).max()))


def integer_tiles(arch: str, kind: tuple[int, bool]) -> list[tiles.Tile]:
    known = kind[0] in int_tiles.orders_of(arch)
    return list(int_moe_tiles.all_tiles(arch, *kind)) if known else []


@pytest.mark.parametrize(
    ("tile", "kind", "arch"), emulated.of_all_cards(integer_tiles, emulated.INTEGER_KINDS)
)
def test_grouped_integer_products(tile: tiles.Tile, kind: tuple[int, bool], arch: str) -> None:
    """One scale a column: the same bits as the reference."""
    order, grouped = kind
    bits, width = 8 if order == orders_int.Q32 else 4, 4 if order == orders_int.S64 else 8
    for seed, dtype in enumerate(emulated.EPSILON):
        g = torch.Generator().manual_seed(seed)
        unit = int_tiles.unit_k(tile, order)
        k, n, group = unit * (tile.slots + 1) + 64, tile.columns + 64, (64, 128)[seed] if grouped else -1
        groups = -(-k // group) if grouped else 1
        codes = torch.randint(-8, 8, (TOKENS, k), generator=g).to(torch.int8)
        words = torch.randint(-(2**31), 2**31, (3, k // 16, n * bits // 2), generator=g).to(torch.int32)
        scales = torch.rand((3, groups, n), generator=g).mul(0.01).to(dtype)
        act_scales = torch.rand(TOKENS, generator=g)
        rows, offsets = routing(tile, seed)
        tensors = [emulated.aligned(t) for t in (orders_int.arrange(codes, order), act_scales, words, scales)]
        product = GroupedProduct(*tensors, rows, offsets, bits, width, group, order, k, dtype)
        out = torch.full((rows.numel(), n), float("nan"), dtype=dtype)
        with emulated.machine(arch, late=bool(seed), seed=seed) as card:
            int_moe_launch._gemm(card, product, out, tiles.Launch(tile, 3))
        wanted = torch.zeros_like(out)
        for e, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
            at = rows[begin:end].long()
            one = Product(
                tensors[0][at], act_scales[at], words[e], scales[e], None, bits, width, group, order, k, dtype
            )
            wanted[begin:end] = int_reference.gemm(one)
        if grouped:
            off = (out.double() - wanted.double()).abs()
            assert bool((off <= 2 * emulated.EPSILON[dtype] * wanted.double().abs() + 1e-5).all()), seed
        else:
            assert torch.equal(out, wanted), seed
