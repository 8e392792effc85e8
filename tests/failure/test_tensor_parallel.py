"""F24, F26, F27, F28: which tensor-parallel and group sizes an engine takes, with the numbers of reports."""

from __future__ import annotations

import pytest
from engine_models import (
    CONFIG,
    GPTQ,
    MIXTRAL,
    artifact,
    block,
    changed,
    compressed,
    ct,
    experts,
    facts,
    gptq,
    layer,
)

from w4pack.convert.core.facts import LayerFacts, ModelFacts
from w4pack.convert.engines.rules import evaluate, max_tp, suggest
from w4pack.convert.engines.table import Blocker

SIZES = (1, 2, 4, 8)
# intermediate size, largest TP in g128, groups
F24 = ((11008, 2, 86), (13824, 4, 108), (14336, 8, 112), (27392, 2, 214), (29568, 1, 231), (18944, 4, 148))
WIDE = CONFIG | {"num_attention_heads": 32, "num_key_value_heads": 8}
DOWN = "model.layers.0.mlp.down_proj"


def with_inner(inner: int, layout: str = "gptq") -> tuple[LayerFacts, ...]:
    """Return a block of hidden size 4096 with another intermediate size."""
    layers = []
    for x in block(layout):
        leaf = x.name.rpartition(".")[2]
        k = inner if leaf == "down_proj" else 4096
        n = inner if leaf in ("gate_proj", "up_proj") else 1024 if leaf in ("k_proj", "v_proj") else 4096
        layers.append(layer(x.name, k, n, layout=layout, act_order=x.act_order))
    return tuple(layers)


def blockers(model: ModelFacts, engine: str, tp: int, rule: str) -> list[Blocker]:
    """Return what one rule reports."""
    return [b for b in evaluate(model, engine, tp).blockers if b.rule == rule]


@pytest.mark.parametrize(("inner", "largest", "groups"), F24)
def test_f24_max_tp_of_down_proj(inner: int, largest: int, groups: int) -> None:
    assert inner == 128 * groups
    assert max_tp(layer(DOWN, inner, 4096), WIDE) == largest


@pytest.mark.parametrize(("inner", "largest", "groups"), F24)
def test_f24_check_takes_up_to_that_size_and_refuses_the_others(
    inner: int, largest: int, groups: int
) -> None:
    model = gptq(with_inner(inner), WIDE)
    for tp in SIZES:
        result = evaluate(model, "vllm", tp)
        assert result.ok is (tp <= largest)
        if tp <= largest:
            assert result.blockers == ()
            continue
        (found,) = result.blockers
        assert (found.layer, found.rule, result.verdict) == (DOWN, "vllm.k-split", "refuses")
        assert f"K/{tp} = {inner // tp}" in found.found
        assert "group size 128" in found.expected


@pytest.mark.parametrize(("inner", "largest", "groups"), F24)
def test_f24_artifact_has_the_same_sizes(inner: int, largest: int, groups: int) -> None:
    model = artifact(with_inner(inner, "marlin"), WIDE)
    taken = [tp for tp in SIZES if not blockers(model, "w4pack", tp, "w4pack.k-tile")]
    assert taken == [tp for tp in SIZES if tp <= largest]


def test_f24_refusal_names_the_padded_size_and_the_command() -> None:
    model = gptq(with_inner(29568), WIDE)
    for tp in (2, 4, 8):
        (found,) = blockers(model, "vllm", tp, "vllm.k-split")
        assert "29696 = 8 * 29 * 128 would allow TP 8" in found.expected
    results = [evaluate(model, "vllm", tp) for tp in SIZES]
    assert suggest(results, model) == "w4pack convert SRC OUT --to gptq --pad-for-tp 8"


def test_f24_padded_model_is_taken_at_every_size() -> None:
    model = gptq(with_inner(29696), WIDE)
    assert all(evaluate(model, "vllm", tp).verdict == "ok" for tp in SIZES)


def test_f24_a_smaller_group_or_one_group_splits_further() -> None:
    assert max_tp(layer(DOWN, 29568, 4096, group_size=64), WIDE) == 2  # 462 groups
    assert max_tp(layer(DOWN, 29568, 4096, group_size=32), WIDE) == 4  # 924 groups
    assert max_tp(layer(DOWN, 29568, 4096, group_size=-1), WIDE) == 8


MOE = MIXTRAL | {"num_attention_heads": 32, "num_key_value_heads": 8}


@pytest.mark.parametrize(("inner", "largest"), ((768, 2), (1408, 1), (2048, 8)))
def test_f26_max_tp_of_experts(inner: int, largest: int) -> None:
    down = layer("model.layers.0.mlp.experts.5.down_proj", inner, 2048)
    assert max_tp(down, MOE) == largest


@pytest.mark.parametrize(("inner", "largest"), ((768, 2), (1408, 1), (2048, 8)))
def test_f26_check_names_the_experts(inner: int, largest: int) -> None:
    """compressed-tensors has no fallback: the engine stops."""
    model = ct(experts("compressed-tensors", hidden=2048, inner=inner), MOE)
    for tp in SIZES:
        found = blockers(model, "vllm", tp, "vllm.k-split")
        assert bool(found) is (tp > largest)
        for one in found:
            assert (one.layer, one.count) == ("model.layers.*.block_sparse_moe.experts.*.w2", 2)
            assert f"K/{tp} = {inner // tp}" in one.found


def test_f26_check_names_experts_of_the_other_spelling() -> None:
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    layers = tuple(
        layer(
            x.name.replace("block_sparse_moe", "mlp")[:-2] + names[x.name[-2:]],
            x.in_features,
            x.out_features,
            layout="compressed-tensors",
            act_order="none",
        )
        for x in experts(hidden=2048, inner=768)
    )
    model = ct(layers, MOE | {"architectures": ["Qwen3MoeForCausalLM"]})
    assert evaluate(model, "vllm", 2).ok
    (found,) = blockers(model, "vllm", 4, "vllm.k-split")
    assert found.layer == "model.layers.*.mlp.experts.*.down_proj"


def test_f26_gptq_experts_fall_back_to_a_slow_kernel_with_smaller_groups() -> None:
    model = gptq(experts(hidden=2048, inner=768), MOE)
    assert [evaluate(model, "vllm", tp).verdict for tp in SIZES] == ["ok", "ok", "slow", "slow"]
    (found, *_) = blockers(model, "vllm", 4, "vllm.moe-slow")
    assert "I/4 % 128 = 64" in found.found


def one_linear(k: int, n: int, group: int, layout: str = "compressed-tensors") -> ModelFacts:
    """Return a model of one column-parallel linear."""
    order = "none" if layout != "gptq" else "trivial"
    only = (layer("model.layers.0.mlp.up_proj", k, n, layout=layout, group_size=group, act_order=order),)
    if layout == "compressed-tensors":
        return ct(only, quant=compressed(group))
    return facts(only, GPTQ | {"group_size": group})


def test_f27_group_64_with_k_off_the_tile() -> None:
    """8256 = 64.5 * 128: SGLang's Marlin does not take it, vLLM's pads it and says so."""
    refused = evaluate(one_linear(8256, 1024, 64, "gptq"), "sglang", 1)
    assert [(b.rule, b.found) for b in refused.blockers] == [
        ("sglang.shape-tile", "K % 128 = 64, N % 64 = 0")
    ]
    taken = evaluate(one_linear(8256, 1000, 64, "gptq"), "vllm", 1)
    assert taken.verdict == "ok"
    padded = [n.found for n in taken.notes if n.rule == "vllm.pads"]
    assert padded == ["K % 128 = 64, N % 64 = 40: padded at load"]


def test_f27_every_kernel_gives_its_reason() -> None:
    model = one_linear(8256, 1000, 48)
    (found,) = blockers(model, "vllm", 1, "vllm.slow-kernel")
    assert found.found == (
        "a slower kernel (Machete: group 48 is not -1, 64 or 128; "
        "Marlin: group 48 is not -1, 32, 64 or 128; Triton: group 48 is not 32, 64, 128 or K)"
    )
    in_bf16 = ct(model.layers, CONFIG | {"dtype": "bfloat16"}, compressed(48))
    (found,) = blockers(in_bf16, "vllm", 1, "vllm.no-kernel")
    assert found.found == (
        "Machete: group 48 is not -1, 64 or 128; Marlin: group 48 is not -1, 32, 64 or 128; "
        "Exllama: float16 only; Triton: group 48 is not 32, 64, 128 or K"
    )


def test_f27_group_256_is_refused_and_the_split_is_suggested() -> None:
    model = one_linear(1024, 1024, 256, "gptq")
    (found,) = evaluate(model, "vllm", 1).blockers
    assert (found.rule, found.found) == ("vllm.gptq-group", "256")
    assert found.expected == "group size -1, 32, 64 or 128"
    assert suggest([evaluate(model, "vllm", 1)], model) == "w4pack convert SRC OUT --to gptq"
    assert evaluate(one_linear(1024, 1024, 128, "gptq"), "vllm", 1).verdict == "ok"


def test_f27_group_16_goes_to_compressed_tensors_in_float16_or_to_transformers() -> None:
    model = gptq(block(group_size=16), group_size=16)
    results = [evaluate(model, "vllm", 1)]
    assert results[0].verdict == "refuses"
    assert suggest(results, model) == "w4pack convert SRC OUT --to compressed-tensors"
    assert evaluate(model, "transformers", 1).verdict == "ok"
    (found,) = {b.rule for b in evaluate(artifact(block("marlin", group_size=16)), "w4pack", 1).blockers}
    assert found == "w4pack.group"


def test_f28_columns_off_the_tile_are_named_by_the_engines_that_refuse_them() -> None:
    for columns in (48, 1440):
        model = gptq(changed(block(), "up_proj", out_features=columns))
        assert evaluate(model, "vllm", 1).verdict == "ok"
        (found,) = blockers(model, "sglang", 1, "sglang.shape-tile")
        assert f"N % 64 = {columns % 64}" in found.found
