"""Layers that differ from their neighbours: fused where they are alike, apart where not, the same numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

import builders  # noqa: E402
import w4pack  # noqa: E402
from runtime import models  # noqa: E402
from w4pack.convert import convert  # noqa: E402
from w4pack.convert.errors import Refused  # noqa: E402
from w4pack.kernels.experts import MixedExperts, PackedExperts  # noqa: E402
from w4pack.kernels.modules import FusedLinear, PackedLinear  # noqa: E402

TOKENS = torch.tensor([list(range(3, 40))])


def redrawn(made: builders.Model, leaf: str, **scheme: Any) -> None:
    """Draw the layers whose names end in ``leaf`` again, in another scheme."""
    rng = np.random.default_rng(99)
    for name, linear in made.linears.items():
        if name.endswith(leaf):
            own = dict(scheme)
            if own.pop("ordered", False):
                own["order"] = builders.act_order(rng, linear.k)
            made.linears[name] = builders.layer(rng, linear.k, linear.n, bias=linear.bias, **own)


def write(made: builders.Model, place: Path, **settings: Any) -> Path:
    """Write a model as GPTQ, and convert it."""
    source = place / "source"
    builders.write(source, made, builders.gptq, builders.gptq_config(desc_act=True, **settings))
    convert(source, place / "out")
    return source


def compare(
    source: Path, place: Path, edit: Callable[[PreTrainedModel], None] | None = None
) -> PreTrainedModel:
    """Load both ways, compare with the dense model, and return what ``load`` made."""
    plain = models.dense(source, place)
    if edit is not None:
        edit(plain)
    exact = models.logits(plain, TOKENS)
    model = w4pack.load(place / "out")
    found = models.logits(model, TOKENS)
    assert float((found.float() - exact).abs().max()) <= models.tolerance(exact, model.dtype)
    w4pack.register()
    assert torch.equal(models.logits(AutoModelForCausalLM.from_pretrained(place / "out"), TOKENS), found)
    return model


def fused(model: PreTrainedModel) -> set[str]:
    """Return the names of the layers that share a product."""
    named = dict(model.named_modules())
    return {n for n, m in named.items() if isinstance(m, PackedLinear) and isinstance(m.fused, FusedLinear)}


Q, K, V, GATE, UP = (
    f"model.layers.0.{name}"
    for name in (*(f"self_attn.{p}_proj" for p in "qkv"), "mlp.gate_proj", "mlp.up_proj")
)


@pytest.mark.parametrize(
    ("leaf", "scheme", "together"),
    [
        ("nothing", {}, {Q, K, V, GATE, UP}),
        ("k_proj", {"bits": 8}, {GATE, UP}),
        ("q_proj", {"group": 32}, {GATE, UP}),
        ("up_proj", {"sym": False}, {Q, K, V, GATE, UP}),  # a fused set is asymmetric as a whole
        ("q_proj", {"ordered": True, "group": 64}, {GATE, UP}),
    ],
    ids=["alike", "k in 8 bit", "q in other groups", "up with zero points", "q in another order"],
)
def test_only_layers_that_are_alike_are_fused(
    leaf: str, scheme: dict[str, Any], together: set[str], tmp_path: Path
) -> None:
    made = builders.model(3, builders.llama_config(), group=64)
    redrawn(made, leaf, **({"group": 64} | scheme))
    dynamic = {f"+:.*{leaf}": {"bits": scheme.get("bits", 4), "group_size": scheme.get("group", 64)}}
    model = compare(write(made, tmp_path, group=64, sym="sym" not in scheme, dynamic=dynamic), tmp_path)
    assert fused(model) == together


def test_layers_in_one_order_share_a_gather(tmp_path: Path) -> None:
    order = builders.act_order(np.random.default_rng(5), 256)
    made = builders.model(3, builders.llama_config(), group=64)
    for leaf in ("q_proj", "k_proj", "v_proj"):
        redrawn(made, leaf, group=64, order=order)
    assert fused(compare(write(made, tmp_path, group=64), tmp_path)) == {Q, K, V, GATE, UP}


def test_a_bias_that_only_one_part_has_is_applied_and_keeps_it_apart(tmp_path: Path) -> None:
    made = builders.model(3, builders.llama_config(), group=64)
    bias = builders.dense(np.random.default_rng(8), 256)
    made.linears[Q].bias = bias
    source = tmp_path / "source"
    writer = {n: builders.gptq for n in made.linears}
    builders.write(source, made, writer, builders.gptq_config(group=64), extra={f"{Q}.bias": bias})
    convert(source, tmp_path / "out")

    def edit(plain: PreTrainedModel) -> None:
        plain.model.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(
            torch.from_numpy(bias.array().astype(np.float32))
        )

    assert fused(compare(source, tmp_path, edit)) == {GATE, UP}


def test_biases_of_ten_over_zero_weights_come_out_exactly(tmp_path: Path) -> None:
    made = builders.model(3, builders.qwen2_config(), group=64)
    for name, linear in made.linears.items():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            linear.scales[:] = 0
            linear.bias = builders.tensor(np.full(linear.n, 10, np.float16), "F16")
    model = compare(write(made, tmp_path, group=64), tmp_path)
    attention = model.model.layers[0].self_attn
    x = torch.randn(1, 3, 256).half()
    assert all(
        bool((layer(x) == 10).all()) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    )


# ---- experts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("config", [builders.mixtral_config, builders.qwen3_moe_config])
def test_experts_in_stacks(config: Callable[..., dict[str, Any]], ordered: bool, tmp_path: Path) -> None:
    made = builders.model(4, config(num_hidden_layers=2), group=64)
    if ordered:  # every layer of every expert has an order of its own
        redrawn(made, "", group=64, ordered=True)
    model = compare(write(made, tmp_path, group=64), tmp_path)
    stacks = [m for m in model.modules() if isinstance(m, PackedExperts)]
    assert [len(m.first) for m in stacks] == [2 if ordered else 1] * 2


def test_gate_and_up_of_other_bits_are_two_stacks(tmp_path: Path) -> None:
    made = builders.model(4, builders.qwen3_moe_config(), group=64)
    redrawn(made, "up_proj", bits=8, group=64)
    model = compare(write(made, tmp_path, group=64, dynamic={"+:.*up_proj": {"bits": 8}}), tmp_path)
    (experts,) = (m for m in model.modules() if isinstance(m, PackedExperts))
    assert experts.first == ("gate_proj", "up_proj")


def test_a_shared_expert_and_its_gate(tmp_path: Path) -> None:
    """Qwen2-MoE: experts, one shared expert behind a gate of one output, biases of q, k and v."""
    config = builders.qwen3_moe_config(
        num_hidden_layers=1,
        shared_expert_intermediate_size=192,
        moe_intermediate_size=128,
        norm_topk_prob=False,
    )
    made = builders.model(4, config, group=64)
    rng = np.random.default_rng(1)
    config |= {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
    made.dense = {n: t for n, t in made.dense.items() if "_norm.weight" not in n.replace("layernorm", "")}
    made.dense["model.norm.weight"] = builders.dense(rng, 256)
    shared = "model.layers.0.mlp.shared_expert"
    made.dense[f"{shared}_gate.weight"] = builders.dense(rng, 1, 256)
    for leaf, (k, n) in {"gate_proj": (256, 192), "up_proj": (256, 192), "down_proj": (192, 256)}.items():
        made.linears[f"{shared}.{leaf}"] = builders.layer(rng, k, n, group=64)
    for name in (Q, K, V):
        made.linears[name].bias = builders.dense(rng, made.linears[name].n)
    model = compare(write(made, tmp_path, group=64), tmp_path)
    assert {f"{shared}.gate_proj", f"{shared}.up_proj"} <= fused(model)


@pytest.mark.pair
def test_a_layer_of_experts_left_in_16_bit_beside_a_packed_one(tmp_path: Path) -> None:
    for config in (builders.mixtral_config, builders.qwen3_moe_config):
        place = tmp_path / config.__name__
        made = builders.model(4, config(num_hidden_layers=2), group=64)
        source = place / "source"
        builders.write(source, made, builders.gptq, builders.gptq_config(group=64))
        convert(source, place / "out", ignore=[r"re:model\.layers\.1\..*experts.*"])
        model = compare(source, place)
        assert [isinstance(x.mlp.experts, PackedExperts) for x in model.model.layers] == [True, False]


def test_experts_packed_in_different_ways_are_stacks_of_each_kind(tmp_path: Path) -> None:
    made = builders.model(4, builders.qwen3_moe_config(), group=64)
    redrawn(made, "experts.2.down_proj", bits=8, group=64)
    redrawn(made, "experts.0.up_proj", bits=8, group=64)
    dynamic = {"+:.*experts.(2.down|0.up)_proj": {"bits": 8}}
    model = compare(write(made, tmp_path, group=64, dynamic=dynamic), tmp_path)
    (experts,) = (m for m in model.modules() if isinstance(m, MixedExperts))
    assert [kind.num_experts for kind in experts.kinds] == [1, experts.num_experts - 2, 1]
    assert [len(kind.first) for kind in experts.kinds] == [2, 1, 1]


def test_experts_packed_in_different_ways_are_refused_where_something_runs_between(tmp_path: Path) -> None:
    made = builders.model(4, builders.qwen3_moe_config(), group=64)
    redrawn(made, "experts.2.down_proj", bits=8, group=64)
    write(made, tmp_path, group=64, dynamic={"+:.*experts.2.down_proj": {"bits": 8}})
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["online"] = [
        {"kind": "act_quant", "site": "attn_in", "bits": 4, "clip": {"4": 0.9}, "symmetric": True}
    ]
    path.write_text(json.dumps(config))
    with pytest.raises(Refused) as caught:
        w4pack.load(tmp_path / "out")
    assert (caught.value.code, caught.value.where) == (
        "experts-mixed", "model.layers.0.mlp.experts.*.down_proj",
    )  # fmt: skip
    assert caught.value.found == "4 bit g64 sym F16 and 8 bit g64 sym F16"


def test_a_layer_with_some_experts_packed_is_refused(tmp_path: Path) -> None:
    made = builders.model(4, builders.qwen3_moe_config(), group=64)
    source = tmp_path / "source"
    builders.write(source, made, builders.gptq, builders.gptq_config(group=64))
    convert(source, tmp_path / "out", ignore=["re:.*experts.3.*"])
    with pytest.raises(Refused) as caught:
        w4pack.load(tmp_path / "out")
    assert caught.value.where == "model.layers.0.mlp.experts"
