"""Round-to-nearest with a search: exact on an exact grid, no worse than the plain one, scales as stored."""

import numpy as np
import pytest

from w4pack.convert.core import dtypes, rtn
from w4pack.convert.core.scheme import QuantScheme


def scheme(
    k: int, n: int, *, bits: int = 4, group: int = 32, sym: bool = True, tag: str = "F16"
) -> QuantScheme:
    return QuantScheme(bits, group, sym, False, k, n, tag)


def restored(found: rtn.RtnResult, how: QuantScheme) -> np.ndarray:
    """(code - zero) * scale in float64, by loops over groups."""
    k, n = found.codes.shape
    scales = dtypes.to_f32(found.scales, how.scale_dtype).astype(np.float64)
    zeros = np.full(scales.shape, how.midpoint) if found.zeros is None else found.zeros.astype(np.int64)
    out = np.empty((k, n))
    for row in range(k):
        g = 0 if how.group_size == -1 else row // how.group_size
        out[row] = (found.codes[row].astype(np.int64) - zeros[g]) * scales[g]
    return out


@pytest.mark.parametrize("tag", ["F16", "BF16"])
@pytest.mark.parametrize("group", [-1, 32, 48])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_reported_error_is_the_real_one_and_scales_are_stored_before_codes_are_chosen(
    bits: int, sym: bool, group: int, tag: str
) -> None:
    rng = np.random.default_rng(bits + group)
    weights = (rng.standard_normal((96, 5)) * np.exp(rng.standard_normal(5))).astype(np.float32)
    how = scheme(96, 5, bits=bits, group=group, sym=sym, tag=tag)
    found = rtn.quantize(weights, how)
    real = float(((restored(found, how) - weights) ** 2).sum())
    assert found.squared_error == pytest.approx(real, rel=1e-6)
    assert found.squared_norm == pytest.approx(float((weights.astype(np.float64) ** 2).sum()), rel=1e-12)
    assert (found.zeros is None) is sym


def test_weights_on_a_grid_come_back_exactly() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (64, 8))
    codes[:2] = [[0], [15]]  # the full range, so that the widest clip is the right grid
    weights = ((codes - 7.5) * 2).astype(np.float32)  # symmetric about zero: absmax 15, scale 2
    found = rtn.quantize(weights, scheme(64, 8, group=-1))
    assert found.squared_error <= float(((weights - np.rint(weights / 2) * 2) ** 2).sum()) + 1e-9
    exact = ((codes - 4) * 0.5).astype(np.float32)
    again = rtn.quantize(exact, scheme(64, 8, group=-1, sym=False))
    assert again.squared_error == 0
    assert np.array_equal(restored(again, scheme(64, 8, group=-1, sym=False)), exact)


def test_the_search_never_loses_to_the_plain_grid() -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_t(3, (128, 16)).astype(np.float32)  # heavy tails: clipping pays
    how = scheme(128, 16)
    plain = 0.0
    for start in range(0, 128, 32):
        part = weights[start : start + 32].astype(np.float64)
        scale = (np.abs(part).max(axis=0) / 7.5).astype(np.float16).astype(np.float64)
        plain += float(((np.clip(np.rint(part / scale) + 8, 0, 15) - 8) * scale - part).__pow__(2).sum())
    assert rtn.quantize(weights, how).squared_error < 0.98 * plain


def test_a_group_of_zeros_stays_zero() -> None:
    found = rtn.quantize(np.zeros((32, 3), np.float32), scheme(32, 3))
    assert found.squared_error == 0
    assert not restored(found, scheme(32, 3)).any()
