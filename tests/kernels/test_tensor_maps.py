"""Boxes of weights and scales: the bytes of a stage as kernels read it, within what the copy engine takes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from w4pack.kernels import launch, tensor_maps, tiles
from w4pack.kernels.quarot import int_tiles, orders_int

MOST_OF_A_BOX, ALIGNED = 256, 16  # values along an axis; bytes of a line, of a stride
Made = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], Any]  # what ``_make`` is given


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> launch.Device:
    """A card whose maps are what they would be made of."""
    monkeypatch.setattr(tensor_maps, "_make", lambda *given: given)
    return launch.Device(0, SimpleNamespace(set_current=lambda: None), "sm_90a", 132, 227 << 10)


def _strides(made: Made) -> list[int]:
    return [step * made[4].bytes for step in made[2]]


def _box(data: np.ndarray, made: Made, at: tuple[int, ...]) -> np.ndarray:
    """The bytes that a box brings from value ``at`` on: zeros outside of the matrix."""
    _, shape, _, box, kind = made
    places = np.indices(box).reshape(len(box), -1).T + at
    inside = (places < shape).all(1)
    found = np.zeros((len(places), kind.bytes), np.uint8)
    found[inside] = data[(places[inside] @ _strides(made))[:, None] + np.arange(kind.bytes)]
    return found


def _producers() -> list[tuple[tiles.Tile, int, int]]:
    """Every tile with a producer warp, the rows of K in its unit and the width of the weight's codes."""
    found = [(t, t.unit, bits) for bits in (4, 8) for t in tiles.all_tiles("sm_90a", bits) if t.producer]
    for order in int_tiles.KINDS:
        for tile in (t for g in (False, True) for t in int_tiles.all_tiles("sm_90a", order, g)):
            if tile.producer:
                found.append((tile, int_tiles.unit_k(tile, order), 8 if order == orders_int.Q32 else 4))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("n", [64, 320, 28672])
def test_boxes_are_what_the_copy_engine_takes_and_a_stage_expects(n: int) -> None:
    assert len(_producers()) > 10
    for tile, unit, bits in _producers():
        chunks = tile.columns // 64
        weight = tensor_maps.weights(0, 4096, n, bits, unit // 16, tile.columns)
        scales = tensor_maps.scale_rows(0, 4096 // 64, n, max(1, unit // 64), tile.columns)
        for made in (weight, scales):
            assert max(made[3]) <= MOST_OF_A_BOX and made[3][-1] == made[1][-1]
            assert all(stride % ALIGNED == 0 for stride in _strides(made)[:-1])
            assert _strides(made)[-1] == made[4].bytes and made[3][-1] * made[4].bytes % ALIGNED == 0
        assert np.prod(weight[3]) * weight[4].bytes == chunks * unit // 16 * 512 * bits // 4
        assert np.prod(scales[3]) * scales[4].bytes == unit // 64 * chunks * 128


@pytest.mark.parametrize("bits", [4, 8])
def test_a_box_of_the_weight_holds_the_units_tiles_and_zeros_past_its_ends(bits: int) -> None:
    k, n, rows, chunks, run = 192, 320, 8, 4, 128 * bits  # a unit of 128 and a tile of 256 pass both ends
    data = np.random.default_rng(bits).integers(1, 256, k * n * bits // 8, np.uint8)
    made = tensor_maps.weights(0, k, n, bits, rows, 64 * chunks)
    tiles_of = data.reshape(k // 16, n // 64, run)
    for unit, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        found = _box(data, made, (unit * rows, column * chunks, 0)).reshape(rows, chunks, run)
        for row in range(rows):
            for chunk in range(chunks):
                at = unit * rows + row, column * chunks + chunk
                there = at[0] < k // 16 and at[1] < n // 64
                assert np.array_equal(found[row, chunk], tiles_of[at] if there else np.zeros(run))


def test_a_box_of_scales_holds_the_units_groups() -> None:
    groups, n, of_unit, chunks = 3, 192, 2, 2
    data = np.random.default_rng(0).integers(1, 256, groups * n * 2, np.uint8)
    made = tensor_maps.scale_rows(0, groups, n, of_unit, 64 * chunks)
    found = _box(data, made, (2, 0, 0)).reshape(of_unit, chunks * 128)
    assert np.array_equal(found[0], data.reshape(groups, n * 2)[2, : chunks * 128])
    assert not found[1].any()  # past the last group


def test_a_map_is_made_once_for_each_address_shape_and_box(card: launch.Device) -> None:
    def packed(weight: int, unit: int) -> tuple[Any, Any]:
        return tensor_maps.packed(card, (weight, 512), 128, 128, 4, 1, (unit, 1), 128)

    first = packed(4096, 128)
    assert packed(4096, 128) is first
    assert first == (
        tensor_maps.weights(4096, 128, 128, 4, 8, 128),
        tensor_maps.scale_rows(512, 1, 128, 1, 128),
    )
    assert packed(8192, 128) != first != packed(4096, 64)
    tensor_maps.boxes(card, 4096, 128, 128, 128, 128)
    assert len(card.weight_maps) == 3 and len(card.maps) == 1
