"""The engine's linear method on layers that stand in for the engine's: on a CPU, and on a card.

Artifacts of random words; what a layer computes is compared with the dequantized matrices in fp64.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from plugin import standins  # noqa: E402
from plugin.random_modules import bound, matrix, source, tensors_of  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from w4pack.kernels.spec import LinearSpec  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _engine() -> Iterator[None]:
    with standins.engine():
        yield


KINDS = {
    "one weight": {},
    "zero points": {"sym": False},
    "8 bit": {"bits": 8},
    "orders": {"act_order": True},
    "per channel": {"group_size": -1},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_layer_of_a_rank(kind: str, rank: int, device: str) -> None:
    from w4pack.kernels.vllm.linear import W4PackLinearMethod

    widths = {"a.q_proj": 256, "a.k_proj": 128, "a.v_proj": 128}
    specs = {n: replace(LinearSpec(128, w, group_size=32), **KINDS[kind]) for n, w in widths.items()}
    files = {name: tensors_of(spec, seed) for seed, (name, spec) in enumerate(specs.items())}
    method = W4PackLinearMethod(source(specs, files), tuple(specs))
    layer = standins.Linear("a.qkv_proj", rank, 2, bias=False)
    with torch.device(device):
        method.create_weights(layer, 128, [128, 64, 64], 128, 512, torch.float16)
    for shard, module in zip("qkv", specs, strict=True):
        for suffix, tensor in files[module].items():
            getattr(layer, suffix).weight_loader(getattr(layer, suffix), tensor, shard)
    method.process_weights_after_loading(layer)
    x = torch.randn(2, 3, 128).half()
    bias = torch.randn(256).half()
    found = method.apply(layer, x.to(device), bias.to(device)).cpu()
    shares = [
        matrix(specs[m], files[m])[:, rank * w : (rank + 1) * w]
        for m, w in zip(specs, (128, 64, 64), strict=True)
    ]
    exact = x.double() @ torch.cat(shares, 1).double() + bias.double()
    assert found.shape == (2, 3, 256)
    assert float((found.double() - exact).abs().max()) <= bound(exact, 128)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_layer_holds_the_bytes_of_the_file_where_they_were_put(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is repacked, moved or held twice (failure kinds F36, F57)."""
    from w4pack.kernels.vllm.linear import W4PackLinearMethod

    specs = {n: replace(LinearSpec(128, w, group_size=32), **KINDS[kind]) for n, w in (("q", 128), ("k", 64))}
    files = {name: tensors_of(spec, seed) for seed, (name, spec) in enumerate(specs.items())}
    for name in files if kind == "orders" else ():
        files[name]["act_perm"] = files["q"]["act_perm"]  # as GPTQ gives them: one order, one weight
    found = source(specs, files)
    method = W4PackLinearMethod(found, tuple(specs))
    layer = standins.Linear("a.qk_proj")
    same = files["q"].get("act_perm", torch.zeros(0)).numpy().tobytes()
    monkeypatch.setattr(type(found), "order", lambda *_: same)
    method.create_weights(layer, 128, [128, 64], 128, 192, torch.float16)
    for shard, module in enumerate(specs):
        for suffix, tensor in files[module].items():
            getattr(layer, suffix).weight_loader(getattr(layer, suffix), tensor, shard)
    places = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    method.process_weights_after_loading(layer)
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == places
    for suffix, parameter in layer.named_parameters():
        parts = [files[module][suffix] for module in specs]
        assert torch.equal(parameter, parts[0] if suffix == "act_perm" else torch.cat(parts, dim=-1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_that_is_filled_from_a_file_at_once(rank: int, device: str, tmp_path: Path) -> None:
    """As the loader does it: the engine's code hands over unread tensors, and the bytes come behind it.

    Gate and up are two runs (4 and 8 bit), so the parameters are flat and what is copied are rectangles.
    """
    from w4pack.kernels import transfer
    from w4pack.kernels.vllm.lazy import Ledger, Watch, names
    from w4pack.kernels.vllm.linear import W4PackLinearMethod

    specs = {
        f"a.{leaf}": LinearSpec(128, 256, bits=bits, group_size=32) for leaf, bits in (("gate", 4), ("up", 8))
    }
    files = {name: tensors_of(spec, seed) for seed, (name, spec) in enumerate(specs.items())}
    save_file(
        {f"{m}.{s}": t for m, found in files.items() for s, t in found.items()}, tmp_path / "a.safetensors"
    )
    method = W4PackLinearMethod(source(specs, files), tuple(specs))
    layer = standins.Linear("a.gate_up", rank, 2)
    with torch.device(device):
        method.create_weights(layer, 128, [128, 128], 128, 512, torch.float16)
    tensors, places = transfer.file_tensors(tmp_path / "a.safetensors")
    ledger = Ledger(places)
    with Watch(ledger):
        for name, tensor in names(tensors, ledger):
            module, _, suffix = name.rpartition(".")
            parameter = getattr(layer, suffix)
            parameter.weight_loader(parameter, tensor, list(specs).index(module))
    assert not layer.weight.any()  # nothing was read
    ledger.execute()
    method.process_weights_after_loading(layer)
    x = torch.randn(3, 128).half()
    found = method.apply(layer, x.to(device)).cpu()
    shares = [matrix(specs[m], files[m])[:, rank * 128 : (rank + 1) * 128] for m in specs]
    exact = x.double() @ torch.cat(shares, 1).double()
    assert float((found.double() - exact).abs().max()) <= bound(exact, 128)


def test_a_tensor_that_did_not_come_is_named(tmp_path: Path) -> None:
    from w4pack.convert.errors import SourceError
    from w4pack.kernels.vllm.linear import W4PackLinearMethod

    specs = {"a.o_proj": LinearSpec(128, 128, group_size=32)}
    files = {"a.o_proj": tensors_of(specs["a.o_proj"], 0)}
    method = W4PackLinearMethod(source(specs, files), ("a.o_proj",))
    layer = standins.Linear("a.o_proj")
    method.create_weights(layer, 128, [128], 128, 128, torch.float16)
    layer.weight.weight_loader(layer.weight, files["a.o_proj"]["weight"])
    with pytest.raises(SourceError) as caught:
        method.process_weights_after_loading(layer)
    assert caught.value.where == "a.o_proj.weight_scale"


def test_an_order_that_is_none_is_named() -> None:
    from w4pack.convert.errors import SourceError
    from w4pack.kernels.vllm.linear import W4PackLinearMethod

    specs = {"a.o_proj": LinearSpec(128, 128, group_size=32, act_order=True)}
    files = {"a.o_proj": tensors_of(specs["a.o_proj"], 0)}
    files["a.o_proj"]["act_perm"][3] = files["a.o_proj"]["act_perm"][4]
    method = W4PackLinearMethod(source(specs, files), ("a.o_proj",))
    layer = standins.Linear("a.o_proj")
    method.create_weights(layer, 128, [128], 128, 128, torch.float16)
    for suffix, tensor in files["a.o_proj"].items():
        getattr(layer, suffix).weight_loader(getattr(layer, suffix), tensor)
    with pytest.raises(SourceError) as caught:
        method.process_weights_after_loading(layer)
    assert (caught.value.code, caught.value.where) == ("act-perm", "a.o_proj")


@pytest.mark.parametrize("held", [True, False])
def test_a_bias_without_a_place_and_a_place_without_a_bias(held: bool) -> None:
    from w4pack.convert.errors import SourceError
    from w4pack.kernels.vllm.linear import W4PackLinearMethod

    specs = {"a.o_proj": LinearSpec(128, 128, group_size=32, bias=held)}
    files = {"a.o_proj": tensors_of(specs["a.o_proj"], 0)}
    if held:
        files["a.o_proj"]["bias"] = torch.zeros(128).half()
    method = W4PackLinearMethod(source(specs, files), ("a.o_proj",))
    with pytest.raises(SourceError) as caught:
        method.create_weights(standins.Linear("a.o_proj", bias=not held), 128, [128], 128, 128, torch.float16)
    assert (caught.value.code, caught.value.where) == (
        "extra-tensor" if held else "missing-tensor",
        "a.o_proj.bias",
    )
