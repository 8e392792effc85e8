"""Rows that eight blocks of a cluster share: which they are, and the index arithmetic of their kernel."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from w4pack.convert.rotate.constructions import matrix  # noqa: E402
from w4pack.kernels import build, tiles  # noqa: E402
from w4pack.kernels.quarot import quantize_launch, quantize_plan  # noqa: E402
from w4pack.kernels.quarot.calls import Form  # noqa: E402
from w4pack.kernels.quarot.transform import NONE, Transform, apply  # noqa: E402

BLOCKS, THREADS = quantize_plan.CLUSTER_BLOCKS, quantize_plan.CLUSTER_THREADS


def test_long_rows_of_a_few_tokens_take_the_cluster() -> None:
    wanted = {14336: (6, 28), 16384: (7, 16), 20480: (7, 20), 24576: (7, 24), 28672: (7, 28), 32768: (7, 32)}
    for n, (log_slice, m) in wanted.items():
        found = quantize_plan.cluster(Transform.planned(n))
        assert found is not None and (found[0], found[2]) == (log_slice, m), n
        assert m << found[1].log_c == n and BLOCKS << log_slice == 1 << found[1].log_c
    for n in (4096, 8192, 12288, 13824, 18944, 29568, 65536):  # short; of other factors; of too many lines
        assert quantize_plan.cluster(Transform.planned(n)) is None, n
    assert quantize_plan.cluster(Transform.planned(28672, 2)) is None
    assert quantize_plan.cluster(NONE) is None


def test_rows_are_few_while_a_multiprocessor_has_one_of_their_blocks() -> None:
    assert quantize_plan.cluster_rows("sm_90a", 132) == 16
    assert quantize_plan.cluster_rows("sm_90a", 114) == 14
    assert not any(quantize_plan.cluster_rows(arch, 132) for arch in ("sm_80", "sm_100", "sm_120"))


def test_a_launch_takes_the_cluster_for_whole_rows_alone() -> None:
    card: Any = SimpleNamespace(arch="sm_90a", multiprocessors=132)

    def shared(m: int = 1, n: int = 28672, **changes: Any) -> bool:
        form = changes.pop("form", Form(4, 0.9, 1, n))
        given: dict[str, Any] = {"kind": "silu", "gain": None, "heads": 0} | changes
        empty = torch.empty(0)
        task = quantize_launch.Task(
            x=torch.empty(m, 2 * n, device="meta"), k=n, eps=0.0, transform=Transform.planned(n),
            codes=empty, scales=empty, form=form, **given,
        )  # fmt: skip
        return quantize_launch._spread(card, task) is not None

    assert all(shared(m, n, kind=kind) for m in (1, 16) for n in (14336, 28672) for kind in ("none", "silu"))
    assert not shared(17) and not shared(17, 14336) and not shared(1, 8192)
    assert not shared(kind="norm") and not shared(heads=8) and not shared(gain=torch.ones(28672))
    assert not shared(form=Form(4, 0.9, 1, 28736))
    card.arch = "sm_100"
    assert not shared()


def test_its_kernels_are_built_where_clusters_are() -> None:
    for arch in (*tiles.ARCHES, tiles.PTX_ARCH):
        built = {job.entry for job in build.jobs(arch)}
        for dtype in tiles.DTYPES:
            for log_slice in quantize_plan.CLUSTER_SLICES:
                entry = quantize_plan.cluster_entry(dtype, log_slice)
                assert (entry in built) == (quantize_plan.cluster_rows(arch, 132) > 0)


def spread(i: np.ndarray | int) -> np.ndarray:
    """Return where bits 3, 5, 6 of a column lie when they are counted together."""
    n = np.asarray(i)
    return (n & 1) << 3 | (n >> 1 & 1) << 5 | (n >> 2 & 1) << 6


def fragments(form: quantize_plan.Dense, m: int, transform: Transform) -> np.ndarray:
    """Return the matrix that the tensor cores multiply by, (32, 32), from the lanes' registers."""
    table = quantize_plan.fragments(transform, form, m, "fp16").view(np.uint32)
    lane, h = np.arange(32), np.zeros((form.rows, form.rows))
    for i, k, e, half in np.ndindex(2, 2, 4, 2):
        value = (table[i, k, :, e] >> 16 * half & 0xFFFF).astype(np.uint16).view(np.float16)
        h[16 * i + lane // 4 + 8 * (e % 2), 16 * k + 8 * (e // 2) + 2 * (lane % 4) + half] = value
    return h


def local(h: np.ndarray, lines: np.ndarray, m: int) -> np.ndarray:
    """Return what one block has after its own steps, (groups, 16).

    Args:
        h: the matrix, (32, 32).
        lines: the block's columns of the row's lines, (32, slice); zeros past m.
        m: lines that are the row's.
    """
    nt, pitch = lines.shape[1] // 16, lines.shape[1] + 8
    lane, exchange, product = np.arange(32), np.full(m * pitch, np.nan), h @ lines
    n_steps = matrix(nt, "sylvester").astype(np.float64)
    for m_tile, bit4 in np.ndindex(2, 2):
        columns = 16 * bit4 + spread(np.arange(nt))[:, None] + np.arange(8)
        d = np.einsum("rnc,nk->krc", product[16 * m_tile : 16 * m_tile + 16][:, columns], n_steps)
        for n, half, r in np.ndindex(nt, 2, 2):
            j, t, b5, b6 = 16 * m_tile + lane // 4 + 8 * half, lane % 4, n >> 1 & 1, n >> 2 & 1
            at = j * pitch + 16 * (bit4 ^ b6) + 4 * (t >> 1 ^ b5) + 2 * (t & 1) + spread(n) + r
            real = j < m
            assert np.isnan(exchange[at[real]]).all()  # each place is written once
            exchange[at[real]] = d[n, lane // 4 + 8 * half, 2 * t + r][real]
    out = np.full((m * nt, 16), np.nan)
    for group in range(m * nt):
        low = int(spread(group % nt))
        line = group // nt * pitch + low
        at = [line + 16 * (q // 2 ^ low >> 6 & 1) + 4 * (q % 2 ^ low >> 5 & 1) for q in range(4)]
        v = np.concatenate([exchange[a : a + 4] for a in at]) @ matrix(16, "sylvester")
        out[group] = v
    return out


def shared(m: int, log_slice: int, blocks: np.ndarray) -> np.ndarray:
    """Return the row from what its blocks have, (8, groups, 16): each is sent a share of all of them."""
    nt, c = (1 << log_slice) // 16, BLOCKS << log_slice
    pairs, out, thread = m * nt // 2, np.full(m * c, np.nan), np.arange(THREADS)
    each = -(-pairs // BLOCKS)
    assert each <= THREADS // 16  # sixteen threads a pair
    place = 16 * thread[:, None] + 4 * (np.arange(4) ^ (thread // 2 % 4)[:, None])  # in floats, by piece
    for i, q in np.ndindex(THREADS // 8, 4):
        assert np.unique(place[8 * i : 8 * i + 8, q] // 4 % 8).size == 8  # eight lanes meet in no bank
    for rank in range(BLOCKS):
        gathered = np.full(16 * THREADS, np.nan)
        for source, group, q in np.ndindex(BLOCKS, m * nt, 4):
            if group // 2 // each == rank:
                at = place[group // 2 % each * 16 + source * 2 + group % 2, q]
                assert np.isnan(gathered[at : at + 4]).all()  # each place is written once
                gathered[at : at + 4] = blocks[source, group, 4 * q : 4 * q + 4]
        expected = min(each, max(0, pairs - rank * each)) * 16 * 64  # bytes that the barrier waits for
        assert 4 * np.count_nonzero(~np.isnan(gathered)) == expected
        pair, source = rank * each + thread // 16, thread // 2 % BLOCKS
        real = (thread // 16 < each) & (pair < pairs)
        group = 2 * np.where(real, pair, 0) + thread % 2
        v = gathered[place[..., None] + np.arange(4)].reshape(THREADS, 16)
        for step in (2, 4, 8):
            v = np.where(thread & step, -1, 1)[:, None] * v + v[thread ^ step]
        block = (group // nt * c + (source << log_slice) + (spread(group % nt) & ~8)) // 32
        for h in range(2):
            at = (32 * block + 16 * h + 8 * (thread & 1))[real, None] + np.arange(8)
            assert np.isnan(out[at]).all()
            out[at] = v[real, 8 * h : 8 * h + 8]
    return out


@pytest.mark.parametrize("n", [14336, 16384, 20480, 28672, 32768])
def test_the_threads_of_the_kernel_make_the_transform(n: int) -> None:
    """Fragments, exchange, groups, the share of each block, the place of each value: in exact numbers."""
    transform = Transform.planned(n)
    log_slice, form, m = quantize_plan.cluster(transform) or pytest.fail("no cluster")
    x = np.random.default_rng(n).integers(-8, 8, n).astype(np.float64)
    lines = np.zeros((form.rows, BLOCKS << log_slice))
    lines[:m] = x.reshape(m, -1)
    h = fragments(form, m, transform)
    parts = np.split(lines, BLOCKS, axis=1)
    found = shared(m, log_slice, np.stack([local(h, part, m) for part in parts]))
    wanted = apply(torch.from_numpy(x), transform).numpy() * math.sqrt(transform.block)
    np.testing.assert_array_equal(found, np.rint(wanted))
