"""The choice of kernels: which file a card runs, and a legal tile for every shape, on the CPU."""

import itertools
import json

import pytest

from w4pack.convert.errors import UsageError
from w4pack.kernels import launch, tiles
from w4pack.kernels.quarot import int_tiles

SHAPES = (
    (57344, 8192),
    (8192, 28672),
    (10240, 8192),
    (8192, 8192),
    (28672, 4096),
    (4096, 14336),
    (6144, 4096),
    (4096, 4096),
    (64, 64),
    (320, 192),
    (192, 2752),
    (128256, 4096),
)
MS = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1024, 4096, 70000)
MULTIPROCESSORS = {"sm_80": 108, "sm_90a": 132, "sm_100": 148, "sm_120": 170}
KIB = 1024
# Bytes that a block may have on cards of an architecture (8.0 and 8.7; 8.6 and 8.9); a multiprocessor has
# 1 KiB more.
ROOMS = {
    "sm_80": (163 * KIB, 99 * KIB),
    "sm_90a": (227 * KIB,),
    "sm_100": (227 * KIB,),
    "sm_120": (99 * KIB,),
}


@pytest.mark.parametrize(
    ("capability", "files"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((11, 0), "compute_80"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
        ((13, 0), "compute_80"),
    ],
)
def test_every_card_has_its_files(capability: tuple[int, int], files: str) -> None:
    assert launch.supported_arch(capability, "cuda:0") == files


def test_an_old_card_is_refused_with_a_way_on() -> None:
    with pytest.raises(UsageError) as caught:
        launch.supported_arch((7, 5), "cuda:1")
    text = str(caught.value)
    assert "7.5" in text and "8.0" in text and "cuda:1" in text and "--device cpu" in text


@pytest.mark.parametrize("arch", tiles.ARCHES)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_product_finds_a_tile_that_fits(arch: str, bits: int) -> None:
    for (n, k), m, room in itertools.product(SHAPES, MS, ROOMS[arch]):
        found = tiles.choose(arch, MULTIPROCESSORS[arch], room, m, n, k, bits)
        tile = found.tile
        for zeros in (False, True):
            # the driver keeps 1 KiB a block
            assert (tile.shared_bytes(bits, zeros) + KIB) * tile.blocks <= room + KIB, (n, k, m)
        units = tiles.column_tiles(tile, m, n) * (k // tile.unit)
        assert k % tile.unit == 0, (n, k, m)
        assert 1 <= found.grid <= MULTIPROCESSORS[arch] * tile.blocks, (n, k, m)
        assert found.grid <= units, "a block without work would never hand anything over"


@pytest.mark.parametrize("arch", tiles.ARCHES)
@pytest.mark.parametrize("bits", [4, 8])
def test_tiles_fit_the_card(arch: str, bits: int) -> None:
    for tile in tiles.all_tiles(arch, bits):
        assert tile.threads <= 1024 and tile.threads * tile.blocks <= 2048 and tile.threads % 32 == 0
        assert tile.fits_workspace, tile
        assert tile.slots <= 2 * tile.words
        assert tile.engine == "mma" or arch == "sm_90a"


def test_tuned_choices_for_the_benchmarks_first_point() -> None:
    """The H200's table at M = 1: a change of the rule that moves these should be measured first."""
    grids = {shape: tiles.choose("sm_90a", 132, *ROOMS["sm_90a"], 1, *shape, 4).grid for shape in SHAPES[:8]}
    assert grids == {
        (57344, 8192): 224,
        (8192, 28672): 128,
        (10240, 8192): 132,
        (8192, 8192): 128,
        (28672, 4096): 224,
        (4096, 14336): 128,
        (6144, 4096): 96,
        (4096, 4096): 128,
    }


def test_tables_say_where_they_were_measured() -> None:
    of_integers = [json.loads(path.read_text()) for path in int_tiles.HERE.glob("int_tiles_*.json")]
    assert {table["arch"] for table in of_integers} == set(tiles.ARCHES)
    for table in (*map(tiles.table, tiles.ARCHES), *of_integers):
        measured = table["measured"]
        if measured is None:
            assert "no such card" in str(table["why"])
        else:
            assert {"card", "driver", "date", "commit"} <= set(measured)  # type: ignore[call-overload]


@pytest.mark.parametrize(("size", "shift"), [(-1, 31), (32, 5), (64, 6), (128, 7)])
def test_group_shift(size: int, shift: int) -> None:
    assert tiles.group_shift(size) == shift
    assert {row >> shift for row in range(256)} == ({0} if size == -1 else set(range(256 // size)))
