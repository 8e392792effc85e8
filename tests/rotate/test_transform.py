"""The fast transform is the dense product, on every axis, and a rotation keeps lengths."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from w4pack.convert.rotate.constructions import matrix
from w4pack.convert.rotate.rotated import round_once, turn
from w4pack.convert.rotate.rotation import Rotation, make_rotation
from w4pack.convert.rotate.steps import Center, Gain, Turn, row_axes, whole
from w4pack.convert.rotate.transform import rotate

LARGE = (10944, 11008, 13696, 14336, 18944, 28672, 29568)


def made(n: int, *, kind: str = "r1", seed: int | None = 3, parts: int = 1, ones: bool = False) -> Rotation:
    found = make_rotation(kind, n, 4, seed=seed, parts=parts, ones=ones)
    assert found is not None
    return found


def dense(rotation: Rotation) -> np.ndarray:
    """The matrix from its definition: signs, Kronecker factors, blocks; no fast path."""
    block = np.ones((1, 1))
    for m, kind in rotation.factors:
        block = np.kron(block, matrix(m, kind).astype(np.float64))
    q = np.kron(np.eye(rotation.n // rotation.block), block) / np.sqrt(rotation.block)
    signs = rotation.sign_vector()
    if signs is not None:
        q = signs.astype(np.float64)[:, None] * q
    if rotation.ones:
        e = np.full(rotation.n, rotation.n**-0.5)
        v = e @ q - e
        q = q - 2 * np.outer(q @ v, v) / (v @ v)
    return q


SIZES = (2, 4, 12, 14, 16, 20, 28, 36, 48, 64, 80, 90, 92, 96, 104, 112, 128, 172, 188, 256, 520, 576, 1152)


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_the_fast_transform_is_the_dense_product(n: int, ones: bool) -> None:
    rotation = made(n, ones=ones)
    q = dense(rotation)
    assert np.allclose(q @ q.T, np.eye(n), atol=1e-12)
    x = torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    assert np.allclose(rotate(x, rotation).numpy(), x.numpy() @ q, atol=1e-12)


@pytest.mark.parametrize("n", LARGE)
def test_large_orders_are_exact_in_integers(n: int) -> None:
    """On integers all sums are exact: rows of H that the transform gives are signs and orthogonal."""
    rotation = made(n, seed=None)
    x = torch.zeros(4, n, dtype=torch.float64)
    places = [0, 1, n // 2 + 1, n - 1]
    for row, place in enumerate(places):
        x[row, place] = 1
    y = rotate(x, rotation) * np.sqrt(n)
    h = y.round()
    assert float((y - h).abs().max()) < 1e-9
    assert bool((h.abs() == 1).all())
    assert torch.equal(h @ h.T, n * torch.eye(4, dtype=torch.float64))
    # the entry from its definition: a product over the digits of row and column
    column = n // 3
    for row, place in enumerate(places):
        entry, i, j = 1, place, column
        for m, kind in reversed(rotation.factors):
            entry *= int(matrix(m, kind)[i % m, j % m])
            i, j = i // m, j // m
        assert float(h[row, column]) == entry


def test_any_axis_and_every_vector_alone() -> None:
    rotation = made(12)
    q = torch.from_numpy(dense(rotation))
    x = torch.randn(5, 12, 7, dtype=torch.float64)
    assert torch.allclose(rotate(x, rotation, 1), torch.einsum("aib,ij->ajb", x, q), atol=1e-13)
    before = x.clone()
    rotate(x, rotation, 1)
    assert torch.equal(x, before)
    assert rotate(torch.empty(0, 12, dtype=torch.float64), rotation).shape == (0, 12)


def test_a_rotation_that_fixes_the_ones_keeps_means_and_lengths() -> None:
    for n in (48, 520, 14):
        rotation = made(n, ones=True)
        ones = torch.ones(1, n, dtype=torch.float64)
        assert torch.allclose(rotate(ones, rotation), ones, atol=1e-12)
        x = torch.randn(4, n, dtype=torch.float64)
        y = rotate(x, rotation)
        assert torch.allclose(y.mean(-1), x.mean(-1), atol=1e-12)
        assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), atol=1e-12)
    plain = rotate(torch.ones(1, 48, dtype=torch.float64), made(48))
    assert not torch.allclose(plain, torch.ones(1, 48, dtype=torch.float64), atol=0.1)


@pytest.mark.parametrize(("n", "parts", "block"), [(96, 1, 96), (96, 2, 48), (28672, 8, 3584), (64, 8, 8)])
def test_parts_are_blocks_of_contiguous_channels(n: int, parts: int, block: int) -> None:
    rotation = made(n, kind="r4", seed=None, parts=parts)
    assert rotation.block == block
    x = torch.zeros(1, n, dtype=torch.float64)
    x[0, 0] = 1
    assert int((rotate(x, rotation) != 0).sum()) == block


def test_no_rotation_of_odd_length() -> None:
    assert make_rotation("heads", 9) is None
    assert make_rotation("heads", 6, parts=2) is None


# ---- signs and digests ----


def test_signs_are_those_of_the_stated_generator() -> None:
    rotation = made(48, kind="r2", seed=11)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([11, 2, 4])))
    assert rotation.sign_vector() is not None
    assert np.array_equal(rotation.sign_vector(), 2 * generator.integers(0, 2, 48) - 1)
    whole_model = make_rotation("r1", 48, seed=11)
    assert whole_model is not None
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([11, 1, 2**32 - 1])))
    assert np.array_equal(whole_model.sign_vector(), 2 * generator.integers(0, 2, 48) - 1)


def test_signs_do_not_change_with_time() -> None:
    """Written down from a run: another value means that every recorded seed lost its meaning."""
    assert made(24, seed=0, kind="r1").signs == GOLDEN_SIGNS


GOLDEN_SIGNS = "c0c4f7"


def test_the_digest_is_that_of_the_canonical_record() -> None:
    rotation = made(24, seed=0)
    text = json.dumps(
        {"block": 24, "factors": [[12, "paley1"], [2, "sylvester"]], "n": 24, "signs": rotation.signs},
        sort_keys=True,
        separators=(",", ":"),
    )
    assert rotation.digest == hashlib.sha256(text.encode()).hexdigest()
    others = [made(24, seed=1), made(24, seed=None), made(24, seed=0, ones=True), made(24, seed=0, parts=2)]
    assert len({rotation.digest, *(r.digest for r in others)}) == 5


# ---- parts of a tensor ----


def test_a_turn_touches_its_rows_alone() -> None:
    rotation = made(4)
    q = torch.from_numpy(dense(rotation))
    w = torch.randn(20, 3, dtype=torch.float64)
    found = turn(w, Turn(0, rotation, start=2, stride=6, count=3, offset=1))
    wanted = w.clone()
    for vector in range(3):
        rows = slice(2 + 6 * vector + 1, 2 + 6 * vector + 5)
        wanted[rows] = q.T @ w[rows]
    assert torch.allclose(found, wanted, atol=1e-13)
    untouched = [0, 1, 2, 7, 8, 13, 14, 19]
    assert torch.equal(found[untouched], w[untouched])


def test_a_turn_across_heads_leaves_channels_apart() -> None:
    rotation = made(4, kind="heads", seed=None)
    q = torch.from_numpy(dense(rotation))
    w = torch.randn(5, 4 * 3, dtype=torch.float64)
    found = turn(w, Turn(1, rotation, stride=12, apart=3))
    assert torch.allclose(found, w @ torch.kron(q, torch.eye(3, dtype=torch.float64)), atol=1e-13)


def test_bands_are_cut_across_axes_that_nothing_mixes() -> None:
    rotation = made(4)
    assert row_axes((Gain("norm", plus_one=False),)) == {1}  # a band of columns has other gains
    assert row_axes((Center(0),)) == {0}
    assert row_axes((Gain("norm", plus_one=False), whole(1, rotation), Turn(0, rotation))) == {0, 1}


# ---- one rounding ----


def test_one_rounding_where_two_would_differ() -> None:
    """1 + 2^-8 + 2^-40 lies above the middle of two bfloat16 numbers; by way of float32 it falls on it."""
    above = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert float(above.to(torch.bfloat16)) == 1.0  # what two roundings give
    assert float(round_once(above, torch.bfloat16)) == 1 + 2.0**-7
    assert float(round_once(-above, torch.bfloat16)) == -(1 + 2.0**-7)
    below = torch.tensor([1 + 3 * 2.0**-8 - 2.0**-40], dtype=torch.float64)
    assert float(below.to(torch.bfloat16)) == 1 + 2.0**-6
    assert float(round_once(below, torch.bfloat16)) == 1 + 2.0**-7
    half = torch.tensor([1 + 2.0**-11 + 2.0**-40], dtype=torch.float64)
    assert float(round_once(half, torch.float16)) == 1 + 2.0**-10


@given(st.lists(st.floats(allow_nan=False, width=64), min_size=1, max_size=20))
def test_rounding_once_is_numpys_for_float16(values: list[float]) -> None:
    """numpy rounds float64 to float16 in one step."""
    found = round_once(torch.tensor(values, dtype=torch.float64), torch.float16)
    with np.errstate(over="ignore"):
        wanted = np.array(values).astype(np.float16)
    assert np.array_equal(found.numpy().view(np.uint16), wanted.view(np.uint16))


def test_special_values_keep_their_kind() -> None:
    inf = float("inf")
    values = torch.tensor([0.0, -0.0, inf, -inf, float("nan"), 1e300, 1e-300], dtype=torch.float64)
    for dtype in (torch.float16, torch.bfloat16):
        found = round_once(values, dtype).double()
        assert found[:4].tolist() == [0.0, -0.0, inf, -inf]
        assert bool(torch.signbit(found[1])) and bool(found[4].isnan())
        assert float(found[5]) == inf and float(found[6]) == 0
