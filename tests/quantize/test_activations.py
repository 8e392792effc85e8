"""Codes of activations and of the cache, against slow arithmetic of single numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from w4pack.convert.quantize.activations import (
    dequantize_cache,
    dequantize_tokens,
    fake_cache,
    fake_tokens,
    quantize_cache,
    quantize_tokens,
)
from w4pack.convert.quantize.clips import RATIOS, Costs, Trial, cheapest, trials

F = np.float32


def rows(seed: int, shape: tuple[int, ...] = (7, 24)) -> torch.Tensor:
    """Values of very different sizes, a few of them on ties."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(-4, 3, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return torch.randn(shape, generator=generator) * size


def slow_token(row: list[float], bits: int, clip: float) -> tuple[list[int], float]:
    most = 2 ** (bits - 1) - 1
    scale = F(F(max(abs(F(x)) for x in row)) * F(clip)) / F(most)
    if scale == 0:
        scale = F(1)
    return [int(np.clip(np.rint(F(x) / scale), -most - 1, most)) for x in row], float(scale)


def slow_head(row: list[float], bits: int, clip: float) -> tuple[list[int], float, int]:
    levels = 2**bits - 1
    low, high = F(min(*row, 0.0)) * F(clip), F(max(*row, 0.0)) * F(clip)
    scale = max(F(np.float16((high - low) / F(levels))), F(2.0**-14))
    zero = int(np.clip(np.rint(-low / scale), 0, levels))
    return [int(np.clip(np.rint(F(x) / scale) + zero, 0, levels)) for x in row], float(scale), zero


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("clip", [0.8, 0.9, 1.0])
def test_codes_of_tokens_are_those_of_single_numbers(bits: int, clip: float) -> None:
    x = rows(bits)
    codes, scales = quantize_tokens(x, bits, clip)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32
    for row, found, scale in zip(x.tolist(), codes.tolist(), scales.tolist(), strict=True):
        assert (found, scale) == slow_token(row, bits, clip)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("clip", [0.9, 0.95, 1.0])
def test_codes_of_the_cache_are_those_of_single_numbers(bits: int, clip: float) -> None:
    x = rows(bits + 1) + 0.3
    made = quantize_cache(x, bits, clip)
    assert torch.equal(made.scales, made.scales.half().float())
    for row, codes, scale, zero in zip(
        x.tolist(), made.codes.tolist(), made.scales.tolist(), made.zeros.tolist(), strict=True
    ):
        assert (codes, scale, zero) == slow_head(row, bits, clip)


def test_ties_go_to_the_even_code() -> None:
    x = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    codes, scales = quantize_tokens(x, 4, 1.0)
    assert (codes.tolist(), scales.tolist()) == ([[7, 0, 2, 2, 0, -2, -2]], [1.0])


def test_what_is_clipped_has_the_last_code_and_minus_one_more() -> None:
    x = torch.tensor([[-10.0, 10.0, 7.0, 0.0]])
    assert quantize_tokens(x, 4, 0.7)[0].tolist() == [[-8, 7, 7, 0]]
    assert quantize_tokens(x, 8, 0.9)[0].tolist() == [[-128, 127, 99, 0]]


@pytest.mark.parametrize("bits", [4, 8])
def test_f92_rows_at_the_edges(bits: int) -> None:
    """All zero; one value that flattens the rest; all equal; as small as float32 goes."""
    x = torch.full((4, 16), 1e-3)
    x[0] = 0
    x[1, 3] = 6e4
    x[2] = -0.25
    x[3] = 1e-45
    codes, scales = quantize_tokens(x, bits, 0.9)
    most = 2 ** (bits - 1) - 1
    assert torch.isfinite(scales).all() and (scales > 0).all()
    assert codes[0].tolist() == [0] * 16 and float(scales[0]) == 1.0
    assert codes[1].tolist() == [0] * 3 + [most] + [0] * 12
    assert codes[2].tolist() == [-most - 1] * 16
    assert torch.isfinite(dequantize_tokens(codes, scales)).all()


@pytest.mark.parametrize("value", [0.0, 1e-7, -1e-7, 0.37, -250.0, 6e4])
@pytest.mark.parametrize("clip", [0.95, 1.0])
def test_f92_a_constant_head_comes_back_within_half_a_step(value: float, clip: float) -> None:
    x = torch.full((2, 64), value)
    made = quantize_cache(x, 4, clip)
    step = float(made.scales.max())
    error = float((dequantize_cache(made) - x).abs().max())
    assert error <= step / 2 + (1 - clip) * abs(value) + 1e-6 * abs(value)
    assert step >= 2.0**-14


def test_zeros_stay_zeros_in_the_cache() -> None:
    x = rows(5)
    x[:, ::3] = 0
    assert torch.equal(fake_cache(x, 4, 0.95)[:, ::3], torch.zeros(7, 8))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_zero_has_the_bits_of_zero(bits: int) -> None:
    x = rows(7).abs()
    x[0] = 0
    x[1, :5] = -0.0
    made = quantize_cache(x, bits, 0.95)
    assert not made.zeros.view(torch.int32).any()


def test_sixteen_bits_are_the_values_themselves_and_the_dtype_is_kept() -> None:
    x = rows(6).to(torch.bfloat16)
    assert fake_tokens(x, 16, 0.9) is x and fake_cache(x, 16, 0.9) is x
    assert fake_tokens(x, 8, 1.0).dtype == torch.bfloat16 == fake_cache(x, 4, 1.0).dtype


# ---- clip ratios -----------------------------------------------------------------------------------------


def test_every_site_and_the_cache_are_tried_at_both_widths() -> None:
    tried = trials({"q": "attn_in", "k": "attn_in", "down": "mlp_mid"})
    assert {t.what for t in tried} == {"attn_in", "mlp_mid", "k", "v"} and {t.bits for t in tried} == {4, 8}
    assert len(tried) == len(set(tried))


def test_the_cheapest_ratio_wins_the_largest_of_equals_and_a_default_where_none_was_tried() -> None:
    costs = {("o", 4, 0.8): 2.0, ("o", 4, 0.9): 1.0, ("o", 4, 1.0): 1.0, ("k", 8, 0.95): 0.5}
    found = Costs({Trial(*key): cost for key, cost in costs.items()}).clips({"o_proj": "o"})
    assert found.acts == {"o": {4: 1.0, 8: 1.0}}
    assert (found.keys, found.values) == ({4: 0.95, 8: 0.95}, {4: 0.95, 8: 1.0})


def test_chance_does_not_decide_between_ratios() -> None:
    """A valley around 0.8 with one lucky trial far from it; few trials speak for themselves."""
    costs = {r: 0.05 + (r - 0.8) ** 2 for r in RATIOS[4]}
    assert cheapest(costs) == 0.8
    assert abs(cheapest({**costs, 0.95: 0.048}) - 0.8) <= 0.051
    assert cheapest({0.9: 0.0, 0.95: 0.0, 1.0: 0.0}) == 1.0
    assert cheapest({0.95: 1.0, 1.0: 2.0}) == 0.95
