"""Layers of the quantized cache: after each operation they hold, bit for bit, what a plain list would."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, LlamaConfig, MistralConfig, StaticCache  # noqa: E402

from runtime import quarot_reference as fake  # noqa: E402
from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels.hf import kv_cache  # noqa: E402
from w4pack.kernels.hf.kv_adopt import adopt, sync_cache  # noqa: E402
from w4pack.kernels.hf.kv_attention import ATTENTION, _Before  # noqa: E402
from w4pack.kernels.hf.kv_cache import KVLayer  # noqa: E402
from w4pack.kernels.hf.kv_pages import KVPlan  # noqa: E402
from w4pack.kernels.hf.kv_steps import Steps  # noqa: E402
from w4pack.kernels.quarot import kv_layout, kv_reference  # noqa: E402
from w4pack.kernels.quarot.transform import Transform  # noqa: E402

HEADS, SIZE = 2, 64
PLAIN = KVPlan(4, 0.95, 0.9, "")
R3 = Transform.planned(SIZE).key
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": HEADS}


class Twin:
    """A cache of two layers, and beside it each row's values in plain tensors."""

    def __init__(
        self, rows: int, plan: KVPlan = PLAIN, *, static: int | None = None, window: int = 0
    ) -> None:
        sizes = {**SIZES, "head_dim": SIZE}
        config = MistralConfig(**sizes, sliding_window=window) if window else LlamaConfig(**sizes)
        self.cache = StaticCache(config, static) if static else DynamicCache(config=config)
        self.plan, self.window = plan, window
        self.steps = adopt(self.cache, [plan, plan])
        self.held = [[torch.zeros(2, HEADS, 0, SIZE) for _ in range(rows)] for _ in range(2)]
        self.random = torch.Generator().manual_seed(0)

    def draw(self, *shape: int) -> Any:
        return torch.randn(*shape, generator=self.random).half()

    def add(self, tokens: int, mask: Any = None) -> None:
        """Pass tokens through both layers, and their attention; compare the attention."""
        rows = len(self.held[0])
        valid = torch.ones(rows, tokens, dtype=torch.bool)
        if mask is not None:
            valid = mask[:, -tokens:].bool()
            self.steps.begin(rows, tokens, torch.device("cpu"), mask)
        for number in range(2):
            k, v = self.draw(rows, HEADS, tokens, SIZE), self.draw(rows, HEADS, tokens, SIZE)
            handle, _ = self.cache.update(k, v, number)
            q = self.draw(rows, 2 * HEADS, tokens, SIZE)
            found = handle.attend(q, 0.125, self.window, 0.0)
            for row, keep in enumerate(valid):
                made = torch.stack([self.rounded(k[row], 0), self.rounded(v[row], 1)])[:, :, keep]
                self.held[number][row] = torch.cat([self.held[number][row], made], 2)
                wanted = self.attention(number, row, q[row][:, keep])
                torch.testing.assert_close(found[row][keep].float(), wanted, atol=2e-3, rtol=2e-3)

    def rounded(self, x: Any, side: int) -> Any:
        plan = self.plan
        wide = kv_reference.turn(x, plan.transform) if side == 0 else x.float()
        return fake.cached(wide, plan.bits, plan.clip_v if side else plan.clip_k)

    def attention(self, number: int, row: int, q: Any) -> Any:
        """Attention of a row's last queries, in fp32 (T, heads, size)."""
        k, v = self.held[number][row].repeat_interleave(2, 1)
        turned = kv_reference.turn(q, self.plan.transform)
        total, new = k.shape[1], q.shape[1]
        place, slot = torch.arange(total - new, total)[:, None], torch.arange(total)
        seen = (slot <= place) & (slot > place - (self.window or total + 1))
        scores = (turned @ k.transpose(-1, -2) * 0.125).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1)

    def check(self) -> None:
        """Compare all that both layers hold, to the bit."""
        for number, layer in enumerate(self.cache.layers):
            for row, held in enumerate(self.held[number]):
                length = int(self.steps.lengths[row])
                assert length == held.shape[2]
                k, v = kv_reference.gather(
                    layer.keys, layer.values, layer.store.table[row], length, self.plan.bits
                )
                assert torch.equal(torch.stack([k, v]), held)


@pytest.fixture(params=[PLAIN, KVPlan(8, 1.0, 1.0, R3)], ids=["4 bit", "8 bit and R3"])
def twin(request: pytest.FixtureRequest) -> Twin:
    return Twin(3, request.param)


@pytest.mark.parametrize("chunks", [(1,) * 9, (7, 7, 5), (64, 64, 1), (130, 1, 1)], ids=str)
def test_chunks_do_not_change_what_is_held(chunks: tuple[int, ...], twin: Twin) -> None:
    for tokens in chunks:
        twin.add(tokens)
    twin.check()


def test_rows_are_reordered_repeated_and_selected(twin: Twin) -> None:
    def take(rows: list[int]) -> None:
        twin.held = [[layer[row] for row in rows] for layer in twin.held]

    mask = torch.ones(3, 70, dtype=torch.bool)
    mask[1, :9], mask[2, :30] = False, False  # rows of different lengths
    twin.add(70, mask)
    twin.cache.reorder_cache(torch.tensor([2, 0, 0]))
    take([2, 0, 0])
    twin.check()
    twin.add(3)
    twin.cache.batch_select_indices(torch.tensor([1, 0]))
    take([1, 0])
    twin.check()
    twin.cache.batch_repeat_interleave(2)
    take([0, 0, 1, 1])
    twin.add(2)
    twin.check()


def test_tokens_are_taken_back(twin: Twin) -> None:
    twin.add(66)
    twin.cache.crop(-5)
    twin.held = [[row[:, :, :61] for row in layer] for layer in twin.held]
    assert twin.cache.get_seq_length() == 61
    twin.check()
    twin.add(4)
    twin.check()
    with pytest.raises(UsageError, match="negative"):
        twin.cache.crop(5)


def test_padding_takes_no_place_wherever_it_stands(twin: Twin) -> None:
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, :4] = 0  # left
    mask[1, 6:] = 0  # right
    mask[2, 3] = 0  # in the middle
    twin.add(9, mask)
    twin.check()
    assert twin.steps.lengths.tolist() == [5, 6, 8]
    longer = torch.cat([mask, torch.ones(3, 1, dtype=torch.int64)], 1)
    longer[1, -1] = 0  # a row that has ended
    twin.add(1, longer)
    twin.check()
    twin.cache.crop(-2)  # one slot of the decoding, one of the prompt
    twin.held = [
        [row[:, :, :keep] for row, keep in zip(layer, (4, 6, 7), strict=True)] for layer in twin.held
    ]
    twin.check()


def test_a_static_cache_holds_the_same_and_says_when_it_is_full() -> None:
    twin = Twin(2, static=70)
    twin.add(60)
    address = twin.cache.layers[0].keys.data_ptr()
    twin.add(4)
    twin.cache.reorder_cache(torch.tensor([1, 0]))
    twin.held = [layer[::-1] for layer in twin.held]
    twin.check()
    assert twin.cache.layers[0].keys.data_ptr() == address
    assert int(twin.cache.get_seq_length()) == 64
    mask = torch.zeros(2, 70, dtype=torch.bool)  # as long as the cache: what was and what is passed counts
    mask[:, :66] = True
    twin.steps.begin(2, 2, torch.device("cpu"), mask)
    assert twin.steps.lengths.tolist() == [66, 66]
    assert int(twin.cache.get_seq_length()) == 64  # until the layers have their tokens
    with pytest.raises(UsageError, match="full"):
        Twin(1, static=70).add(129)
    twin.cache.reset()
    assert int(twin.cache.get_seq_length()) == 0


def replayed(twin: Twin, tokens: int) -> None:
    """Leave a cache as passes leave it that were replayed in a graph: the host has not counted them."""
    twin.steps.count -= tokens
    if twin.steps.mask is not None:
        twin.steps.mask = twin.steps.mask[:, : twin.steps.count]
    for layer in twin.cache.layers:
        layer.count -= tokens


@pytest.mark.parametrize("window", [0, 20])
def test_replayed_tokens_are_counted_when_asked(window: int) -> None:
    twin = Twin(2, static=200, window=window)
    twin.add(60)
    for _ in range(7):
        twin.add(1)
    replayed(twin, 7)
    sync_cache(twin.cache)
    assert [layer.count for layer in twin.cache.layers] == [67, 67]
    assert int(twin.cache.get_seq_length()) == 67
    twin.add(3)
    twin.cache.crop(-4)
    twin.held = [[row[:, :, :66] for row in layer] for layer in twin.held]
    twin.add(1)
    if not window:
        twin.check()
    sync_cache(twin.cache)  # nothing was replayed: nothing changes
    assert twin.cache.layers[1].count == 67


def test_replayed_padding_takes_a_mask() -> None:
    twin = Twin(2, static=200)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    twin.add(8, mask[:, :8])
    for length in range(9, 13):
        mask[1, 10:] = 0  # this row has ended
        twin.add(1, mask[:, :length])
    replayed(twin, 4)
    with pytest.raises(UsageError, match="not known") as seen:
        sync_cache(twin.cache)
    assert "[8, 10]" in str(seen.value)
    with pytest.raises(UsageError, match="another size"):
        sync_cache(twin.cache, mask[:, :11])
    sync_cache(twin.cache, torch.cat([mask, torch.zeros(2, 188)], 1))  # as long as the cache
    twin.check()
    twin.cache.crop(-3)
    twin.held = [[row[:, :, :keep] for row, keep in zip(layer, (5, 9), strict=True)] for layer in twin.held]
    twin.check()


@pytest.mark.parametrize("room", [1, 30, 64, 65])
def test_a_static_cache_ends_where_it_was_asked_to(room: int) -> None:
    """Not with its last page, in one pass or in several, and after it was emptied."""
    for passes in ([room + 1], [room, 1], [room + 40]):
        twin = Twin(1, static=room)
        for tokens in passes[:-1]:
            twin.add(tokens)
        with pytest.raises(UsageError, match="full") as seen:
            twin.add(passes[-1])
        assert (seen.value.expected, seen.value.found) == (f"at most {room} tokens", str(sum(passes)))
        twin.cache.reset()
        twin.held = [[row[:, :, :0] for row in layer] for layer in twin.held]
        twin.add(room)


def test_replays_past_the_room_are_an_error() -> None:
    twin = Twin(1, static=64)
    twin.add(64)
    sync_cache(twin.cache)
    twin.steps.position.add_(1)
    twin.steps.lengths.add_(1)
    with pytest.raises(UsageError, match="full") as seen:
        sync_cache(twin.cache)
    assert (seen.value.expected, seen.value.found) == ("at most 64 tokens", "65")


def test_a_cache_of_other_layers_has_nothing_to_count() -> None:
    config = LlamaConfig(**SIZES, head_dim=SIZE)
    cache = DynamicCache(config=config)
    sync_cache(cache)
    cache.update(torch.zeros(1, HEADS, 3, SIZE), torch.zeros(1, HEADS, 3, SIZE), 0)
    sync_cache(cache)
    assert cache.get_seq_length() == 3
    adopt(empty := DynamicCache(config=config), [PLAIN, PLAIN])
    sync_cache(empty)
    assert empty.get_seq_length() == 0


@pytest.mark.parametrize("static", [None, 300])
def test_a_window_keeps_its_pages_only(monkeypatch: pytest.MonkeyPatch, static: int | None) -> None:
    monkeypatch.setattr(kv_cache, "CHUNK", 16)
    twin = Twin(2, window=20, static=static)
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[1, :37] = False
    twin.add(150, mask)  # longer than a chunk, longer than the pages: appended and read in pieces
    for _ in range(70):
        twin.add(1)
    twin.add(40)
    layer = twin.cache.layers[0]
    assert layer.store.each == layer.most_pages == 2
    twin.cache.crop(-16)
    twin.held = [[row[:, :, :-16] for row in layer] for layer in twin.held]
    twin.add(1)
    with pytest.raises(UsageError, match="window"):
        twin.cache.crop(-17)


def test_bytes_are_those_of_the_tokens() -> None:
    twin = Twin(2, static=128)
    twin.add(1)
    layer = twin.cache.layers[0]
    assert layer.nbytes == 2 * 128 * kv_layout.token_bytes(HEADS, SIZE, 4)
    assert 2 * 128 * 2 * HEADS * SIZE * 2 / layer.nbytes > 3.5  # of fp16


def test_layers_that_fall_out_of_step_are_an_error() -> None:
    twin = Twin(1)
    twin.add(3)
    k = twin.draw(1, HEADS, 2, SIZE)
    twin.cache.update(k, k, 0)
    with pytest.raises(UsageError, match="same tokens"):
        twin.cache.update(twin.draw(1, HEADS, 1, SIZE), twin.draw(1, HEADS, 1, SIZE), 1)
    with pytest.raises(UsageError, match="batch"):
        Twin(1).steps.__class__.begin(twin.steps, 2, 1, torch.device("cpu"))


def test_foreign_caches_are_refused() -> None:
    config = LlamaConfig(**SIZES, head_dim=SIZE)
    filled = DynamicCache(config=config)
    filled.update(torch.zeros(1, HEADS, 1, SIZE), torch.zeros(1, HEADS, 1, SIZE), 0)
    with pytest.raises(UsageError, match="no quantized layers"):
        adopt(filled, [PLAIN])
    bare = DynamicCache()
    steps = adopt(bare, [PLAIN])
    bare.update(torch.zeros(1, HEADS, 1, SIZE), torch.zeros(1, HEADS, 1, SIZE), 0)
    assert isinstance(bare.layers[0], KVLayer)
    assert adopt(bare, [PLAIN]) is steps


@pytest.mark.parametrize(
    ("size", "value", "text"), [(72, 72, "head size"), (64, 128, "different sizes")], ids=["72", "two sizes"]
)
def test_head_sizes_without_kernel_are_refused(size: int, value: int, text: str) -> None:
    layer = KVLayer(PLAIN, Steps())
    with pytest.raises(UsageError, match=text):
        layer.update(torch.zeros(1, 1, 1, size).half(), torch.zeros(1, 1, 1, value).half())


def test_the_hook_reads_positional_arguments_too() -> None:
    decoder = transformers.LlamaModel(LlamaConfig(**SIZES, head_dim=SIZE, hidden_size=64, vocab_size=8))
    decoder.set_attn_implementation(ATTENTION)
    before = _Before(decoder, {layer.self_attn: PLAIN for layer in decoder.layers})
    given = before(decoder, (torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5)), {"use_cache": True})[1]
    cache = given[fake.CACHE]
    assert cache.layers[0].steps.lengths.tolist() == [5, 5]
    packed = {"input_ids": torch.zeros(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])}
    with pytest.raises(UsageError, match="one sequence"):
        before(decoder, (), packed)
