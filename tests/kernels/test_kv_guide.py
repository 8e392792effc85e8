"""Guides of keys: an offset that the softmax does not see, and codes that are moved along a direction."""

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.convert.quantize.activations import (  # noqa: E402
    MOVES,
    CacheCodes,
    dequantize_cache,
    quantize_cache,
    quantize_keys,
)
from w4pack.kernels.quarot import kv, kv_layout, kv_reference  # noqa: E402
from w4pack.kernels.quarot.transform import Transform  # noqa: E402

SIZE, HEADS = 64, 2


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _guide(size: int = SIZE, strength: float = 6.0) -> torch.Tensor:
    offset, direction = _random(2, HEADS, size, seed=7)
    return torch.stack([3 * offset, direction * strength / direction.norm(dim=-1, keepdim=True)])


def _cost(codes: list[int], steps: list[float], w: list[float]) -> float:
    """What a row's error costs; ``steps``: z + x / s."""
    errors = [code - x for code, x in zip(codes, steps, strict=True)]
    return sum(e * e for e in errors) + sum(a * b for a, b in zip(errors, w, strict=True)) ** 2


def _moved(codes: list[int], steps: list[float], w: list[float], top: int) -> list[int]:
    """The definition once more, in float64, a code at a time: the best of all single moves, twice."""
    made = list(codes)
    for _ in range(MOVES):
        options = [made]
        for i, x in enumerate(steps):
            to = made[i] + (-1 if made[i] > x else 1)
            if 0 <= to <= top:
                options.append([*made[:i], to, *made[i + 1 :]])
        made = min(options, key=lambda tried: _cost(tried, steps, w))
    return made


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("clip", [0.7, 1.0])
def test_the_codes_are_those_of_the_best_single_moves(bits: int, clip: float) -> None:
    guide = _guide()
    x = _random(25, HEADS, SIZE) * 4
    plain = quantize_cache(x - guide[0], bits, clip)
    found = quantize_keys(x, bits, clip, guide)
    assert torch.equal(found.scales, plain.scales) and torch.equal(found.zeros, plain.zeros)
    assert (found.codes != plain.codes).any()
    ties = 0
    for t, h in itertools.product(range(25), range(HEADS)):
        s, z, w = float(plain.scales[t, h]), int(plain.zeros[t, h]), guide[1, h].tolist()
        steps = [z + value / s for value in (x[t, h] - guide[0, h]).tolist()]
        wanted, got = _moved(plain.codes[t, h].tolist(), steps, w, 2**bits - 1), found.codes[t, h].tolist()
        ties += got != wanted
        # float32 knows an error to 2^-17 at 8 bits: that may decide between moves of one cost, and no others
        assert abs(_cost(got, steps, w) - _cost(wanted, steps, w)) < 1e-3, (t, h)
    assert ties <= 1


def test_the_error_along_the_direction_goes() -> None:
    guide, x = _guide(), _random(500, HEADS, SIZE) * 4
    unit = guide[1] / guide[1].norm(dim=-1, keepdim=True)
    errors = [
        ((dequantize_cache(made) - (x - guide[0])) * unit).sum(-1).pow(2).mean()
        for made in (quantize_cache(x - guide[0], 4, 1.0), quantize_keys(x, 4, 1.0, guide))
    ]
    assert errors[1] < 0.05 * errors[0]


def test_without_direction_no_code_moves_and_without_guide_nothing_changes() -> None:
    x, guide = _random(50, HEADS, SIZE), _guide()
    x[0, 0] = 0
    guide[1] = 0
    for found, wanted in (
        (quantize_keys(x, 4, 0.9, guide), quantize_cache(x - guide[0], 4, 0.9)),
        (quantize_keys(x, 4, 0.9, None), quantize_cache(x, 4, 0.9)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_equal_gains_move_the_first_channel_and_ends_stay() -> None:
    # Two levels that are met exactly; channel 2 and 3 lie between, at equal distance.
    row = torch.tensor([[-7.0, 8.0, 0.25, 0.25, 0.0, 0.0]])
    guide = torch.stack([torch.zeros(1, 6), torch.ones(1, 6)])
    made = quantize_keys(row[None], 4, 1.0, guide)
    assert made.scales.item() == 1.0 and made.zeros.item() == 7.0
    # e = (0, 0, -1/4, -1/4, 0, 0), along = -1/2: one move up costs 1/2 and gains 1/4 - 1/4 = 0
    assert made.codes[0, 0].tolist() == [0, 15, 7, 7, 7, 7]
    guide[1] *= 4
    # along = -2: a move up leaves e = 3/4 and along = 2: nothing is gained; with 3 it is
    assert quantize_keys(row[None], 4, 1.0, guide).codes[0, 0].tolist() == [0, 15, 7, 7, 7, 7]
    row[0, 4] = 0.25
    # along = -3, 1 after a move: 9 + 3/16 - 1 - 11/16 - the first channel; the second move gains nothing
    assert quantize_keys(row[None], 4, 1.0, guide).codes[0, 0].tolist() == [0, 15, 8, 7, 7, 7]


class Pages:
    """One sequence's pages, written and read by the operators."""

    def __init__(self, size: int, bits: int, tokens: int) -> None:
        self.bits, self.key, self.tokens = bits, Transform.planned(size).key, tokens
        each = kv_layout.pages_of(tokens)
        self.codes, self.params = kv_layout.empty(each, HEADS, size, bits, "cpu")
        self.table = torch.arange(each, dtype=torch.int32)[None]

    def append(self, k: torch.Tensor, v: torch.Tensor, guide: torch.Tensor | None) -> None:
        start = torch.zeros(1, dtype=torch.int32)
        args = (k, v, self.codes, self.params, self.table, start, self.key, 1.0, 1.0, self.bits)
        kv.kv_append(*args, guide)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([self.tokens], dtype=torch.int32)
        scale = q.shape[-1] ** -0.5
        found: torch.Tensor = kv.kv_attention(
            q, self.codes, self.params, self.table, ends, None, scale, 0, 0.0, self.key, self.bits
        )
        return found


@pytest.mark.parametrize("size", kv_layout.HEAD_DIMS)
def test_pages_hold_the_codes_of_the_definition(size: int) -> None:
    pages, guide = Pages(size, 4, 70), _guide(size)
    k, v = _random(1, HEADS, 70, size), _random(1, HEADS, 70, size, seed=1)
    pages.append(k, v, guide)
    wanted = quantize_keys(kv_reference.turn(k, pages.key).transpose(1, 2), 4, 1.0, guide)
    found, values = kv_reference.gather(pages.codes, pages.params, pages.table[0], 70, 4)
    assert torch.equal(found, dequantize_cache(wanted)[0].transpose(0, 1))
    assert torch.equal(values, dequantize_cache(quantize_cache(v, 4, 1.0))[0])


def test_attention_does_not_see_the_offset() -> None:
    # At 8 bits a large offset on all keys is most of their range: without the guide they lose all detail.
    k, v, q = (_random(1, heads, 70, SIZE, seed=heads) for heads in (HEADS, HEADS, 4))
    shared = 200 * _random(HEADS, SIZE, seed=9)
    rotated = kv_reference.turn(shared, Transform.planned(SIZE).key)
    guide = torch.stack([rotated, torch.zeros_like(rotated)])
    exact, plain, guided = Pages(SIZE, 8, 70), Pages(SIZE, 8, 70), Pages(SIZE, 8, 70)
    exact.append(k, v, None)
    plain.append(k + shared[None, :, None], v, None)
    guided.append(k + shared[None, :, None], v, guide)
    wanted = exact.attend(q)
    assert (guided.attend(q) - wanted).norm() < 0.01 * wanted.norm()
    assert (plain.attend(q) - wanted).norm() > 0.3 * wanted.norm()


@pytest.mark.parametrize(
    "guide",
    [
        torch.zeros(2, HEADS, SIZE, dtype=torch.float16),
        torch.zeros(2, HEADS + 1, SIZE),
        torch.zeros(2, SIZE, HEADS).transpose(1, 2),
        torch.zeros(1, HEADS, SIZE),
    ],
)
def test_a_guide_of_another_form_is_refused(guide: torch.Tensor) -> None:
    k = _random(1, HEADS, 3, SIZE)
    with pytest.raises(UsageError, match="guide"):
        Pages(SIZE, 4, 3).append(k, k, guide)


def test_a_lost_key_shows_the_size_of_a_step() -> None:
    """Moves never take a value further than one step from where it was: |e| stays below 1."""
    guide, x = _guide(strength=50.0), _random(200, HEADS, SIZE)
    made = quantize_keys(x, 4, 1.0, guide)
    steps = (dequantize_cache(CacheCodes(*made)) - (x - guide[0])) / made.scales[..., None]
    assert float(steps.abs().max()) < 1 + 1e-3 and math.isfinite(float(steps.sum()))
