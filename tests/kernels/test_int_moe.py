"""The integer product of a mixture of experts on the CPU: values, borders, refusals."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import packed  # noqa: E402
from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels import layout  # noqa: E402
from w4pack.kernels.experts import PackedExperts, StackedLinear  # noqa: E402
from w4pack.kernels.quarot import int_moe_ops, int_ops, orders_int  # noqa: E402
from w4pack.kernels.quarot.calls import GroupedProduct  # noqa: E402
from w4pack.kernels.quarot.experts import QuantizedExperts  # noqa: E402
from w4pack.kernels.quarot.fronts import PlainFront  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402

E, TOKENS, K, N = 4, 6, 192, 128
ORDERS = [
    pytest.param(4, orders_int.P32, id="s8w4"),
    pytest.param(8, orders_int.Q32, id="s8w8"),
    pytest.param(4, orders_int.S64, id="s4w4"),
]
NAMES = (
    "codes", "act_scales", "weight", "scales", "rows", "offsets",
    "bits", "act_bits", "group_size", "order", "k", "dtype",
)  # fmt: skip


def arguments(
    counts: tuple[int, ...] = (3, 0, 5, 1), *, bits: int = 4, group: int = -1, order: int = 1, spare: int = 0
) -> tuple[dict[str, Any], torch.Tensor]:
    """The operator's arguments by name, and the exact (R, N) in fp64; ``spare`` pairs belong to nobody."""
    g = torch.Generator().manual_seed(bits + group + sum(counts))
    low, high = (-8, 8) if order == orders_int.S64 else (-128, 128)
    codes = torch.randint(low, high, (TOKENS, K), generator=g, dtype=torch.int32).to(torch.int8)
    q = torch.randint(0, 2**bits, (E, K, N), generator=g)
    groups = 1 if group == -1 else -(-K // group)
    scales = (torch.rand(E, groups, N, generator=g) + 0.5).half()
    act = torch.rand(TOKENS, generator=g) * 0.01
    rows = torch.randint(0, TOKENS, (sum(counts) + spare,), generator=g, dtype=torch.int32)
    offsets = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    packed = [torch.from_numpy(layout.pack_codes(w.numpy().astype(np.uint8), bits)) for w in q]
    place = torch.from_numpy(layout.grouped_order(N))
    placed = scales[:, :, place].contiguous()
    values = (
        orders_int.arrange(codes, order), act, torch.stack(packed), placed, rows, offsets,
        bits, 4 if order == orders_int.S64 else 8, group, order, K, torch.float16,
    )  # fmt: skip
    exact = torch.zeros(rows.shape[0], N, dtype=torch.float64)
    at = torch.arange(K) // (K if group == -1 else group)
    for e in range(E):
        span = slice(int(offsets[e]), int(offsets[e + 1]))
        taken = rows[span].long()
        dense = (q[e] - 2 ** (bits - 1)).double() * scales[e].double()[at]
        exact[span] = codes[taken].double() * act[taken, None].double() @ dense
    return dict(zip(NAMES, values, strict=True)), exact


def run(given: dict[str, Any]) -> torch.Tensor:
    y: torch.Tensor = int_moe_ops.int_moe_gemm(*given.values())
    return y


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 0, 7), (0, 0, 0, 0), (1, 1, 1, 1)])
@pytest.mark.parametrize("group", [-1, 64])
@pytest.mark.parametrize(("bits", "order"), ORDERS)
def test_every_pair_is_its_experts_product(
    bits: int, order: int, group: int, counts: tuple[int, ...]
) -> None:
    given, exact = arguments(counts, bits=bits, group=group, order=order)
    y = run(given)
    assert y.dtype == torch.float16 and y.shape == exact.shape
    room = 2.0**-11 * exact.abs() + 1e-6 * exact.abs().max() if exact.numel() else exact
    assert bool(((y.double() - exact).abs() <= room).all())


def test_pairs_of_nobody_are_zeros() -> None:
    given, exact = arguments((2, 0, 1, 0), spare=3)
    y = run(given)
    assert not y[3:].any() and bool((exact[3:] == 0).all()) and bool(y[:3].any())


def test_it_passes_the_checks_of_torch() -> None:
    given, _ = arguments(group=64)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(int_moe_ops.int_moe_gemm, tuple(given.values()), test_utils=tests)


def test_wrong_arguments_are_errors_that_name_the_argument() -> None:
    given, _ = arguments()
    rows, offsets = given["rows"], given["offsets"]
    border = [(2, 1, 8, 9), (3, 3, 8, 10)]  # falls; ends past the pairs
    wrong: list[tuple[str, Any]] = [
        ("codes", given["codes"][:, :128]),
        ("act_scales", given["act_scales"][:-1]),
        ("weight", given["weight"][0]),
        ("weight", given["weight"].transpose(1, 2)),
        ("scales", given["scales"][:3]),
        ("scales", given["scales"][0]),
        ("rows", rows.long()),
        ("rows", torch.full_like(rows, TOKENS)),
        ("rows", torch.full_like(rows, -1)),
        ("offsets", offsets[:-1]),
        *(("offsets", torch.tensor([0, *b], dtype=torch.int32)) for b in border),
        ("offsets", torch.tensor([1, 3, 3, 8, 9], dtype=torch.int32)),
        ("bits", 3),
        ("act_bits", 16),
        ("order", orders_int.Q32),
        ("k", 128),
        ("dtype", torch.float32),
    ]
    for name, value in wrong:
        with pytest.raises(UsageError) as caught:
            run(given | {name: value})
        assert caught.value.where == name, (name, caught.value)


def test_codes_past_the_reach_of_an_offset_are_an_error() -> None:
    given = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in arguments()[0].items()}
    tokens = 1 << 20
    given["act_scales"] = torch.empty(tokens, device="meta")

    def check(step: int) -> None:
        codes = torch.empty_strided((tokens, K), (step, 1), dtype=torch.int8, device="meta")
        int_moe_ops.check(GroupedProduct(**given | {"codes": codes}))

    check(65536)
    with pytest.raises(UsageError, match="codes is too large"):
        check(65552)


# ---- the layer that uses it -------------------------------------------------------------------------------

H, INNER = 128, 192


def stack(spec: LinearSpec, seed: int) -> StackedLinear:
    made = [packed.layer(spec, seed + e)[0] for e in range(E)]
    return StackedLinear(spec, {name: torch.stack([t[name] for t in made]) for name in made[0]})


def layer() -> QuantizedExperts:
    """A layer of random experts; what its last linear reads is padded from 168 features to 192."""
    first = LinearSpec(H, 168, group_size=-1, stored_out=INNER)
    back = LinearSpec(168, H, group_size=64, stored_in=INNER)
    made = PackedExperts([stack(first, 10), stack(first, 20)], stack(back, 30), torch.nn.functional.silu)
    return QuantizedExperts(made, PlainFront(8, 1.0, ""), PlainFront(4, 0.9, ""), gated=False)


def one(linear: StackedLinear, front: PlainFront, x: torch.Tensor, expert: int) -> torch.Tensor:
    """A single expert's product of one token."""
    spec = linear.spec
    codes, scales = front.codes(x[None], orders_int.P32, spec.k)
    weight, columns = linear.weight[expert], linear.weight_scale[expert]
    scheme = (spec.bits, front.bits, spec.group_size, orders_int.P32, spec.k, x.dtype)
    return int_ops.int_gemm(codes, scales, weight, columns, None, *scheme)[0, : spec.out_features]


def test_a_layer_is_its_experts_token_by_token() -> None:
    experts, (first, last) = layer(), (PlainFront(8, 1.0, ""), PlainFront(4, 0.9, ""))
    g = torch.Generator().manual_seed(1)
    x, weights = torch.randn(7, H, generator=g).half(), torch.rand(7, 2, generator=g)
    chosen = torch.stack([torch.randperm(E, generator=g)[:2] for _ in range(7)])
    found = experts(x, chosen, weights)
    for t in range(7):
        total = torch.zeros(H)
        for e, weight in zip(chosen[t].tolist(), weights[t], strict=True):
            gate, up = (one(getattr(experts, name), first, x[t], e) for name in experts.first)
            inner = torch.nn.functional.silu(gate) * up
            total += weight * one(experts.down_proj, last, inner, e).float()
        assert torch.equal(found[t], total.half())


def test_a_gradient_through_quantized_experts_is_an_error() -> None:
    x = torch.randn(3, H).half().requires_grad_()
    y = layer()(x, torch.tensor([[0, 1]] * 3), torch.rand(3, 2))
    with pytest.raises(UsageError, match="no gradient"):
        y.sum().backward()
