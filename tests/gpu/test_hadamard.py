"""The quantize operators on a card against their definition: every kernel and order, edge rows, refusals."""

import pytest

torch = pytest.importorskip("torch")

from gpu.graphs import captured  # noqa: E402
from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels.quarot import orders_int, quantize_reference  # noqa: E402
from w4pack.kernels.quarot.transform import Transform  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

Found = tuple[torch.Tensor, torch.Tensor]
# Sums in another order differ by some ulp of fp32, so codes differ at ties only: 1 in 10,000 at most.
TIES, SCALE = 1e-4, 4e-6
# Behind an activation the device's exponential is not the library's: a few d are rounded the other way, by a
# step of 16 bit, which the transform spreads over the row; the scale moves by half as much, if d is one of a
# few outliers.
ACTIVATED_TIES = 2e-3
DENSE = (1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 7168, 8192, 10240, 14336, 16384, 28672, 32768)
WIDE = (4608, 4864, 5632, 9216, 11008, 12800, 13696, 18944, 21504, 22016, 25600)
FLAT = (4096, 8192, 9216, 11008, 13824, 14336, 16384, 18944, 28672)  # has a form for many rows too
ANY = (576, 896, 2304, 2880, 5376, 10944, 13824, 36864)
MODES = ((4, 0.9, 1), (8, 1.0, 1), (4, 0.8, 2), (8, 0.95, 3), (8, 1.0, 0), (4, 1.0, 3), (16, 1.0, 0))


def poison() -> None:
    """Fill what an allocation of a moment later is likely to get."""
    for _ in range(4):
        torch.full((1 << 22,), float("nan"), device="cuda")


def normal(m: int, k: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed * 7919 + m + k)
    x = torch.randn(m, k, device="cuda", generator=g)
    x[:, :: max(1, k // 7)] *= 20  # outliers, as activations have them
    return x.to(dtype)


def activated_scale(dtype: torch.dtype) -> float:
    """Return how far a scale behind an activation may be off, relative to it."""
    return float(torch.finfo(dtype).eps) / 2


def compare(
    found: Found,
    y: torch.Tensor,
    dtype: torch.dtype,
    mode: tuple[int, float, int],
    width: int,
    ties: float = TIES,
    scale: float = SCALE,
) -> None:
    """Check codes and scales against those of y, computed in float64."""
    bits, clip, order = mode
    wanted = quantize_reference.codes(y.float(), dtype, bits, clip, order, width)
    if bits == 16:
        step = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(found[0].float(), wanted[0].float(), rtol=step, atol=step)
        assert found[1].shape == (0,)
        return
    torch.testing.assert_close(found[1], wanted[1], rtol=scale, atol=0)
    assert found[0].shape == wanted[0].shape and found[0].dtype == wanted[0].dtype
    a, b = (orders_int.natural(codes, order).int() for codes in (found[0], wanted[0]))
    assert int((a - b).abs().max()) <= 1
    share = float((a != b).float().mean())
    assert share <= max(ties, 2 / a.numel()), share
    assert bool((a[:, y.shape[1] :] == 0).all())


def many(m: int, k: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    """Return so many rows that blocks take several; the first ones and the last ones are at the edges."""
    x = normal(m, k, dtype, seed)
    x[0], x[m - 1] = 0, 1
    x[1, 7], x[2, k - 1] = float("inf"), float("nan")
    x[m - 2, k - 1], x[m - 3, 0] = float("-inf"), float("nan")
    return x


def compare_many(
    found: Found, y: torch.Tensor, dtype: torch.dtype, mode: tuple[int, float, int], **limits: float
) -> None:
    """Check what was made of ``many`` rows, or of some with an activation in front."""
    m, n = y.shape
    edges = [1, 2, m - 3, m - 2]
    if mode[0] != 16:
        natural = orders_int.natural(found[0], mode[2])
        assert bool((natural[[0, *edges]] == 0).all()) and float(found[1][0]) == 1
        assert bool(found[1][edges].isnan().all())
    kept = torch.ones(m, dtype=torch.bool, device=y.device)
    kept[edges] = False
    scales = found[1][kept] if mode[0] != 16 else found[1]
    compare((found[0][kept], scales), y[kept], dtype, mode, n, **limits)


def transformed(v: torch.Tensor, transform: Transform, heads: int = 0) -> torch.Tensor:
    """Return the transform of float64 values."""
    if heads:
        return quantize_reference.apply(v.unflatten(-1, (heads, -1)), transform, -2).flatten(-2)
    return quantize_reference.apply(v, transform)


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("n", [*DENSE, *WIDE, *ANY])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_transform_and_quantize(n: int, dtype: torch.dtype) -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    transform = Transform.planned(n)
    x = normal(5, n, dtype)
    y = transformed(x.double(), transform)
    poison()
    for bits, clip, order in MODES:
        found = ops.act_quantize(x, "none", transform.key, bits, clip, order, n)
        compare(found, y, dtype, (bits, clip, order), n)
    found = ops.norm_quantize(x, None, 1e-5, transform.key, 4, 0.9, 1, n)
    compare(found, y * rms(x, 1e-5), dtype, (4, 0.9, 1), n)


@pytest.mark.parametrize("n", FLAT)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_rows_take_the_kernel_without_an_exchange(n: int, dtype: torch.dtype) -> None:
    """Odd numbers of rows, from few enough for one turn of a block to several; edge rows in between."""
    from w4pack.kernels.quarot import quantize_ops as ops

    transform = Transform.planned(n)
    for m in (513, 1403):
        x = many(m, n, dtype)
        y = transformed(x.double(), transform)
        for mode in MODES if m == 513 else MODES[:2]:
            poison()
            compare_many(ops.act_quantize(x, "none", transform.key, *mode, n), y, dtype, mode)
        found = ops.norm_quantize(x, None, 1e-5, transform.key, 8, 1.0, 1, n)
        compare_many(found, y * rms(x, 1e-5), dtype, (8, 1.0, 1))


@pytest.mark.parametrize("n", FLAT)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_many_rows_behind_an_activation(n: int, activation: str) -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    transform = Transform.planned(n)
    for m, dtype in ((513, torch.bfloat16), (1403, torch.float16)):
        gate_up = normal(m, 2 * n, dtype)
        y = transformed(quantize_reference.activation(gate_up, activation).double(), transform)
        for mode in ((8, 1.0, 1), (4, 0.9, 2)):
            poison()
            found = ops.act_quantize(gate_up, activation, transform.key, *mode, n)
            compare(found, y, dtype, mode, n, ACTIVATED_TIES, activated_scale(dtype))


@pytest.mark.parametrize("n", FLAT)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_rows_behind_an_activation_equal_few(n: int, activation: str, dtype: torch.dtype) -> None:
    """The same d on another kernel: nothing but the order of sums differs, and no run from another."""
    from w4pack.kernels.quarot import quantize_ops as ops

    transform = Transform.planned(n)
    gate_up = normal(1030, 2 * n, dtype)
    few = [ops.act_quantize(part, activation, transform.key, 8, 1.0, 1, n) for part in gate_up.split(206)]
    codes, scales = (torch.cat(parts) for parts in zip(*few, strict=True))
    for _ in range(5):
        poison()
        found = ops.act_quantize(gate_up, activation, transform.key, 8, 1.0, 1, n)
        torch.testing.assert_close(found[1], scales, rtol=SCALE, atol=0)
        apart = (found[0].int() - codes.int()).abs()
        assert int(apart.max()) <= 1 and float((apart != 0).float().mean()) <= TIES


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gates_whose_sigmoid_is_nothing(activation: str, dtype: torch.dtype) -> None:
    """A large negative gate gives 0, beside others and in a row of its own, by few rows and by many."""
    from w4pack.kernels.quarot import quantize_ops as ops

    gates = [1.0, -60.0, -100.0, -5e4, 3.0, -87.0, -44.0, -2.0]
    gates += [-1e19, 1.0, 1.0, -3e38] if dtype == torch.bfloat16 else []
    for n in (1536, 14336):
        transform = Transform.planned(n)
        gate = torch.tensor(gates, device="cuda").repeat(-(-n // len(gates)))[:n].to(dtype)
        for m in (3, 600):
            x = normal(m, 2 * n, dtype)
            x[:, :n] = gate
            x[1, :n] = -100
            d = quantize_reference.activation(x, activation)
            found = ops.act_quantize(x, activation, transform.key, 8, 1.0, 1, n)
            assert float(found[1][1]) == 1 and not bool(found[0][1].any())
            y = transformed(d.double(), transform)
            compare(found, y, dtype, (8, 1.0, 1), n, ACTIVATED_TIES, activated_scale(dtype))


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_rows_across_heads(heads: int, dtype: torch.dtype) -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    transform, k = Transform.planned(heads), 128 * heads
    for m in (513, 1403):
        x = many(m, k, dtype)
        # An infinity or a NaN reaches its own channel of every head.
        y = transformed(x.double(), transform, heads)
        for mode in MODES:
            poison()
            compare_many(ops.heads_quantize(x, heads, transform.key, *mode, k), y, dtype, mode)


def test_every_form_for_many_rows_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of the tests above are those of the plan, and each one's kernel runs on sm_90a."""
    from w4pack.kernels import launch
    from w4pack.kernels.quarot import flat_plan
    from w4pack.kernels.quarot import quantize_ops as ops

    if launch.device(0).arch != flat_plan.ARCH:
        pytest.skip("the kernel is for sm_90a")
    assert {row.size for row in flat_plan.FLATS} == {*FLAT, 32, 64}
    names, start = [], launch.start
    monkeypatch.setattr(
        launch, "start", lambda card, name, *rest: (names.append(name), start(card, name, *rest))
    )
    for n in FLAT:
        ops.act_quantize(normal(512, n), "none", Transform.planned(n).key, 8, 1.0, 1, n)
        ops.act_quantize(normal(512, 2 * n), "silu", Transform.planned(n).key, 8, 1.0, 1, n)
    for heads in (32, 64):
        ops.heads_quantize(
            normal(512, 128 * heads), heads, Transform.planned(heads).key, 8, 1.0, 1, 128 * heads
        )
    assert set(names) == {row.entry("fp16") for row in flat_plan.FLATS}


@pytest.mark.parametrize("n", [2048, 8192, 14336, 28672, 11008])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activation_transform_and_quantize(n: int, activation: str, dtype: torch.dtype) -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    transform = Transform.planned(n)
    gate_up = normal(7, 2 * n, dtype)
    d = quantize_reference.activation(gate_up, activation)
    for key in (transform.key, ""):
        y = transformed(d.double(), Transform.of(key))
        for mode in ((4, 0.9, 1), (8, 1.0, 1), (16, 1.0, 0)):
            poison()
            found = ops.act_quantize(gate_up, activation, key, *mode, n)
            # Without a transform a d that is rounded the other way is the row's scale, or a code of its own.
            loose = (
                (ACTIVATED_TIES, activated_scale(dtype))
                if key
                else (ACTIVATED_TIES, float(torch.finfo(dtype).eps))
            )
            compare(found, y, dtype, mode, n, *loose)


@pytest.mark.parametrize("n", [14336, 16384, 20480, 28672, 32768])
@pytest.mark.parametrize("activation", ["none", "silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_few_long_rows(n: int, activation: str, dtype: torch.dtype) -> None:
    """Blocks of a cluster share a row, where the card has clusters and the rows are few enough."""
    from w4pack.kernels.quarot import quantize_ops as ops

    transform = Transform.planned(n)
    acts = activation != "none"
    for m in (1, 2, 4, 5, 16, 17):
        x = normal(m, (1 + acts) * n, dtype)
        d = quantize_reference.activation(x, activation) if acts else x
        y = transformed(d.double(), transform)
        for mode in MODES:
            poison()
            found = ops.act_quantize(x, activation, transform.key, *mode, n)
            compare(
                found,
                y,
                dtype,
                mode,
                n,
                *((ACTIVATED_TIES, activated_scale(dtype)) if acts else (TIES, SCALE)),
            )


def test_edges_of_a_few_long_rows() -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    for n in (14336, 28672):
        for value in (0.0, float("inf"), float("nan")):
            x = normal(3, n)
            x[1] = value
            codes, scales = ops.act_quantize(x, "none", Transform.planned(n).key, 8, 1.0, 1, n)
            assert bool((codes[1] == 0).all())
            assert float(scales[1]) == 1 if value == 0 else bool(scales[1].isnan())
            alone = ops.act_quantize(x[::2].contiguous(), "none", Transform.planned(n).key, 8, 1.0, 1, n)
            assert torch.equal(codes[::2], alone[0]) and torch.equal(scales[::2], alone[1])


@pytest.mark.parametrize("gained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_and_quantize(gained: bool, dtype: torch.dtype) -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    for k, width in ((64, 64), (2304, 2304), (4096, 4096), (8192, 8192), (5000, 5056), (18432, 18432)):
        x = normal(6, k, dtype, 1)
        x[:, 3] = 211  # the largest: a prime, so that no other value lies between two codes exactly
        for type_ in (torch.float32, dtype) if gained else (None,):
            gain = None if type_ is None else (1 + torch.randn(k, device="cuda") / 4).to(type_)
            y = x.double() * (1 if gain is None else gain.double()) * rms(x, 1e-6)
            for bits, clip, order in MODES:
                poison()
                found = ops.norm_quantize(x, gain, 1e-6, "", bits, clip, order, width)
                compare(found, y, dtype, (bits, clip, order), width)


@pytest.mark.parametrize("k", [1000, 3072, 4104, 5120, 7168, 7176, 9216, 9224, 12288, 12296, 16384])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_without_a_transform_at_the_edges_of_their_forms(k: int, dtype: torch.dtype) -> None:
    """Widths that fill a form and that begin the next, with padding; more rows than blocks on the card."""
    from w4pack.kernels.quarot import quantize_ops as ops

    width = -(-k // 64) * 64
    x = normal(4099, k, dtype, 2)
    x[:, 5] = 211  # the largest: a prime, so that no other value lies between two codes exactly
    x[:, k - 1] = x[:, k // 2]
    gain = (1 + torch.randn(k, device="cuda") / 8).to(dtype)
    gain[5] = 1
    poison()
    found = ops.act_quantize(x, "none", "", 8, 1.0, 1, width)
    compare(found, x.double(), dtype, (8, 1.0, 1), width)
    for bits, clip, order in MODES:
        poison()
        found = ops.norm_quantize(x, gain, 1e-6, "", bits, clip, order, width)
        compare(found, x.double() * gain.double() * rms(x, 1e-6), dtype, (bits, clip, order), width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [3584, 4096, 4608])
def test_norm_with_gain_in_front_of_a_transform(n: int, dtype: torch.dtype) -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    x, gain = normal(9, n, torch.bfloat16), (1 + torch.randn(n, device="cuda") / 4).to(dtype)
    transform = Transform.planned(n)
    y = transformed(x.double() * gain.double(), transform) * rms(x, 1e-6)
    found = ops.norm_quantize(x, gain, 1e-6, transform.key, 8, 1.0, 1, n)
    compare(found, y, x.dtype, (8, 1.0, 1), n)


@pytest.mark.parametrize(
    ("heads", "size"), [(8, 64), (32, 64), (64, 64), (12, 128), (32, 128), (40, 128), (64, 128)]
)
def test_across_heads(heads: int, size: int) -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    check_heads(ops, heads, size, Transform.planned(heads))


@pytest.mark.parametrize(("heads", "size"), [(14, 64), (16, 256), (8, 96), (20, 80), (96, 128), (4, 256)])
def test_across_heads_of_other_sizes(heads: int, size: int) -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    check_heads(ops, heads, size, Transform.planned(heads))


def test_across_heads_in_parts() -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    check_heads(ops, 64, 128, Transform.planned(64, parts=4))


def check_heads(ops: object, heads: int, size: int, transform: Transform) -> None:
    k = heads * size
    width = -(-k // 64) * 64
    x = normal(5, k, torch.float16, 3)
    y = transformed(x.double(), transform, heads)
    for bits, clip, order in MODES:
        poison()
        found = ops.heads_quantize(x, heads, transform.key, bits, clip, order, width)  # type: ignore[attr-defined]
        compare(found, y, x.dtype, (bits, clip, order), width)


@pytest.mark.parametrize("n", [4096, 8192, 14336, 11008])
@pytest.mark.parametrize("key", [True, False])
def test_edge_rows(n: int, key: bool) -> None:
    """Zeros, one huge value, an infinity, a NaN, tiny values: codes and scales are defined for each."""
    from w4pack.kernels.quarot import quantize_ops as ops

    x = normal(8, n)
    x[0] = 0
    x[1] = 1e-3
    x[1, 5] = 6e4
    x[2, 7] = float("inf")
    x[3, n - 1] = float("nan")
    x[4] = 6e-8
    x[5] = 1
    transform = Transform.planned(n) if key else Transform.of("")
    for bits, order in ((4, 1), (8, 3), (4, 2)):
        poison()
        codes, scales = ops.act_quantize(x, "none", transform.key, bits, 1.0, order, n)
        natural = orders_int.natural(codes, order)
        for row in (0, 2, 3):
            assert bool((natural[row] == 0).all()), (row, bits)
        assert float(scales[0]) == 1 and bool(scales[2:4].isnan().all())
        kept = [0, 1, 4, 5, 6, 7]
        compare(
            (codes[kept], scales[kept]),
            transformed(x.double(), transform)[kept],
            x.dtype,
            (bits, 1.0, order),
            n,
        )


@pytest.mark.parametrize("m", [0, 1, 3, 300, 1111])
def test_any_number_of_rows_and_a_stride(m: int) -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    for n in (4096, 3584, 28672):
        transform = Transform.planned(n)
        x = normal(max(m, 1), n + 64)[:m, :n]
        found = ops.act_quantize(x, "none", transform.key, 8, 1.0, 1, n)
        if m:
            compare(found, transformed(x.double(), transform), x.dtype, (8, 1.0, 1), n)
        plain = ops.norm_quantize(x, None, 1e-5, "", 4, 0.9, 1, n)
        if m:
            compare(plain, x.double() * rms(x, 1e-5), x.dtype, (4, 0.9, 1), n)


@pytest.mark.parametrize("rows", [4, 7, 600])
def test_a_graph_replays_what_eager_computes(rows: int) -> None:
    from w4pack.kernels.quarot import quantize_launch
    from w4pack.kernels.quarot import quantize_ops as ops

    transform = Transform.planned(14336)
    quantize_launch.prepare(transform, 0, 1, 0)
    x = normal(rows, 14336)
    eager = ops.act_quantize(x, "none", transform.key, 4, 0.9, 1, 14336)
    check_captured(x, transform, eager)


def test_one_call_prepares_every_number_of_rows() -> None:
    from w4pack.kernels.quarot import quantize_launch
    from w4pack.kernels.quarot import quantize_ops as ops

    transform = Transform.planned(14336)
    x = normal(600, 14336)
    whole = ops.act_quantize(x, "none", transform.key, 4, 0.9, 1, 14336)
    quantize_launch._fragments.cache_clear()
    ops.act_quantize(x[:7], "none", transform.key, 4, 0.9, 1, 14336)
    check_captured(x, transform, whole)


def check_captured(x: torch.Tensor, transform: Transform, eager: Found) -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    graph, out = captured(lambda: ops.act_quantize(x, "none", transform.key, 4, 0.9, 1, 14336), warm_ups=0)
    poison()
    graph.replay()
    assert torch.equal(out[0], eager[0]) and torch.equal(out[1], eager[1])


def test_wrong_arguments_never_reach_the_card() -> None:
    from w4pack.kernels.quarot import quantize_ops as ops

    x = normal(2, 4096)
    with pytest.raises(UsageError, match="another size"):
        ops.act_quantize(x, "none", Transform.planned(2048).key, 4, 0.9, 1, 4096)
    with pytest.raises(UsageError, match="not known"):
        ops.act_quantize(x, "none", "4096:7-paley1", 4, 0.9, 1, 4096)
    with pytest.raises(UsageError, match="dtype"):
        ops.act_quantize(x.float(), "none", "", 4, 0.9, 1, 4096)
    with pytest.raises(UsageError, match="width"):
        ops.act_quantize(x, "none", "", 4, 0.9, 1, 4032)
