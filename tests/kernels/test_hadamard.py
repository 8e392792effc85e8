"""Transforms as texts, the quantize operators' definition, and the index arithmetic of their kernels."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.convert.rotate.constructions import matrix  # noqa: E402
from w4pack.kernels import build, tiles  # noqa: E402
from w4pack.kernels.quarot import orders_int, quantize_plan, quantize_reference, row_plan  # noqa: E402
from w4pack.kernels.quarot import quantize_ops as ops  # noqa: E402
from w4pack.kernels.quarot.transform import NONE, Transform, apply  # noqa: E402

ROOM = 227 * 1024  # bytes of shared memory of an sm_90 block
SIZES = (64, 576, 896, 1536, 2304, 3584, 4096, 5120, 8192, 11008, 13696, 13824, 14336, 18944, 28672, 29568)


def dense_matrix(transform: Transform) -> np.ndarray:
    """Return (I ⊗ H) / sqrt(block) by Kronecker products, float64."""
    made = np.ones((1, 1))
    for m, kind in transform.factors:
        made = np.kron(made, matrix(m, kind).astype(np.float64))
    return np.kron(np.eye(transform.order // transform.block), made) / math.sqrt(transform.block)


# ------------------------------------------------------------ texts


@pytest.mark.parametrize("n", SIZES)
def test_a_text_names_one_transform(n: int) -> None:
    for parts in (1, 2):
        found = Transform.planned(n, parts)
        assert Transform.of(found.key) == found
        assert found.scale == 1 / math.sqrt(found.block)
    assert Transform.of("") == NONE and NONE.key == ""


def test_texts_are_as_documented() -> None:
    assert Transform.planned(14336).key == "14336:28-paley1,512-sylvester"
    assert Transform.planned(28672, 8).key == "28672/3584:28-paley1,128-sylvester"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("12", "ORDER"),
        ("x:12-paley1", "ORDER"),
        ("12:12-paley1-3", "ORDER"),
        ("12:7-paley1", "product"),
        ("28/14:28-paley1", "product"),
        ("12:-12-paley1,-1-sylvester", "ORDER"),
        ("12/5:12-paley1", "a block that divides"),
        ("12:12-sylvester", "a construction of order 12"),
        ("12:12-walsh", "a construction of order 12"),
        ("36:36-paley1", "a construction of order 36"),
        ("2097152:2097152-sylvester", "an order up to"),
        ("0:0-sylvester", "an order up to"),
    ],
)
def test_what_is_no_transform_is_refused(key: str, expected: str) -> None:
    with pytest.raises(UsageError, match="the transform is not known") as caught:
        Transform.of(key)
    assert expected in caught.value.expected


def test_an_order_without_a_matrix_is_refused() -> None:
    for n in (0, 9, 15):
        with pytest.raises(UsageError, match="not known"):
            Transform.planned(n)
    assert Transform.planned(14).block == 2


# ------------------------------------------------------------ the definition


@pytest.mark.parametrize(("n", "parts"), [(64, 1), (80, 1), (96, 2), (336, 1), (520, 1)])
def test_apply_multiplies_from_the_right(n: int, parts: int) -> None:
    transform = Transform.planned(n, parts)
    x = torch.randn(3, n, dtype=torch.float64)
    wanted = x.numpy() @ dense_matrix(transform)
    np.testing.assert_allclose(apply(x, transform).numpy(), wanted, atol=1e-12)
    np.testing.assert_allclose(apply(x.T, transform, 0).T.numpy(), wanted, atol=1e-12)


def slow_codes(y: np.ndarray, bits: int, clip: float) -> tuple[np.ndarray, np.ndarray]:
    """Return codes in the natural order and scales, value by value in float32."""
    most = np.float32(2 ** (bits - 1) - 1)
    codes, scales = np.zeros(y.shape, np.int64), np.ones(y.shape[0], np.float32)
    for r, row in enumerate(y.astype(np.float32)):
        scale = np.float32(np.abs(row).max() * np.float32(clip)) / most
        if scale > 0:
            scales[r] = scale
        for c, value in enumerate(row):
            codes[r, c] = np.clip(np.rint(np.float32(value / scales[r])), -most - 1, most)
    return codes, scales


@pytest.mark.parametrize(("bits", "clip", "order"), [(4, 0.9, 1), (4, 0.8, 2), (8, 1.0, 3), (8, 0.9, 0)])
def test_act_quantize_without_activation(bits: int, clip: float, order: int) -> None:
    n, width = 96, 128
    x = torch.randn(4, n).half()
    x[2] = 0
    transform = Transform.planned(n)
    y = apply(x.float(), transform)
    wanted, scales = slow_codes(y.numpy(), bits, clip)
    codes, found = ops.act_quantize(x, "none", transform.key, bits, clip, order, width)
    natural = orders_int.natural(codes, order)
    assert natural.shape == (4, width) and bool((natural[:, n:] == 0).all())
    np.testing.assert_array_equal(natural[:, :n].numpy(), wanted)
    np.testing.assert_array_equal(found.numpy(), scales)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_the_activation_is_rounded_before_the_transform(name: str) -> None:
    gate_up = torch.randn(3, 128).bfloat16()
    gate, up = gate_up.double().chunk(2, -1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    acted = gate * torch.sigmoid(gate) if name == "silu" else gate * (1 + torch.tanh(inner)) / 2
    d = (acted.float() * up.float()).bfloat16()
    transform = Transform.planned(64)
    values, none = ops.act_quantize(gate_up, name, transform.key, 16, 1.0, 0, 64)
    assert none.shape == (0,) and values.dtype == torch.bfloat16
    wanted = apply(d.double(), transform)
    torch.testing.assert_close(values.double(), wanted, rtol=2**-8, atol=2**-8)
    scale = ops.act_quantize(gate_up, name, "", 8, 1.0, 1, 64)[1]
    torch.testing.assert_close(scale.double(), d.double().abs().amax(-1) / 127, rtol=2**-8, atol=0)


def test_the_norm_stays_fp32_into_the_transform() -> None:
    x, gain = torch.randn(5, 128).half(), torch.rand(128)
    rms = (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    for factor in (None, gain):
        y = x.double() / rms * (1 if factor is None else factor.double())
        turned = y.numpy() @ dense_matrix(Transform.planned(128))
        scales = ops.norm_quantize(x, factor, 1e-5, Transform.planned(128).key, 8, 1.0, 1, 128)[1]
        np.testing.assert_allclose(scales.numpy(), np.abs(turned).max(-1) / 127, rtol=1e-5)


def test_heads_are_mixed_channel_by_channel() -> None:
    x = torch.randn(2, 8 * 16).half()
    h = dense_matrix(Transform.planned(8))
    wanted = np.einsum("mhc,hg->mgc", x.double().numpy().reshape(2, 8, 16), h).reshape(2, -1)
    values, _ = ops.heads_quantize(x, 8, Transform.planned(8).key, 16, 1.0, 0, 128)
    np.testing.assert_allclose(values.double().numpy(), wanted, rtol=2**-10, atol=2**-10)


def test_rows_at_the_edges() -> None:
    """Zero, subnormal, huge, infinite and NaN rows: codes are defined, scales finite or NaN on purpose."""
    x = torch.zeros(5, 64, dtype=torch.bfloat16)
    x[1] = 1e-38
    x[2, 3], x[2, 4] = 3e38, 1e-3
    x[3, 5] = float("inf")
    x[4, 6] = float("nan")
    for bits in (4, 8):
        codes, scales = ops.act_quantize(x, "none", "", bits, 1.0, 0, 64)
        assert bool((codes[[0, 1, 3, 4]] == 0).all())
        assert scales[:2].tolist() == [1, 1] and bool(scales[3:].isnan().all())
        assert int(codes[2, 3]) == 2 ** (bits - 1) - 1 and int(codes[2].count_nonzero()) == 1


def test_wrong_arguments_are_refused() -> None:
    x = torch.randn(2, 128).half()
    key = Transform.planned(128).key
    wrong = {
        "another size": lambda: ops.act_quantize(x, "none", Transform.planned(64).key, 4, 1.0, 1, 128),
        "the activation is not known": lambda: ops.act_quantize(x, "relu", key, 4, 1.0, 1, 128),
        "wrong dtype": lambda: ops.norm_quantize(x.float(), None, 1e-5, key, 4, 1.0, 1, 128),
        "the heads do not divide K": lambda: ops.heads_quantize(x, 3, "", 4, 1.0, 1, 128),
        "code width": lambda: ops.act_quantize(x, "none", key, 5, 1.0, 1, 128),
        "clip ratio": lambda: ops.act_quantize(x, "none", key, 4, 0.0, 1, 128),
        "natural order": lambda: ops.act_quantize(x, "none", key, 16, 1.0, 1, 128),
        "packs codes": lambda: ops.act_quantize(x, "none", key, 8, 1.0, 2, 128),
        "width is not supported": lambda: ops.act_quantize(x, "none", key, 8, 1.0, 1, 160),
        "order of activation codes": lambda: ops.act_quantize(x, "none", key, 8, 1.0, 4, 128),
        "gain has the wrong shape": lambda: ops.norm_quantize(x, torch.ones(64), 1e-5, key, 4, 1.0, 1, 128),
        "eps is no number": lambda: ops.norm_quantize(x, None, -1.0, key, 4, 1.0, 1, 128),
        "x has a stride": lambda: ops.norm_quantize(x[:, ::2], None, 1e-5, "", 4, 1.0, 1, 64),
    }
    for text, call in wrong.items():
        with pytest.raises(UsageError, match=text):
            call()


def test_the_operators_can_be_traced() -> None:
    key = Transform.planned(128).key
    x, gate_up = torch.randn(3, 128).half(), torch.randn(3, 256).half()
    tests = ("test_schema", "test_faketensor")
    for bits, order, width in ((4, 1, 128), (4, 2, 192), (8, 3, 128), (16, 0, 128)):
        tail = (bits, 0.9, order, width)
        torch.library.opcheck(ops.norm_quantize, (x, None, 1e-5, key, *tail), test_utils=tests)
        torch.library.opcheck(ops.act_quantize, (gate_up, "silu", key, *tail), test_utils=tests)
        torch.library.opcheck(ops.heads_quantize, (x, 4, "", *tail), test_utils=tests)


# ------------------------------------------------------------ the kernels' choices and arithmetic


def test_every_width_of_a_model_has_its_kernel() -> None:
    wanted = {
        4096: 16,
        8192: 32,
        14336: 28,
        28672: 28,
        5120: 40,
        11008: 172,
        18944: 148,
        25600: 400,
        13696: 428,
    }
    for n, m in wanted.items():
        found = quantize_plan.dense(Transform.planned(n), 0, 1, ROOM)
        assert found is not None and found[1] == m and m << found[0].log_c == n
    for n in (576, 13824):
        assert quantize_plan.dense(Transform.planned(n), 0, 1, ROOM) is None
    assert quantize_plan.dense(Transform.planned(28672, 2), 0, 1, ROOM) is None
    assert quantize_plan.dense(Transform.planned(28672), 0, 1, 99 * 1024) is None
    assert quantize_plan.dense(Transform.planned(64), 64, 128, ROOM) is not None


def test_the_general_kernel_keeps_one_row_where_all_is_in_place() -> None:
    rows = {n: quantize_plan.any_rows(Transform.planned(n)) for n in (13824, 2880, 5376, 10944)}
    assert rows == {13824: 1, 2880: 1, 5376: 1, 10944: 2}


def test_what_a_launch_names_is_built() -> None:
    entries = {job.entry for job in build.jobs("sm_90a")}
    for dtype in tiles.DTYPES:
        assert quantize_plan.any_entry(dtype) in entries
        named = [row.entry(dtype) for row in (*quantize_plan.WIDTHS, *quantize_plan.HEADS)]
        named += [row.entry(dtype) for acts in (False, True) for row in row_plan.forms("sm_90a", acts)]
        assert len(set(named)) == len(named) and set(named) <= entries


def spread(i: int) -> int:
    """Return where bits 3, 5, 6, 7 of a column lie when they are counted together."""
    return (i & 1) << 3 | (i >> 1 & 1) << 5 | (i >> 2 & 1) << 6 | (i >> 3 & 1) << 7


def steps(values: np.ndarray, axis: int) -> np.ndarray:
    """Return the Sylvester product along an axis of a power of two."""
    count = values.shape[axis]
    moved = np.moveaxis(values, axis, -1) @ matrix(count, "sylvester").astype(np.float64)
    return np.moveaxis(moved, -1, axis)


def simulate(row: quantize_plan.Dense, m: int, transform: Transform, x: np.ndarray) -> np.ndarray:
    """Return the sums of a row as threads of ``hadamard_dense.cu`` hold them, put where they are written."""
    c, nt = 1 << row.log_c, 1 << row.nt_bits
    pitch, sets = c + 8, c // (8 * nt)
    table = quantize_plan.fragments(transform, row, m, "fp16").view(np.uint32)
    padded = np.zeros((row.rows, c))
    padded[:m] = x.reshape(m, c)
    exchange = np.full(m * pitch, np.nan)
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    for warp in range(min(row.warps, sets * -(-row.rows // 16 // row.mt))):
        tile0, s = warp // sets * row.mt, warp % sets
        if 16 * tile0 >= m:
            continue
        column0 = (s & 1) << 4 | (s >> 1) << (row.nt_bits + 4)
        d = np.zeros((row.mt, nt, 16, 8))
        for i in range(row.mt):
            for k in range(row.rows // 16):
                a = np.zeros((16, 16))
                for e in range(4):
                    word = table[tile0 + i, k, :, e]
                    for half in range(2):
                        value = (word >> (16 * half) & 0xFFFF).astype(np.uint16).view(np.float16)
                        a[g + 8 * (e % 2), 8 * (e // 2) + 2 * t + half] = value
                for n in range(nt):
                    columns = column0 + spread(n) + np.arange(8)
                    d[i, n] += a @ padded[16 * k : 16 * k + 16, columns]
        if row.steps:
            d = steps(d, 1)
        for i, n, h, r in np.ndindex(row.mt, nt, 2, 2):
            b5, b6 = n >> 1 & 1, n >> 2 & 1
            j = 16 * (tile0 + i) + g + 8 * h
            line = j * pitch + (column0 & ~16) + 2 * (t & 1)
            at = line + (column0 & 16 ^ b6 << 4) + 4 * (t >> 1 ^ b5) + spread(n) + r
            real = j < m
            assert np.isnan(exchange[at[real]]).all()  # each place is written once
            exchange[at[real]] = d[i, n, g + 8 * h, 2 * t + r][real]
    held = 1 << (row.log_c - row.nt_bits)
    out = np.full(m * c, np.nan)
    for group in range(m * nt):
        j, low = group // nt, spread(group % nt)
        b5, b6 = low >> 5 & 1, low >> 6 & 1
        v = np.empty((held // 16, 2, 8))
        for high, b4, h in np.ndindex(held // 16, 2, 2):
            at = j * pitch + low + 16 * (b4 ^ b6) + 4 * (h ^ b5) + (1 << (row.nt_bits + 4)) * high
            v[high, b4, 4 * h : 4 * h + 4] = exchange[at : at + 4]
        if row.steps:
            v = steps(v.reshape(-1), 0).reshape(v.shape)
        for high, b4 in np.ndindex(held // 16, 2):
            block = (j * c + (low & ~8)) // 32 + (high << (row.nt_bits - 1))
            first = 32 * block + 16 * b4 + 8 * (group & 1)
            out[first : first + 8] = v[high, b4]
    return out


@pytest.mark.parametrize(
    "row", [*quantize_plan.WIDTHS, *quantize_plan.HEADS], ids=lambda row: row.entry("fp16")
)
def test_the_lanes_of_the_kernel_make_the_transform(row: quantize_plan.Dense) -> None:
    """Each compiled form, lane by lane: fragments of H, exchange, groups, place of each octet."""
    c = 1 << row.log_c
    by_rows = {16: (12, 16), 32: (28,), 48: (40,), 64: (64,), 176: (148,), 432: (336,)}
    for m in by_rows[row.rows]:
        transform = Transform.planned(m * c if row.steps else m)
        x = np.random.default_rng(m).standard_normal((m, c))
        values, axis = (x.reshape(-1), -1) if row.steps else (x, 0)
        wanted = apply(torch.from_numpy(values), transform, axis).flatten() * math.sqrt(transform.block)
        np.testing.assert_allclose(simulate(row, m, transform, x), wanted.numpy(), atol=1e-9)


@pytest.mark.parametrize(("n", "size", "parts"), [(576, 1, 1), (40, 4, 1), (1376, 1, 2), (14, 8, 1)])
def test_the_tables_of_the_general_kernel_make_the_transform(n: int, size: int, parts: int) -> None:
    """Factor by factor as ``hadamard_any.cu`` goes: strides and bits of signs."""
    transform = Transform.planned(n, parts)
    entries, words = quantize_plan.any_tables(transform, size)
    x = np.random.default_rng(n).standard_normal(n * size)
    made = x.copy()
    for f in range(entries[0]):
        m, stride, first = (int(v) for v in entries[3 * f + 1 : 3 * f + 4])
        if first < 0:
            h = matrix(m, "sylvester")
        else:
            count = -(-m // 32)
            bits = words[first : first + m * count].view(np.uint8)
            h = 1 - 2 * np.unpackbits(bits, bitorder="little").reshape(m, -1)[:, :m].astype(np.int64).T
        made = np.einsum("oij,ik->okj", made.reshape(-1, m, stride), h.astype(np.float64)).ravel()
    wanted = apply(torch.from_numpy(x).view(n, size), transform, 0).flatten() * math.sqrt(transform.block)
    np.testing.assert_allclose(made, wanted.numpy(), atol=1e-9)


def test_a_definition_that_is_not_finite_says_so() -> None:
    y = torch.tensor([[1.0, float("nan")], [1.0, 2.0]])
    codes, scales = quantize_reference.codes(y, torch.float16, 8, 1.0, 0, 64)
    assert bool(scales[0].isnan()) and codes[0].tolist() == [0] * 64 and codes[1, :2].tolist() == [64, 127]
