"""The engine's expert method on layers that stand in for the engine's: on a CPU, and on a card.

Experts of random words; what a layer computes is compared with the dequantized matrices in fp64.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from plugin import standins  # noqa: E402
from plugin.random_modules import Files, bound, matrix, source, tensors_of  # noqa: E402

from w4pack.convert.errors import Refused, SourceError  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LEAVES = ("w1", "w3", "w2")
HIDDEN, INNER, TOKENS = 128, 256, 9
Changes = Mapping[str, Any] | None  # of a layer's spec; None: it is left in 16 bit


@pytest.fixture(autouse=True)
def _engine() -> Iterator[None]:
    with standins.engine():
        yield


@dataclass
class Model:
    """Experts of a decoder layer: what the file holds of each, and the matrices it stands for."""

    specs: dict[str, LinearSpec] = field(default_factory=dict)
    files: Files = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # (in, out)

    def add(self, name: str, inputs: int, outputs: int, changes: Changes) -> None:
        """Put a layer in: random words, or for None a random matrix in 16 bit."""
        seed = len(self.files)
        if changes is None:
            dense = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).half() / 16
            self.files[name], self.weights[name] = {"weight": dense}, dense.t().float()
            return
        spec = replace(LinearSpec(inputs, outputs, group_size=32), **changes)
        self.specs[name], self.files[name] = spec, tensors_of(spec, seed)
        self.weights[name] = matrix(spec, self.files[name])


def model_of(experts: list[Mapping[str, Changes]]) -> Model:
    """Make experts that differ as said: leaf -> what is not as in the plain layer."""
    model = Model()
    for number, changes in enumerate(experts):
        for leaf in LEAVES:
            inputs, outputs = (INNER, HIDDEN) if leaf == "w2" else (HIDDEN, INNER)
            model.add(f"m.experts.{number}.{leaf}", inputs, outputs, changes.get(leaf, {}))
    return model


def layer_of(
    model: Model,
    count: int,
    here: tuple[int, ...] | None,
    device: str,
    rank: int = 0,
    ranks: int = 1,
    without: str | None = None,
) -> tuple[Any, Any]:
    """Make the engine's layer and fill it; ``here``: the experts of this rank, else all."""
    from w4pack.kernels.vllm.moe import method as method_of

    layer = standins.Experts("m.experts", count, rank, ranks)
    local = tuple(range(count)) if here is None else here
    if here is not None:
        numbers = [local.index(e) if e in here else -1 for e in range(count)]
        layer.expert_map = torch.tensor(numbers, device=device)
    method = method_of(source(model.specs, model.files), layer, "m.experts")
    assert method is not None
    with torch.device(device):
        method.create_weights(layer, len(local), HIDDEN, INNER // ranks, torch.float16)
    for name, found in model.files.items():
        _, _, expert, leaf = name.split(".")
        prefix = "w2_" if leaf == "w2" else "w13_"
        for suffix, tensor in found.items():
            if f"{name}.{suffix}" == without:
                continue
            parameter = getattr(layer, prefix + suffix)
            took = parameter.weight_loader(parameter, tensor, name, leaf, int(expert), return_success=True)
            assert took == (int(expert) in local)
    method.process_weights_after_loading(layer)
    return method, layer


def check(model: Model, count: int, here: tuple[int, ...] | None, device: str, ranks: int = 1) -> None:
    """Compare the sum over the ranks with the sum over the experts in fp64."""
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.standard_normal((TOKENS, HIDDEN))).half()
    chosen = torch.from_numpy(np.stack([rng.permutation(count)[:2] for _ in range(TOKENS)]).astype(np.int32))
    weights = torch.from_numpy(rng.uniform(size=(TOKENS, 2))).float()
    found = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for rank in range(ranks):
        method, layer = layer_of(model, count, here, device, rank, ranks)
        out = method.apply(layer, x.to(device), weights.to(device), chosen.to(device))
        assert out.dtype == torch.float16
        found += out.cpu().double()
    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for expert, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            if here is None or expert in here:
                gate, up, down = (model.weights[f"m.experts.{expert}.{leaf}"].double() for leaf in LEAVES)
                row = x[token].double()
                mid = torch.nn.functional.silu(row @ gate) * (row @ up)
                exact[token] += weight * (mid @ down)
    # gate, up and their product are rounded to fp16 on the way, and each rank's sum: three units more
    assert float((found - exact).abs().max()) <= 4 * ranks * bound(exact, HIDDEN)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("here", [None, (0, 2)])
def test_experts(here: tuple[int, ...] | None, apart: bool, ordered: bool, device: str) -> None:
    order = {"act_order": ordered}
    up = order | {"bits": 8} if apart else order
    model = model_of([{"w1": order, "w3": up}] * 4)
    check(model, 4, here, device)


ALL: Mapping[str, Changes] = {leaf: {"bits": 8, "group_size": 64, "sym": False} for leaf in LEAVES}
MIXED: dict[str, list[Mapping[str, Changes]]] = {
    "bits of whole experts": [{}, ALL, {}, ALL],
    "bits of one layer": [{}, {"w2": {"bits": 8}}, {}, {}],
    "an order in some": [{"w1": {"act_order": True}}, {}, {"w2": {"act_order": True}}, {}],
    "every one another": [{}, {"w1": {"sym": False}}, {"w3": {"group_size": -1}}, ALL],
    "one in 16 bit": [{}, dict.fromkeys(LEAVES), {}, {}],
    "a layer of one in 16 bit": [{}, {}, {"w3": None}, {"w2": None}],
    "most in 16 bit": [dict.fromkeys(LEAVES), {}, dict.fromkeys(LEAVES), dict.fromkeys(LEAVES)],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("here", [None, (3, 1)])
@pytest.mark.parametrize("what", MIXED)
def test_experts_that_differ(what: str, here: tuple[int, ...] | None, device: str) -> None:
    check(model_of(MIXED[what]), 4, here, device)


@pytest.mark.parametrize("what", [name for name in MIXED if "order" not in name])
def test_experts_that_differ_cut_over_ranks(what: str) -> None:
    check(model_of(MIXED[what]), 4, None, "cpu", ranks=2)


def test_experts_that_are_alike_are_one_stack_of_the_files_shapes() -> None:
    model = model_of([{}] * 4)
    _, layer = layer_of(model, 4, None, "cpu")
    assert layer.w2_weight.shape == (4, INNER // 16, HIDDEN * 2)
    for number in range(4):
        assert torch.equal(layer.w2_weight[number], model.files[f"m.experts.{number}.w2"]["weight"])


def test_each_expert_is_held_once_however_many_kinds_there_are() -> None:
    model = model_of(MIXED["every one another"])
    _, layer = layer_of(model, 4, None, "cpu")
    held = sum(p.numel() * p.element_size() for p in layer.parameters())
    files = sum(t.numel() * t.element_size() for found in model.files.values() for t in found.values())
    assert held == files  # every tensor here is a multiple of 16 bytes
    assert not list(layer.buffers())  # which an engine that loads weights again would empty


@pytest.mark.parametrize("what", MIXED)
def test_what_the_engine_counts_while_it_loads_again_is_what_comes(what: str) -> None:
    model = model_of(MIXED[what])
    _, layer = layer_of(model, 4, None, "cpu")
    came: dict[str, int] = {}
    for name, found in model.files.items():
        prefix = "w2_" if name.endswith("w2") else "w13_"
        for suffix, tensor in found.items():
            came[prefix + suffix] = came.get(prefix + suffix, 0) + tensor.numel()
    for name, parameter in layer.named_parameters():
        assert getattr(parameter, "weight_loader_numel", parameter.numel()) == came[name]


def test_a_tensor_of_an_expert_of_its_own_kind_that_did_not_come_is_named() -> None:
    model = model_of(MIXED["one in 16 bit"])
    for lost in ("m.experts.2.w1.weight_scale", "m.experts.1.w2.weight"):
        with pytest.raises(SourceError) as caught:
            layer_of(model, 4, None, "cpu", without=lost)
        assert (caught.value.code, caught.value.where) == ("missing-tensor", lost)


def test_an_expert_that_is_nowhere_is_named() -> None:
    model = model_of(MIXED["one in 16 bit"])
    model.files["m.experts.1.w3"] = {}
    with pytest.raises(Refused) as caught:
        layer_of(model, 4, None, "cpu")
    assert (caught.value.code, caught.value.where) == ("missing-tensor", "m.experts.1.w3.weight")
