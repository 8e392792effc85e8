"""The grouped product and gather on a card: against fp64, every kind of routing, graphs, bit for bit."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from gpu import cases  # noqa: E402
from gpu.graphs import captured  # noqa: E402
from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels import moe_tiles, reference, tiles  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TYPES = (torch.float16, torch.bfloat16)
ROUTINGS = {  # pairs of each expert
    "one pair": (0, 0, 1, 0, 0),
    "one each": (1, 1, 1, 1, 1),
    "all on one": (0, 0, 0, 70, 0),
    "the first and last": (3, 0, 0, 0, 9),
    "odd": (7, 0, 33, 1, 130),
    "many": (257, 64, 0, 65, 96),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """The experts of a layer, with their dense weights (E, K, N) in fp64."""

    weight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group_size: int
    dense: torch.Tensor


def _layer(
    experts: int,
    k: int,
    n: int,
    bits: int = 4,
    group: int = 128,
    zeros: bool = False,
    dtype: torch.dtype = torch.float16,
    scale_dtype: torch.dtype | None = None,
) -> Layer:
    made = [
        cases.make(1, k, n, bits, group, zeros=zeros, dtype=dtype, scale_dtype=scale_dtype, seed=e)
        for e in range(experts)
    ]
    stacked = [torch.stack([getattr(c, name) for c in made]) for name in ("weight", "scales", "dense")]
    packed_zeros = torch.stack([c.zeros for c in made if c.zeros is not None]) if zeros else None
    return Layer(stacked[0], stacked[1], packed_zeros, bits, group, stacked[2])


def _offsets(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda")


def _owner(offsets: torch.Tensor, pairs: int) -> torch.Tensor:
    """(R,): each pair's expert; E where it belongs to nobody."""
    return torch.searchsorted(offsets[1:].contiguous(), torch.arange(pairs, device="cuda"), right=True)


def _exact(layer: Layer, x: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    out = torch.zeros((rows.numel(), layer.dense.shape[2]), dtype=torch.float64, device="cuda")
    borders = offsets.tolist()
    for e, (begin, end) in enumerate(itertools.pairwise(borders)):
        out[begin:end] = x[rows[begin:end].long()].double() @ layer.dense[e]
    return out


def _run(
    layer: Layer,
    x: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    chosen: tiles.Launch | None = None,
) -> torch.Tensor:
    """Run into the middle of a poisoned buffer; check that nothing else was touched."""
    from w4pack.kernels import moe_launch
    from w4pack.kernels.arguments import Packed

    pairs = rows.numel()
    buffer = torch.full((pairs + 2, layer.dense.shape[2]), float("nan"), dtype=x.dtype, device="cuda")
    out = buffer[1 : pairs + 1]
    packed = Packed(layer.weight, layer.scales, layer.zeros, layer.bits, layer.group_size)
    moe_launch.run_gemm(x, packed, rows, offsets, out, chosen)
    found = out.clone()
    out.fill_(float("nan"))
    assert torch.isnan(buffer).all(), "wrote outside the output"
    return found


def _card() -> tuple[str, int]:
    from w4pack.kernels import launch

    card = launch.device(0)
    return launch.table_arch(card.arch), card.multiprocessors


def _routed(counts: Sequence[int], tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator(device="cuda").manual_seed(seed)
    rows = torch.randint(tokens, (sum(counts),), generator=g, device="cuda", dtype=torch.int32)
    return rows, _offsets(counts)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_shape_and_routing(bits: int, zeros: bool, dtype: torch.dtype) -> None:
    for k, n, group in itertools.product((64, 192, 384, 768, 2752), (64, 192, 320), (-1, 32, 64, 128)):
        layer = _layer(5, k, n, bits, group, zeros, dtype)
        x = torch.randn(40, k, device="cuda").to(dtype)
        for name, counts in ROUTINGS.items():
            rows, offsets = _routed(counts, 40)
            err = cases.error(_run(layer, x, rows, offsets), _exact(layer, x, rows, offsets))
            assert err < cases.BOUND[dtype], (name, k, n, group, err)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_tile_serves_every_routing(bits: int, dtype: torch.dtype) -> None:
    arch, sms = _card()
    for k, n, group, zeros in (
        (128, 64, 32, True), (768, 320, 128, False), (4096, 1024, 64, True), (1024, 448, 64, False)
    ):  # fmt: skip
        layer = _layer(5, k, n, bits, group, zeros, dtype)
        x = torch.randn(300, k, device="cuda").to(dtype)
        for tile in (t for t in moe_tiles.all_tiles(arch, bits, zeros) if k % t.unit == 0):
            for name, counts in ROUTINGS.items():
                rows, offsets = _routed(counts, 300)
                chosen = tiles.Launch(tile, moe_tiles.grid(tile, sms, rows.numel(), 5, n, k))
                err = cases.error(_run(layer, x, rows, offsets, chosen), _exact(layer, x, rows, offsets))
                assert err < cases.BOUND[dtype], (tile, name, k, n, err)


@pytest.mark.parametrize(("experts", "top"), [(1, 1), (8, 2), (128, 8), (512, 10)])
def test_random_routings_of_many_experts(experts: int, top: int) -> None:
    layer = _layer(experts, 256, 192)
    for tokens in (1, 3, 16, 100):
        x = torch.randn(tokens, 256, device="cuda").half()
        chosen = torch.stack([torch.randperm(experts, device="cuda")[:top] for _ in range(tokens)])
        order = torch.argsort(chosen.flatten(), stable=True)
        rows = (order // top).int()
        counts = torch.bincount(chosen.flatten(), minlength=experts).tolist()
        offsets = _offsets(counts)
        err = cases.error(_run(layer, x, rows, offsets), _exact(layer, x, rows, offsets))
        assert err < cases.BOUND[torch.float16], (experts, tokens, err)


def test_either_scale_dtype_goes_with_either_activation() -> None:
    for dtype, scale_dtype in itertools.product(TYPES, TYPES):
        layer = _layer(5, 512, 256, scale_dtype=scale_dtype, dtype=dtype)
        x = torch.randn(40, 512, device="cuda").to(dtype)
        for counts in ROUTINGS.values():
            rows, offsets = _routed(counts, 40)
            assert (
                cases.error(_run(layer, x, rows, offsets), _exact(layer, x, rows, offsets))
                < cases.BOUND[dtype]
            )


def test_pairs_of_nobody_give_zeros() -> None:
    layer = _layer(3, 128, 192)
    x = torch.randn(8, 128, device="cuda").half()
    for counts in ((2, 0, 3), (0, 0, 0)):
        rows = torch.randint(8, (sum(counts) + 50,), device="cuda", dtype=torch.int32)
        found = _run(layer, x, rows, _offsets(counts))
        assert not found[sum(counts) :].any()
        err = cases.error(found[: sum(counts)], _exact(layer, x, rows, _offsets(counts))[: sum(counts)])
        assert sum(counts) == 0 or err < cases.BOUND[torch.float16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_identity_gives_each_experts_weight_bit_for_bit(bits: int, dtype: torch.dtype) -> None:
    arch, sms = _card()
    for k, group in ((128, 32), (256, 128)):
        layer = _layer(3, k, 320, bits, group, zeros=True, dtype=dtype)
        x = torch.eye(k, dtype=dtype, device="cuda")
        rows = torch.arange(k, device="cuda", dtype=torch.int32).repeat(3)
        wanted = layer.dense.float().to(dtype).reshape(3 * k, 320)
        for tile in (t for t in moe_tiles.all_tiles(arch, bits, True) if k % t.unit == 0):
            chosen = tiles.Launch(tile, moe_tiles.grid(tile, sms, 3 * k, 3, 320, k))
            assert torch.equal(_run(layer, x, rows, _offsets((k, k, k)), chosen), wanted), (tile, k, group)


def test_strided_rows_of_x() -> None:
    layer = _layer(5, 256, 128)
    x = torch.randn(40, 512, device="cuda").half()[:, 128:384]
    rows, offsets = _routed(ROUTINGS["odd"], 40)
    err = cases.error(_run(layer, x, rows, offsets), _exact(layer, x, rows, offsets))
    assert err < cases.BOUND[torch.float16]


def test_a_graph_follows_the_routing() -> None:
    from w4pack.kernels import moe_ops, ops

    ops.prepare(0)
    layer = _layer(5, 768, 320)
    x = torch.randn(40, 768, device="cuda").half()
    rows, offsets = _routed((40, 0, 0, 0, 0), 40)
    arguments = (x, layer.weight, layer.scales, None, rows, offsets, 4, 128)
    graph, (out, again) = captured(lambda: [moe_ops.moe_gemm(*arguments) for _ in range(2)])
    for counts in ((40, 0, 0, 0, 0), (0, 1, 2, 3, 34), (8, 8, 8, 8, 8), (0, 0, 0, 0, 40), (1, 0, 0, 0, 3)):
        offsets.copy_(_offsets(counts))
        x.normal_()
        wanted = moe_ops.moe_gemm(*arguments)
        torch.empty(1 << 20, device="cuda").fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted) and torch.equal(again, wanted), counts
        assert cases.error(wanted, _exact(layer, x, rows, offsets)) < cases.BOUND[torch.float16]


def test_the_same_input_gives_the_same_bits() -> None:
    layer = _layer(5, 2048, 1536)
    x = torch.randn(300, 2048, device="cuda").half()
    for counts in ROUTINGS.values():
        rows, offsets = _routed(counts, 300)
        first = _run(layer, x, rows, offsets)
        assert all(torch.equal(_run(layer, x, rows, offsets), first) for _ in range(50)), counts


def test_any_stream_and_no_pairs() -> None:
    from w4pack.kernels import moe_ops

    layer = _layer(5, 256, 128)
    x = torch.randn(40, 256, device="cuda").half()
    rows, offsets = _routed(ROUTINGS["odd"], 40)
    arguments = (x, layer.weight, layer.scales, None, rows, offsets, 4, 128)
    wanted = moe_ops.moe_gemm(*arguments)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = moe_ops.moe_gemm(*arguments)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found, wanted)
    nothing = moe_ops.moe_gemm(*arguments[:4], rows[:0], torch.zeros_like(offsets), 4, 128)
    assert nothing.shape == (0, 128)


def test_too_many_experts_are_refused() -> None:
    from w4pack.kernels import moe_ops

    experts = moe_tiles.MOST_EXPERTS + 1
    weight = torch.zeros((experts, 4, 128), dtype=torch.int32, device="cuda")
    scales = torch.ones((experts, 1, 64), dtype=torch.float16, device="cuda")
    x = torch.ones((1, 64), dtype=torch.float16, device="cuda")
    rows = torch.zeros(1, dtype=torch.int32, device="cuda")
    offsets = torch.ones(experts + 1, dtype=torch.int32, device="cuda")
    with pytest.raises(UsageError, match="more experts"):
        moe_ops.moe_gemm(x, weight, scales, None, rows, offsets, 4, -1)


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_moe_gather_takes_each_experts_order(tokens: int) -> None:
    from w4pack.kernels import moe_ops

    for k, width in ((64, 64), (203, 256), (2048, 2048), (14336, 14400)):
        x = torch.randn(tokens, k, device="cuda").half()
        perm = torch.stack([torch.randperm(k, device="cuda") for _ in range(5)]).int()
        for counts in ROUTINGS.values():
            rows, offsets = _routed(counts, tokens)
            rows = torch.cat([rows, rows[:3]])  # the last belong to nobody
            found = moe_ops.moe_gather(x, rows, offsets, perm, width)
            owner = _owner(offsets, rows.numel())
            wanted = torch.zeros_like(found)
            for r in range(sum(counts)):
                wanted[r, :k] = x[rows[r].long(), perm[owner[r]].long()]
            assert torch.equal(found, wanted), (k, counts)


@pytest.mark.parametrize("m", [2, 4, 5, 64, 1000])
def test_gather_of_rows_that_are_not_aligned(m: int) -> None:
    from w4pack.kernels import ops

    for k, columns, width in (
        (200, 203, 256),
        (2050, 2051, 2056),
        (30000, 30000, 30000),
        (60000, 60000, 60000),
    ):
        x = torch.randn(m, columns, device="cuda").half()[:, :k]
        perm = torch.randperm(k + 1, device="cuda").int()
        perm = perm[perm < k][:k].contiguous()
        assert torch.equal(ops.gather(x, perm, width), reference.gather(x, perm, width)), (m, k)
