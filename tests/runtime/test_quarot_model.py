"""Artifacts with ``online`` records in transformers: every site's codes, every layer, the logits.

The expected values are those of ``quarot_reference``, fp32 and fp64, with Hadamard matrices from their
definition. Layers are compared from the same input: after a first code that differs at a tie, streams drift.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import w4pack  # noqa: E402
from runtime import quarot_models as models  # noqa: E402
from runtime import quarot_reference as fake  # noqa: E402
from runtime.quarot_calls import (  # noqa: E402
    Call,
    check_codes,
    check_product,
    forced,
    layer_inputs,
    record,
    relative,
)
from runtime.quarot_layers import LAYER, TIES, distances  # noqa: E402
from w4pack.convert.rotate.constructions import matrix  # noqa: E402

DENSE = ("llama", "llama-mha", "qwen2", "qwen3", "gemma2")
EXPERTS = ("mixtral",)
OTHERS = ("llama-biased", "phi3", "olmo2", "qwen2-moe")  # other parts of a layer
TOKENS = torch.randint(3, 256, (2, 33), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return models.Artifacts(tmp_path_factory)


# ---- the codes of every site -----------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    return record(monkeypatch)


@pytest.mark.parametrize("name", (*DENSE, *EXPERTS))
def test_codes_are_the_definition_s_and_sums_are_exact(
    name: str, made: Callable[[str], Path], calls: list[Call]
) -> None:
    model = w4pack.load(made(name))
    with torch.no_grad():
        model(TOKENS)
    quantized = [call for call in calls if call.kind != "int_gemm" and call.args[-4] != 16]
    differing = sum(check_codes(call) for call in quantized)
    assert differing <= TIES * sum(call.result[0].numel() for call in quantized)
    products = [call for call in calls if call.kind == "int_gemm"]
    for call in products:
        check_product(call)
    layers = models.SIZES["num_hidden_layers"]
    assert len(products) >= 4 * layers
    if name in DENSE:  # q/k/v and gate/up are one product each
        assert len(products) == len(quantized) == 4 * layers


# ---- layers from the same input --------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group", "inner"), [(8, 64, 320), (4, -1, 320), (4, 32, 328)], ids=str)
def test_other_weights_are_multiplied_exactly(
    bits: int, group: int, inner: int, calls: list[Call], tmp_path: Path
) -> None:
    """8-bit weights read another order of codes; 328 columns are padded."""
    out = models.artifact("llama", tmp_path, bits=bits, group=group, intermediate_size=inner)
    with torch.no_grad():
        w4pack.load(out)(TOKENS)
    products = [call for call in calls if call.kind == "int_gemm"]
    for call in products:
        check_product(call)
    quantized = [call for call in calls if call.kind != "int_gemm"]
    assert sum(check_codes(call) for call in quantized) <= TIES * sum(c.result[0].numel() for c in quantized)
    orders = {call.args[8] for call in products}
    assert orders == {3 if bits == 8 else 1}
    assert {call.args[9] for call in products} == {192, 256, 320 if inner == 320 else 384}


@pytest.mark.parametrize("name", (*DENSE, *EXPERTS, *OTHERS))
def test_layers_are_those_of_the_fake_quantized_model(
    name: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    for _, error, most in distances(made(name), tmp_path / "dense", TOKENS, "cpu"):
        assert error < most


def test_a_transform_that_is_left_out_is_seen(made: Callable[[str], Path], tmp_path: Path) -> None:
    """The comparison of layers fails where one record of the model is not applied."""
    out = made("llama")
    inputs, found = layer_inputs(w4pack.load(out, act_bits=16, kv_bits=16), TOKENS)
    exact = fake.FakeModel(out, tmp_path / "plain", 16, 16)
    exact.records = {key: r for key, r in exact.records.items() if key[0] != "mlp_mid"}
    wanted = forced(exact.model, inputs, lambda: exact.logits(TOKENS))
    assert relative(found[0] - inputs[0].float(), wanted[0] - inputs[0].float()) > 10 * LAYER


NEAR: list[tuple[str, tuple[int, int], float]] = [
    ("llama", (16, 16), 0.02),
    ("llama", (16, 4), 0.2),
    ("llama", (8, 8), 0.1),
    ("gemma2", (16, 8), 0.03),  # a soft cap, and a window in every second layer
    ("mistral", (16, 8), 0.03),  # a window
    ("phi3", (16, 8), 0.03),  # q/k/v and gate/up in one tensor each
]


@pytest.mark.parametrize(("name", "bits", "most"), NEAR, ids=str)
def test_logits_are_near_the_fake_quantized_model_s(
    name: str, bits: tuple[int, int], most: float, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two random layers, relative error of all logits: what 16-bit streams and the codes they move leave."""
    out = made(name)
    model = w4pack.load(out, act_bits=bits[0], kv_bits=bits[1])
    with torch.no_grad():
        found = model(TOKENS).logits.float()
    wanted = fake.FakeModel(out, tmp_path / "dense", *bits).logits(TOKENS)
    assert relative(found, wanted) < most


def test_matrices_of_the_reference_are_orthogonal() -> None:
    """The reference's Hadamard matrices are matrices, in the direction that records mean."""
    h = fake.hadamard({"order": 24, "block": 12, "factors": [[12, "paley1"]]})
    torch.testing.assert_close(h @ h.T, torch.eye(24, dtype=torch.float64))
    whole = torch.tensor(matrix(12, "paley1"), dtype=torch.float64)
    assert torch.equal((h[:12, :12] * 12**0.5).round(), whole)
    assert not torch.equal(h, h.T)
