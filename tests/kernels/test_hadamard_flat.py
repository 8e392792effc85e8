"""Transforms without an exchange: which rows take them, and what their kernel computes, lane by lane."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from w4pack.convert.rotate.constructions import matrix  # noqa: E402
from w4pack.kernels import build, tiles  # noqa: E402
from w4pack.kernels.quarot import calls, flat_plan, orders_int, quantize_launch, quantize_plan  # noqa: E402
from w4pack.kernels.quarot.transform import NONE, Transform, apply  # noqa: E402

ROOM = 227 * 1024  # bytes of shared memory of an sm_90 block
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def form_of(size: int) -> tuple[flat_plan.Flat, int, Transform]:
    """Return a form, its m, and the transform of rows of ``size`` values, or over so few heads."""
    transform, heads = Transform.planned(size), size if size < 128 else 0
    found = flat_plan.choose(transform, heads, 128 if heads else 1, False, ROOM)
    assert found is not None
    return *found, transform


# ------------------------------------------------------------ choices


def test_every_form_has_its_sizes() -> None:
    taken = [(size, row.steps) for row in flat_plan.FLATS for size in row.sizes]
    assert len(set(taken)) == len(taken)
    for size, steps in taken:
        row, m, transform = form_of(size)
        assert row.steps == steps and row.lines - 16 < m <= row.lines
        assert m * row.columns == (size if steps else 128 * size)
        assert row.resident * (row.shared_bytes(m, False) + quantize_plan.RESERVED) <= 228 * 1024
        behind = flat_plan.choose(transform, 0 if steps else size, 1 if steps else 128, True, ROOM)
        assert (behind is not None) == row.acts


def test_what_was_not_measured_to_gain_has_no_form() -> None:
    for n in (2048, 3584, 5120, 7168, 10240, 12288, 32768, 576):
        assert flat_plan.choose(Transform.planned(n), 0, 1, False, ROOM) is None, n
    for heads, size in ((40, 128), (32, 64), (64, 64), (8, 128)):
        assert flat_plan.choose(Transform.planned(heads), heads, size, False, ROOM) is None, heads
    assert flat_plan.choose(Transform.planned(28672, 2), 0, 1, False, ROOM) is None
    assert flat_plan.choose(Transform.planned(28672), 0, 1, True, 99 * 1024) is None
    assert flat_plan.choose(NONE, 0, 1, False, ROOM) is None


def test_few_rows_take_the_dense_kernel_where_there_is_one() -> None:
    assert [flat_plan.is_chosen(rows, True) for rows in (1, 511, 512)] == [False, False, True]
    assert flat_plan.is_chosen(1, False)
    without = [row.sizes for row in flat_plan.FLATS if not _has_dense(row.sizes[0])]
    assert without == [(13824,)]


def _has_dense(size: int) -> bool:
    heads = size if size < 128 else 0
    return quantize_plan.dense(Transform.planned(size), heads, 128 if heads else 1, ROOM) is not None


def test_forms_are_built_for_sm_90a_alone() -> None:
    names = {row.entry(dtype) for row in flat_plan.FLATS for dtype in tiles.DTYPES}
    assert len(names) == 2 * len(flat_plan.FLATS)
    for arch in (*tiles.ARCHES, tiles.PTX_ARCH):
        built = {job.entry: job for job in build.jobs(arch) if job.source == "hadamard_flat.cu"}
        assert set(built) == (names if arch == "sm_90a" else set())
        assert all(job.hot for job in built.values())


# ------------------------------------------------------------ lanes


def fragments(row: flat_plan.Flat, m: int, transform: Transform) -> np.ndarray:
    """Return the matrix that the products multiply by, (lines of all warps, lines), from registers."""
    table = quantize_plan.fragments(transform, row, m, "fp16").view(np.uint32)
    made = np.zeros((16 * table.shape[0], row.lines))
    for i, k, e, half in np.ndindex(table.shape[0], row.kt, 4, 2):
        value = (table[i, k, :, e] >> 16 * half & 0xFFFF).astype(np.uint16).view(np.float16)
        made[16 * i + G + 8 * (e % 2), 16 * k + 8 * (e // 2) + 2 * T + half] = value
    return made


def place(row: flat_plan.Flat, tid: int, odd: int) -> int:
    """Return the byte of a place where a thread's octets lie, as the kernel counts."""
    octets = row.columns // 8
    line, octet = tid // octets + odd * (row.threads // octets), tid % octets
    return octet // 8 * 128 * row.lines + 128 * line + 16 * (octet % 8 ^ line % 8)


def copied(row: flat_plan.Flat, m: int, x: np.ndarray) -> np.ndarray:
    """Return a place of a row as octets (bytes / 16, 8), as all threads copy it; NaN is what none wrote."""
    octets = row.columns // 8
    step = row.threads // octets
    to = np.full((-(-row.columns // 64) * 8 * row.lines, 8), np.nan)
    for tid in range(row.threads):
        for i in range(-(-row.lines // step)):
            line, odd = tid // octets + i * step, int(step == 4 and i % 2)
            if line < m:
                at = place(row, tid, odd) + 128 * (i - odd) * step
                assert np.isnan(to[at // 16]).all()  # each octet is written once
                from_ = 8 * tid + i * step * row.columns
                to[at // 16] = x[from_ : from_ + 8]
    for block in range(-(-row.columns // 64)):  # the kernel's zeros past line m
        first = block * 8 * row.lines
        to[first + 8 * m : first + 8 * row.lines] = 0
    return to


def read(row: flat_plan.Flat, place_: np.ndarray) -> np.ndarray:
    """Return (lines, columns) as the swizzled descriptor reads a place: chunk c of line j at c ^ (j % 8)."""
    line, column = np.meshgrid(np.arange(row.lines), np.arange(row.columns), indexing="ij")
    chunk = column % 64 // 8 ^ line % 8
    return place_[column // 64 * 8 * row.lines + 8 * line + chunk, column % 8]


def low_bits(d: np.ndarray) -> np.ndarray:
    """Return step 2 of registers (tiles, lane, 4), by the operands' places in ``mma.m16n8k8`` of tf32."""
    a, b = np.empty((d.shape[0], 16, 8)), np.empty((8, 8))
    for e in range(4):  # register e of A: line g + 8 (e % 2), term t + 4 (e / 2)
        a[:, G + 8 * (e % 2), T + 4 * (e // 2)] = d[:, LANE, (e & 1) << 1 | e >> 1]
    for e in range(2):  # register e of B: term t + 4 e, column g
        sign = np.array([bin((2 * t | e) & g).count("1") & 1 for g, t in zip(G, T, strict=True)])
        b[T + 4 * e, G] = 1 - 2 * sign
    c, out = a @ b, np.empty_like(d)
    for e in range(4):
        out[:, LANE, e] = c[:, G + 8 * (e // 2), 2 * T + e % 2]
    return out


def twelve(d: np.ndarray) -> np.ndarray:
    """Return H_12 over tiles as the kernel adds: sums of three, with all signs, then of four."""
    u, v, w = (d[i::3] for i in range(3))
    three = np.stack((u + v + w, u - v + w, u + v - w, u - v - w), 1)
    out = np.zeros_like(d)
    for j, signs in enumerate(flat_plan.twelve_signs()):
        for i in range(4):
            s = signs >> 3 * i & 7
            which = (s >> 1 & 1 ^ s & 1) | (s >> 2 & 1 ^ s & 1) << 1
            out[j] += (1 - 2 * (s & 1)) * three[i, which]
    return out


def high_bits(row: flat_plan.Flat, d: np.ndarray) -> np.ndarray:
    """Return step 3 of registers (tiles, lane, 4)."""
    if row.twelve:
        return twelve(d)
    step = 1
    while step < d.shape[0]:
        u = d.reshape(-1, 2, step, 32, 4)
        d = np.stack((u[:, 0] + u[:, 1], u[:, 0] - u[:, 1]), 1).reshape(d.shape)
        step *= 2
    return d


def registers(row: flat_plan.Flat, m: int, transform: Transform, x: np.ndarray) -> np.ndarray:
    """Return the sums of a row, (warp, tiles of all its parts, lane, 4), as threads hold them at the end."""
    product = fragments(row, m, transform) @ read(row, copied(row, m, x))
    assert not np.isnan(product).any()
    warps, count = row.tiles[0], row.columns // 8
    d = np.empty((warps, count, 32, 4))
    for e in range(4):
        lines = 16 * np.arange(warps)[:, None, None] + G + 8 * (e // 2)
        d[..., e] = product[lines, 8 * np.arange(count)[:, None] + 2 * T + e % 2]
    if not row.steps:
        return d
    for w in range(warps):
        parts = [high_bits(row, low_bits(part)) for part in np.split(d[w], count // row.nt)]
        joined = [parts[0]] if len(parts) == 1 else [parts[0] + parts[1], parts[0] - parts[1]]
        d[w] = np.concatenate(joined)
    return d


def words_of(codes: np.ndarray, order: int) -> list[tuple[int, np.ndarray]]:
    """Return (place, bytes (warps, blocks, lane, 4)) of the words that lanes make of blocks of 32 columns.

    Args:
        codes: int8 (warps, blocks, octet, lane, h, e) of one h.
        order: P32, Q32 or S64.
    """
    c = codes.view(np.uint8)

    def word(*at: tuple[int, int]) -> np.ndarray:
        return np.stack([c[:, :, o, :, e] for o, e in at], -1)

    if order == orders_int.Q32:
        pairs = [((2 * b, 0), (2 * b + 1, 0), (2 * b, 1), (2 * b + 1, 1)) for b in (0, 1)]
        return [(16 * b, word(*pairs[b])) for b in (0, 1)]
    halves = [word((b, 0), (b, 1), (b + 2, 0), (b + 2, 1)) for b in (0, 1)]
    if order == orders_int.P32:
        return [(0, halves[0]), (16, halves[1])]
    return [(0, halves[0] & 0x0F | halves[1] << 4 & 0xF0)]


def stored(row: flat_plan.Flat, m: int, d: np.ndarray, order: int) -> np.ndarray:
    """Return a row's bytes as the lanes write codes, (block of the row, bytes)."""
    codes = d.astype(np.int8).reshape(d.shape[0], -1, 4, 32, 2, 2)  # warp, block, octet, lane, h, e
    blocks, bytes_ = codes.shape[1], 16 if order == orders_int.S64 else 32
    out = np.zeros((m * blocks, bytes_), np.uint8)
    for h in (0, 1):
        lines = 16 * np.arange(codes.shape[0])[:, None] + G + 8 * h  # (warp, lane)
        at = lines[:, None] * blocks + np.arange(blocks)[:, None]  # (warp, block, lane)
        real = np.broadcast_to((lines < m)[:, None], at.shape)
        for offset, made in words_of(codes[..., h, :], order):
            for i in range(4):
                out[at[real], offset + (4 * T + i + 0 * at)[real]] = made[..., i][real]
    return out


SIZES = [size for row in flat_plan.FLATS for size in row.sizes]


@pytest.mark.parametrize("size", SIZES)
def test_the_lanes_of_the_kernel_make_the_transform(size: int) -> None:
    """Each form: the way to shared memory and out of it, fragments, tf32 operands, butterflies."""
    row, m, transform = form_of(size)
    x = np.random.default_rng(size).standard_normal(m * row.columns)
    values, axis = (x, -1) if row.steps else (x.reshape(m, -1), 0)
    wanted = apply(torch.from_numpy(values), transform, axis).numpy().reshape(m, -1) * math.sqrt(
        transform.block
    )
    d = registers(row, m, transform, x)
    made = np.zeros((16 * d.shape[0], row.columns))
    for i, e in np.ndindex(d.shape[1], 4):
        for warp in range(d.shape[0]):
            made[16 * warp + G + 8 * (e // 2), 8 * i + 2 * T + e % 2] = d[warp, i, :, e]
    np.testing.assert_allclose(made[:m], wanted, atol=1e-9)
    assert not made[m:].any()  # lines that are padding


@pytest.mark.parametrize("size", [4096, 13824, 18944, 28672, 64])
@pytest.mark.parametrize("order", [orders_int.P32, orders_int.Q32, orders_int.S64])
def test_the_lanes_write_each_code_where_its_order_wants_it(size: int, order: int) -> None:
    row, m, _ = form_of(size)
    codes = np.random.default_rng(size).integers(-8, 8, (16 * row.tiles[0], row.columns))
    d = np.empty((row.tiles[0], row.columns // 8, 32, 4))
    for warp, i, e in np.ndindex(d.shape[0], d.shape[1], 4):
        d[warp, i, :, e] = codes[16 * warp + G + 8 * (e // 2), 8 * i + 2 * T + e % 2]
    natural = torch.from_numpy(codes[:m].astype(np.int8).reshape(1, -1))
    wanted = orders_int.arrange(natural, order).numpy().view(np.uint8)
    assert np.array_equal(stored(row, m, d, order).reshape(1, -1), wanted)


@pytest.mark.parametrize("size", SIZES)
def test_all_lines_have_one_warp_each(size: int) -> None:
    """Warps of a warpgroup are turned from block to block, to spread idle ones; none goes missing."""
    row, _, _ = form_of(size)
    warp = np.arange(row.threads // 32)
    for block in range(0, 64, 4):
        tile = warp if row.kt % 4 == 0 else (warp & ~3) | ((warp + block // 4) & 3)
        assert sorted(tile) == list(range(row.tiles[0])) and (tile // 4 == warp // 4).all()


def test_signs_of_twelve_are_those_of_its_matrix() -> None:
    h = matrix(*flat_plan.TWELVE)
    signs = flat_plan.twelve_signs()
    assert all((signs[j] >> i & 1) == (h[i, j] < 0) for i, j in np.ndindex(12, 12))


def test_two_parts_of_tf32_leave_a_small_error() -> None:
    """The upper and the lower part of a sum, each cut to tf32's 19 bits, are the sum within 2^-21."""
    v = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)

    def cut(a: np.ndarray) -> np.ndarray:
        return (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    upper = cut(v)
    lower = cut(v - upper)
    error = np.abs(upper.astype(np.float64) + lower - v) / np.abs(v)
    assert 0 < error.max() <= 2.0**-21


# ------------------------------------------------------------ the launch


def launched(
    monkeypatch: pytest.MonkeyPatch, rows: int, n: int, kind: str = "none", arch: str = "sm_90a"
) -> tuple:
    """Return (entry, blocks, threads, shared bytes) of what quantizes rows on a card of an H200's size."""
    started: list[tuple] = []
    card = SimpleNamespace(arch=arch, multiprocessors=132, index=0)
    monkeypatch.setattr(quantize_launch, "_card", lambda index: (ROOM, 228 * 1024))
    monkeypatch.setattr(quantize_launch, "_fragments_of", lambda *given: 0)
    monkeypatch.setattr(quantize_launch.launch, "device", lambda index: card)
    monkeypatch.setattr(quantize_launch.launch, "start", lambda card, *given: started.append(given[:4]))
    monkeypatch.setattr(quantize_launch.arguments, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    x = torch.zeros(1, n * (2 if kind == "silu" else 1), dtype=torch.float16).expand(rows, -1)
    codes = torch.zeros(1)
    form = calls.Form(8, 1.0, 1, n)
    task = quantize_launch.Task(x, n, kind, None, 0.0, Transform.planned(n), 0, codes, codes, form)
    quantize_launch.run(task)
    return started[0] if started else ()


def test_the_launch_follows_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {rows: launched(monkeypatch, rows, 11008) for rows in (0, 1, 511, 512, 513, 2001)}
    assert found[0] == ()
    assert found[1][0] == found[511][0] == "hadamard_fp16_m176_c6"
    two = 1024 + 2 * 128 * 176 * 2
    assert found[513] == found[2001] == ("flat_fp16_m176_c64_rows", 132, 384, two)
    few = [launched(monkeypatch, rows, 13824)[:2] for rows in (1, 7, 4000)]
    assert few == [("flat_fp16_m144_c96", 1), ("flat_fp16_m144_c96", 7), ("flat_fp16_m144_c96", 132)]


def test_an_activation_and_another_architecture_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, 600, 16384)[0] == "flat_fp16_m64_c256_halves"
    assert launched(monkeypatch, 600, 16384, "silu")[0] == "hadamard_fp16_m32_c9"
    acts = 1024 + 2 * 2 * 128 * 112 + 4 * 14336
    assert launched(monkeypatch, 600, 14336, "silu") == ("flat_fp16_m112_c128", 264, 256, acts)
    assert launched(monkeypatch, 600, 14336) == ("flat_fp16_m112_c128", 264, 256, 1024 + 2 * 2 * 128 * 112)
    for arch in ("sm_80", "sm_100"):
        assert launched(monkeypatch, 600, 14336, arch=arch)[0] == "hadamard_fp16_m32_c9"
