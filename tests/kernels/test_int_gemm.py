"""The integer product without a GPU: definition, lane arithmetic, choices, refusals."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels import layout, tiles  # noqa: E402
from w4pack.kernels.quarot import int_ops, int_reference, int_tiles, orders_int  # noqa: E402

LANES = np.arange(32)
G8, T = LANES // 4, LANES % 4
P32 = (0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23)
Q32 = (0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)
S32 = (0, 8, 1, 9, 16, 24, 17, 25, 2, 10, 3, 11, 18, 26, 19, 27)
SCHEMES = [
    pytest.param(4, orders_int.P32, id="s8w4"),
    pytest.param(8, orders_int.Q32, id="s8w8"),
    pytest.param(4, orders_int.S64, id="s4w4"),
]
Words = NDArray[np.uint32]


# ---- orders ---------------------------------------------------------------------------------------------


def test_orders_are_those_of_the_format() -> None:
    assert tuple(orders_int.columns(orders_int.P32)) == P32 + tuple(k + 8 for k in P32)
    assert tuple(orders_int.columns(orders_int.Q32)) == Q32 + tuple(k + 16 for k in Q32)
    assert tuple(orders_int.columns(orders_int.S64)) == S32 + tuple(k + 4 for k in S32)
    assert tuple(orders_int.columns(orders_int.NATURAL)) == tuple(range(32))


@pytest.mark.parametrize("order", orders_int.ORDERS)
def test_arranged_codes_come_back(order: int) -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 12)
    assert torch.equal(orders_int.natural(orders_int.arrange(codes, order), order), codes)


def test_the_low_half_of_a_byte_comes_first() -> None:
    codes = torch.zeros(1, 64, dtype=torch.int8)
    codes[0, 0], codes[0, 8], codes[0, 1] = 3, -2, 5
    assert orders_int.arrange(codes, orders_int.S64)[0, :2].tolist() == [3 | 14 << 4, 5]


# ---- the definition -------------------------------------------------------------------------------------


def _arguments(
    m: int = 3,
    k: int = 192,
    n: int = 128,
    *,
    bits: int = 4,
    group: int = -1,
    order: int = 1,
    bias: bool = True,
) -> tuple[list[Any], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the operator's arguments, and natural codes (M, K), signed weight (K, N), scales (G, N)."""
    g = torch.Generator().manual_seed(k + n + bits)
    low, high = (-8, 8) if order == orders_int.S64 else (-128, 128)
    codes = torch.randint(low, high, (m, k), generator=g, dtype=torch.int32).to(torch.int8)
    q = torch.randint(0, 2**bits, (k, n), generator=g)
    packed = torch.from_numpy(layout.pack_codes(q.numpy().astype(np.uint8), bits))
    scales = (torch.rand(1 if group == -1 else -(-k // group), n, generator=g) + 0.5).half()
    act = torch.rand(m, generator=g) * 0.01
    b = torch.randn(n, generator=g).half() if bias else None
    placed = scales[:, torch.from_numpy(layout.grouped_order(n))].contiguous()
    act_bits = 4 if order == orders_int.S64 else 8
    given = [orders_int.arrange(codes, order), act, packed, placed, b, bits, act_bits, group, order, k]
    return [*given, torch.float16], codes, q - 2 ** (bits - 1), scales


@pytest.mark.parametrize(
    ("bits", "order", "group"),
    [
        (bits, order, group)
        for bits, order in ((4, orders_int.P32), (8, orders_int.Q32), (4, orders_int.S64))
        for group in (-1, 32, 64, 128)
        if (order, group) != (orders_int.S64, 32)
    ],
)
def test_the_operator_computes_its_definition(bits: int, order: int, group: int) -> None:
    arguments, codes, q, scales = _arguments(bits=bits, order=order, group=group)
    y = torch.ops.w4pack.int_gemm(*arguments)
    rows = torch.arange(q.shape[0]) // (q.shape[0] if group == -1 else group)
    exact = codes.double() @ (q.double() * scales.double()[rows])
    exact = exact * arguments[1].double()[:, None] + arguments[4].double()
    assert y.dtype == torch.float16
    room = 2.0**-11 * exact.abs() + 1e-6 * exact.abs().max()
    assert bool(((y.double() - exact).abs() <= room).all())


def test_sums_are_exact_where_fp32_is_not() -> None:
    codes = torch.full((1, 32768), -128, dtype=torch.int8)
    codes[0, 0] = 127
    weight = torch.full((32768, 64), -8, dtype=torch.int32)
    weight[0] = 7
    total = int_reference.accumulate(codes, weight, 4)
    assert total[0, 0].item() == 128 * 8 * 32767 + 127 * 7


def test_no_tokens_give_no_rows() -> None:
    arguments, *_ = _arguments(m=0)
    assert torch.ops.w4pack.int_gemm(*arguments).shape == (0, 128)


def test_a_zero_row_gives_the_bias() -> None:
    arguments, *_ = _arguments()
    arguments[0] = torch.zeros_like(arguments[0])
    assert torch.equal(torch.ops.w4pack.int_gemm(*arguments), arguments[4].expand(3, -1))


def test_the_operator_passes_the_checks_of_torch() -> None:
    arguments, *_ = _arguments(group=64)
    torch.library.opcheck(torch.ops.w4pack.int_gemm.default, tuple(arguments))


# ---- lanes: what csrc/int_operand.cuh and the register maps of the tensor cores do ------------------------


def _lane_words(packed: NDArray[np.int32], row: int, bits: int) -> Words:
    """(32, bits): the words of each lane in one 16 x 64 tile of a matrix of 64 columns."""
    return packed.view(np.uint32)[row].reshape(32, bits)


def _prmt(a: Words, b: Words, selector: int) -> Words:
    source = [(word >> np.uint32(8 * i)) & np.uint32(255) for word in (a, b) for i in range(4)]
    out = np.zeros_like(a)
    for i in range(4):
        out |= source[selector >> (4 * i) & 7] << np.uint32(8 * i)
    return out


def _low(x: Words) -> Words:
    return ((x << np.uint32(4)) & np.uint32(0xF0F0F0F0)) ^ np.uint32(0x80808080)


def _high(x: Words) -> Words:
    return (x & np.uint32(0xF0F0F0F0)) ^ np.uint32(0x80808080)


def _operand(bits: int, order: int, words: list[Words], j: int) -> list[Words]:
    """The A registers of a step from the words of its k-tiles, ``int_operand::of_step`` line for line."""
    if order == orders_int.P32:
        u = _prmt(words[0][:, j], words[1][:, j], 0x6420)
        v = _prmt(words[0][:, j], words[1][:, j], 0x7531)
        return [_low(u), _low(v), _high(u), _high(v)]
    if order == orders_int.Q32:
        return [words[i // 2][:, 2 * j + i % 2] ^ np.uint32(0x80808080) for i in range(4)]
    flip, picks = np.uint32(0x88888888), (0x6420, 0x7531)
    return [
        _prmt(words[i // 2 * 2][:, j], words[i // 2 * 2 + 1][:, j], picks[i % 2]) ^ flip for i in range(4)
    ]


def _elements(register: Words, order: int) -> NDArray[np.int64]:
    """(32, 4 or 8): a register's signed values, lowest first."""
    width = 4 if order == orders_int.S64 else 8
    values = np.stack(
        [(register >> np.uint32(width * i)) & np.uint32(2**width - 1) for i in range(32 // width)], -1
    )
    signed = values.astype(np.int64)
    return np.where(signed >= 2 ** (width - 1), signed - 2**width, signed)


def _step(bits: int, order: int, words: list[Words], j: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """(16 n, 8): one product of the tensor core; ``tokens`` (8, step) are codes in their order."""
    size = tokens.shape[1] // 8  # values of a register: 4 or 8
    a = np.zeros((16, 8 * size), np.int64)
    for r, register in enumerate(_operand(bits, order, words, j)):
        for e in range(size):
            a[G8 + 8 * (r % 2), size * T + e + 4 * size * (r // 2)] = _elements(register, order)[:, e]
    return a @ tokens.T


@pytest.mark.parametrize(("bits", "order"), SCHEMES)
def test_the_whole_product_lane_by_lane(bits: int, order: int) -> None:
    """A warp's product of 64 columns, 128 rows of K and 8 tokens, from packed words to integer sums."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 2**bits, (128, 64), dtype=np.uint8)
    x = rng.integers(-8, 8, (8, 128)).astype(np.int8)
    packed = layout.pack_codes(codes, bits)
    placed = orders_int.arrange(torch.from_numpy(x), order)
    if order == orders_int.S64:  # the bytes as the tensor core reads them: low half first
        placed = torch.stack((placed & 15, placed >> 4), -1).flatten(1).to(torch.int8)
        placed = torch.where(placed >= 8, placed - 16, placed)
    tokens, step = placed.numpy().astype(np.int64), int_tiles._step_k(order)
    y = np.zeros((8, 64), np.int64)
    for k in range(0, 128, step):
        words = [_lane_words(packed, row, bits) for row in range(k // 16, (k + step) // 16)]
        for j in range(4):
            y[:, 16 * j : 16 * j + 16] += _step(bits, order, words, j, tokens[:, k : k + step]).T
    factor = 16 if order == orders_int.P32 else 1
    wanted = x.astype(np.int64) @ (codes.astype(np.int64) - 2 ** (bits - 1))
    np.testing.assert_array_equal(y, factor * wanted)


def test_a_lane_finds_the_scales_of_its_pairs() -> None:
    """``Scaling::column_scale``: pair p of a warp at column0 is column column0 + 8 p + g8."""
    placed = np.arange(256)[layout.grouped_order(256)]
    for column0 in range(0, 256, 16):
        for pair in range((64 - column0 % 64) // 8):
            at = column0 // 64 * 64 + G8 * 8 + column0 % 64 // 8 + pair
            np.testing.assert_array_equal(placed[at], column0 + 8 * pair + G8)


def _own_words(warp: int) -> NDArray[np.int64]:
    """(32,): the first word of each lane of a warp whose words are spread (``Lane`` with ``SPREAD``)."""
    return (warp % 2 * 2) ^ (LANES // 8 % 2 * 2)


def test_lanes_with_spread_words_meet_no_bank_twice() -> None:
    """Two words of a lane's 16 bytes: the 16 lanes of half a warp reach all 32 banks."""
    for warp in range(2):
        banks = (LANES * 4 + _own_words(warp))[:, None] % 32 + np.arange(2)
        for half in (banks[:16], banks[16:]):
            assert len(np.unique(half)) == 32


def test_spread_words_come_back_in_order() -> None:
    """``SpreadStore::rows``: eight tokens of a chunk through the rows of two warps, 16 bytes a lane."""
    values = np.arange(8 * 64).reshape(8, 64)  # token, column
    staged = np.full((2, 8 * 4, 8), -1)  # warp, piece's place, column of the piece
    place = np.arange(8)[:, None] * 4 + (np.arange(4) ^ (np.arange(8)[:, None] // 2 & 3))  # row, piece
    for warp in range(2):
        for pair in range(4):
            columns = 16 * (_own_words(warp) + pair // 2) + 8 * (pair % 2) + G8
            for i in range(2):  # a matrix is stored transposed: row = token, place in it = g8
                staged[warp, place[2 * T + i, pair], G8] = values[2 * T + i, columns]
    out = np.full((8, 64), -1)
    for warp in range(2):
        row, piece = LANES // 4, LANES % 4
        mine, theirs = staged[warp, place[row, piece]], staged[1 - warp, place[row, piece]]
        own = np.array([True, True, False, False] * 2)
        for value in range(8):
            out[row, 32 * warp + 8 * piece + value] = (mine if own[value] else theirs)[:, value]
    np.testing.assert_array_equal(out, values)


def test_spread_words_come_back_pair_by_pair() -> None:
    """``SpreadStore::pairs``: a transposed register holds columns 2t and 2t + 1 of a lane's token."""
    seen = np.zeros(64, int)
    for warp in range(2):
        first = (warp * 2 ^ (LANES % 2 * 2)) * 16 + 2 * T
        for pair in range(4):
            for i in range(2):
                column = first + 8 * pair + i
                lane = (2 * T + i) * 4  # who held that column before: g8 = 2t + i
                held = 16 * (_own_words(warp)[lane] + pair // 2) + 8 * (pair % 2) + 2 * T + i
                np.testing.assert_array_equal(column, held)
                seen[column[:4]] += 1
    assert (seen == 1).all()


def test_spread_pairs_find_their_columns() -> None:
    """``Scaling::column``: the columns of a lane's pairs."""
    for warp in range(4):
        column0 = 32 * warp
        moved = np.where(LANES & 8, -32 if column0 & 32 else 32, 0)
        for pair in range(4):
            mine = column0 // 64 * 64 + 16 * (_own_words(warp) + pair // 2) + 8 * (pair % 2) + G8
            np.testing.assert_array_equal(column0 + moved + 8 * pair + G8, mine)


# ---- choices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100", "sm_120"])
def test_every_product_finds_a_kernel_that_is_built(arch: str) -> None:
    built = {file.entry for file in int_tiles.files(arch)}
    for order in (orders_int.P32, orders_int.Q32):
        for group in (-1, 32, 64, 128):
            for m in (1, 8, 9, 33, 100, 5000):
                for n, k in ((64, 64), (57344, 8192), (4096, 14336), (320, 192)):
                    found = int_tiles.choose(arch, 132, m, n, k, order, group)
                    assert found is not None
                    steps = int_tiles.group_steps(found.tile, order, group)
                    assert int_tiles.kernel_name(found.tile, "bf16", order, steps) in built
                    assert 1 <= found.grid <= 132 * found.tile.blocks


@pytest.mark.parametrize(("arch", "most"), [("sm_80", 99), ("sm_90a", 227), ("sm_100", 227), ("sm_120", 99)])
def test_tiles_fit_the_card_and_the_workspace(arch: str, most: int) -> None:
    for order in int_tiles.KINDS:
        for grouped in (False, True):
            for tile in int_tiles.all_tiles(arch, order, grouped):
                assert tile.blocks * int_tiles.shared_bytes(tile, order, grouped) <= most * 1024
                assert tile.fits_workspace and tile.sharing in (tiles.COLLECTED, tiles.MARKED_COLLECTED), tile


def test_large_products_take_the_tile_with_the_fewest_clocks() -> None:
    def tokens(m: int, n: int, k: int) -> int:
        found = int_tiles.choose("sm_90a", 132, m, n, k, orders_int.P32, -1)
        assert found is not None
        return found.tile.tokens

    assert tokens(8192, 57344, 8192) == 192
    assert tokens(2048, 4096, 4096) == 128  # two whole rounds: less than 1.33 rounds of 192 with an exchange
    assert tokens(4096, 4096, 4096) == tokens(2048, 4096, 14336) == 128
    assert tokens(2048, 6144, 4096) == tokens(4096, 28672, 4096) == 192
    assert tokens(100, 57344, 8192) == 128  # one block of tokens


def test_the_order_follows_card_and_scheme() -> None:
    order = int_tiles.int_order
    assert order(None, 4, -1) == order((9, 0), 4, 128) == order((12, 0), 4, 64) == orders_int.P32
    assert order(None, 8, -1) == order((8, 0), 8, 128, 4) == orders_int.Q32
    for card in ((8, 0), (8, 6), (8, 7), (8, 9)):
        assert order(card, 4, -1) == order(card, 4, 64) == orders_int.S64
        assert order(card, 4, 32) == order(card, 4, 128, act_bits=8) == orders_int.P32


def test_where_s4_is_chosen_there_are_kernels() -> None:
    assert int_tiles.choose("sm_80", 108, 7, 4096, 4096, orders_int.S64, 128) is not None
    assert int_tiles.choose("sm_120", 108, 7, 4096, 4096, orders_int.S64, 128) is None
    assert not [f for f in int_tiles.files(tiles.PTX_ARCH) if "s4w4" in f.entry]


# ---- refusals -------------------------------------------------------------------------------------------

CHANGES: list[tuple[str, dict[int, Any], str]] = [
    ("k", {9: 128}, "k is not the weight's"),
    ("order of 8-bit weights", {8: orders_int.Q32}, "the order does not fit"),
    ("natural order", {8: orders_int.NATURAL}, "the order does not fit"),
    ("unknown order", {8: 7}, "order of activation codes is not known"),
    ("act_bits", {6: 16}, "code width"),
    ("dtype", {10: torch.float32}, "dtype is not supported"),
    ("codes dtype", {0: torch.zeros(3, 192, dtype=torch.uint8)}, "codes has the wrong dtype"),
    ("codes width", {0: torch.zeros(3, 128, dtype=torch.int8)}, "codes has the wrong shape"),
    ("codes stride", {0: torch.zeros(3, 200, dtype=torch.int8)[:, :192]}, "stride"),
    ("codes dims", {0: torch.zeros(192, dtype=torch.int8)}, "dimensions"),
    ("scales of tokens", {1: torch.ones(4)}, "act_scales has the wrong shape"),
    ("half scales of tokens", {1: torch.ones(3).half()}, "act_scales has the wrong dtype"),
    ("strided scales of tokens", {1: torch.ones(6)[::2]}, "act_scales is not contiguous"),
    ("bias dtype", {4: torch.zeros(128)}, "bias has the wrong dtype"),
    ("bias shape", {4: torch.zeros(64).half()}, "bias has the wrong shape"),
    ("group", {7: 48}, "group size"),
    ("scales of groups", {7: 64}, "scales has the wrong shape"),
    ("bits", {5: 3}, "code width"),
    ("S64 with 8 bit", {8: orders_int.S64}, "S64 holds codes of 4 bit"),
]


@pytest.mark.parametrize(("changes", "message"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_what_does_not_fit_is_refused(changes: dict[int, Any], message: str) -> None:
    arguments, *_ = _arguments()
    for place, value in changes.items():
        arguments[place] = value
    with pytest.raises(UsageError, match=message):
        torch.ops.w4pack.int_gemm(*arguments)


def test_groups_of_32_and_sums_that_could_overflow_are_refused() -> None:
    arguments, *_ = _arguments(order=orders_int.S64, group=32)
    with pytest.raises(UsageError, match="two groups"):
        torch.ops.w4pack.int_gemm(*arguments)
    k = int_ops.MOST_K
    weight, scales = torch.zeros(k // 16, 128, dtype=torch.int32), torch.ones(1, 64).half()
    codes = torch.zeros(1, k, dtype=torch.int8)
    with pytest.raises(UsageError, match="too large for int32"):
        torch.ops.w4pack.int_gemm(codes, torch.ones(1), weight, scales, None, 4, 8, -1, 1, k, torch.float16)
