"""Guides of keys: sums over a model's attention against slow loops, and what they are good for."""

import itertools
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from w4pack.convert.core.families import natural_key  # noqa: E402
from w4pack.convert.events import Quiet  # noqa: E402
from w4pack.convert.files.checkpoint import open_checkpoint  # noqa: E402
from w4pack.convert.files.local import LocalStore  # noqa: E402
from w4pack.convert.files.provider import Added  # noqa: E402
from w4pack.convert.files.tensorfile import TensorInfo  # noqa: E402
from w4pack.convert.jobs.running import Running  # noqa: E402
from w4pack.convert.modeljobs import measuring  # noqa: E402
from w4pack.convert.modeljobs.prepared import prepare  # noqa: E402
from w4pack.convert.planning.options import ConvertOptions  # noqa: E402
from w4pack.convert.planning.quantize_options import QuantizeOptions  # noqa: E402
from w4pack.convert.quantize.activations import fake_keys  # noqa: E402
from w4pack.convert.quantize.guides import WATCHED, Sums, watched  # noqa: E402
from w4pack.convert.source.detect import read_source  # noqa: E402
from w4pack.convert.source.online_places import GUIDE  # noqa: E402
from w4pack.convert.source.reading import DetectOptions  # noqa: E402

SIZE = 8


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _slow(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, cap: float
) -> tuple[torch.Tensor, ...]:
    """The sums of one row, query by query and key by key, in float64."""
    group = q.shape[0] // k.shape[0]
    keys, weights = torch.zeros(k.shape[0], SIZE).double(), torch.zeros(k.shape[0]).double()
    queries = torch.zeros(k.shape[0], SIZE, SIZE).double()
    for head, t in itertools.product(range(q.shape[0]), range(q.shape[1])):
        at, x = head // group, q[head, t].double()
        slots = seen[t].nonzero().flatten().tolist()
        scores = torch.stack([x @ k[at, j].double() for j in slots]) / math.sqrt(SIZE)
        p = torch.softmax(cap * torch.tanh(scores / cap) if cap else scores, 0)
        out = sum(p[n] * v[at, j].double() for n, j in enumerate(slots))
        for n, j in enumerate(slots):
            m = p[n] ** 2 * (v[at, j].double() - out).square().sum()
            keys[at] += m * (x @ x) * k[at, j].double()
            weights[at] += m * (x @ x)
            queries[at] += m * torch.outer(x, x)
    return keys, weights, queries


@pytest.mark.parametrize("kind", ["causal", "bool", "added", "of heads"])
@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_sums_are_those_of_slow_loops(kind: str, cap: float) -> None:
    q, k, v = _random(2, 4, 6, SIZE), _random(2, 2, 6, SIZE, seed=1), _random(2, 2, 6, SIZE, seed=2)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    if kind != "causal":
        seen = seen & torch.ones(6, 6, dtype=torch.bool).triu(-2)  # a window
    mask = {
        "causal": None,
        "bool": seen[None, None],
        "added": torch.zeros(2, 1, 6, 6).masked_fill(~seen, torch.finfo(torch.float32).min),
        "of heads": seen.expand(1, 4, 6, 6),
    }[kind]
    sums = Sums.empty(2, SIZE)
    sums.add(q, k, v, SIZE**-0.5, mask, cap)
    wanted = [
        sum(parts) for parts in zip(*(_slow(q[n], k[n], v[n], seen, cap) for n in range(2)), strict=True)
    ]
    for found, exact in zip((sums.keys, sums.weights, sums.queries), wanted, strict=True):
        assert (found - exact).norm() < 1e-5 * exact.norm()


def test_a_guide_is_the_weighted_mean_and_the_first_direction() -> None:
    sums = Sums.empty(1, SIZE)
    sums.keys[0], sums.weights[0] = torch.arange(8.0).double() * 4, 4.0
    unit = torch.full((SIZE,), -(SIZE**-0.5)).double()
    sums.queries[0] = 2 * torch.eye(SIZE).double() + 18 * torch.outer(unit, unit)  # 20 and seven times 2
    offset, direction = sums.guide(None)
    assert torch.equal(offset[0], torch.arange(8.0)) and offset.dtype == torch.float32
    # |e|^2 + (w e)^2 = e^T C e / 2 for w = 3 of the unit vector, turned so that its largest entry is positive
    assert torch.allclose(direction[0], torch.full((SIZE,), 3 * SIZE**-0.5))
    turned = sums.guide(lambda x: x.flip(-1))
    assert torch.equal(turned[0, 0], torch.arange(8.0).flip(-1))
    sums.fixed = True
    assert not sums.guide(None)[0].any() and sums.guide(None)[1].any()


def test_nothing_seen_and_one_query_give_finite_guides() -> None:
    assert not Sums.empty(3, SIZE).guide(None).any()
    one = Sums.empty(1, SIZE)
    one.add(_random(1, 1, 2, SIZE), _random(1, 1, 2, SIZE), _random(1, 1, 2, SIZE), 1.0, None)
    assert torch.isfinite(one.guide(None)).all()


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": SIZE,
    "vocab_size": 64,
}
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "gemma2": transformers.Gemma2Config(**SIZES, attn_logit_softcapping=2.0, sliding_window=5),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=5),
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("mistral", "eager"), ("gemma2", "eager")],
)
def test_watching_a_layer_changes_nothing_and_sees_every_query(name: str, implementation: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name], attn_implementation=implementation)
    layer, calls = model.eval().model.layers[0], []
    layer.register_forward_pre_hook(lambda m, args, given: calls.append((args, given)), with_kwargs=True)
    sums, tokens = Sums.empty(2, SIZE), torch.arange(24).view(2, 12)
    with torch.no_grad():
        model(tokens, use_cache=False)
        args, given = calls[0]
        before = layer(*args, **given)
        with watched(layer, sums):
            assert layer.self_attn.config._attn_implementation == WATCHED
            seen = layer(*args, **given)
    assert model.config._attn_implementation == implementation
    assert torch.equal(before[0], seen[0])
    guide = sums.guide(None)
    assert (sums.weights > 0).all() and guide[1].any()
    assert sums.fixed == (name == "gemma2") == (not guide[0].any())


def test_sums_stay_where_the_queries_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy for each head and row would wait for the device as often."""
    sums = Sums.empty(2, SIZE)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("moved on the way"))
    sums.add(*(_random(2, 2, 6, SIZE, seed=seed) for seed in range(3)), SIZE**-0.5, None)
    assert (sums.weights > 0).all()
    assert Sums.empty(2, SIZE, "meta").queries.device.type == "meta"


@pytest.mark.parametrize("seen", [True, False])
def test_attention_that_is_not_seen_is_told(
    seen: bool, llama: Path, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = QuantizeOptions(method="gptq", group_size=32, samples=8, seqlen=32, calibration=str(book))
    options = ConvertOptions(quantize=replace(asked, kv_bits=4))
    if not seen:
        monkeypatch.setattr(measuring, "watched", lambda layer, into: nullcontext())
    with open_checkpoint(LocalStore(llama)) as checkpoint:
        source = read_source(checkpoint, DetectOptions())
        prepared = prepare(source, options, None, Running(threads=1))
        found = measuring.measure(prepared, Quiet(), lambda: None)
        made = measuring.settled(prepared, found)
        layers = [n for n in made.provider.names() if n.endswith(GUIDE)]
        assert [bool(made.provider.get(n).any()) for n in layers] == [seen] * len(layers)
    told = [w.where for w in found.warnings if w.code == "guide-empty"]
    assert layers and told == ([] if seen else [", ".join(layers)])


def test_the_scores_that_matter_lose_less_with_a_guide() -> None:
    """Queries share a direction and keys an offset, as they do in trained models."""
    shared, far = 3 * _random(SIZE, seed=7), 6 * _random(SIZE, seed=8)
    q, k, v = (_random(1, heads, 200, SIZE, seed=heads) for heads in (2, 1, 1))
    q, k = q + shared, k + far
    sums = Sums.empty(1, SIZE)
    sums.add(q, k, v, SIZE**-0.5, None)
    guide = sums.guide(None)

    def lost(used: torch.Tensor | None) -> float:
        held = fake_keys(k.transpose(1, 2), 4, 1.0, used).transpose(1, 2)
        causal = {"is_causal": True, "enable_gqa": True}
        attend = torch.nn.functional.scaled_dot_product_attention
        return float((attend(q, held, v, **causal) - attend(q, k, v, **causal)).square().mean())

    offset, direction = (guide * torch.tensor(part)[:, None, None] for part in ([1.0, 0.0], [0.0, 1.0]))
    assert lost(guide) < 0.5 * min(lost(offset), lost(direction))
    assert max(lost(offset), lost(direction)) < 0.7 * lost(None)


def test_added_tensors_stand_among_the_source_s(tmp_path: Path) -> None:
    class Source:
        def names(self) -> list[str]:
            return ["a.2.w", "a.10.w"]

        def info(self, name: str) -> str:
            return f"info of {name}"

        def get(self, name: str, dtype: Any = None) -> tuple[str, Any]:
            return name, dtype

    info = TensorInfo("a.2.g", "F32", (2,), "", 0, 8)
    own = torch.tensor([1.0, 2.0])
    made = Added(Source(), {"a.2.g": info}, {"a.2.g": own})  # type: ignore[arg-type]
    assert made.names() == sorted(["a.2.w", "a.10.w", "a.2.g"], key=natural_key)
    assert made.info("a.2.g") is info and made.info("a.2.w") == "info of a.2.w"  # type: ignore[comparison-overlap]
    assert made.get("a.10.w", torch.float64) == ("a.10.w", torch.float64)  # type: ignore[comparison-overlap]
    given = made.get("a.2.g")
    given += 1  # the caller's own
    assert torch.equal(own, torch.tensor([1.0, 2.0]))
    assert made.get("a.2.g", torch.float16).dtype == torch.float16
