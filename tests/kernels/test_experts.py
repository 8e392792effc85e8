"""Stacked experts and the grouped operators on the CPU, against single experts and a plain routing loop."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import packed  # noqa: E402
from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels import moe_checks, moe_ops, ops  # noqa: E402
from w4pack.kernels.arguments import Packed  # noqa: E402
from w4pack.kernels.experts import MixedExperts, PackedExperts, StackedLinear  # noqa: E402
from w4pack.kernels.spec import LinearSpec, fuse  # noqa: E402

E, H, INNER = 4, 128, 192


def stack(spec: LinearSpec, seed: int, count: int = E) -> tuple[StackedLinear, np.ndarray]:
    """A stack of random experts, and their dense weights (E, in, out) in fp64."""
    made = [packed.layer(spec, seed + e) for e in range(count)]
    tensors = {name: torch.stack([t[name] for t, _ in made]) for name in made[0][0]}
    return StackedLinear(spec, tensors), np.stack([dense for _, dense in made])


def routing(tokens: int, choices: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    picked = torch.stack([torch.randperm(E, generator=g)[:choices] for _ in range(tokens)])
    return picked, torch.rand(tokens, choices, generator=g)


def plain(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: np.ndarray, down: np.ndarray
) -> np.ndarray:
    """The definition, token by token, in fp64."""
    out = np.zeros((x.shape[0], down.shape[2]))
    for t, token in enumerate(x.double().numpy()):
        for e, w in zip(index[t].tolist(), weights[t].double().tolist(), strict=True):
            gate, up = np.split(token @ gate_up[e], 2)
            out[t] += w * ((gate / (1 + np.exp(-gate)) * up) @ down[e])
    return out


SPECS = {
    "plain": LinearSpec(H, INNER, group_size=64),
    "zeros": LinearSpec(H, INNER, sym=False, group_size=32),
    "order": LinearSpec(H, INNER, act_order=True, group_size=32),
    "8 bit": LinearSpec(H, INNER, bits=8, group_size=-1),
    "padded": LinearSpec(100, 168, stored_in=128, stored_out=192, group_size=64),
    "padded, order": LinearSpec(100, 168, stored_in=128, stored_out=192, group_size=64, act_order=True),
}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_experts_equal_the_plain_routing(name: str, together: bool) -> None:
    spec = SPECS[name]
    gate, gates = stack(spec, 10)
    up, ups = stack(spec, 20)
    back = LinearSpec(
        spec.out_features, spec.in_features, spec.bits, spec.group_size, spec.sym, spec.act_order,
        stored_in=spec.n, stored_out=spec.k,
    )  # fmt: skip
    down, downs = stack(back, 30)
    layers = [gate, up]
    joined = fuse([spec, spec], same_order=True)
    if together:
        if joined is None:
            pytest.skip("cannot become one: padded columns in between")
        tensors = {
            n: getattr(gate, n) if n == "act_perm" else torch.cat([getattr(gate, n), getattr(up, n)], -1)
            for n in spec.shapes()
        }
        layers = [StackedLinear(joined, tensors)]
        if spec.act_order:  # up's rows are now read in gate's order
            for e in range(E):
                natural = np.empty_like(ups[e])
                natural[gate.act_perm[e].long().numpy()] = ups[e][up.act_perm[e].long().numpy()]
                ups[e] = natural
    experts = PackedExperts(layers, down, torch.nn.functional.silu)
    gate_up = np.concatenate([gates, ups], axis=2)
    for tokens, choices in ((1, 2), (7, 2), (33, 1), (5, E)):
        x = torch.randn(tokens, spec.in_features).half()
        index, weights = routing(tokens, choices, tokens)
        found = experts(x, index, weights).double().numpy()
        exact = plain(x, index, weights, gate_up, downs)
        # one rounding to fp16 (2^-11) of gate, up, act, their product and each expert's output
        assert np.linalg.norm(found - exact) < 6 * 2**-11 * np.linalg.norm(exact), (tokens, choices)


def test_a_token_does_not_depend_on_the_others() -> None:
    gate, _ = stack(SPECS["zeros"], 1)
    up, _ = stack(SPECS["zeros"], 5)
    down, _ = stack(LinearSpec(INNER, H, sym=False, group_size=32), 9)
    experts = PackedExperts([gate, up], down, torch.nn.functional.silu)
    x = torch.randn(9, H, generator=torch.Generator().manual_seed(0)).half()
    index, weights = routing(9, 2)
    whole = experts(x, index, weights)
    # A library's product may add in another order for another number of rows. Single values between gate and
    # down then round the other way, by a unit of 2^-11: little beside the largest output, and maybe much
    # beside one whose terms cancel.
    unit = 2**-10 * float(whole.abs().max())
    for t in range(9):
        alone = experts(x[t : t + 1], index[t : t + 1], weights[t : t + 1])[0]
        assert torch.allclose(alone, whole[t], rtol=2**-10, atol=unit)


def test_experts_compile_without_a_break_and_without_shapes_that_depend_on_the_routing() -> None:
    gate, _ = stack(SPECS["order"], 1)
    up, _ = stack(SPECS["order"], 5)
    down, _ = stack(LinearSpec(INNER, H, act_order=True, group_size=32), 9)
    experts = PackedExperts([gate, up], down, torch.nn.functional.silu)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager", dynamic=False)
    x = torch.randn(6, H).half()
    for seed in range(3):
        index, weights = routing(6, 2, seed)
        assert torch.equal(compiled(x, index, weights), experts(x, index, weights))


# ---- operators --------------------------------------------------------------------------------------------


def pairs(counts: list[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(0, tokens, (sum(counts),), dtype=torch.int32)
    return rows, torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 4], [1, 1, 1, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("name", ["plain", "zeros", "8 bit"])
def test_moe_gemm_is_gemm_expert_by_expert(name: str, counts: list[int]) -> None:
    spec = SPECS[name]
    layer, _ = stack(spec, 3)
    x = torch.randn(6, spec.k).to(torch.bfloat16)
    rows, offsets = pairs(counts, 6)
    args = (layer.weight, layer.weight_scale, layer.weight_zero_point)
    found = moe_ops.moe_gemm(x, *args, rows, offsets, spec.bits, spec.group_size)
    assert found.shape == (sum(counts), spec.n) and found.dtype == x.dtype
    for e in range(E):
        start, end = int(offsets[e]), int(offsets[e + 1])
        z = None if args[2] is None else args[2][e]
        one = ops.gemm(x[rows[start:end].long()], args[0][e], args[1][e], z, None, spec.bits, spec.group_size)
        assert torch.equal(found[start:end], one)


def test_moe_gather_reads_each_experts_order_and_pads() -> None:
    x = torch.randn(5, 72).half()
    perm = torch.stack([torch.randperm(72) for _ in range(E)]).int()
    rows, offsets = pairs([2, 0, 3, 1], 5)
    found = moe_ops.moe_gather(x, rows, offsets, perm, 128)
    experts = [0, 0, 2, 2, 2, 3]
    for r, e in enumerate(experts):
        assert torch.equal(found[r, :72], x[rows[r]][perm[e].long()])
    assert not found[:, 72:].any()


def test_the_operators_pass_torchs_own_checks() -> None:
    layer, _ = stack(SPECS["zeros"], 3)
    x = torch.randn(6, H).half()
    rows, offsets = pairs([2, 0, 3, 1], 6)
    perm = torch.stack([torch.randperm(H) for _ in range(E)]).int()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    gemm = (x, layer.weight, layer.weight_scale, layer.weight_zero_point, rows, offsets, 4, 32)
    torch.library.opcheck(moe_ops.moe_gemm, gemm, test_utils=tests)
    torch.library.opcheck(moe_ops.moe_gather, (x, rows, offsets, perm, H), test_utils=tests)


def test_wrong_arguments_are_errors_that_name_the_argument() -> None:
    layer, _ = stack(SPECS["zeros"], 3)
    x = torch.randn(6, H).half()
    rows, offsets = pairs([2, 0, 3, 1], 6)
    good = {
        "x": x, "weight": layer.weight, "scales": layer.weight_scale, "zeros": layer.weight_zero_point,
        "rows": rows, "offsets": offsets, "bits": 4, "group_size": 32,
    }  # fmt: skip
    wrong = {
        "x": x.float(), "weight": layer.weight[0], "scales": layer.weight_scale[:3],
        "zeros": layer.weight_zero_point[:, :1].contiguous(), "rows": rows.long(), "offsets": offsets[:-1],
        "bits": 3, "group_size": 48,
    }  # fmt: skip
    moe_ops.moe_gemm(*good.values())
    for name, value in wrong.items():
        with pytest.raises(UsageError) as caught:
            moe_ops.moe_gemm(*(good | {name: value}).values())
        assert caught.value.where == name
    for name, value in (
        ("rows", torch.full_like(rows, 6)),
        ("rows", torch.full_like(rows, -1)),
        ("offsets", torch.tensor([0, 2, 1, 6, 6], dtype=torch.int32)),
        ("offsets", torch.tensor([1, 2, 2, 5, 6], dtype=torch.int32)),
        ("offsets", torch.tensor([0, 2, 2, 5, 7], dtype=torch.int32)),
    ):
        with pytest.raises(UsageError) as caught:
            moe_ops.moe_gemm(*(good | {name: value}).values())
        assert caught.value.where == name
    perm = torch.stack([torch.randperm(H) for _ in range(E)]).int()
    for args, where in (
        ((x, rows, offsets, perm.long(), H), "perm"),
        ((x, rows, offsets, perm[:, :64].contiguous(), H), "perm"),
        ((x, rows, offsets, perm.flip(1).clamp(max=H - 2), H), "perm"),
        ((x, rows, offsets, perm, H - 8), "width"),
        ((x, rows, offsets, perm, H + 4), "width"),
    ):
        with pytest.raises(UsageError) as caught:
            moe_ops.moe_gather(*args)
        assert caught.value.where == where


def test_rows_past_the_reach_of_an_offset_are_an_error() -> None:
    """A kernel counts what lies before a pair's row of x in 32 bits, 16 bytes at a time."""
    layer, _ = stack(SPECS["zeros"], 3)
    rows, offsets = pairs([2, 0, 3, 1], 6)
    tensors = (layer.weight, layer.weight_scale, layer.weight_zero_point)
    packed = Packed(*(t.to("meta") for t in tensors), 4, 32)

    def check(step: int) -> None:
        x = torch.empty_strided((1 << 20, H), (step, 1), dtype=torch.float16, device="meta")
        moe_checks.gemm(x, packed, rows.to("meta"), offsets.to("meta"))

    check(32768)
    with pytest.raises(UsageError, match="x is too large"):
        check(32776)


def test_experts_of_several_kinds_are_bit_for_bit_those_of_one_stack() -> None:
    """The experts are alike, and put into two kinds: what differs is only who runs them."""
    gate, _ = stack(SPECS["zeros"], 1)
    up, _ = stack(SPECS["zeros"], 5)
    down, _ = stack(LinearSpec(INNER, H, sym=False, group_size=32), 9)

    def some(layer: StackedLinear, experts: list[int]) -> StackedLinear:
        names = layer.spec.shapes()
        return StackedLinear(layer.spec, {n: getattr(layer, n)[experts].contiguous() for n in names})

    whole = PackedExperts([gate, up], down, torch.nn.functional.silu)
    sides = (list(range(1, E)), [0])
    kinds = [
        (side, PackedExperts([some(gate, side), some(up, side)], some(down, side), torch.nn.functional.silu))
        for side in sides
    ]
    mixed = MixedExperts(kinds)
    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager", dynamic=False)
    x = torch.randn(9, H, generator=torch.Generator().manual_seed(0)).half()
    for seed in range(3):
        index, weights = routing(9, 2, seed)
        found = mixed(x, index, weights)
        assert torch.equal(found, whole(x, index, weights))
        assert torch.equal(found, compiled(x, index, weights))
