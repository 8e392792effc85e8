"""The kernels of the quantized cache run on a CPU from their own source, against their definition in fp32."""

import pytest

torch = pytest.importorskip("torch")

import emulated  # noqa: E402

from w4pack.kernels.quarot import kv_launch, kv_layout, kv_reference, kv_tiles  # noqa: E402
from w4pack.kernels.quarot.calls import Append, Attention  # noqa: E402
from w4pack.kernels.quarot.transform import Transform  # noqa: E402

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs a C++ compiler")

TIES = 1e-4  # share of codes that the order of R3's sums may decide
BOUND = {
    torch.float16: 1.2e-3,
    torch.bfloat16: 4e-3,
}  # of attention: weights and values are rounded on the way
SETTINGS = [(size, bits) for size in kv_layout.HEAD_DIMS for bits in kv_layout.BITS]


class Cache:
    """Pages of two sequences, scattered, filled by the kernel or by the reference."""

    def __init__(self, size: int, bits: int, capacity: int) -> None:
        self.size, self.bits, self.kv_heads = size, bits, 2
        self.kept: list[torch.Tensor] = []
        each = kv_layout.pages_of(capacity)
        codes, params = kv_layout.empty(2 * each + 1, self.kv_heads, size, bits, "cpu")
        self.codes, self.params = (
            emulated.aligned(codes.fill_(0xA5)),
            emulated.aligned(params.fill_(float("nan"))),
        )
        order = torch.randperm(2 * each + 1, generator=torch.Generator().manual_seed(size))
        self.table = emulated.aligned(order[: 2 * each].reshape(2, each).int())
        self.key = Transform.planned(size).key

    def states(self, heads: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """(2, heads, T, size), as RoPE leaves them: a view of (2, T, heads, size); one channel is large."""
        x = torch.randn(
            (2, tokens, heads, self.size), generator=torch.Generator().manual_seed(tokens + heads)
        )
        x[..., 3] *= 9
        self.kept.append(emulated.aligned(x.to(dtype)))
        return self.kept[-1].transpose(1, 2)

    def append(self, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor) -> Append:
        pages = (self.codes, self.params, self.table)
        return Append(k, v, *pages, start, self.key, 0.95, 0.9, self.bits)

    def attention(
        self, q: torch.Tensor, lengths: torch.Tensor, first: object, window: int, cap: float
    ) -> Attention:
        pages = (self.codes, self.params, self.table)
        return Attention(q, *pages, lengths, first, self.size**-0.5, window, cap, self.key, self.bits)


def counts(*values: int) -> torch.Tensor:
    return emulated.aligned(torch.tensor(values, dtype=torch.int32))


@pytest.mark.parametrize(("size", "bits"), SETTINGS)
def test_appended_codes_are_those_of_the_definition(size: int, bits: int) -> None:
    """With and without a guide, which says what a head's channels weigh."""
    for seed, (dtype, late, guided) in enumerate(
        ((torch.float16, True, False), (torch.bfloat16, False, False), (torch.float16, False, True))
    ):
        found, wanted = Cache(size, bits, 80), Cache(size, bits, 80)
        k, v, start = found.states(2, 37, dtype), found.states(2, 36, dtype), counts(5, 40)
        k = k[:, :, :36]
        guide = emulated.aligned(torch.randn((2, 2, size), generator=torch.Generator().manual_seed(size)))
        guide[1] *= 6 * size**-0.5
        with emulated.machine("sm_80", late=late, seed=seed):
            kv_launch.append(found.append(k, v, start)._replace(guide=guide if guided else None))
        kv_reference.append(wanted.append(k, v, start)._replace(guide=guide if guided else None))
        apart = kv_reference.unpack(found.codes, bits).int() - kv_reference.unpack(wanted.codes, bits).int()
        assert int(apart.abs().max()) <= 1 and float((apart != 0).float().mean()) <= TIES
        torch.testing.assert_close(found.params, wanted.params, rtol=2e-3, atol=1e-4, equal_nan=True)


def attend(
    cache: Cache, q: torch.Tensor, given: Attention, dtype: torch.dtype, late: bool, seed: int
) -> None:
    with emulated.machine("sm_80", late=late, seed=seed) as card:
        found = kv_launch.attention(given).double()
    kernel = "kv_decode" if q.shape[2] == 1 else "kv_prefill"
    assert [name.startswith(kernel) for name in card.started] == [True], card.started
    exact = kv_reference.attention(given._replace(q=q.float())).double()
    off, bound = found - exact, BOUND[dtype]
    assert float(off.norm() / exact.norm()) < bound, float(off.norm() / exact.norm())
    assert float(off.abs().max() / exact.abs().max()) < 6 * bound


@pytest.mark.parametrize(("size", "bits"), SETTINGS)
def test_one_query_a_sequence_reads_the_cache(size: int, bits: int) -> None:
    """In parts that the last block joins; nine query heads on one of the cache are two tiles."""
    cases = [
        ((600, 397), None, 0, 0.0, 4),
        ((541, 600), (3, 220), 333, 0.0, 18),
        ((72, 70), None, 0, 20.0, 4),
    ]
    for seed, (lengths, first, window, cap, heads) in enumerate(cases):
        dtype = (torch.float16, torch.bfloat16)[seed % 2]
        cache = Cache(size, bits, 600)
        units = 2 * cache.kv_heads * -(-heads // cache.kv_heads // kv_tiles.HEADS)
        warps, slots = kv_tiles.decode_warps("sm_80", size, bits), cache.table.shape[1] * kv_layout.PAGE
        assert heads != 4 or kv_tiles.splits(units, slots, 4, warps) > 1
        kv_reference.append(
            cache.append(cache.states(2, 600, dtype), cache.states(2, 600, dtype).flip(2), counts(0, 0))
        )
        q = cache.states(heads, 1, dtype)
        begins = None if first is None else counts(*first)
        given = cache.attention(q, counts(*lengths), begins, window, cap)
        attend(cache, q, given, dtype, bool(seed // 2), seed)


@pytest.mark.parametrize(("size", "bits"), SETTINGS)
def test_several_queries_read_the_cache(size: int, bits: int) -> None:
    """Two blocks of queries a head; windows, caps, beginnings."""
    cases = [((150, 97), None, 0, 0.0), ((141, 150), (3, 20), 33, 0.0), ((72, 70), None, 0, 20.0)]
    for seed, (lengths, first, window, cap) in enumerate(cases):
        dtype = (torch.bfloat16, torch.float16)[seed % 2]
        cache = Cache(size, bits, 150)
        kv_reference.append(
            cache.append(cache.states(2, 150, dtype), cache.states(2, 150, dtype).flip(2), counts(0, 0))
        )
        q = cache.states(6, 70, dtype)
        begins = None if first is None else counts(*first)
        given = cache.attention(q, counts(*lengths), begins, window, cap)
        attend(cache, q, given, dtype, bool(seed // 2), seed)
