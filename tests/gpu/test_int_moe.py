"""The grouped integer product on a card: bit for bit against each expert's product, and under a graph."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import packed  # noqa: E402
from gpu import cases  # noqa: E402
from gpu.graphs import captured  # noqa: E402
from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels import launch, moe_tiles, tiles  # noqa: E402
from w4pack.kernels.experts import PackedExperts, StackedLinear  # noqa: E402
from w4pack.kernels.quarot import int_moe_ops, int_moe_tiles, int_ops, orders_int  # noqa: E402
from w4pack.kernels.quarot.calls import GroupedProduct  # noqa: E402
from w4pack.kernels.quarot.experts import QuantizedExperts  # noqa: E402
from w4pack.kernels.quarot.fronts import PlainFront  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROUTINGS = (
    (4, (3, 0, 5, 1)),
    (8, (0, 70, 0, 1, 200, 17, 0, 0)),
    (128, tuple(1 + (i * 7) % 5 for i in range(128))),
    (3, (0, 0, 0)),
)
KINDS = {"s8w4": (4, orders_int.P32), "s8w8": (8, orders_int.Q32), "s4w4": (4, orders_int.S64)}
TOKENS = 50


def make(
    kind: str, experts: int, counts: tuple[int, ...], n: int, k: int, group: int, dtype: torch.dtype
) -> tuple[object, ...]:
    """Arguments of the operator; three pairs belong to nobody."""
    bits, order = KINDS[kind]
    g = torch.Generator(device="cuda").manual_seed(n + k + experts)
    low, high = (-8, 8) if kind == "s4w4" else (-128, 128)
    codes = torch.randint(low, high, (TOKENS, k), device="cuda", generator=g, dtype=torch.int32)
    act = torch.rand(TOKENS, device="cuda", generator=g) * 0.01
    weight = cases.random_words((experts, k // 16, n * bits // 2), "cuda", g)
    groups = 1 if group == -1 else -(-k // group)
    scales = (torch.rand((experts, groups, n), device="cuda", generator=g) * 0.01 + 0.005).to(dtype)
    total = sum(counts) + 3
    rows = torch.randint(0, TOKENS, (total,), device="cuda", generator=g, dtype=torch.int32)
    offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda")
    placed = orders_int.arrange(codes.to(torch.int8), order)
    scheme = (bits, 4 if kind == "s4w4" else 8, group, order, k, dtype)
    return (placed, act, weight, scales, rows, offsets, *scheme)


def expected(arguments: tuple[object, ...]) -> torch.Tensor:
    codes, act, weight, scales, rows, offsets, *scheme = arguments
    n = scales.shape[2]
    out = torch.zeros(rows.shape[0], n, device="cuda", dtype=scheme[-1])
    for e, (a, b) in enumerate(itertools.pairwise(offsets.tolist())):
        if b > a:
            taken = rows[a:b].long()
            out[a:b] = int_ops.int_gemm(codes[taken], act[taken], weight[e], scales[e], None, *scheme)
    return out


def close(found: torch.Tensor, wanted: torch.Tensor, grouped: bool) -> bool:
    if not grouped:
        return torch.equal(found, wanted)
    step = 2.0**-7 if found.dtype == torch.bfloat16 else 2.0**-10
    room = step * wanted.double().abs() + 1e-5 * wanted.double().abs().max()
    return bool(((found.double() - wanted.double()).abs() <= room).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_serves_every_routing(kind: str, dtype: torch.dtype) -> None:
    from w4pack.kernels.quarot import int_moe_launch

    card, order = launch.device(0), KINDS[kind][1]
    arch, sms = launch.table_arch(card.arch), card.multiprocessors
    groups = (-1, 64, 128) if kind == "s4w4" else (-1, 32, 64, 128)
    for (k, n), group, (experts, counts) in itertools.product(
        ((128, 64), (192, 320), (2048, 1536)), groups, ROUTINGS
    ):
        given = make(kind, experts, counts, n, k, group, dtype)
        wanted = expected(given)
        rows = given[4]
        for tile in int_moe_tiles.all_tiles(arch, order, group != -1):
            buffer = torch.full((rows.shape[0] + 2, n), float("nan"), device="cuda", dtype=dtype)
            grid = int_moe_tiles.grid(tile, sms, rows.shape[0], experts, n, k, order)
            for blocks in {grid, max(1, grid // 3)}:
                chosen = tiles.Launch(tile, blocks)
                int_moe_launch.gemm(GroupedProduct(*given), buffer[1:-1], chosen)
                assert close(buffer[1:-1], wanted, group != -1), (tile.text, k, n, group, experts, blocks)
                assert buffer[0].isnan().all() and buffer[-1].isnan().all()


def test_more_experts_than_a_block_can_list_are_refused() -> None:
    experts = moe_tiles.MOST_EXPERTS + 1
    given = make("s8w4", experts, (1,) * experts, 64, 64, -1, torch.float16)
    with pytest.raises(UsageError, match="more experts than"):
        int_moe_ops.int_moe_gemm(*given)


def test_a_layer_of_experts_is_captured() -> None:
    """Fronts, both products, the routing and the sum: nothing waits for the card."""
    g = torch.Generator().manual_seed(0)
    first, back = LinearSpec(128, 256, group_size=-1), LinearSpec(256, 128, group_size=64)

    def stack(spec: LinearSpec) -> StackedLinear:
        made = [packed.layer(spec, seed)[0] for seed in range(4)]
        return StackedLinear(spec, {name: torch.stack([t[name] for t in made]) for name in made[0]})

    made = PackedExperts([stack(first), stack(first)], stack(back), torch.nn.functional.silu)
    layer = QuantizedExperts(made, PlainFront(8, 1.0, ""), PlainFront(4, 0.9, ""), gated=False).cuda()
    x, weights = torch.randn(5, 128, generator=g).half().cuda(), torch.rand(5, 2, generator=g).cuda()
    chosen = torch.zeros(5, 2, dtype=torch.int64, device="cuda")
    graph, y = captured(lambda: layer(x, chosen, weights))
    for _ in range(3):
        chosen.copy_(torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(5)]))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, layer(x, chosen, weights)) and bool(y.isfinite().all()) and bool(y.any())


def test_a_graph_takes_another_routing_at_its_replay() -> None:
    given = list(make("s8w4", 8, (0, 70, 0, 1, 200, 17, 0, 0), 320, 192, -1, torch.float16))
    graph, y = captured(lambda: int_moe_ops.int_moe_gemm(*given))
    for counts in ((36,) * 8, (288, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 5)):
        given[4].copy_(given[4].flip(0))
        given[5].copy_(torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected(tuple(given)))
