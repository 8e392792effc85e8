"""The integer products on a card: bit for bit against exact sums, at every odd shape, in every order."""

import itertools
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from gpu import cases  # noqa: E402
from gpu.graphs import captured  # noqa: E402
from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels import tiles  # noqa: E402
from w4pack.kernels.quarot import int_ops, int_tiles, orders_int  # noqa: E402, F401
from w4pack.kernels.quarot.calls import Product  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MS = (1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 65, 127, 129, 257, 1023)
KS = (64, 128, 192, 320, 384, 2752)
NS = (64, 192, 320)
TYPES = (torch.float16, torch.bfloat16)
KINDS = {"s8w4": (4, orders_int.P32), "s8w8": (8, orders_int.Q32), "s4w4": (4, orders_int.S64)}
ULP = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True, slots=True)
class Case:
    """One product: natural codes, and what the operator takes."""

    codes: torch.Tensor
    act_scales: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    bits: int
    group_size: int
    order: int
    dtype: torch.dtype

    @property
    def k(self) -> int:
        return self.codes.shape[1]

    @property
    def n(self) -> int:
        return self.scales.shape[1]

    @property
    def product(self) -> Product:
        return Product(
            orders_int.arrange(self.codes, self.order),
            self.act_scales,
            self.weight,
            self.scales,
            self.bias,
            self.bits,
            4 if self.order == orders_int.S64 else 8,
            self.group_size,
            self.order,
            self.k,
            self.dtype,
        )

    def rows(self, m: int) -> "Case":
        """Return the product of the first rows."""
        return Case(
            self.codes[:m],
            self.act_scales[:m],
            self.weight,
            self.scales,
            self.bias,
            self.bits,
            self.group_size,
            self.order,
            self.dtype,
        )


def make(
    m: int, k: int, n: int, kind: str, group: int, dtype: torch.dtype, *, bias: bool = False, extreme: int = 0
) -> Case:
    """Return a random product; ``extreme`` sets every code to that value, weights to their lowest."""
    bits, order = KINDS[kind]
    g = torch.Generator(device="cuda").manual_seed(m + k + n)
    low, high = (-8, 8) if kind == "s4w4" else (-128, 128)
    codes = torch.randint(low, high, (m, k), device="cuda", generator=g, dtype=torch.int32).to(torch.int8)
    weight = cases.random_words((k // 16, n * bits // 2), "cuda", g)
    if extreme:
        codes, weight = codes.fill_(extreme), weight.zero_()
    groups = 1 if group == -1 else -(-k // group)
    scales = (torch.rand((groups, n), device="cuda", generator=g) * 0.01 + 0.005).to(dtype)
    act_scales = torch.rand(m, device="cuda", generator=g) * 0.01
    b = torch.randn(n, device="cuda", generator=g).to(dtype) if bias else None
    return Case(codes, act_scales, weight, scales, b, bits, group, order, dtype)


def _run(case: Case, chosen: tiles.Launch | None = None, shift: int = 64) -> torch.Tensor:
    """Run into the middle of a poisoned buffer, ``shift`` columns in; check that nothing else was touched."""
    from w4pack.kernels.quarot import int_launch

    m, n = case.codes.shape[0], case.n
    buffer = torch.full((m + 2, n + 2 * shift), float("nan"), dtype=case.dtype, device="cuda")
    out = buffer[1 : m + 1, shift : shift + n]
    int_launch.gemm(case.product, out, chosen)
    found = out.clone()
    out.fill_(float("nan"))
    assert torch.isnan(buffer).all(), "wrote outside the output"
    return found


def _exact(case: Case) -> torch.Tensor:
    from w4pack.kernels.quarot import int_reference

    return int_reference.gemm(case.product)


def _compare(found: torch.Tensor, wanted: torch.Tensor, grouped: bool, what: object) -> None:
    """One scale a column: equal bits. Groups: blocks that share a tile add fp32 sums in another order."""
    if not grouped:
        assert torch.equal(found, wanted), (what, float((found.double() - wanted.double()).abs().max()))
        return
    off = (found.double() - wanted.double()).abs()
    room = ULP[found.dtype] * wanted.double().abs() + 1e-5 * wanted.double().abs().max()
    assert bool((off <= room).all()), (what, float((off - room).max()))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_is_right_and_stays_inside(kind: str, dtype: torch.dtype) -> None:
    groups = (-1, 64, 128) if kind == "s4w4" else (-1, 32, 64, 128)
    for k, n, group in itertools.product(KS, NS, groups):
        whole = make(max(MS), k, n, kind, group, dtype, bias=n == 192)
        wanted = _exact(whole)
        for m in MS:
            _compare(_run(whole.rows(m)), wanted[:m], group != -1, (m, k, n, group))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_serves_every_m(kind: str, dtype: torch.dtype) -> None:
    from w4pack.kernels import launch

    card = launch.device(0)
    arch, sms, order = launch.table_arch(card.arch), card.multiprocessors, KINDS[kind][1]
    for group, (k, n) in itertools.product((-1, 64, 128), ((64, 64), (320, 192), (4160, 1024), (512, 8192))):
        whole = make(1500, k, n, kind, group, dtype)
        wanted = _exact(whole)
        for tile in int_tiles.all_tiles(arch, order, group != -1):
            for m in (1, 13, 64, 300, 1500):
                grid = int_tiles.grid(tile, sms, m, n, k, order)
                for blocks in {grid, max(1, grid // 3), min(grid, 5)}:
                    found = _run(whole.rows(m), tiles.Launch(tile, blocks))
                    _compare(found, wanted[:m], group != -1, (tile.text, blocks, m, k, n, group))


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_sums_are_exact(kind: str) -> None:
    """All codes at their lowest: the sums are as large as they get, and odd scales make every bit count."""
    lowest = -8 if kind == "s4w4" else -128
    for m, k in ((1, 28672), (200, 28672)):
        case = make(m, k, 256, kind, -1, torch.bfloat16, extreme=lowest)
        _compare(_run(case), _exact(case), False, (m, k))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_begin_at_any_pair_of_values(kind: str) -> None:
    for m, n, group in itertools.product((1, 40, 300), (192, 4096), (-1, 128)):
        case = make(m, 320, n, kind, group, torch.float16, bias=True)
        _compare(_run(case, shift=34), _exact(case), group != -1, (m, n, group))


def test_zero_rows_give_the_bias() -> None:
    case = make(40, 512, 128, "s8w4", -1, torch.float16, bias=True)
    case.codes.zero_()
    assert torch.equal(_run(case), case.bias.expand(40, 128))


def test_products_are_the_same_under_a_graph_and_from_run_to_run() -> None:
    case = make(300, 4096, 4096, "s8w4", 128, torch.float16)
    first = _run(case)
    for _ in range(20):
        assert torch.equal(_run(case), first)
    codes = orders_int.arrange(case.codes, case.order)
    arguments = (codes, case.act_scales, case.weight, case.scales, None, 4, 8, 128, case.order, 4096)
    graph, y = captured(lambda: torch.ops.w4pack.int_gemm(*arguments, torch.float16))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, first)


def test_sums_handed_over_early_are_those_of_their_own_launch() -> None:
    """Launches one behind the other share flags and sums: each finds what its own blocks left."""
    from w4pack.kernels import launch
    from w4pack.kernels.quarot import int_launch

    card = launch.device(0)
    arch, sms, order = launch.table_arch(card.arch), card.multiprocessors, orders_int.P32
    case = make(2048, 4096, 4096, "s8w4", -1, torch.float16)
    wanted, product = _exact(case), case.product
    found = []
    for tile in [*int_tiles.all_tiles(arch, order, False)] * 3:
        m = 2048 if tile.tokens >= 64 else 64
        for blocks in {int_tiles.grid(tile, sms, m, case.n, case.k, order), 7}:
            out = torch.full((m, case.n), float("nan"), dtype=case.dtype, device="cuda")
            few = product._replace(codes=product.codes[:m], act_scales=product.act_scales[:m])
            int_launch.gemm(few, out, tiles.Launch(tile, blocks))
            found.append((tile.text, blocks, out))
    for text, blocks, out in found:
        assert torch.equal(out, wanted[: len(out)]), (text, blocks)


@pytest.mark.parametrize("group", [-1, 128])
def test_places_are_marked_again_whatever_tile_comes_next(group: int) -> None:
    """Products of other values one behind the other: a place that kept an old value would show."""
    from w4pack.kernels import launch

    card = launch.device(0)
    marked = [
        t for t in int_tiles.all_tiles(launch.table_arch(card.arch), orders_int.P32, group != -1) if t.marked
    ]
    cases_of = [make(m, 8192, 704, "s8w4", group, torch.float16) for m in (1, 7, 16, 31)]
    wanted = [_exact(case) for case in cases_of]
    for _, tile, (case, exact) in itertools.product(range(5), marked, zip(cases_of, wanted, strict=True)):
        grid = int_tiles.grid(tile, card.multiprocessors, len(exact), 704, 8192, orders_int.P32)
        for blocks in (grid, grid - 5, 40):
            _compare(_run(case, tiles.Launch(tile, blocks)), exact, group != -1, (tile.text, blocks))
    torch.cuda.synchronize()
    spaces = [space.memory for space in (*card.workspaces.values(), *card.spare) if space.memory]
    assert spaces and all((places == -1).all() for _, places, _ in spaces)


def test_what_the_card_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(4, 64, 64, "s4w4", -1, torch.float16)
    monkeypatch.setattr(int_tiles, "choose", lambda *_: None)
    with pytest.raises(UsageError, match="no kernel for this order"):
        _run(case)
