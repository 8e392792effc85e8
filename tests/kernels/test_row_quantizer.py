"""Rows without a transform: which kernel takes a width, and lane by lane where its codes lie."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from w4pack.kernels import build, tiles  # noqa: E402
from w4pack.kernels.quarot import orders_int, row_plan  # noqa: E402

WIDTHS = (64, 1024, 1088, 4096, 4160, 5120, 7168, 7232, 8192, 9216, 9280, 12288, 12352, 14336, 16384)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("acts", [False, True])
def test_every_width_has_the_first_form_that_holds_it(arch: str, acts: bool) -> None:
    forms = row_plan.forms(arch, acts)
    for width in range(64, 16384 + 1, 64):
        row = row_plan.choose(arch, width, acts)
        assert row is not None and row.warps_of(width) <= row.warps <= 32
        held = 512 * row.pairs * row.warps_of(width)
        assert width <= held < width + 512 * row.pairs
        smaller = forms[: forms.index(row)]
        assert all(512 * other.pairs * other.warps < width for other in smaller)
        blocks = row.blocks(width)
        assert blocks == 32 or row.resident * row.warps < row.warps_of(width) * (blocks + 1)
    assert row_plan.choose(arch, 16448, acts) is None


def test_widths_of_models_have_the_forms_that_were_measured() -> None:
    wanted = {
        "sm_90a": {2048: (2, 2, 16), 4096: (2, 4, 8), 5120: (2, 5, 5), 8192: (3, 6, 3), 14336: (2, 14, 1)},
        "sm_120": {2048: (2, 2, 14), 4096: (2, 4, 7), 5120: (2, 5, 5), 8192: (4, 4, 3), 14336: (2, 14, 1)},
    }
    for arch, widths in wanted.items():
        for width, form in widths.items():
            row = row_plan.choose(arch, width, False)
            assert row is not None and (row.pairs, row.warps_of(width), row.blocks(width)) == form


def test_the_forms_are_built_for_every_architecture() -> None:
    for arch in (*tiles.ARCHES, tiles.PTX_ARCH):
        built = {job.entry: job for job in build.jobs(arch)}
        for dtype in tiles.DTYPES:
            for row in (*row_plan.forms(arch, False), *row_plan.ACTS):
                assert built[row.entry(dtype)].hot
        assert {built[row.entry("fp16")].source for row in row_plan.ACTS} == {"quantize_acts.cu"}


def permute(a: np.ndarray, b: np.ndarray, select: int) -> np.ndarray:
    """Return four of the eight bytes of (a, b), as the instruction does; arrays (..., 4)."""
    both = np.concatenate((a, b), -1)
    return both[..., [select >> 4 * i & 7 for i in range(4)]]


def written(octets: np.ndarray, order: int) -> np.ndarray:
    """Return the bytes of blocks as ``write_block`` makes them, (blocks, 32), or (blocks, 16) of nibbles.

    Args:
        octets: int8 codes (blocks, lane b3, octet, 8) that the two lanes of a block hold.
        order: of the codes.
    """
    first, second = (octets[:, :, h].view(np.uint8).reshape(-1, 2, 2, 4) for h in (0, 1))  # words x and y
    if order == orders_int.P32:
        words = [
            permute(first[:, :, w], second[:, :, w], select) for w in (0, 1) for select in (0x5410, 0x7632)
        ]
        return np.concatenate(words, -1).reshape(-1, 32)
    if order == orders_int.S64:
        made = []
        for t in range(4):
            bytes_ = permute(first[:, :, t // 2], second[:, :, t // 2], 0x7632 if t % 2 else 0x5410)
            made.append(bytes_.reshape(-1, 8).copy().view(np.uint32) & 0x0F0F0F0F)
        words = np.stack(made, 1) << np.array([0, 4], np.uint32)  # (blocks, t, b3)
        return np.ascontiguousarray(words[:, :, 0] | words[:, :, 1]).view(np.uint8)
    parts = []
    for octet in (first, second):  # lane 0 writes the first octets of both, lane 1 the second ones
        low, high = octet[:, 0], octet[:, 1]
        if order == orders_int.NATURAL:
            parts += [low[:, 0], low[:, 1], high[:, 0], high[:, 1]]
        else:
            parts += [permute(low[:, w], high[:, w], s) for w in (0, 1) for s in (0x5140, 0x7362)]
    return np.concatenate(parts, -1)


def columns(row: row_plan.Rows, width: int) -> np.ndarray:
    """Return the first columns of all threads' octets, (warp, lane, pair, octet), as the sources count."""
    count = row.warps_of(width)
    warp, lane, pair, h = np.meshgrid(*map(np.arange, (count, 32, row.pairs, 2)), indexing="ij")
    if row.acts:
        unit = 32 * warp + lane + pair * 32 * count
        return unit // 2 * 32 + unit % 2 * 8 + 16 * h
    return row.pairs * 512 * warp + lane // 2 * 32 + lane % 2 * 8 + 512 * pair + 16 * h


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("arch", "acts"), [("sm_90a", False), ("sm_100", False), ("sm_90a", True)])
def test_the_lanes_write_each_code_where_its_order_wants_it(width: int, arch: str, acts: bool) -> None:
    row = row_plan.choose(arch, width, acts)
    assert row is not None
    k = width - 56 if width % 1024 else width  # what lies past K are codes of 0
    codes = np.zeros((1, 512 * row.pairs * row.warps_of(width)), np.int8)
    codes[0, :k] = np.random.default_rng(width).integers(-8, 8, k)
    at = columns(row, width)
    assert np.array_equal(np.sort(at.ravel()), np.arange(0, codes.shape[1], 8))
    held = codes[0][at[..., None] + np.arange(8)]  # (warp, lane, pair, octet, 8)
    blocks = at[:, ::2, :, 0] // 32  # of each two lanes
    octets = held.reshape(-1, 16, 2, row.pairs, 2, 8).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 2, 2, 8)
    for order in orders_int.ORDERS:
        made = written(np.ascontiguousarray(octets), order)
        out = np.zeros((blocks.size, made.shape[1]), np.uint8)
        out[blocks.ravel()] = made
        wanted = orders_int.arrange(torch.from_numpy(codes[:, :width]), order).numpy().view(np.uint8)
        assert np.array_equal(out.reshape(1, -1)[:, : wanted.shape[1]], wanted), order
