"""The quantized cache on a card: codes and attention against their definition, head sizes, masks, graphs."""

import pytest

torch = pytest.importorskip("torch")

from gpu.graphs import captured  # noqa: E402
from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels.quarot import kv, kv_layout, kv_reference, kv_tiles  # noqa: E402
from w4pack.kernels.quarot.calls import Append, Attention  # noqa: E402
from w4pack.kernels.quarot.transform import Transform  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TIES = 1e-4  # share of codes that the order of R3's sums may decide
# Weights of the softmax are rounded to fp16 on the way (2^-12 each, at random), then the result to its dtype.
BOUND = {torch.float16: 6e-4, torch.bfloat16: 3e-3}
# Prefill rounds the cache's values to fp16 too: scores of some size move by 2^-12 of themselves.
PREFILL = {torch.float16: 1.2e-3, torch.bfloat16: 3.5e-3}


class Cache:
    """Pages of a few sequences, scattered; ``fill`` appends random tokens and returns them."""

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        size: int,
        bits: int,
        capacity: int,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        g = torch.Generator().manual_seed(size + bits)
        self.batch, self.kv_heads, self.size, self.bits, self.dtype = batch, kv_heads, size, bits, dtype
        each = kv_layout.pages_of(capacity)
        pages = batch * each + 3
        self.codes, self.params = kv_layout.empty(pages, kv_heads, size, bits, "cuda")
        self.codes.fill_(0xA5)
        self.params.fill_(float("nan"))
        order = torch.randperm(pages, generator=g)[: batch * each]
        self.table = order.reshape(batch, each).int().cuda()
        self.key = Transform.planned(size).key
        self.random = torch.Generator("cuda").manual_seed(size)

    def states(self, heads: int, tokens: int) -> torch.Tensor:
        """(B, heads, T, size), as RoPE leaves them: a view of (B, T, heads, size); one channel is large."""
        x = torch.randn((self.batch, tokens, heads, self.size), device="cuda", generator=self.random)
        x[..., 3] *= 9
        return x.to(self.dtype).transpose(1, 2)

    def append(
        self, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, guide: torch.Tensor | None = None
    ) -> None:
        pages = (self.codes, self.params, self.table)
        kv.kv_append(k, v, *pages, start, self.key, 0.95, 0.9, self.bits, guide)

    def fill(self, tokens: int, start: int = 0) -> None:
        slots = torch.full((self.batch,), start, dtype=torch.int32, device="cuda")
        self.append(self.states(self.kv_heads, tokens), self.states(self.kv_heads, tokens), slots)

    def arguments(
        self, q: torch.Tensor, lengths: torch.Tensor, first: object, window: int, cap: float
    ) -> tuple:
        scale = self.size**-0.5
        pages = (self.codes, self.params, self.table)
        return (q, *pages, lengths, first, scale, window, cap, self.key, self.bits)


def _lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _check(
    cache: Cache,
    q: torch.Tensor,
    lengths: torch.Tensor,
    first: torch.Tensor | None = None,
    window: int = 0,
    cap: float = 0.0,
    bound: float | None = None,
) -> None:
    arguments = cache.arguments(q, lengths, first, window, cap)
    found = kv.kv_attention(*arguments)
    exact = kv_reference.attention(Attention(q.float(), *arguments[1:])).double()
    assert found.dtype == q.dtype and torch.isfinite(found).all()
    bound = bound or (BOUND if q.shape[2] == 1 else PREFILL)[q.dtype]
    difference = found.double() - exact
    assert float(difference.norm() / exact.norm()) < bound, float(difference.norm() / exact.norm())
    assert float(difference.abs().max() / exact.abs().max()) < 6 * bound


@pytest.mark.parametrize("size", kv_layout.HEAD_DIMS)
@pytest.mark.parametrize("bits", kv_layout.BITS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("guided", [False, True])
def test_appended_codes_are_those_of_the_definition(
    size: int, bits: int, dtype: torch.dtype, guided: bool
) -> None:
    cache = Cache(2, 3, size, bits, 200, dtype)
    guide = None
    if guided:
        guide = torch.randn((2, 3, size), generator=cache.random, device="cuda")
        guide[1] *= 6 * size**-0.5
    k, v, start = cache.states(3, 77), cache.states(3, 77), _lengths(5, 60)
    k[0, 0, 3] = 0
    v[0, 1, 4] = 2.5
    v[1, 2, 5] = 1e-7
    v[1, 2, 6] = 60000.0
    v[0, 0, 7, 1], v[1, 1, 8, 0] = float("-inf"), float("inf")
    host = [x.cpu() for x in (k, v, cache.codes, cache.params, cache.table, start)]
    kv_reference.append(Append(*host, cache.key, 0.95, 0.9, bits, None if guide is None else guide.cpu()))
    codes, params = host[2].cuda(), host[3].cuda()
    cache.append(k, v, start, guide)
    assert torch.equal(cache.params[:, 1].view(torch.int16), params[:, 1].view(torch.int16))
    assert torch.equal(cache.codes[:, 1], codes[:, 1])  # V is not transformed: no tie moves
    unequal = (
        (kv_reference.unpack(cache.codes[:, 0], bits) != kv_reference.unpack(codes[:, 0], bits)).sum().item()
    )
    # With a guide a tie may also decide which code is moved.
    assert unequal <= max(4, TIES * 2 * (1 + guided) * k.numel()), unequal
    s, z = cache.params[:, 0].unbind(-1)
    t, w = params[:, 0].unbind(-1)
    seen = torch.isfinite(t)
    assert torch.equal(torch.isfinite(s), seen)
    assert ((s - t)[seen].abs() <= t[seen] * 2**-9).all() and ((z - w)[seen].abs() <= 1).all()


@pytest.mark.parametrize("size", kv_layout.HEAD_DIMS)
@pytest.mark.parametrize("bits", kv_layout.BITS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (16, 2), (14, 2), (24, 2), (9, 3)])
def test_decoding(size: int, bits: int, heads: int, kv_heads: int) -> None:
    cache = Cache(3, kv_heads, size, bits, 1500)
    cache.fill(1500)
    _check(cache, cache.states(heads, 1), _lengths(1500, 1, 799))


@pytest.fixture(params=[1, 1 << 30], ids=["unpacked", "direct"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill over K and V that are unpacked first (where there is such a kernel), and directly."""
    monkeypatch.setattr(kv_tiles, "LEAST_READERS", request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", kv_layout.HEAD_DIMS)
@pytest.mark.parametrize("bits", kv_layout.BITS)
def test_prefill_and_chunks_of_it(size: int, bits: int) -> None:
    cache = Cache(2, 2, size, bits, 400)
    cache.fill(330)
    for tokens, length in ((330, 330), (64, 330), (7, 300), (65, 129), (2, 2)):
        _check(cache, cache.states(8, tokens), _lengths(length, max(tokens, length - 5)))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128])
def test_padding_windows_and_soft_caps(tokens: int, dtype: torch.dtype, size: int) -> None:
    cache = Cache(2, 2, size, 4, 300, dtype)
    cache.fill(290)
    q, lengths = cache.states(8, tokens), _lengths(290, 200)
    for first in (None, _lengths(0, 37), _lengths(139, 199)):
        for window in (0, 33, 64, 1000):
            for cap in (0.0, 20.0):
                _check(cache, q, lengths, first, window, cap)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_query_that_sees_nothing_gets_zeros(tokens: int) -> None:
    cache = Cache(2, 2, 128, 4, 300)
    cache.fill(290)
    found = kv.kv_attention(
        *cache.arguments(cache.states(4, tokens), _lengths(290, 20), _lengths(0, 20), 0, 0.0)
    )
    assert (found[1] == 0).all() and (found[0] != 0).any()


@pytest.mark.parametrize("size", kv_layout.HEAD_DIMS)
def test_long_prefill_is_one_result_always_however_it_is_cut(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiles, "LEAST_READERS", 1)
    cache = Cache(3, 2, size, 4, 2500)
    cache.fill(2500)
    q, lengths, first = cache.states(16, 1200), _lengths(2500, 1200, 1777), _lengths(0, 0, 700)
    arguments = cache.arguments(q, lengths, first, 0, 0.0)
    _check(cache, q, lengths, first)
    whole = kv.kv_attention(*arguments)
    assert all(torch.equal(whole, kv.kv_attention(*arguments)) for _ in range(20))
    monkeypatch.setattr(kv_tiles, "L2_BYTES", 1)  # every KV head by itself
    assert torch.equal(whole, kv.kv_attention(*arguments))
    for bound in ("MOST_UNPACKED", "MOST_FILLING"):
        monkeypatch.setattr(kv_tiles, bound, 1)  # and unpacked by itself
    assert torch.equal(whole, kv.kv_attention(*arguments))


def test_scales_far_apart_lose_nothing() -> None:
    cache = Cache(1, 1, 128, 4, 600)
    k, v = cache.states(1, 600) * 0.2, cache.states(1, 600)
    v[:, :, ::2] *= 2e-4
    v[:, :, 7] *= 3000
    k[:, :, 7] *= 0.01
    cache.append(k.contiguous(), v.contiguous(), _lengths(0))
    for tokens, sharp in ((1, 6e-4), (40, 2e-2)):  # scores of several hundred: 2^-12 of one is much
        _check(cache, cache.states(8, tokens) * 300, _lengths(600), bound=sharp)
        _check(cache, cache.states(8, tokens) * 1e-4, _lengths(600))


def test_equal_inputs_give_equal_bits_and_graphs_follow_the_lengths_on_the_card() -> None:
    cache = Cache(2, 2, 128, 4, 3000)
    cache.fill(2999)
    q, lengths, start = cache.states(16, 1), _lengths(2000, 100), _lengths(2000, 100)
    k, v = cache.states(2, 1), cache.states(2, 1)
    again = [kv.kv_attention(*cache.arguments(q, lengths, None, 0, 0.0)) for _ in range(3)]
    assert all(torch.equal(again[0], other) for other in again)

    def step() -> torch.Tensor:
        cache.append(k, v, start)
        return kv.kv_attention(*cache.arguments(q, lengths, None, 0, 0.0))

    graph, out = captured(step)
    for a, b in ((2000, 100), (1, 2999), (64, 65)):
        start.copy_(_lengths(a - 1, b - 1))
        lengths.copy_(_lengths(a, b))
        graph.replay()
        alone = cache.codes.clone(), cache.params.clone()
        cache.append(k, v, start)
        assert torch.equal(alone[0], cache.codes)
        assert torch.equal(alone[1].view(torch.int16), cache.params.view(torch.int16))
        assert torch.equal(out, kv.kv_attention(*cache.arguments(q, lengths, None, 0, 0.0)))


def test_what_does_not_fit_is_refused_before_a_launch() -> None:
    cache = Cache(1, 2, 128, 4, 100)
    cache.fill(64)
    q, lengths = cache.states(3, 1), _lengths(64)
    with pytest.raises(UsageError, match="do not divide"):
        kv.kv_attention(*cache.arguments(q, lengths, None, 0, 0.0))
    with pytest.raises(UsageError, match="on different devices"):
        kv.kv_attention(*cache.arguments(cache.states(4, 1), lengths.cpu(), None, 0, 0.0))
    with pytest.raises(UsageError, match="stride"):
        kv.kv_attention(
            *cache.arguments(
                cache.states(4, 1).transpose(1, 3).contiguous().transpose(1, 3), lengths, None, 0, 0.0
            )
        )
