"""Laws of the layouts: what is written is what the slow makers write, and it comes back as it was.

Linears are drawn over shapes of one to three tiles and off by one unit where a layout allows it, bits, group
sizes, symmetry, orders and scale dtypes. Expected bytes come from `builders`, expected numbers from `oracle`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

import builders
import oracle
from w4pack.convert import formats
from w4pack.convert.core.bitpack import Words, pack_rows, permute_rows, unpack_rows
from w4pack.convert.core.dequant import dequantize, from_f64
from w4pack.convert.core.order import sorted_rows
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.errors import Refused, SourceError
from w4pack.convert.formats import marlin
from w4pack.kernels import layout as tile

Made = tuple[oracle.Linear, QuantScheme, GroupParams]
Maker = Callable[[str, oracle.Linear], builders.Tensors]


@st.composite
def linears(
    draw: st.DrawFn,
    *,
    unit: tuple[int, int] = (8, 8),
    bits: tuple[int, ...] = (4, 8),
    groups: tuple[int, ...] = (-1, 16, 32, 64, 128),
    sym: bool | None = None,
    orders: bool = False,
    tags: tuple[str, ...] = ("F16", "BF16", "F32"),
    short: bool = False,
) -> Made:
    """Draw a linear with sizes in multiples of ``unit``; ``short`` allows a short last group."""
    width = draw(st.sampled_from(bits))
    size = draw(st.sampled_from(groups))
    k = unit[0] * draw(st.integers(1, -(-200 // unit[0])))
    n = unit[1] * draw(st.integers(1, -(-200 // unit[1])))
    if not short and size > 0:
        k = np.lcm(size, unit[0]) * draw(st.integers(1, max(1, 256 // size)))
    symmetric = draw(st.booleans()) if sym is None else sym
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    ordered = orders and size > 0 and k > size and draw(st.booleans())
    order = rng.permutation(k) if ordered else None
    tag = draw(st.sampled_from(tags))
    made = builders.layer(rng, int(k), n, bits=width, group=size, sym=symmetric, order=order, tag=tag)
    if not symmetric and draw(st.booleans()):
        made.zeros[:] = rng.integers(0, 1 << width, made.zeros.shape)  # with 0, which the maker avoids
        made.zeros[0, 0] = 3
    if tag == "F16" and draw(st.booleans()):
        made.scales[...] = made.scales * rng.choice([-1.0, 1.0], made.scales.shape).astype(np.float16)
    scheme = QuantScheme(width, size, symmetric, ordered, made.k, n, tag)
    group = made.gi if ordered else None
    return made, scheme, GroupParams(made.scales, None if symmetric else made.zeros, group)


def stored(made: builders.Tensors) -> dict[str, NDArray[Any]]:
    """Return the arrays of the one layer ``P``."""
    return {key.removeprefix("P."): value.array() for key, value in made.items()}


def check(name: str, made: Made, maker: Maker, reading: str = "plain", **encode: Any) -> None:
    """Compare bytes with the maker's, headers with the specs, and read everything back."""
    linear, scheme, params = made
    layout = formats.get(name)
    want = stored(maker("P", linear))
    codes, words = layout.grid(scheme.bits).suffix, pack_rows(linear.codes, scheme.bits)
    got = {codes: layout.pack(words, scheme.bits), **layout.encode_params(params, scheme, **encode)}
    assert set(got) == set(want) == set(layout.specs(scheme))
    for suffix, (tag, shape) in layout.specs(scheme).items():
        assert got[suffix].dtype == np.dtype(oracle.CARRIER[tag])
        assert got[suffix].shape == shape
        assert got[suffix].tobytes() == want[suffix].tobytes(), suffix
    assert np.array_equal(layout.unpack(want[codes], scheme.bits), words)
    same_params(layout.decode_params(want, scheme, reading), params)
    match = layout.match(
        {k: (scheme.scale_dtype if v.dtype.kind == "f" else oracle_tag(v), v.shape) for k, v in want.items()},
        want,
    )
    assert (match.bits, match.in_features, match.out_features) == (
        scheme.bits,
        scheme.in_features,
        scheme.out_features,
    )
    assert match.groups in (0, scheme.groups)


def oracle_tag(values: NDArray[Any]) -> str:
    """Return the tag of an integer tensor."""
    return {"<i4": "I32", "<i2": "I16", "<i8": "I64", "<u2": "BF16"}[values.dtype.str]


def same_params(got: GroupParams, want: GroupParams) -> None:
    """Compare parameters bit for bit."""
    assert np.array_equal(oracle.bits_of(got.scales), oracle.bits_of(want.scales))
    assert (got.zeros is None) == (want.zeros is None)
    assert got.zeros is None or np.array_equal(got.zeros, want.zeros)
    assert (got.group is None) == (want.group is None)
    assert got.group is None or np.array_equal(got.group, want.group)


@given(linears(orders=True, short=True))
def test_gptq_v1(made: Made) -> None:
    check("gptq", made, builders.gptq, "v1", zero_kind="v1")


@given(linears(orders=True, short=True))
def test_gptq_v2(made: Made) -> None:
    check("gptq", made, builders.gptq_v2, "v2", zero_kind="v2")


@given(linears(orders=True))
def test_gptq_is_written_as_v1_when_symmetric_and_v2_when_not(made: Made) -> None:
    check("gptq", made, builders.gptq if made[1].sym else builders.gptq_v2, "v1" if made[1].sym else "v2")


@given(linears(bits=(4,), unit=(1, 8), groups=(16, 32, 64, 128)))
def test_awq_gemm(made: Made) -> None:
    check("awq", made, builders.awq_gemm)


@given(linears(bits=(4,), unit=(32, 1), groups=(32, 64, 128)))
def test_awq_gemv(made: Made) -> None:
    check("awq-gemv", made, builders.awq_gemv)


@given(linears(bits=(4,), unit=(64, 4), groups=(32, 64, 128), tags=("F16",)))
def test_awq_gemv_fast(made: Made) -> None:
    check("awq-gemv-fast", made, builders.awq_gemv_fast)


@given(linears(bits=(4,), unit=(16, 64), groups=(-1, 64, 128), sym=True, tags=("F16",)))
def test_awq_marlin(made: Made) -> None:
    check("awq-marlin", made, builders.awq_marlin)


@given(linears(bits=(4,), unit=(128, 256), groups=(-1, 128), sym=True, tags=("F16",)))
def test_legacy_marlin(made: Made) -> None:
    check("marlin-legacy", made, builders.legacy)


@given(linears(unit=(1, 1), short=True, orders=True))
def test_compressed_tensors(made: Made) -> None:
    assume(not made[1].act_order or bool((np.diff(made[0].gi) < 0).any()))
    assume(made[1].in_features > 4)  # one word a row at 4 and at 8 bit: no header tells them apart
    check("compressed-tensors", made, builders.compressed)


def padding_codes(scheme: QuantScheme, params: GroupParams) -> NDArray[np.uint8]:
    """Return the codes (K' - K, N') of the padded rows: the zero points of the group each row falls into."""
    _, zeros = marlin.pad_params(params, scheme)
    rows = np.arange(scheme.in_features, marlin.stored_size(scheme.in_features))
    group = rows * 0 if scheme.group_size == ONE_GROUP else rows // scheme.group_size
    return zeros[group]


def pad_words(words: Words, scheme: QuantScheme, params: GroupParams, k0: int = 0, n0: int = 0) -> Words:
    """Pad a block of canonical words to whole units where it ends at K or N; rows are in packed order.

    The block starts at row ``k0`` (a multiple of 64) and column ``n0``. Without padding this is ``words``.
    """
    rows = min(words.shape[0] * scheme.codes_per_word, scheme.in_features - k0)
    cols = words.shape[1]
    high = marlin.stored_size(rows) if k0 + rows == scheme.in_features else rows
    wide = marlin.stored_size(cols) if n0 + cols == scheme.out_features else cols
    if (high, wide) == (rows, cols):
        return words
    midpoint_word = np.uint32(scheme.midpoint * (0x11111111 if scheme.bits == 4 else 0x01010101))
    out = np.full((high // scheme.codes_per_word, wide), midpoint_word, np.uint32)
    out[: words.shape[0], :cols] = words
    if high > rows:
        tail = rows // scheme.codes_per_word  # the word in which padding begins
        codes = unpack_rows(out[tail:], scheme.bits)
        codes[rows % scheme.codes_per_word :] = padding_codes(scheme, params)[:, n0 : n0 + wide]
        out[tail:] = pack_rows(codes, scheme.bits)
    return out


@given(linears(unit=(1, 1), groups=(-1, 16, 32, 64, 128), orders=True, short=True, tags=("F16", "BF16")))
def test_artifact_is_read_by_the_slow_decoder_and_comes_back(made: Made) -> None:
    linear, scheme, params = made
    words = pack_rows(linear.codes, scheme.bits)
    if params.group is not None:
        words = permute_rows(words, scheme.bits, sorted_rows(params.group))
    padded = pad_words(words, scheme, params)
    got = {"weight": marlin.pack(padded, scheme.bits), **marlin.encode_params(params, scheme)}
    for suffix, (tag, shape) in marlin.specs(scheme).items():
        assert (got[suffix].shape, got[suffix].dtype) == (shape, np.dtype(oracle.CARRIER[tag]))
    assert set(got) == set(marlin.specs(scheme))
    codes = unpack_rows(padded, scheme.bits)
    assert np.array_equal(got["weight"], tile.pack_codes(codes, scheme.bits))
    check_slow_reading(linear, scheme, got)
    assert np.array_equal(marlin.unpack(got["weight"], scheme.bits), padded)
    same_params(marlin.decode_params(got, scheme, "plain"), params)
    perm = marlin.row_order(got, scheme)
    assert (perm is None) == (params.group is None)
    assert np.array_equal(codes[: linear.k, : linear.n], linear.codes if perm is None else linear.codes[perm])


def check_slow_reading(linear: oracle.Linear, scheme: QuantScheme, got: dict[str, NDArray[Any]]) -> None:
    """Let the slow decoder, which also checks the padding, read the artifact."""
    tags = {suffix: tag for suffix, (tag, _) in formats.get("marlin").specs(scheme).items()}
    tensors = {f"P.{suffix}": builders.tensor(array, tags[suffix]) for suffix, array in got.items()}
    fields = {
        name: getattr(scheme, name)
        for name in ("bits", "group_size", "sym", "act_order", "in_features", "out_features")
    }
    read, whole = oracle.decode_artifact(tensors, "P", {**fields, "modules": {"P": fields}})
    for mine, theirs in zip(read.per_row(), linear.per_row(), strict=True):
        assert np.array_equal(mine, theirs)
    rows, columns = np.arange(whole.k) >= linear.k, np.arange(whole.n) >= linear.n
    padding = whole.weight64()[columns[:, None] | rows[None, :]]
    assert not padding.any()


@given(linears(unit=(8, 8), groups=(-1, 32, 128), short=True), st.data())
def test_blocks_of_the_artifact_are_padded_as_the_whole(made: Made, data: st.DataObject) -> None:
    linear, scheme, params = made
    words = pack_rows(linear.codes, scheme.bits)
    whole = pad_words(words, scheme, params)
    k0 = 64 * data.draw(st.integers(0, (linear.k - 1) // 64))
    n0 = 64 * data.draw(st.integers(0, (linear.n - 1) // 64))
    per = scheme.codes_per_word
    block = pad_words(words[k0 // per :, n0:], scheme, params, k0, n0)
    assert np.array_equal(block, whole[k0 // per :, n0:])


@given(linears(bits=(4,), unit=(64, 64), groups=(64,), sym=False, tags=("F16",)), st.data())
def test_blocks_convert_as_the_whole(made: Made, data: st.DataObject) -> None:
    linear = made[0]
    words = pack_rows(linear.codes, 4)
    for name in ("gptq", "awq", "awq-gemv", "awq-gemv-fast", "awq-marlin", "compressed-tensors", "marlin"):
        layout = formats.get(name)
        grid, whole = layout.grid(4), layout.pack(words, 4)
        assert whole.shape == grid.shape(linear.k, linear.n)
        k1 = 64 * data.draw(st.integers(1, linear.k // 64))
        n1 = 64 * data.draw(st.integers(1, linear.n // 64))
        k, n = k1 // grid.k_unit * grid.k_elems, n1 // grid.n_unit * grid.n_elems
        part = whole[:k, :n] if grid.k_axis == 0 else whole[:n, :k]
        assert np.array_equal(layout.pack(words[: k1 // 8, :n1], 4), part)
        assert np.array_equal(layout.unpack(part, 4), words[: k1 // 8, :n1])
        out = np.zeros((k1 // 8, n1), np.uint32)
        assert layout.unpack(part, 4, out) is out
        assert np.array_equal(out, words[: k1 // 8, :n1])
        room = np.zeros_like(part)
        assert layout.pack(words[: k1 // 8, :n1], 4, room) is room
        assert np.array_equal(room, part)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 1 << 32))
def test_eight_bit_awq_has_no_interleave_and_a_ragged_k_is_filled_with_zeros(
    k: int, n: int, seed: int
) -> None:
    codes = np.random.default_rng(seed).integers(0, 256, (k, 4 * n)).astype(np.uint8)
    awq = formats.get("awq")
    given_words = builders.pack_words(codes, 8, 1)
    words = awq.unpack(given_words, 8)
    assert np.array_equal(words.view(np.int32), builders.pack_words(codes, 8, 0))
    assert np.array_equal(awq.pack(words, 8)[:k], given_words)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 1 << 32))
def test_awq_goes_straight_to_the_tiles_of_the_definition(tile_rows: int, chunks: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 16, (16 * tile_rows, 64 * chunks)).astype(np.uint8)
    awq = formats.get("awq")
    block = awq.pack(pack_rows(codes, 4), 4)
    want = tile.pack_codes(codes, 4)
    assert np.array_equal(awq.to_tiles(block), want)
    wide = np.zeros((tile_rows, want.shape[1] + 128), np.int32)
    assert np.array_equal(awq.to_tiles(block, wide[:, 128:]), want)
    assert not wide[:, :128].any()
    part = awq.to_tiles(np.tile(block, (1, 2))[:, : block.shape[1]])
    assert np.array_equal(part, want)


def test_awq_goes_straight_to_tiles_in_bands_and_never_to_part_of_one() -> None:
    codes = np.random.default_rng(2).integers(0, 16, (160, 2048)).astype(np.uint8)
    awq = formats.get("awq")
    assert np.array_equal(awq.to_tiles(awq.pack(pack_rows(codes, 4), 4)), builders.marlin_words(codes, 4))
    for shape in ((8, 8), (16, 4)):
        with pytest.raises(ValueError, match="not whole tiles"):
            awq.to_tiles(np.zeros(shape, np.int32))


# ---- zero points ------------------------------------------------------------------------------------------

ZEROS_SCHEME = QuantScheme(4, 32, False, False, 32, 8, "F16")


def test_known_words_of_zero_points() -> None:
    gptq = formats.get("gptq")
    zeros = np.array([[0, 5, 8, 8, 8, 8, 8, 8]], np.uint8)
    v1, v2 = (gptq.write_zeros(zeros, ZEROS_SCHEME, kind).view(np.uint32)[0, 0] for kind in ("v1", "v2"))
    assert (hex(v1), hex(v2)) == ("0x7777773f", "0x88888850")
    for bits, want in ((4, "0x77777777"), (8, "0x7f7f7f7f")):
        scheme = replace(ZEROS_SCHEME, bits=bits, sym=True)
        assert {hex(w) for w in gptq.write_zeros(None, scheme, "v1").view(np.uint32).ravel()} == {want}
    row = np.arange(8, dtype=np.uint8)[None]
    awq = formats.get("awq").encode_params(GroupParams(np.ones((1, 8), np.float16), row, None), ZEROS_SCHEME)
    assert hex(awq["qzeros"].view(np.uint32)[0, 0]) == "0x75316420"


@given(st.lists(st.integers(0, 15), min_size=8, max_size=8))
@example([0] * 8)
@example([15, 0, 15, 0, 0, 0, 0, 15])
def test_v1_borrows_across_fields_as_the_subtraction_on_the_word_does(zeros: list[int]) -> None:
    word = (sum(z << 4 * i for i, z in enumerate(zeros)) - 0x11111111) % 2**32
    gptq = formats.get("gptq")
    written = gptq.write_zeros(np.array([zeros], np.uint8), ZEROS_SCHEME, "v1")
    assert int(written.view(np.uint32)[0, 0]) == word
    assert gptq.read_zeros(written, ZEROS_SCHEME, "v1").tolist() == [zeros]


@given(st.lists(st.integers(0, 15), min_size=8, max_size=8))
def test_reading_by_nibble_adds_one_to_every_field(fields: list[int]) -> None:
    word = np.array([[sum(f << 4 * i for i, f in enumerate(fields))]], np.uint32).view(np.int32)
    read = formats.get("gptq").read_zeros(word, ZEROS_SCHEME, "v1-nibble")
    assert (read.dtype, read.tolist()) == (np.uint8, [[f + 1 for f in fields]])
    back = formats.get("gptq").write_zeros(read, ZEROS_SCHEME, "v1-nibble")
    assert np.array_equal(back, word)


def test_a_zero_point_of_256_is_not_lost() -> None:
    scheme = replace(ZEROS_SCHEME, bits=8, out_features=4)
    word = np.array([[0x00FF7F01]], np.uint32).view(np.int32)
    read = formats.get("gptq").read_zeros(word, scheme, "v1-nibble")
    assert (read.dtype, read.tolist()) == (np.uint16, [[2, 128, 256, 1]])


FAST_SCHEME = QuantScheme(4, 64, False, False, 64, 4, "F16")


def test_scaled_zeros_of_every_scale_and_zero_come_back() -> None:
    fast = formats.get("awq-gemv-fast")
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    scales = np.concatenate([finite, -finite])[:, None].repeat(16, 1)
    zeros = np.arange(16, dtype=np.uint8)[None].repeat(len(scales), 0)
    product = scales.astype(np.float64) * zeros
    fits = np.abs(product) < 65520
    scaled = np.where(fits, -product, 0).astype(np.float16)
    zeros[~fits] = 0
    zeros[scales == 0] = 0
    assert np.array_equal(fast.recover_zeros(scaled, scales), zeros)


@pytest.mark.parametrize("bad", [0.1, np.nan, np.inf, -20.0 * 0.25, 0.25])
def test_scaled_zeros_of_no_integer_are_refused(bad: float) -> None:
    fast = formats.get("awq-gemv-fast")
    tensors = {"scales": np.zeros((16, 4), np.float16), "qzeros": np.zeros((16, 4), np.float16)}
    tensors["scales"][0] = 0.25
    tensors["qzeros"][0] = -0.25 * np.arange(4)
    assert fast.decode_params(tensors, FAST_SCHEME, "plain").zeros.tolist() == [[0, 1, 2, 3]]
    tensors["qzeros"][0, 2] = bad
    with pytest.raises(SourceError) as caught:
        fast.decode_params(tensors, FAST_SCHEME, "plain")
    assert (caught.value.code, caught.value.where) == ("zero-recovery", "qzeros")
    assert "group 0, column 2" in (caught.value.found or "")


# ---- weights ----------------------------------------------------------------------------------------------


@given(linears(orders=True, short=True), st.sampled_from(("F16", "BF16", "F32")), st.integers(0, 100))
def test_weights_are_rounded_once_whole_and_in_blocks(made: Made, tag: str, start: int) -> None:
    linear, scheme, params = made
    whole = dequantize(linear.codes, params, scheme, tag)
    assert np.array_equal(oracle.bits_of(whole.T), oracle.bits_of(linear.weight(tag)))
    k0 = min(start, linear.k)
    assert np.array_equal(
        oracle.bits_of(dequantize(linear.codes[k0:], params, scheme, tag, k0)), oracle.bits_of(whole[k0:])
    )


@given(st.floats(min_value=1e-30, max_value=3e38), st.booleans())
def test_float64_is_rounded_to_bfloat16_once(value: float, negative: bool) -> None:
    value = -value if negative else value
    got = int(from_f64(np.array([value]), "BF16")[0])
    exact = oracle.round_once(np.array([value]), "BF16")
    assert got == int(exact[0])


def test_float64_just_above_a_tie_is_rounded_up() -> None:
    tie = 1 + 2.0**-8
    values = np.array([tie, tie + 2.0**-40, tie - 2.0**-40, -tie - 2.0**-40, 3.5e38, 1e39, 0.0])
    assert [hex(int(v)) for v in from_f64(values, "BF16")] == [
        "0x3f80",
        "0x3f81",
        "0x3f80",
        "0xbf81",
        "0x7f80",
        "0x7f80",
        "0x0",
    ]


# ---- recognition ------------------------------------------------------------------------------------------

Makers: dict[str, Maker] = {
    "gptq": builders.gptq,
    "awq": builders.awq_gemm,
    "awq-gemv": builders.awq_gemv,
    "awq-gemv-fast": builders.awq_gemv_fast,
    "awq-marlin": builders.awq_marlin,
    "compressed-tensors": builders.compressed,
    "marlin-legacy": builders.legacy,
}


@pytest.mark.parametrize("name", sorted(Makers))
@given(
    k=st.sampled_from((128, 256, 384, 512)),
    n=st.sampled_from((64, 128, 256, 512)),
    size=st.sampled_from((32, 64, 128)),
)
def test_shapes_name_the_layout(name: str, k: int, n: int, size: int) -> None:
    linear = builders.layer(np.random.default_rng(k + n), k, n, group=size)
    made = {key.removeprefix("P."): value for key, value in Makers[name]("P", linear).items()}
    for headers in (
        {s: (t.tag, t.shape) for s, t in made.items()},
        {s: (t.tag, t.shape) for s, t in made.items() if s != "g_idx"},
    ):
        found = formats.recognise(headers, {s: t.array() for s, t in made.items()})
        assert found is not None
        assert found[0] == name
        assert (found[1].bits, found[1].in_features, found[1].out_features) == (4, k, n)
        assert found[1].groups in (0, k // size)


def test_the_artifact_and_dense_layers_are_told_apart() -> None:
    headers = {"weight": ("I32", (8, 512)), "weight_scale": ("F16", (1, 256))}
    assert formats.recognise(headers) == ("marlin", formats.Match(4, 128, 256, 1))
    headers["act_perm"] = ("I32", (100,))
    assert formats.recognise(headers) == ("marlin", formats.Match(4, 100, 256, 1))
    assert formats.recognise({"weight": ("F16", (8, 512))}) is None
    assert formats.recognise({"weight": ("F8_E4M3", (8, 512)), "weight_scale": ("F32", (1,))}) is None
    assert (
        formats.recognise({"weight_packed": ("U8", (8, 512)), "weight_scale": ("F8_E4M3", (8, 64))}) is None
    )


def test_compressed_tensors_needs_the_value_of_its_shape_to_tell_four_bits_from_eight() -> None:
    headers = {
        "weight_packed": ("I32", (64, 32)),
        "weight_scale": ("BF16", (64, 2)),
        "weight_shape": ("I64", (2,)),
    }
    for bits, k in ((4, 256), (8, 128), (4, 250)):
        values = {"weight_shape": np.array([64, k])}
        assert formats.recognise(headers, values) == ("compressed-tensors", formats.Match(bits, k, 64, 2))


GPTQ_HEADERS: dict[str, formats.Header] = {
    "qweight": ("I32", (16, 64)),
    "qzeros": ("I32", (4, 8)),
    "scales": ("F16", (4, 64)),
    "g_idx": ("I32", (128,)),
}


@pytest.mark.parametrize(
    ("change", "where", "expected", "found"),
    [
        ({"qweight": ("I32", (15, 64))}, "qweight", "[16, 64] (128 rows in g_idx, 4 bit)", "[15, 64]"),
        ({"qzeros": ("I32", (3, 8))}, "qzeros", "[4, 64 * bits / 32] beside scales [4, 64]", "[3, 8]"),
        ({"qweight": ("I32", (16, 48))}, "qweight", "a shape that goes with scales [4, 64]", "[16, 48]"),
        ({"g_idx": ("I32", (2, 64))}, "g_idx", "one group for each row", "[2, 64]"),
    ],
)
def test_contradicting_shapes_are_named(
    change: dict[str, formats.Header], where: str, expected: str, found: str
) -> None:
    assert formats.recognise(GPTQ_HEADERS) == ("gptq", formats.Match(4, 128, 64, 4))
    with pytest.raises(SourceError) as caught:
        formats.recognise({**GPTQ_HEADERS, **change})
    got = caught.value
    assert (got.code, got.where, got.expected, got.found) == ("shape-mismatch", where, expected, found)


@pytest.mark.parametrize("missing", ["scales", "qzeros"])
def test_missing_companions_are_named(missing: str) -> None:
    with pytest.raises(SourceError) as caught:
        formats.recognise({k: v for k, v in GPTQ_HEADERS.items() if k != missing})
    assert (caught.value.code, caught.value.where) == ("missing-tensor", missing)


def test_fused_experts_in_one_packed_tensor_are_refused() -> None:
    with pytest.raises(Refused) as caught:
        formats.recognise({"weight_packed": ("I32", (4, 64, 32)), "weight_scale": ("BF16", (4, 64, 2))})
    assert (caught.value.code, caught.value.found) == ("packed-3d", "[4, 64, 32]")


def test_g_idx_out_of_range_is_an_error_and_negative_groups_count_from_the_end() -> None:
    scheme = QuantScheme(4, 32, True, True, 64, 8, "F16")
    gptq = formats.get("gptq")
    tensors = {"scales": np.ones((2, 8), np.float16), "g_idx": np.arange(64, dtype=np.int32) % 2}
    tensors["g_idx"][::2] = -2
    assert gptq.decode_params(tensors, scheme, "v1").group.tolist() == [0, 1] * 32
    for bad in (2, -3):
        tensors["g_idx"][5] = bad
        with pytest.raises(SourceError) as caught:
            gptq.decode_params(tensors, scheme, "v1")
        assert (caught.value.code, caught.value.where) == ("g-idx-range", "g_idx")
        assert caught.value.found == f"{bad} at row 5 (1 such rows)"


def test_act_perm_that_is_no_permutation_is_an_error() -> None:
    scheme = QuantScheme(4, 32, True, True, 64, 64, "F16")
    tensors = {"weight_scale": np.ones((2, 64), np.float16), "act_perm": np.arange(64, dtype=np.int32)}
    assert formats.get("marlin").row_order(tensors, scheme).tolist() == list(range(64))
    tensors["act_perm"][3] = 4
    with pytest.raises(SourceError) as caught:
        formats.get("marlin").decode_params(tensors, scheme, "plain")
    assert (caught.value.code, caught.value.where) == ("act-perm", "act_perm")


# ---- obstacles --------------------------------------------------------------------------------------------

PLAIN = QuantScheme(4, 128, True, False, 1024, 1024, "F16")
ALL = ("marlin", "gptq", "awq", "compressed-tensors", "marlin-legacy")


@pytest.mark.parametrize(
    ("change", "able", "shape"),
    [
        ({}, ALL, False),
        ({"group_size": -1}, ALL, False),
        ({"group_size": 64}, ALL[:4], False),
        ({"group_size": 16}, ("gptq", "awq", "compressed-tensors"), False),
        ({"sym": False}, ALL[:4], False),
        ({"act_order": True}, ("marlin",), False),
        ({"bits": 8}, ("marlin", "gptq", "compressed-tensors"), False),
        ({"bits": 3}, (), False),
        ({"out_features": 1001}, ("marlin", "compressed-tensors"), True),
        ({"out_features": 1032}, ALL[:4], True),
        ({"in_features": 1000, "group_size": -1}, ALL[:4], True),
        ({"in_features": 1000}, ("marlin",), True),
    ],
)
def test_obstacles_name_the_targets_that_can(
    change: dict[str, Any], able: tuple[str, ...], shape: bool
) -> None:
    scheme = replace(PLAIN, **change)
    for name in ALL:
        obstacle = formats.obstacle(name, scheme)
        assert (obstacle is None) == (name in able), name
        if obstacle is not None:
            assert obstacle.targets == (*able, "dense")
            assert obstacle.is_shape == shape


def test_an_obstacle_gives_the_numbers() -> None:
    found = formats.obstacle("marlin-legacy", replace(PLAIN, out_features=1032))
    assert found == formats.Obstacle(
        "marlin-legacy packs out_features in units of 256",
        "a multiple of 256",
        "out_features 1032",
        (*ALL[:4], "dense"),
        True,
    )


def test_the_tables_cover_every_layout() -> None:
    assert set(formats.DETECTION_ORDER) == set(formats.FORMATS)
    for name in formats.FORMATS:
        layout = formats.get(name)
        for scheme in (PLAIN, replace(PLAIN, sym=False), replace(PLAIN, act_order=True)):
            assert set(layout.specs(scheme)) <= set(layout.SUFFIXES)
            assert layout.grid(4).suffix in layout.specs(scheme)
