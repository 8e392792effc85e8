"""The packed linear layer on the CPU against the dense one, padded and permuted as the file is."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import packed  # noqa: E402
from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels import modules, ops  # noqa: E402
from w4pack.kernels.spec import LinearSpec, fuse  # noqa: E402


@pytest.mark.parametrize(
    "spec",
    [
        LinearSpec(128, 64),
        LinearSpec(128, 64, bias=True, sym=False, group_size=32),
        LinearSpec(192, 128, act_order=True, group_size=64),
        LinearSpec(100, 40, stored_in=128, stored_out=64, bias=True, sym=False, group_size=64),
        LinearSpec(100, 72, stored_in=128, stored_out=128, act_order=True, bias=True, group_size=-1),
        LinearSpec(192, 64, bits=8, group_size=128, sym=False),
    ],
    ids=lambda spec: f"{spec.in_features}x{spec.out_features}b{spec.bits}",
)
def test_a_layer_equals_the_dense_one(spec: LinearSpec) -> None:
    tensors, dense = packed.layer(spec)
    module = modules.PackedLinear(spec)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == spec.shapes()
    module.load_state_dict(tensors, assign=True)
    x = torch.randn(2, 3, spec.in_features).half()
    y = module(x)
    assert y.shape == (2, 3, spec.out_features) and y.dtype == x.dtype
    exact = x.double().numpy() @ dense
    if spec.bias:
        exact = exact + tensors["bias"].double().numpy()
    assert np.linalg.norm(y.double().numpy() - exact) < 4e-4 * np.linalg.norm(exact)


def test_a_file_that_does_not_fit_is_refused() -> None:
    tensors, _ = packed.layer(LinearSpec(128, 64))
    module = modules.PackedLinear(LinearSpec(128, 64, bias=True))
    with pytest.raises(RuntimeError, match="bias"):
        module.load_state_dict(tensors, assign=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        modules.PackedLinear(LinearSpec(192, 64)).load_state_dict(tensors, assign=True)


# ---- fused ------------------------------------------------------------------------------------------------


def _filled(spec: LinearSpec, seed: int) -> modules.PackedLinear:
    module = modules.PackedLinear(spec)
    module.load_state_dict(packed.layer(spec, seed)[0], assign=True)
    return module


def _fused(specs: Sequence[LinearSpec]) -> tuple[list[modules.PackedLinear], list[modules.PackedLinear]]:
    """The same layers alone, and joined."""
    alone, parts = ([_filled(spec, seed) for seed, spec in enumerate(specs)] for _ in range(2))
    for part in parts[1:]:
        if specs[0].act_order:
            alone_perm = parts[0].act_perm
            part.act_perm = torch.nn.Parameter(alone_perm.clone(), requires_grad=False)
    if specs[0].act_order:
        for layer in alone[1:]:
            layer.act_perm = alone[0].act_perm
    joined = fuse(specs, same_order=True)
    assert joined is not None
    modules.FusedLinear(joined, parts, modules.side_by_side(parts))
    return alone, parts


FUSED = {
    "qkv": [LinearSpec(256, 256), LinearSpec(256, 64), LinearSpec(256, 64)],
    "bias, zeros": [LinearSpec(192, n, bias=True, sym=False, group_size=64) for n in (128, 64)],
    "order": [LinearSpec(192, n, act_order=True, group_size=32) for n in (64, 128)],
    "padded end": [
        LinearSpec(100, 64, stored_in=128, stored_out=64, bias=True, group_size=-1),
        LinearSpec(100, 40, stored_in=128, stored_out=64, bias=True, group_size=-1),
    ],
    "8 bit": [LinearSpec(128, 64, bits=8, sym=False), LinearSpec(128, 128, bits=8, sym=False)],
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_equal_the_same_layers_alone_bit_for_bit(name: str) -> None:
    alone, parts = _fused(FUSED[name])
    for m in (1, 5):
        x = torch.randn(1, m, alone[0].in_features).half()
        for one, part in zip(alone, parts, strict=True):
            assert torch.equal(part(x), one(x))


def _count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the products that run."""
    runs: list[int] = []
    real = ops.gemm

    def counted(*args: object) -> torch.Tensor:
        runs.append(1)
        return real(*args)

    monkeypatch.setattr(ops, "gemm", counted)
    return runs


def test_one_product_serves_all_parts_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (q, k, v) = _fused(FUSED["qkv"])
    runs = _count(monkeypatch)
    x = torch.randn(3, 256).half()
    q(x), k(x)
    assert len(runs) == 1 and q.fused._held
    v(x)
    assert len(runs) == 1 and q.fused._held == []


def test_any_order_of_calls_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, parts = _fused(FUSED["qkv"])
    x, y = torch.randn(2, 256).half(), torch.randn(7, 256).half()
    for place, value in ((2, x), (0, y), (1, x), (1, x), (0, x), (2, y), (2, y), (0, y), (1, y), (0, x)):
        assert torch.equal(parts[place](value), alone[place](value))


def test_an_input_that_was_written_to_is_computed_again() -> None:
    alone, parts = _fused(FUSED["qkv"])
    x = torch.randn(2, 256).half()
    parts[0](x)
    x.mul_(2)
    assert torch.equal(parts[1](x), alone[1](x))


def test_an_output_that_was_written_to_is_computed_again() -> None:
    alone, parts = _fused(FUSED["qkv"])
    x = torch.randn(2, 256).half()
    parts[0](x).zero_()
    assert torch.equal(parts[0](x), alone[0](x)) and torch.equal(parts[1](x), alone[1](x))


def test_the_parts_show_the_tensors_of_the_file_and_hold_them_once() -> None:
    alone, parts = _fused(FUSED["bias, zeros"])
    model, plain = torch.nn.ModuleList(parts), torch.nn.ModuleList(alone)
    found, wanted = model.state_dict(), plain.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    storages = {t.untyped_storage().data_ptr() for t in found.values()}
    assert len(storages) == len(parts[0].spec.shapes())


def test_a_state_dictionary_reaches_the_joined_tensors() -> None:
    specs = FUSED["bias, zeros"]
    _, parts = _fused(specs)
    fresh = [_filled(spec, seed + 10) for seed, spec in enumerate(specs)]
    for part, other in zip(parts, fresh, strict=True):
        part.load_state_dict(other.state_dict(), assign=True)
    x = torch.randn(3, 192).half()
    assert all(torch.equal(part(x), other(x)) for part, other in zip(parts, fresh, strict=True))


def test_a_copy_is_a_model_of_its_own() -> None:
    _, parts = _fused(FUSED["qkv"])
    model = torch.nn.ModuleList(parts)
    other = copy.deepcopy(model)
    x = torch.randn(2, 256).half()
    before = [part(x) for part in parts]
    assert all(torch.equal(part(x), y) for part, y in zip(other, before, strict=True))
    zeros = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    other.load_state_dict(zeros)
    assert not any(part(x).any() for part in other)
    assert all(torch.equal(part(x), y) for part, y in zip(parts, before, strict=True))


def _doubled(part: modules.PackedLinear) -> torch.nn.Parameter:
    return torch.nn.Parameter(part.weight_scale * 2, requires_grad=False)


WRITTEN: dict[str, Callable[[modules.PackedLinear], Any]] = {
    "in place": lambda part: part.weight_scale.detach().mul_(2),
    "data": lambda part: setattr(part.weight_scale, "data", _doubled(part).data),
    "in place, data": lambda part: part.weight_scale.data.mul_(2),
    "parameter": lambda part: setattr(part, "weight_scale", _doubled(part)),
    "register": lambda part: part.register_parameter("weight_scale", _doubled(part)),
    "load": lambda part: part.load_state_dict(part.state_dict() | {"weight_scale": _doubled(part)}),
    "assign": lambda part: part.load_state_dict(
        part.state_dict() | {"weight_scale": _doubled(part)}, assign=True
    ),
}
COPIED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "copy of a part": lambda model: torch.nn.ModuleList([model[0], copy.deepcopy(model[1])]),
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("copied", COPIED)
def test_what_is_written_to_a_part_reaches_the_product(copied: str, written: str) -> None:
    specs = FUSED["bias, zeros"]
    model = COPIED[copied](torch.nn.ModuleList(_fused(specs)[1]))
    alone = _filled(specs[1], 1)
    alone.weight_scale.mul_(2)
    x = torch.randn(2, 192).half()
    before = [part(x) for part in model]
    WRITTEN[written](model[1])
    assert torch.equal(model[1](x), alone(x)) and not torch.equal(model[1](x), before[1])
    assert torch.equal(model[0](x), before[0])
    assert torch.equal(model.state_dict()["1.weight_scale"], alone.weight_scale)


def test_a_tensor_of_another_kind_does_not_become_a_part() -> None:
    _, (_, part) = _fused(FUSED["bias, zeros"])
    scale = part.weight_scale
    for other in (scale.bfloat16(), scale[:1].clone(), scale.to("meta")):
        with pytest.raises(UsageError) as told:
            scale.data = other
        assert (told.value.code, told.value.expected) == ("fused-part", "float16 [3, 64] on cpu")
        with pytest.raises(UsageError):
            part.weight_scale = torch.nn.Parameter(other, requires_grad=False)
    assert part.weight_scale is scale


def test_an_order_of_one_part_alone_is_refused() -> None:
    """The joined layers read their inputs in one order."""
    _, parts = _fused(FUSED["order"])
    model = torch.nn.ModuleList(parts)
    x = torch.randn(2, 192).half()
    before, held = [part(x) for part in model], model.state_dict()
    held = {name: tensor.clone() for name, tensor in held.items()}
    other = held["0.act_perm"].flip(0)
    for place in (0, 1):
        for given in (model, model[place]):
            name = "act_perm" if given is model[place] else f"{place}.act_perm"
            given.load_state_dict(given.state_dict() | {name: other})
            with pytest.raises(UsageError, match="one order for all of them"):
                model[0](x)
            model.load_state_dict(held)
            assert all(torch.equal(part(x), y) for part, y in zip(model, before, strict=True))
        with pytest.raises(UsageError, match="the order of inputs is that of all layers"):
            model[place].act_perm.data = other
        model[place].act_perm.data = held["0.act_perm"].clone()
    assert all(torch.equal(part(x), y) for part, y in zip(model, before, strict=True))


def test_an_order_that_all_parts_get_is_taken() -> None:
    specs = FUSED["order"]
    _, parts = _fused(specs)
    alone = [_filled(spec, seed) for seed, spec in enumerate(specs)]
    other = parts[0].act_perm.flip(0)
    for part in alone:
        part.act_perm = torch.nn.Parameter(other, requires_grad=False)
    torch.nn.ModuleList(parts).load_state_dict(torch.nn.ModuleList(alone).state_dict())
    x = torch.randn(2, 192).half()
    assert all(torch.equal(part(x), one(x)) for part, one in zip(parts, alone, strict=True))


@pytest.mark.parametrize("joined", [False, True])
def test_an_order_that_is_none_is_not_loaded(joined: bool) -> None:
    """A kernel on a card reads where it points."""
    alone, parts = _fused(FUSED["order"])
    model = torch.nn.ModuleList(parts if joined else alone)
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for value in (-1, 1 << 30, 0):
        wrong = {n: torch.full_like(t, value) for n, t in held.items() if n.endswith("act_perm")}
        with pytest.raises(RuntimeError, match=r"0\.act_perm is no permutation of the layer's inputs"):
            model.load_state_dict(held | wrong)
    assert all(torch.equal(tensor, held[name]) for name, tensor in model.state_dict().items())


def test_a_copy_holds_its_tensors_once() -> None:
    _, parts = _fused(FUSED["bias, zeros"])
    for copied in COPIED.values():
        model = copied(torch.nn.ModuleList(parts))
        for part in model:
            whole = {t.untyped_storage().data_ptr() for t in part.fused.buffers()}
            assert {
                t.untyped_storage().data_ptr() for t in part._parameters.values() if t is not None
            } <= whole


def test_casts_leave_scales_alone_and_moves_keep_the_parts_joined() -> None:
    _, parts = _fused(FUSED["bias, zeros"])
    model = torch.nn.ModuleList(parts)
    scales = parts[0].weight_scale.clone()
    model.to(torch.bfloat16)
    assert torch.equal(parts[0].weight_scale, scales)  # fp16 still
    assert {p.bias.dtype for p in parts} == {torch.bfloat16}
    x = torch.randn(2, 192).bfloat16()
    assert parts[0](x).dtype == torch.bfloat16
    moved = model.to("meta")
    assert moved[1].weight.is_meta and moved[1].fused.weight.is_meta
    assert moved[1].weight.stride() == moved[1].fused.weight.stride()  # still a part of it


def test_fused_layers_compile_to_one_product_without_a_break() -> None:
    class Attention(torch.nn.Module):
        def __init__(self, parts: list[modules.PackedLinear]) -> None:
            super().__init__()
            self.q, self.k, self.v = parts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.q(x) * 2, self.k(x), self.v(x)], -1)

    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(sum("gemm" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    _, parts = _fused(FUSED["qkv"])
    model = Attention(parts)
    x = torch.randn(2, 256).half()
    assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(x), model(x))
    assert graphs == [1]


def test_activations_in_fp32_are_an_error_that_names_the_dtype() -> None:
    with pytest.raises(UsageError, match="float32"):
        _filled(LinearSpec(128, 64), 0)(torch.randn(1, 128))


def test_a_bias_is_exact_over_weights_that_are_zero() -> None:
    tensors, _ = packed.layer(LinearSpec(128, 64, bias=True))
    tensors["weight_scale"].zero_()
    module = modules.PackedLinear(LinearSpec(128, 64, bias=True))
    module.load_state_dict(tensors, assign=True)
    assert torch.equal(module(torch.randn(3, 128).half()), tensors["bias"].expand(3, 64))
