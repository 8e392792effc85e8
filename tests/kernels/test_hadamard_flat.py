"""Transforms without an exchange: which rows take them, and how their kernel is launched."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from w4pack.kernels import build, tiles  # noqa: E402
from w4pack.kernels.quarot import calls, flat_plan, quantize_launch, quantize_plan  # noqa: E402
from w4pack.kernels.quarot.transform import NONE, Transform  # noqa: E402

ROOM = 227 * 1024  # bytes of shared memory of an sm_90 block


# ------------------------------------------------------------ choices


def test_every_form_has_its_sizes() -> None:
    chosen = set()
    for row in flat_plan.FLATS:
        transform, heads = Transform.planned(row.size), 0 if row.steps else row.size
        assert row.lines - 16 < row.m <= row.lines
        assert row.m * row.columns == (row.size if row.steps else 128 * row.size)
        assert row.resident * (row.shared_bytes(False) + quantize_plan.RESERVED) <= 228 * 1024
        for acts in (False, True):
            found = flat_plan.choose(transform, heads, 128 if heads else 1, acts, ROOM)
            assert (found is not None) == (row.steps or not acts)
            chosen |= {found} - {None}
    assert chosen == set(flat_plan.FLATS)


def test_forms_with_warpgroups_that_only_activate_share_out_a_multiprocessor() -> None:
    apart = [row for row in flat_plan.FLATS if row.apart]
    assert {row.apart.warpgroups for row in apart} == {1, 2}
    for row in apart:
        assert not row.reads(False) and row.reads(True)
        given = 65536 // (row.resident * row.threads) // 8 * 8
        spare = given * row.threads - 128 * row.apart.warpgroups * row.apart.registers
        sums = min(240, spare // (128 * row.groups) // 8 * 8)
        held = 8 * row.apart.held  # registers of the pieces of gate and up
        assert sums >= 4 * row.nt + 4 * row.kt and row.apart.registers >= held + 24, row
        assert row.resident * (row.shared_bytes(True) + quantize_plan.RESERVED) <= 228 * 1024


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
    assert [row.size for row in flat_plan.FLATS if not _has_dense(row.size)] == [13824]


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


# ------------------------------------------------------------ the launch


def launched(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    n: int,
    kind: str = "none",
    arch: str = "sm_90a",
) -> tuple:
    """Return (entry, blocks, threads, shared bytes) of what quantizes rows on a card of an H200's size, and
    a form's map."""
    started: list[tuple] = []
    card = SimpleNamespace(arch=arch, multiprocessors=132, shared=ROOM, index=0)
    monkeypatch.setattr(quantize_launch, "_shared_of_multiprocessor", lambda index: 228 * 1024)
    monkeypatch.setattr(quantize_launch, "_fragments_of", lambda *given: 0)
    monkeypatch.setattr(quantize_launch.tensor_maps, "lines", lambda card, pointer, *given: given)
    monkeypatch.setattr(quantize_launch.launch, "device", lambda index: card)
    monkeypatch.setattr(quantize_launch.launch, "start", lambda card, *given: started.append(_seen(*given)))
    monkeypatch.setattr(quantize_launch.arguments, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    width = n * (2 if kind == "silu" else 1)
    x = torch.empty((rows, width), dtype=torch.float16)  # of which nothing is touched
    codes = torch.zeros(1)
    form = calls.Form(8, 1.0, 1, n)
    task = quantize_launch.Task(x, n, kind, None, 0.0, Transform.planned(n), 0, codes, codes, form)
    quantize_launch.run(task)
    return started[0] if started else ()


def _seen(entry: str, *given: object) -> tuple[object, ...]:
    return (entry, *given[:3], *given[4:5]) if entry.startswith("flat") else (entry, *given[:3])


def test_the_launch_follows_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {rows: launched(monkeypatch, rows, 11008) for rows in (0, 1, 511, 512, 513, 2001)}
    assert found[0] == ()
    assert found[1][0] == found[511][0] == "hadamard_fp16_m176_c6"
    two = 1024 + 12 * 64 * 8 + 2 * 128 * 176 * 2
    for rows in (513, 2001):
        assert found[rows] == ("flat_fp16_m172_c64", 132, 384, two, ((rows, 172, 64), 11008, 172))
    few = [launched(monkeypatch, rows, 13824)[:2] for rows in (1, 7, 4000)]
    assert few == [("flat_fp16_m144_c96", 1), ("flat_fp16_m144_c96", 7), ("flat_fp16_m144_c96", 132)]


def test_an_activation_and_another_architecture_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, 600, 16384)[0] == "flat_fp16_m64_c256"
    both = (1024 + 4 * 64 * 32 + 3 * 4 * 128 * 64, ((600, 112, 256), 28672, 56))
    assert launched(monkeypatch, 600, 14336, "silu") == ("flat_fp16_m56_c256_acts", 264, 256, *both)
    wide = (1024 + 8 * 64 * 32 + 3 * 4 * 128 * 112, ((600, 224, 256), 57344, 112))
    assert launched(monkeypatch, 600, 28672, "silu") == ("flat_fp16_m112_c256_acts", 132, 512, *wide)
    alone = (1024 + 4 * 64 * 32 + 2 * 4 * 128 * 64, ((600, 56, 256), 14336, 56))
    assert launched(monkeypatch, 600, 14336) == ("flat_fp16_m56_c256", 264, 128, *alone)
    for arch in ("sm_80", "sm_100"):
        assert launched(monkeypatch, 600, 14336, arch=arch)[0] == "hadamard_fp16_m32_c9"
