"""What a rank holds of a layer: shares, runs, refusals; and that loading copies exactly these rectangles.

The expected weights come from the reference decoder of whole modules, narrowed as a plain matrix.
"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from plugin.random_modules import matrix, tensors_of  # noqa: E402
from torch import nn  # noqa: E402

from w4pack.convert.errors import Refused, SourceError  # noqa: E402
from w4pack.kernels import modules  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402
from w4pack.kernels.vllm import parts as parts_of  # noqa: E402
from w4pack.kernels.vllm.parts import Part, Rank, Wanted  # noqa: E402
from w4pack.kernels.vllm.stores import Layout, Store  # noqa: E402

Q = LinearSpec(128, 256, group_size=32)
KV = LinearSpec(128, 128, group_size=32)


def computed(layer: nn.Module, layout: Layout, x: torch.Tensor) -> torch.Tensor:
    """What the runs compute, side by side."""
    found = []
    for run, tensors in zip(layout.runs, layout.tensors(layer), strict=True):
        if run.spec is None:
            found.append(x @ tensors["weight"].t())
        else:
            found.append(modules.product(run.spec, tensors, x, None))
    return torch.cat(found, -1)


def loaded(parts: tuple[Part, ...], files: dict[str, dict[str, torch.Tensor]], order=None) -> tuple:  # noqa: ANN001
    """Make a layer of parts and fill it from whole modules."""
    layer = nn.Module()
    layout = Layout("", parts_of.runs(parts, order or (lambda _: None)), torch.float16)
    store = Store(layer, layout)
    for part in parts:
        for suffix, tensor in files[part.module].items():
            store.fill(getattr(layer, suffix), suffix, tensor, shard=part.shard)
    assert store.missing() == []
    return layer, layout


def close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """One rounding to fp16 of an fp32 sum, whose own order may differ by a few units of fp32."""
    exact = x.double() @ weight.double()
    assert found.shape == exact.shape
    assert float((found.double() - exact).abs().max()) <= 2**-10 * float(exact.abs().max())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_rank_holds_its_columns_of_every_part(rank: int, sym: bool, bits: int) -> None:
    specs = {n: replace(s, sym=sym, bits=bits) for n, s in (("q", Q), ("k", KV), ("v", KV))}
    files = {name: tensors_of(spec, seed) for seed, (name, spec) in enumerate(specs.items())}
    wanted = Wanted("qkv", 128, (128, 64, 64))
    parts = tuple(
        parts_of.packed(name, n, specs[name], wanted, Rank(rank, 2), "F16") for n, name in enumerate(specs)
    )
    layer, layout = loaded(parts, files)
    assert [len(run.parts) for run in layout.runs] == [3]
    x = torch.randn(5, 128).half()
    slices = [
        matrix(specs[n], files[n])[:, rank * w : (rank + 1) * w]
        for n, w in zip("qkv", (128, 64, 64), strict=True)
    ]
    close(computed(layer, layout, x), x, torch.cat(slices, 1))


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_ranks_that_repeat_a_head_hold_the_same_columns(rank: int) -> None:
    wanted = Wanted("qkv", 128, (64, 64, 64))  # 4 ranks, 2 key/value heads of 64
    part = parts_of.packed("k", 1, KV, wanted, Rank(rank, 4), "F16")
    assert part.columns == ((0, 64) if rank < 2 else (64, 128))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("group", [32, 64, -1])
def test_a_rank_holds_its_rows(rank: int, group: int) -> None:
    spec = LinearSpec(256, 64, group_size=group)
    files = {"down": tensors_of(spec, 3)}
    part = parts_of.packed("down", 0, spec, Wanted("down", 128, (64,)), Rank(rank, 2), "F16")
    layer, layout = loaded((part,), files)
    x = torch.randn(3, 128).half()
    close(computed(layer, layout, x), x, matrix(spec, files["down"])[rank * 128 : (rank + 1) * 128])


UNEQUAL = {
    "bits": replace(KV, bits=8),
    "groups": replace(KV, group_size=64),
    "symmetry": replace(KV, sym=False),
    "an order": replace(KV, act_order=True),
    "padding": LinearSpec(128, 96, group_size=32, stored_in=128, stored_out=128),
}


@pytest.mark.parametrize("what", UNEQUAL)
def test_parts_that_differ_stay_apart_and_compute_the_same(what: str) -> None:
    specs = {"q": Q, "k": UNEQUAL[what], "v": KV}
    files = {name: tensors_of(spec, seed) for seed, (name, spec) in enumerate(specs.items())}
    wanted = Wanted("qkv", 128, tuple(s.out_features for s in specs.values()))
    parts = tuple(parts_of.packed(n, i, specs[n], wanted, Rank(), "F16") for i, n in enumerate(specs))
    layer, layout = loaded(parts, files)
    assert len(layout.runs) == (2 if what == "padding" else 3)
    x = torch.randn(4, 128).half()
    close(computed(layer, layout, x), x, torch.cat([matrix(specs[n], files[n]) for n in "qkv"], 1))


@pytest.mark.parametrize("same", [True, False, None])
def test_parts_share_a_gather_only_where_their_orders_are_known_to_be_equal(same: bool | None) -> None:
    spec = replace(KV, act_order=True)
    files = {"k": tensors_of(spec, 1), "v": tensors_of(spec, 2)}
    if same:
        files["v"]["act_perm"] = files["k"]["act_perm"]
    parts = tuple(
        parts_of.packed(n, i, spec, Wanted("kv", 128, (128, 128)), Rank(), "F16") for i, n in enumerate("kv")
    )

    def order(name: str) -> bytes | None:
        return None if same is None else files[name]["act_perm"].numpy().tobytes()

    layer, layout = loaded(parts, files, order)
    assert len(layout.runs) == (1 if same else 2)
    x = torch.randn(4, 128).half()
    close(computed(layer, layout, x), x, torch.cat([matrix(spec, files[n]) for n in "kv"], 1))


def test_scales_of_two_dtypes_are_kept_as_they_are() -> None:
    files = {"k": tensors_of(KV, 1), "v": tensors_of(KV, 2, torch.bfloat16)}
    wanted = Wanted("kv", 128, (128, 128))
    parts = tuple(
        parts_of.packed(n, i, KV, wanted, Rank(), tag)
        for i, (n, tag) in enumerate([("k", "F16"), ("v", "BF16")])
    )
    layer, layout = loaded(parts, files)
    held = [tensors["weight_scale"] for tensors in layout.tensors(layer)]
    assert [t.dtype for t in held] == [torch.float16, torch.bfloat16]
    assert all(torch.equal(t, files[n]["weight_scale"]) for t, n in zip(held, "kv", strict=True))


def test_a_part_left_in_16_bit_lies_beside_packed_ones() -> None:
    weight = torch.randn(96, 128).half()
    files = {"k": tensors_of(KV, 1), "v": {"weight": weight}}
    wanted = Wanted("kv", 128, (64, 48))
    parts = (
        parts_of.packed("k", 0, KV, wanted, Rank(1, 2), "F16"),
        parts_of.dense("v", 1, (96, 128), wanted, Rank(1, 2)),
    )
    layer, layout = loaded(parts, files)
    x = torch.randn(4, 128).half()
    whole = torch.cat([matrix(KV, files["k"])[:, 64:], weight.float().t()[:, 48:]], 1)
    close(computed(layer, layout, x), x, whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_head_whose_vocabulary_is_padded(rank: int) -> None:
    spec = LinearSpec(64, 200, group_size=32, stored_in=64, stored_out=256)
    files = {"lm_head": tensors_of(spec, 5)}
    part = parts_of.head("lm_head", spec, Wanted("lm_head", 64, (192,)), Rank(rank, 2), "F16")
    layer, layout = loaded((part,), files)
    x = torch.randn(2, 64).half()
    stored = matrix(replace(spec, out_features=256), files["lm_head"])
    whole = torch.cat([stored, torch.zeros(64, 128)], 1)[:, rank * 192 : (rank + 1) * 192]
    close(computed(layer, layout, x), x, whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_that_the_file_holds_fused(rank: int) -> None:
    spec = LinearSpec(128, 512, group_size=32)
    files = {"qkv": tensors_of(spec, 6)}
    wanted = Wanted("qkv", 128, (128, 64, 64))
    parts = parts_of.fused_in_file("qkv", spec, (256, 128, 128), wanted, Rank(rank, 2), "F16")
    layer = nn.Module()
    layout = Layout("", parts_of.runs(parts, lambda _: None), torch.float16)
    store = Store(layer, layout)
    for suffix, tensor in files["qkv"].items():
        store.fill(getattr(layer, suffix), suffix, tensor, shard=None)
    x = torch.randn(2, 128).half()
    whole = matrix(spec, files["qkv"])
    starts = ((0, 128), (256, 64), (384, 64))
    slices = [whole[:, at + rank * w : at + (rank + 1) * w] for at, w in starts]
    close(computed(layer, layout, x), x, torch.cat(slices, 1))


def test_dummy_weights_have_orders_that_point_inside() -> None:
    spec = replace(KV, act_order=True)
    part = parts_of.packed("k", 0, spec, Wanted("k", 128, (128,)), Rank(), "F16")
    layer = nn.Module()
    Store(layer, Layout("", parts_of.runs((part,), lambda _: None), torch.float16))
    assert torch.equal(layer.act_perm, torch.arange(128, dtype=torch.int32))


# ---- refusals --------------------------------------------------------------------------------------

ORDERED = replace(LinearSpec(256, 64, group_size=32), act_order=True)
REFUSED = {
    "columns cut a tile": (LinearSpec(128, 192), Wanted("up", 128, (96,)), "tensor-parallel"),
    "rows cut a group": (LinearSpec(128, 64), Wanted("down", 64, (64,)), "tensor-parallel"),
    "rows of an order": (ORDERED, Wanted("down", 128, (64,)), "tensor-parallel"),
    "padded columns": (
        LinearSpec(128, 224, stored_in=128, stored_out=256), Wanted("up", 128, (112,)), "tensor-parallel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_cut_is_refused_with_the_layers_name(what: str) -> None:
    spec, wanted, code = REFUSED[what]
    with pytest.raises(Refused) as caught:
        parts_of.packed("model.layers.3.mlp.down_proj", 0, spec, wanted, Rank(0, 2), "F16")
    assert (caught.value.code, caught.value.where) == (code, "model.layers.3.mlp.down_proj")


def test_the_nearest_cuts_are_taken() -> None:
    parts_of.packed("a", 0, LinearSpec(128, 256), Wanted("up", 128, (128,)), Rank(0, 2), "F16")
    parts_of.packed("a", 0, LinearSpec(256, 64), Wanted("down", 128, (64,)), Rank(0, 2), "F16")
    parts_of.packed("a", 0, ORDERED, Wanted("down", 256, (64,)), Rank(0, 1), "F16")
    parts_of.packed("a", 0, replace(Q, act_order=True), Wanted("q", 128, (128,)), Rank(1, 2), "F16")


@pytest.mark.parametrize(("inputs", "outputs"), [(127, 256), (128, 255), (128, 512), (256, 256), (64, 128)])
def test_modules_of_other_sizes_are_named(inputs: int, outputs: int) -> None:
    with pytest.raises(SourceError) as caught:
        parts_of.packed("some.layer", 0, Q, Wanted("engine.layer", inputs, (outputs,)), Rank(0, 2), "F16")
    assert caught.value.where == "some.layer"
    assert "engine.layer" in str(caught.value)


@pytest.mark.parametrize("edit", ["shape", "dtype"])
def test_a_tensor_that_is_not_as_the_config_says_is_named(edit: str) -> None:
    part = parts_of.packed("k", 0, KV, Wanted("k", 128, (128,)), Rank(), "F16")
    layer = nn.Module()
    store = Store(layer, Layout("", parts_of.runs((part,), lambda _: None), torch.float16))
    scales = tensors_of(KV, 1)["weight_scale"]
    wrong = scales[:-1] if edit == "shape" else scales.bfloat16()
    with pytest.raises(SourceError) as caught:
        store.fill(layer.weight_scale, "weight_scale", wrong, shard=0)
    assert caught.value.where == "k.weight_scale"
    assert store.missing() == ["k.weight", "k.weight_scale"]


def reloaded(second: dict[str, torch.Tensor]) -> None:
    """Fill gate and up, which share an order, and then once more with other orders."""
    spec = replace(KV, act_order=True)
    parts = tuple(
        parts_of.packed(n, i, spec, Wanted("mlp", 128, (128, 128)), Rank(), "F16") for i, n in GATE_UP
    )
    layer = nn.Module()
    layout = Layout("", parts_of.runs(parts, lambda _: b"the same"), torch.float16)
    assert len(layout.runs) == 1
    store = Store(layer, layout)
    order = torch.arange(127, -1, -1, dtype=torch.int32)
    for orders in ({"gate": order, "up": order.clone()}, second):
        for number, name in GATE_UP:
            store.fill(layer.act_perm, "act_perm", orders[name], shard=number)
    assert torch.equal(layer.act_perm, second["gate"])


GATE_UP = ((0, "gate"), (1, "up"))


def test_orders_of_one_run_may_change_together_when_weights_are_reloaded() -> None:
    natural = torch.arange(128, dtype=torch.int32)
    reloaded({"gate": natural, "up": natural.clone()})


def test_orders_of_one_run_that_differ_when_weights_are_reloaded_are_refused() -> None:
    natural = torch.arange(128, dtype=torch.int32)
    with pytest.raises(SourceError) as caught:
        reloaded({"gate": natural, "up": natural.flip(0)})
    assert (caught.value.code, caught.value.where) == ("act-perm", "gate.act_perm, up.act_perm")
