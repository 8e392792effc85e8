"""What ``w4pack bench`` measures: floors, shapes, and that a wrong product is found. Times are not tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from w4pack.convert.errors import UsageError, W4PackError  # noqa: E402
from w4pack.kernels import ops  # noqa: E402
from w4pack.kernels.bench import products, rates, shapes, timing  # noqa: E402
from w4pack.kernels.bench.rates import Rates  # noqa: E402
from w4pack.kernels.bench.shapes import Shape  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402

CPU = torch.device("cpu")
H200 = Rates(4.6e12, "a sweep", 775e12, "a product")
SPECS = {
    "g128": LinearSpec(256, 192),
    "one group": LinearSpec(192, 64, group_size=-1),
    "short last group": LinearSpec(192, 128),
    "zero points": LinearSpec(128, 256, group_size=32, sym=False),
    "8 bit": LinearSpec(128, 128, bits=8, group_size=64),
    "8 bit, zero points": LinearSpec(128, 128, bits=8, group_size=64, sym=False),
    "act-order, padded": LinearSpec(200, 128, act_order=True, stored_in=256, stored_out=128),
}


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROTATED", 1 << 18)


# ---- floors -----------------------------------------------------------------------------------------------


def test_the_floor_is_the_larger_of_bytes_and_operations() -> None:
    # 57344 x 8192: 242.2 MB at M = 1, 155.2 us of operations at M = 128: docs/gpu.md has the same floors
    weight = 57344 * 8192 // 2 + 2 * 57344 * 64
    seconds, bound = H200.floor(weight + 2 * (8192 + 57344), 2 * 57344 * 8192)
    assert (round(seconds * 1e6, 1), bound) == (52.7, "bytes")
    seconds, bound = H200.floor(weight + 2 * 128 * (8192 + 57344), 2 * 128 * 57344 * 8192)
    assert (round(seconds * 1e6, 1), bound) == (155.2, "operations")


def test_a_floor_counts_every_tensor_once() -> None:
    """Weight, scales, zero points, activations, output: each once."""
    spec = LinearSpec(256, 192, group_size=32, sym=False)
    weights = products.Weights(Shape(spec, "F16"), torch.float16, CPU)
    packed = 256 * 192 // 2 + 2 * 8 * 192 + 8 * 192 // 2
    assert weights.bytes == packed
    found = products.point(weights, 3, Rates(1e9, "", 1e30, ""), 1)
    assert (found.floor, found.bound) == ((packed + 2 * 3 * (256 + 192)) / 1e9, "bytes")
    found = products.point(weights, 3, Rates(1e30, "", 1e9, ""), 1)
    assert (found.floor, found.bound) == (2 * 3 * 256 * 192 / 1e9, "operations")


def test_share_and_speed_up_are_ratios_of_the_times() -> None:
    point = products.Point(1, 2.0, "bytes", 4.0, 12.0, 0.0, 0.0)
    assert (point.share, point.speed_up) == (0.5, 3.0)


def test_rates_are_measured_and_say_by_what() -> None:
    found = rates.measure(CPU, torch.float16, read_bytes=1 << 20, sides=((8, 64, 64), (16, 64, 64)))
    assert found.read > 0 and found.operations > 0
    assert "over 0.00 GiB" in found.read_by and found.operations_by.endswith("x64x64 float16")


# ---- products ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("dtype", "tag"), [(torch.float16, "F16"), (torch.bfloat16, "BF16")], ids=str)
def test_every_kind_of_layer_is_right_and_checked(name: str, dtype: torch.dtype, tag: str) -> None:
    weights = products.Weights(Shape(SPECS[name], tag), dtype, CPU)
    for m in (1, 5):
        found = products.point(weights, m, H200, 1)
        unit = products.UNITS[dtype]
        assert unit / 10 < found.error < unit
        assert unit / 10 < found.library_error < unit * 2


def _unwritten(x: Any, w: Any, s: Any, z: Any, b: Any, bits: int, group: int, out: Any) -> None:
    y = ops.gemm(x, w, s, z, b, bits, group)
    out[:, :-1] = y[:, :-1]


def _one_column_wrong(x: Any, w: Any, s: Any, z: Any, b: Any, bits: int, group: int, out: Any) -> None:
    out.copy_(ops.gemm(x, w, s, z, b, bits, group))
    out[:, 5] *= 1.5


def _nothing(*arguments: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("broken", "found"),
    [(_unwritten, "elements not written"), (_nothing, "not written"), (_one_column_wrong, "e-")],
)
def test_a_wrong_product_is_an_error(
    broken: Callable[..., None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = products.Weights(Shape(LinearSpec(256, 128), "F16"), torch.float16, CPU)
    monkeypatch.setattr(ops, "gemm_out", broken)
    with pytest.raises(W4PackError) as caught:
        products.point(weights, 4, H200, 1)
    error = caught.value
    assert (error.code, error.exit_code, error.where) == ("wrong-result", 1, "w4pack, 128x256, M 4")
    assert found in str(error.found)


def test_an_element_that_was_not_written_is_found_beside_the_sampled_columns() -> None:
    found = torch.ones(3, 640, dtype=torch.float16)
    columns, exact = torch.arange(64), torch.ones(3, 64, dtype=torch.float64)
    assert products.checked(found, columns, exact, "here") == 0
    found[2, 639] = float("nan")
    with pytest.raises(W4PackError) as caught:
        products.checked(found, columns, exact, "here")
    assert (caught.value.where, caught.value.found) == ("here", "1 elements not written")


def test_the_librarys_product_is_checked_too() -> None:
    weights = products.Weights(Shape(LinearSpec(256, 128), "F16"), torch.float16, CPU)
    weights.dense = [dense * 1.01 for dense in weights.dense]
    with pytest.raises(W4PackError, match="wrong") as caught:
        products.point(weights, 4, H200, 1)
    assert str(caught.value.where).startswith("torch.mm")


# ---- shapes -----------------------------------------------------------------------------------------------


def test_a_shape_is_outputs_times_inputs() -> None:
    found = shapes.of_text("28672x4096", 4, 128, "F16")
    assert (found.spec.n, found.spec.k, found.spec.bits, found.spec.group_size) == (28672, 4096, 4, 128)
    assert (found.scale_dtype, found.layers, found.experts) == ("F16", (), False)


@pytest.mark.parametrize(
    "text",
    ["", "x", "4096", "4096x", "0x64", "64x0", "-64x64", "64*64", "6.4x64", "64x64x64", "1e3x64", " 64x64"],
)
def test_what_is_no_shape_is_told(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        shapes.of_text(text, 4, 128, "F16")
    assert caught.value.found == text


def test_a_shape_off_the_tile_names_the_stored_one() -> None:
    with pytest.raises(UsageError) as caught:
        shapes.of_text("11000x4097", 4, 128, "F16")
    assert str(caught.value.hint).endswith("--shape 11008x4160")


# ---- timing -----------------------------------------------------------------------------------------------


def test_a_race_takes_turns_over_every_set() -> None:
    calls: list[tuple[str, int]] = []
    runs = [timing.Candidate(n, lambda i, n=n: calls.append((n, i)), 3, "cpu") for n in ("a", "b")]
    times = timing.race(runs, 8)
    turns = [calls[at : at + 6] for at in range(0, len(calls), 6)]
    first = [(name, i) for name in ("a", "b") for i in range(3)]
    assert set(times) == {"a", "b"} and len(turns) == 8
    assert all(turn in (first, first[3:] + first[:3]) for turn in turns)  # each candidate once, as a whole
    assert len({turn[0] for turn in turns}) == 2  # and not always behind the same one


def test_a_candidate_that_cannot_run_is_told_or_ends_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(self: Any, wanted_us: float) -> None:
        raise RuntimeError(self.name)

    bad = timing.Candidate("bad", lambda i: None, 1, "cpu")
    good = timing.Candidate("good", lambda i: None, 1, "cpu")
    monkeypatch.setattr(bad, "capture", lambda wanted_us: no(bad, wanted_us))
    with pytest.raises(RuntimeError, match="bad"):
        timing.race([bad, good], 1)
    told: list[str] = []
    assert set(timing.race([bad, good], 1, on_error=lambda c, e: told.append(c.name))) == {"good"}
    assert told == ["bad"]


@pytest.mark.parametrize(
    ("size", "copies"), [(1 << 40, 1), (1 << 18, 1), (1 << 16, 4), (100_000, 3), (3, 1024)]
)
def test_copies_cover_the_rotation(size: int, copies: int) -> None:
    assert timing.rotation(size) == copies
