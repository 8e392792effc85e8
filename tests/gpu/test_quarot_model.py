"""Artifacts with ``online`` records on a card: codes, sums and layers as on paper, generation, graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import StaticCache  # noqa: E402

import w4pack  # noqa: E402
from gpu.graphs import captured  # noqa: E402
from runtime import quarot_models as models  # noqa: E402
from runtime import quarot_reference as fake  # noqa: E402
from runtime.quarot_calls import check_codes, check_product, record, relative  # noqa: E402
from runtime.quarot_layers import TIES, distances  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NAMES = ("llama", "llama-mha", "qwen2", "qwen3", "gemma2", "mixtral")
TOKENS = torch.randint(3, 256, (2, 70), generator=torch.Generator().manual_seed(0))
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return models.Artifacts(tmp_path_factory)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_codes_are_the_definition_s_and_sums_are_exact(
    name: str, bits: int, made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record(monkeypatch)
    model = w4pack.load(made(name), "cuda", act_bits=bits)
    with torch.no_grad():
        model(TOKENS.cuda())
    calls = [call.on_cpu() for call in calls]
    quantized = [call for call in calls if call.kind != "int_gemm" and call.args[-4] != 16]
    differing = {call.kind: 0 for call in quantized}
    for call in quantized:
        differing[call.kind] += check_codes(call)
    count = sum(call.result[0].numel() for call in quantized)
    print(f"{name} {bits} bit: {differing} of {count} codes differ")
    behind = differing.pop("act_quantize", 0)  # the library's exponential is not the device's: check_codes
    assert sum(differing.values()) <= TIES * count
    assert behind <= (2 if bits == 4 else 10) * TIES * count
    products = [call for call in calls if call.kind == "int_gemm"]
    for call in products:
        check_product(call)
    assert len(products) >= 4 * models.SIZES["num_hidden_layers"]


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_those_of_the_fake_quantized_model(
    name: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    for bits, error, most in distances(made(name), tmp_path / "dense", TOKENS, "cuda"):
        print(f"{name} {bits} bit: a layer is off by {error:.4f}, allowed {most:.4f}")
        assert error < most


@pytest.mark.parametrize("bits", [(4, 4), (8, 8), (16, 4), (8, 16)])
def test_a_card_gives_the_logits_of_a_cpu(bits: tuple[int, int], made: Callable[[str], Path]) -> None:
    """Codes at ties and orders of summation differ, and streams drift from there."""
    logits = []
    for device in ("cpu", "cuda"):
        model = w4pack.load(made("llama"), device, act_bits=bits[0], kv_bits=bits[1])
        with torch.no_grad():
            logits.append(model(TOKENS.to(device)).logits.float().cpu())
    error = relative(logits[1], logits[0])
    print(f"{bits}: the card's logits are off by {error:.4f}")
    assert error < {(4, 4): 0.4, (8, 8): 0.1, (16, 4): 0.15, (8, 16): 0.1}[bits]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_model_on_a_card_that_is_not_the_current_one(name: str, made: Callable[[str], Path]) -> None:
    found = []
    for device in ("cuda:0", "cuda:1"):
        model = w4pack.load(made(name), device)
        tokens = TOKENS.to(device)
        with torch.no_grad():
            found.append(model(tokens).logits.cpu())
        assert (
            model.generate(tokens, attention_mask=torch.ones_like(tokens), **GREEDY).device == tokens.device
        )
    assert torch.cuda.current_device() == 0
    assert torch.equal(*found)


def test_generation_in_every_mode(made: Callable[[str], Path]) -> None:
    """Whether tokens come at once, in chunks or one by one, codes are the same; attention sums in other
    orders, so logits are compared, not tokens."""
    model = w4pack.load(made("llama"), "cuda")
    tokens = TOKENS.cuda()
    with torch.no_grad():
        whole = model(tokens).logits[:, -1].float()
    for how in (
        {},
        {"prefill_chunk_size": 7},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"cache_implementation": "static"},
        {"use_cache": False},
    ):
        kept = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            output_logits=True,
            return_dict_in_generate=True,
            **GREEDY | how,
        )
        assert kept.sequences.shape[1] == 76
        rows = len(kept.sequences) // 2
        if "num_beams" not in how:
            assert relative(kept.logits[0][::rows].float(), whole) < 0.15, how


def test_padded_rows_are_those_that_stand_alone(made: Callable[[str], Path]) -> None:
    model = w4pack.load(made("llama"), "cuda")
    short = TOKENS[:1, :41].cuda()
    padded, mask = TOKENS.clone().cuda(), torch.ones_like(TOKENS).cuda()
    padded[0, :29], padded[0, 29:], mask[0, :29] = 0, short[0], 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(short).logits
        both = model(padded, attention_mask=mask, position_ids=positions).logits
    assert relative(both[:1, 29:].float(), alone.float()) < 0.02


def test_decoding_is_captured_and_replayed(made: Callable[[str], Path]) -> None:
    model = w4pack.load(made("llama"), "cuda")
    tokens = TOKENS[:, :20].cuda()

    def prefilled() -> Any:
        cache = StaticCache(model.config, 64)
        with torch.no_grad():
            model(tokens, use_cache=True, **{fake.CACHE: cache})
        return cache

    eager_cache, cache = prefilled(), prefilled()
    token = torch.zeros(2, 1, dtype=torch.int64, device="cuda")

    def step(held: Any) -> Any:
        with torch.no_grad():
            return model(token, use_cache=True, **{fake.CACHE: held}).logits

    warm = prefilled()
    graph, found = captured(lambda: step(cache), warm=lambda: step(warm))
    for number in range(5):
        token.fill_(10 + number)
        graph.replay()
        torch.testing.assert_close(found, step(eager_cache), rtol=0, atol=0)
    w4pack.sync_cache(cache)
    assert [layer.count for layer in cache.layers] == [layer.count for layer in eager_cache.layers]
    cache.crop(-3)
    eager_cache.crop(-3)
    torch.testing.assert_close(step(cache), step(eager_cache), rtol=0, atol=0)
