"""The kernels of the quantized cache run on a CPU from their own source, against their definition in fp32."""

import pytest

torch = pytest.importorskip("torch")

import emulated  # noqa: E402

from w4pack.kernels.quarot import kv_launch, kv_layout, kv_reference  # noqa: E402
from w4pack.kernels.quarot.calls import Append, Attention  # noqa: E402
from w4pack.kernels.quarot.transform import Transform  # noqa: E402

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")

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
        return emulated.aligned(x.to(dtype)).transpose(1, 2)

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
    for seed, dtype in enumerate((torch.float16, torch.bfloat16)):
        found, wanted = Cache(size, bits, 80), Cache(size, bits, 80)
        k, v, start = (
            found.states(2, 37, dtype),
            found.states(2, 37, dtype).flip(2).contiguous(),
            counts(5, 40),
        )
        v = emulated.aligned(v)
        with emulated.machine("sm_80", late=bool(seed), seed=seed):
            kv_launch.append(found.append(k, v, start))
        kv_reference.append(wanted.append(k, v, start))
        apart = kv_reference.unpack(found.codes, bits).int() - kv_reference.unpack(wanted.codes, bits).int()
        assert int(apart.abs().max()) <= 1 and float((apart != 0).float().mean()) <= TIES
        torch.testing.assert_close(found.params, wanted.params, rtol=2e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("size", "bits"), SETTINGS)
@pytest.mark.parametrize("tokens", [1, 70])
def test_attention_reads_the_cache(size: int, bits: int, tokens: int) -> None:
    """One query token a sequence, in parts the last block joins, and several; windows, caps, starts."""
    cases = [((150, 97), None, 0, 0.0), ((141, 150), (3, 20), 33, 0.0), ((72, 70), None, 0, 20.0)]
    for seed, (lengths, first, window, cap) in enumerate(cases):
        dtype = (torch.float16, torch.bfloat16)[seed % 2]
        cache = Cache(size, bits, 150)
        kv_reference.append(
            cache.append(cache.states(2, 150, dtype), cache.states(2, 150, dtype).flip(2), counts(0, 0))
        )
        q = cache.states(6, tokens, dtype)
        given = cache.attention(q, counts(*lengths), None if first is None else counts(*first), window, cap)
        with emulated.machine("sm_80", late=bool(seed % 2), seed=seed):
            found = kv_launch.attention(given).double()
        exact = kv_reference.attention(given._replace(q=q.float())).double()
        off, bound = found - exact, BOUND[dtype]
        assert float(off.norm() / exact.norm()) < bound, (lengths, float(off.norm() / exact.norm()))
        assert float(off.abs().max() / exact.abs().max()) < 6 * bound
