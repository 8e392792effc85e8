"""Artifacts with ``online`` records in transformers: every site's codes, every layer, the logits.

The expected values are those of ``quarot_reference``, fp32 and fp64, with Hadamard matrices from their
definition. Layers are compared from the same input: after a first code that differs at a tie, streams drift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.nn import functional  # noqa: E402

import w4pack  # noqa: E402
from runtime import quarot_models as models  # noqa: E402
from runtime import quarot_reference as fake  # noqa: E402
from w4pack.convert.rotate.constructions import matrix  # noqa: E402
from w4pack.kernels import reference  # noqa: E402
from w4pack.kernels.quarot import int_ops, orders_int, quantize_ops  # noqa: E402
from w4pack.kernels.quarot.transform import Transform  # noqa: E402

DENSE = ("llama", "llama-mha", "qwen2", "qwen3", "gemma2")
EXPERTS = ("mixtral",)
OTHERS = ("llama-biased", "phi3", "olmo2", "qwen2-moe", "opt")  # other parts of a layer
TOKENS = torch.randint(3, 256, (2, 33), generator=torch.Generator().manual_seed(0))
TIES = 1e-4  # share of codes that may differ, by one
LAYER = 0.01  # relative error of a layer in 16 bit: about 30 roundings to fp16 and bf16-free sums
DRIFT = 0.7  # of what quantization itself changes: roundings to 16 bit move codes inside a layer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def artifact(name: str) -> Path:
        if name not in found:
            found[name] = models.artifact(name, tmp_path_factory.mktemp(name))
        return found[name]

    return artifact


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products are slower on many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- the codes of every site -----------------------------------------------------------------------


class Call(NamedTuple):
    """One call of an operator."""

    kind: str
    args: tuple[Any, ...]
    result: Any


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    found: list[Call] = []
    for module, name in (
        (quantize_ops, "norm_quantize"),
        (quantize_ops, "act_quantize"),
        (quantize_ops, "heads_quantize"),
        (int_ops, "int_gemm"),
    ):
        own = getattr(module, name)

        def call(*args: Any, own: Any = own, name: str = name) -> Any:
            result = own(*args)
            found.append(Call(name, args, result))
            return result

        monkeypatch.setattr(module, name, call)
    return found


def dense_transform(key: str) -> Any:
    """Return the matrix of a transform, float64."""
    t = Transform.of(key)
    return fake.hadamard({"order": t.order, "block": t.block, "factors": t.factors}) if key else None


def exact_values(call: Call) -> tuple[Any, int, float, int]:
    """Return (values (M, K) float64 before quantization, bits, clip, order) of a call."""
    if call.kind == "norm_quantize":
        x, gain, eps, key, bits, clip, order, _ = call.args
        wide = x.double()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y = wide * factor if gain is None else wide * factor * gain.double()
        turn = dense_transform(key)
        return (y if turn is None else y @ turn), bits, clip, order
    if call.kind == "heads_quantize":
        x, heads, key, bits, clip, order, _ = call.args
        apart = x.double().unflatten(-1, (heads, -1)).transpose(-1, -2)
        return (apart @ dense_transform(key)).transpose(-1, -2).flatten(-2), bits, clip, order
    x, activation, key, bits, clip, order, _ = call.args
    y = x
    if activation != "none":
        gate, up = x.float().chunk(2, -1)
        acts = {"silu": functional.silu, "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh")}
        y = (acts[activation](gate) * up).to(x.dtype)
    turn = dense_transform(key)
    return (y.double() if turn is None else y.double() @ turn), bits, clip, order


def check_codes(call: Call) -> int:
    """Check codes and scales of a call; return how many codes differ from the definition's."""
    y, bits, clip, order = exact_values(call)
    codes, scales = call.result
    most = 2 ** (bits - 1) - 1
    exact = y.abs().amax(-1) * clip / most
    torch.testing.assert_close(scales.double(), exact, rtol=2e-5, atol=0)
    natural = orders_int.natural(codes, order)[:, : y.shape[1]].double()
    wanted = (y / exact[:, None]).round().clamp(-most - 1, most)
    off = (natural - wanted).abs()
    assert float(off.max()) <= 1
    return int((off > 0).sum())


def check_product(call: Call) -> None:
    """Check that sums are the exact integers, and y what the definition makes of them."""
    codes, sx, weight, scales, bias, bits, _, group, order, k, dtype = call.args
    x = orders_int.natural(codes, order).to(torch.int64)
    q = reference.codes(weight, bits).to(torch.int64) - 2 ** (bits - 1)
    sw = reference.natural_scales(scales).double()
    step = k if group == -1 else group
    y = sum(
        (x[:, row : row + step] @ q[row : row + step]).double() * sw[number]
        for number, row in enumerate(range(0, k, step))
    )
    y = y * sx.double()[:, None] + (0 if bias is None else bias.double())
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(call.result.double(), y, rtol=unit, atol=1e-6)


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


def layer_inputs(model: Any) -> tuple[list[Any], list[Any]]:
    """Let a model run; return inputs and outputs of its decoder layers."""
    inputs: list[Any] = []
    outputs: list[Any] = []
    handles = []
    for layer in decoder_layers(model):
        handles.append(layer.register_forward_hook(lambda m, args, y: outputs.append(_tensor(y).float())))
        handles.append(layer.register_forward_pre_hook(lambda m, args: inputs.append(args[0])))
    with torch.no_grad():
        model(TOKENS)
    for handle in handles:
        handle.remove()
    return inputs, outputs


def forced(model: Any, inputs: list[Any], run: Callable[[], Any]) -> list[Any]:
    """Let a model run with other inputs of its layers; return their outputs."""
    outputs: list[Any] = []
    handles = []
    for layer, x in zip(decoder_layers(model), inputs, strict=True):
        handles.append(layer.register_forward_pre_hook(lambda m, args, x=x: (x.to(args[0].dtype), *args[1:])))
        handles.append(layer.register_forward_hook(lambda m, args, y: outputs.append(_tensor(y).float())))
    run()
    for handle in handles:
        handle.remove()
    return outputs


def decoder_layers(model: Any) -> Any:
    base = model.model
    return getattr(base, "decoder", base).layers


def _tensor(y: Any) -> Any:
    return y[0] if isinstance(y, tuple) else y


def relative(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", (*DENSE, *EXPERTS, *OTHERS))
def test_layers_are_those_of_the_fake_quantized_model(
    name: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    out = made(name)
    exact = fake.FakeModel(out, tmp_path / "dense", 16, 16)

    def wanted(bits: int) -> list[Any]:
        exact.act_bits = exact.kv_bits = bits
        found = forced(exact.model, inputs, lambda: exact.logits(TOKENS))
        return [y - x.float() for x, y in zip(inputs, found, strict=True)]

    for bits in (16, 4):
        inputs, outputs = layer_inputs(w4pack.load(out, act_bits=bits, kv_bits=bits))
        for x, y, z, plain in zip(inputs, outputs, wanted(bits), wanted(16), strict=True):
            most = LAYER if bits == 16 else DRIFT * relative(plain, z)
            assert relative(y - x.float(), z) < most


def test_a_transform_that_is_left_out_is_seen(made: Callable[[str], Path], tmp_path: Path) -> None:
    """The comparison of layers fails where one record of the model is not applied."""
    out = made("llama")
    inputs, found = layer_inputs(w4pack.load(out, act_bits=16, kv_bits=16))
    exact = fake.FakeModel(out, tmp_path / "plain", 16, 16)
    exact.records = {key: r for key, r in exact.records.items() if key[0] != "mlp_mid"}
    wanted = forced(exact.model, inputs, lambda: exact.logits(TOKENS))
    assert relative(found[0] - inputs[0].float(), wanted[0] - inputs[0].float()) > 10 * LAYER


@pytest.mark.parametrize(("bits", "most"), [((16, 16), 0.02), ((16, 4), 0.2), ((8, 8), 0.1)])
def test_logits_are_near_the_fake_quantized_model_s(
    bits: tuple[int, int], most: float, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two random layers, relative error of all logits: what 16-bit streams and the codes they move leave."""
    out = made("llama")
    model = w4pack.load(out, act_bits=bits[0], kv_bits=bits[1])
    with torch.no_grad():
        found = model(TOKENS).logits.float()
    wanted = fake.FakeModel(out, tmp_path / "dense", *bits).logits(TOKENS)
    assert relative(found, wanted) < most


def test_matrices_of_the_reference_are_orthogonal() -> None:
    """The reference's Hadamard matrices are matrices, in the direction that records mean."""
    h = fake.hadamard({"order": 24, "block": 12, "factors": [[12, "paley1"]]})
    torch.testing.assert_close(h @ h.T, torch.eye(24, dtype=torch.float64))
    assert torch.equal((h[:12, :12] * 12**0.5).round(), torch.from_numpy(matrix(12, "paley1")).double())
    assert not torch.equal(h, h.T)
