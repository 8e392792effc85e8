"""Tiles of mma.sync run on a CPU from their own source, against exact sums: all of every card's table."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import emulated  # noqa: E402

from w4pack.kernels import gemm_launch, reference, tiles  # noqa: E402
from w4pack.kernels.arguments import Packed  # noqa: E402
from w4pack.kernels.quarot import int_launch, int_reference, int_tiles, orders_int  # noqa: E402
from w4pack.kernels.quarot.calls import Product  # noqa: E402

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs a C++ compiler")

CODES = {  # bits of a weight, range of the activations' codes
    orders_int.P32: (4, (-128, 128)),
    orders_int.Q32: (8, (-128, 128)),
    orders_int.S64: (4, (-8, 8)),
}


def integer_tiles(arch: str, kind: tuple[int, bool]) -> list[tiles.Tile]:
    known = kind[0] in int_tiles.orders_of(arch)
    return list(int_tiles.all_tiles(arch, *kind)) if known else []


def shapes(tile: tiles.Tile, unit: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (M, K, N, blocks): odd ends; whole tiles a block, and tiles cut over blocks."""
    m, n = tile.tokens + 1, tile.columns + 64
    yield tile.tokens - 1, unit * tile.slots, 64, 1
    yield m, unit * (2 * tile.slots + 1) + 64, n, 3
    cut = (
        2 * int_tiles.EXCHANGE_UNITS + 1
    )  # units of a tile, two of which four blocks share rather than leave two idle
    yield 1, unit * max(tile.slots * tile.stages + 3, cut), n, 4


@pytest.mark.parametrize(
    ("tile", "kind", "arch"), emulated.of_all_cards(integer_tiles, emulated.INTEGER_KINDS)
)
def test_integer_products(tile: tiles.Tile, kind: tuple[int, bool], arch: str) -> None:
    """The same bits as the reference, whenever copies come and in whatever order threads run."""
    order, grouped = kind
    bits, (low, high) = CODES[order]
    for seed, (m, k, n, blocks) in enumerate(shapes(tile, int_tiles.unit_k(tile, order))):
        g = torch.Generator().manual_seed(seed)
        dtype = (torch.float16, torch.bfloat16)[seed % 2]
        group = (64, 128, 64)[seed] if grouped else -1
        codes = torch.randint(low, high, (m, k), generator=g).to(torch.int8)
        words = torch.randint(-(2**31), 2**31, (k // 16, n * bits // 2), generator=g).to(torch.int32)
        scales = torch.rand((-(-k // group) if grouped else 1, n), generator=g).mul(0.01).to(dtype)
        act_scales, bias = torch.rand(m, generator=g), torch.randn(n, generator=g).to(dtype)
        arranged = orders_int.arrange(codes, order)
        tensors = map(emulated.aligned, (arranged, act_scales, words, scales, bias))
        width = 4 if order == orders_int.S64 else 8
        product = Product(*tensors, bits, width, group, order, k, dtype)
        wanted = int_reference.gemm(product)
        for late in (False, True):
            buffer = torch.full((m + 2, n + 64), float("nan"), dtype=dtype)
            out = buffer[1:-1, :n]
            with emulated.machine(arch, late=late, seed=seed) as card:
                int_launch._gemm(card, product, out, tiles.Launch(tile, blocks))
            if grouped:
                off = (out.double() - wanted.double()).abs()
                assert bool((off <= 2 * emulated.EPSILON[dtype] * wanted.double().abs() + 1e-5).all()), (
                    m,
                    k,
                    n,
                    late,
                )
            else:
                assert torch.equal(out, wanted), (m, k, n, late)
            out.fill_(float("nan"))
            assert bool(buffer.isnan().all()), "wrote outside the output"


@pytest.mark.parametrize(("tile", "bits", "arch"), emulated.of_all_cards(tiles.all_tiles, [4, 8]))
def test_products_of_16_bit_activations(tile: tiles.Tile, bits: int, arch: str) -> None:
    """Within the rounding of weights and results, with and without zero points, whenever copies come."""
    for seed, (m, k, n, blocks) in enumerate(shapes(tile, tile.unit)):
        g = torch.Generator().manual_seed(seed)
        k -= k % tile.unit  # of which these are whole units
        dtype, group = (torch.float16, torch.bfloat16)[seed % 2], (32, 64, -1)[seed]
        scale_dtype = (torch.float16, torch.bfloat16)[(seed + (bits == 8)) % 2]
        groups = 1 if group == -1 else -(-k // group)
        words = torch.randint(-(2**31), 2**31, (k // 16, n * bits // 2), generator=g).to(torch.int32)
        zeros = torch.randint(-(2**31), 2**31, (groups, n * bits // 32), generator=g).to(torch.int32)
        scales = torch.rand((groups, n), generator=g).mul(0.01).add(0.005).to(scale_dtype)
        x, bias = torch.randn((m, k), generator=g).to(dtype), torch.randn(n, generator=g).to(dtype)
        tensors = map(emulated.aligned, (words, scales, zeros))
        words, scales, zeros = tensors
        for late, given_zeros in ((False, None), (True, zeros)):
            packed = Packed(words, scales, given_zeros, bits, group)
            weight = reference.dense(words, scales, given_zeros, bits, group, torch.float64)
            wanted = x.double() @ weight + bias.double()
            room = emulated.EPSILON[dtype] * (wanted.abs() + 1.1 * x.double().abs() @ weight.abs()) + 1e-6
            buffer = torch.full((m + 2, n + 64), float("nan"), dtype=dtype)
            out = buffer[1:-1, :n]
            with emulated.machine(arch, late=late, seed=seed):
                given = emulated.aligned(x), packed, emulated.aligned(bias), out, k, n
                gemm_launch.run_gemm(*given, tiles.Launch(tile, blocks))
            off = (out.double() - wanted).abs()
            assert bool((off <= room).all()), (m, k, n, late, float((off - room).max()))
            out.fill_(float("nan"))
            assert bool(buffer.isnan().all()), "wrote outside the output"
