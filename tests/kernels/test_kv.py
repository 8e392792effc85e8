"""The quantized cache on a CPU: what codes mean, masks, chunks, sharing of heads, sizes, refusals."""

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels.quarot import calls, kv, kv_checks, kv_launch, kv_layout, kv_reference  # noqa: E402
from w4pack.kernels.quarot.transform import Transform, apply  # noqa: E402


class Cache:
    """Scattered pages of a few sequences, and the tokens they were filled with."""

    def __init__(self, batch: int, kv_heads: int, size: int, bits: int, capacity: int, seed: int = 0) -> None:
        self.bits, self.size, self.key = bits, size, Transform.planned(size).key
        self.random = torch.Generator().manual_seed(seed)
        each = kv_layout.pages_of(capacity)
        self.codes, self.params = kv_layout.empty(batch * each + 2, kv_heads, size, bits, "cpu")
        self.codes.fill_(0x5A)
        self.params.fill_(float("nan"))
        order = torch.randperm(batch * each + 2, generator=self.random)[: batch * each]
        self.table = order.reshape(batch, each).int()
        self.k, self.v = (self.states(batch, kv_heads, capacity) for _ in range(2))

    def states(self, batch: int, heads: int, tokens: int) -> torch.Tensor:
        """Random (batch, heads, tokens, size)."""
        return torch.randn((batch, heads, tokens, self.size), generator=self.random)

    def append(self, begin: int, end: int) -> None:
        """Write tokens begin to end of every sequence."""
        start = torch.full((len(self.table),), begin, dtype=torch.int32)
        k, v = self.k[:, :, begin:end], self.v[:, :, begin:end]
        kv.kv_append(k, v, self.codes, self.params, self.table, start, self.key, 0.95, 0.9, self.bits)

    def attend(
        self, q: torch.Tensor, lengths: list[int], first: list[int] | None = None, **rule: float
    ) -> torch.Tensor:
        """Run the operator."""
        padding = None if first is None else torch.tensor(first, dtype=torch.int32)
        return kv.kv_attention(
            q,
            self.codes,
            self.params,
            self.table,
            torch.tensor(lengths, dtype=torch.int32),
            padding,
            self.size**-0.5,
            int(rule.get("window", 0)),
            rule.get("softcap", 0.0),
            self.key,
            self.bits,
        )

    def exact(
        self, q: torch.Tensor, row: int, length: int, first: int, window: int, softcap: float
    ) -> torch.Tensor:
        """Attention of one sequence in fp64, query by query and slot by slot, over dequantized K and V."""
        k = _fake(
            apply(self.k[row], Transform.of(self.key)), 0.95, self.bits
        )  # fp32: a tie falls as it does there
        v = _fake(self.v[row].double(), 0.9, self.bits)
        heads, tokens, _ = q.shape
        out = torch.zeros((tokens, heads, self.size), dtype=torch.float64)
        turned = apply(q.double(), Transform.of(self.key))
        for head, i in itertools.product(range(heads), range(tokens)):
            shared, position = head // (heads // len(k)), length - tokens + i
            slots = [j for j in range(first, position + 1) if not window or j > position - window]
            if not slots:
                continue
            x = k[shared][slots] @ turned[head, i] / math.sqrt(self.size)
            x = softcap * torch.tanh(x / softcap) if softcap else x
            out[i, head] = torch.softmax(x, 0) @ v[shared][slots]
        return out


def _fake(x: torch.Tensor, clip: float, bits: int) -> torch.Tensor:
    """What the cache gives back, written down once more, with Python's own rounding (half to even)."""
    top, rows = 2**bits - 1, x.float().reshape(-1, x.shape[-1])
    made = torch.empty_like(rows, dtype=torch.float64)
    for n, row in enumerate(rows):
        ratio = torch.tensor(clip, dtype=torch.float32)
        low, high = row.min().clamp(max=0) * ratio, row.max().clamp(min=0) * ratio
        s = max(((high - low) / top).half().item(), 2.0**-14)
        z = min(round(float(-low / torch.tensor(s))), top)
        codes = [min(max(round(value) + z, 0), top) for value in (row / torch.tensor(s)).tolist()]
        made[n] = torch.tensor([(code - z) * s for code in codes], dtype=torch.float64)
    return made.reshape(x.shape)


def _close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return float((found.double() - exact).norm()) < 2e-5 * float(exact.norm()) + 1e-12


@pytest.mark.parametrize("size", kv_layout.HEAD_DIMS)
@pytest.mark.parametrize("bits", kv_layout.BITS)
def test_attention_reads_back_what_was_appended(size: int, bits: int) -> None:
    cache = Cache(2, 2, size, bits, 70)
    cache.append(0, 70)
    q = cache.states(2, 4, 3)
    found = cache.attend(q, [70, 66])
    for row, length in ((0, 70), (1, 66)):
        assert _close(found[row], cache.exact(q[row], row, length, 0, 0, 0.0))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (1, 3.0), (100, 2.0)])
def test_heads_padding_windows_and_caps(heads: int, kv_heads: int, window: int, softcap: float) -> None:
    cache = Cache(2, kv_heads, 64, 4, 30)
    cache.append(0, 30)
    q = cache.states(2, heads, 12)
    found = cache.attend(q, [30, 30], [0, 21], window=window, softcap=softcap)
    for row, first in ((0, 0), (1, 21)):
        assert _close(found[row], cache.exact(q[row], row, 30, first, window, softcap))
    assert (found[1, :3] == 0).all()  # positions 18 to 20 lie before the first slot


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_neither_codes_nor_results(chunk: int) -> None:
    whole, cut = Cache(2, 2, 64, 4, 90), Cache(2, 2, 64, 4, 90)
    whole.append(0, 90)
    for begin in range(0, 90, chunk):
        cut.append(begin, min(90, begin + chunk))
    assert torch.equal(whole.codes, cut.codes)
    assert torch.equal(whole.params.view(torch.int16), cut.params.view(torch.int16))
    q = whole.states(2, 4, 90)
    parts = [
        cut.attend(q[:, :, begin : begin + chunk], [min(90, begin + chunk)] * 2)
        for begin in range(0, 90, chunk)
    ]
    assert torch.allclose(torch.cat(parts, 1), whole.attend(q, [90, 90]), atol=1e-5)


def test_sequences_start_where_they_say_and_touch_no_other_row() -> None:
    cache = Cache(2, 1, 64, 4, 100)
    before = cache.codes.clone()
    k = cache.states(2, 1, 2)
    start = torch.tensor([63, 5], dtype=torch.int32)
    kv.kv_append(k, k, cache.codes, cache.params, cache.table, start, "", 1.0, 1.0, 4)
    changed = (cache.codes != before).any(-1).nonzero()[:, [0, 3]].unique(dim=0).tolist()
    t = cache.table.tolist()
    assert sorted(changed) == sorted([[t[0][0], 63], [t[0][1], 0], [t[1][0], 5], [t[1][0], 6]])


@pytest.mark.parametrize("bits", kv_layout.BITS)
def test_nibbles_scales_and_zeros_lie_where_the_layout_says(bits: int) -> None:
    codes, params = kv_layout.empty(1, 1, 64, bits, "cpu")
    v = torch.zeros(1, 1, 1, 64)
    v[..., 0], v[..., 1] = -1.0, 2.0
    table, start = torch.zeros((1, 1), dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    kv.kv_append(torch.zeros_like(v), v, codes, params, table, start, "", 1.0, 1.0, bits)
    top = 2**bits - 1
    row = codes[0, 1, 0, 9].tolist()
    assert params[0, 1, 0, 9].tolist() == [torch.tensor(3 / top).half().item(), top // 3]
    assert row[:2] == ([0 | top << 4, 5 | 5 << 4] if bits == 4 else [0, top])
    assert params[0, 0, 0, 9].tolist() == [2.0**-14, 0.0]  # all zeros
    assert not codes[0, 0, 0, 9].any()


@pytest.mark.parametrize("value", [0.0, 3.7, -3.7, 1e-7, -1e-7, 65504.0])
def test_rows_of_one_value_come_back_within_half_a_step(value: float) -> None:
    codes, params = kv_layout.empty(1, 1, 64, 4, "cpu")
    x = torch.full((1, 1, 1, 64), value)
    table, start = torch.zeros((1, 1), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    kv.kv_append(x, x, codes, params, table, start, "", 1.0, 1.0, 4)
    _, v = kv_reference.gather(codes, params, table[0], 1, 4)
    step = float(params[0, 1, 0, 0, 0])
    assert torch.isfinite(params[0, :, :, 0]).all() and step >= 2.0**-14
    assert float((v - value).abs().max()) <= max(step / 2, 65504 - 65460)


def test_no_value_leaves_what_fp16_holds() -> None:
    codes, params = kv_layout.empty(1, 1, 64, 4, "cpu")
    x = torch.zeros((1, 1, 1, 64))
    x[..., 0], x[..., 1] = 3e38, -3e38
    table, start = torch.zeros((1, 1), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for bits in kv_layout.BITS:
        codes, params = kv_layout.empty(1, 1, 64, bits, "cpu")
        kv.kv_append(x, x, codes, params, table, start, "", 1.0, 1.0, bits)
        _, v = kv_reference.gather(codes, params, table[0], 1, bits)
        assert float(v.abs().max()) <= 65504


@pytest.mark.parametrize("size", kv_layout.HEAD_DIMS)
def test_r3_leaves_scores_as_they_were(size: int) -> None:
    transform = Transform.planned(size)
    q, k = (
        torch.randn((5, size), dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        for n in (1, 2)
    )
    plain, turned = q @ k.T, apply(q, transform) @ apply(k, transform).T
    assert float((plain - turned).norm() / plain.norm()) < 1e-12


def test_bytes_are_counted_from_kv_heads() -> None:
    assert 32 * 4 * 8 * 128 // 2 * 2 == 131072  # fp16: 32 layers, 8 of 32 heads, K and V
    assert 32 * kv_layout.token_bytes(8, 128, 4) == 32768 + 32 * 2 * 8 * 4
    for size, bits in itertools.product(kv_layout.HEAD_DIMS, kv_layout.BITS):
        codes, params = kv_layout.empty(3, 2, size, bits, "cpu")
        assert codes.nbytes + params.nbytes == 3 * kv_layout.PAGE * kv_layout.token_bytes(2, size, bits)
    assert 4 * 2 * 64 / kv_layout.token_bytes(2, 64, 4) > 3.5


def _arguments() -> dict[str, object]:
    cache = Cache(1, 2, 64, 4, 64)
    cache.append(0, 64)
    return {
        "q": cache.states(1, 4, 1),
        "codes": cache.codes,
        "params": cache.params,
        "block_table": cache.table,
        "lengths": torch.tensor([64], dtype=torch.int32),
        "first": None,
        "scale": 0.125,
        "window": 0,
        "softcap": 0.0,
        "transform": cache.key,
        "bits": 4,
    }


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("q", torch.zeros(1, 3, 1, 64), "3"),
        ("q", torch.zeros(1, 4, 1, 72), "72"),
        ("q", torch.zeros(1, 4, 1, 64, dtype=torch.float64), "float64"),
        ("params", torch.zeros(3, 2, 2, 64, 2), "float32"),
        ("block_table", torch.tensor([[7]], dtype=torch.int32), "[7]"),
        ("lengths", torch.tensor([65], dtype=torch.int32), "(64, 65)"),
        ("lengths", torch.tensor([0], dtype=torch.int32), "(-1, 0)"),
        ("lengths", torch.tensor([64]), "int64"),
        ("block_table", torch.empty((1, 0), dtype=torch.int32), "0"),
        ("scale", 0.0, "0.0"),
        ("window", -1, "-1"),
        ("softcap", float("nan"), "nan"),
        ("transform", "128:128-sylvester", "128"),
        ("bits", 16, "16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_value(name: str, value: object, found: str) -> None:
    arguments = _arguments()
    kv.kv_attention(*arguments.values())
    with pytest.raises(UsageError) as error:
        kv.kv_attention(*{**arguments, name: value}.values())
    assert error.value.found == found


@pytest.mark.parametrize("name", ["lengths", "first"])
def test_numbers_of_sequences_that_lie_apart_are_refused(name: str) -> None:
    """The kernels read them side by side: every second one would be another sequence's."""
    cache = Cache(2, 2, 64, 4, 64)
    cache.append(0, 64)
    apart = torch.tensor([[64, 0], [63, 0]], dtype=torch.int32)[:, 0]
    given = {**_arguments(), "q": cache.states(2, 4, 1), "block_table": cache.table, "codes": cache.codes}
    given |= {"params": cache.params, "lengths": apart.clone()}
    kv.kv_attention(*{**given, name: apart.clone()}.values())
    with pytest.raises(UsageError, match=f"{name} is not contiguous"):
        kv.kv_attention(*{**given, name: apart}.values())


def test_starts_of_sequences_that_lie_apart_are_refused() -> None:
    cache, apart = Cache(2, 1, 64, 4, 64), torch.zeros((2, 2), dtype=torch.int32)[:, 0]
    k = cache.states(2, 1, 1)
    with pytest.raises(UsageError, match="start is not contiguous"):
        kv.kv_append(k, k, cache.codes, cache.params, cache.table, apart, cache.key, 1.0, 1.0, 4)


class _OnCard(torch.Tensor):
    """A tensor that says it lies on a card."""

    is_cuda = True


@pytest.mark.parametrize("name", ["codes", "params"])
def test_pages_that_start_off_sixteen_bytes_are_refused_for_a_card(name: str) -> None:
    given = _arguments()
    pages = given[name]
    assert isinstance(pages, torch.Tensor)
    whole = torch.empty(pages.numel() + 16, dtype=pages.dtype)
    aligned = -whole.data_ptr() % 16 // pages.element_size()
    for off, fits in ((0, True), (8 // pages.element_size(), False)):
        view = whole[aligned + off :][: pages.numel()].view(pages.shape).as_subclass(_OnCard)
        arguments = calls.Attention(**{**given, name: view})
        if fits:
            kv_checks.attention(arguments)
            continue
        with pytest.raises(UsageError, match=f"{name} starts at an odd address"):
            kv_checks.attention(arguments)


def test_signs_met_first_inside_a_capture_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UsageError, match="the first time while a graph is captured") as error:
        kv_launch._signs(Transform.planned(80).key, 0)
    assert error.value.found == "80:20-paley1,4-sylvester"


def test_unsupported_head_sizes_name_the_set() -> None:
    with pytest.raises(UsageError) as error:
        kv_layout.empty(1, 1, 72, 4, "cpu")
    assert (error.value.expected, error.value.found) == ("64, 80, 96, 128, 256", "72")


def test_fakes_have_the_shapes_of_the_results() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = _arguments()
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments.values()]
        made = kv.kv_attention(*faked)
    assert made.shape == (1, 1, 4, 64)
