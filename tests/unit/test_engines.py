"""Verdicts of engines: what is taken, how rules add up, ranks, settings that make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_models import (
    CONFIG,
    EXPERTS,
    MIXTRAL,
    PACKED_HEAD,
    artifact,
    awq,
    block,
    changed,
    ct,
    experts,
    facts,
    gptq,
    layer,
    without,
)

from w4pack.convert.core.facts import ModelFacts
from w4pack.convert.engines.model import survey
from w4pack.convert.engines.rules import ENGINES, engine_version, evaluate, max_tp, render_markdown, suggest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("engine", ("vllm", "sglang", "transformers"))
@pytest.mark.parametrize(
    "model", (gptq(), awq(), ct(), gptq(block(bits=8), bits=8)), ids=("gptq", "awq", "ct", "w8")
)
@pytest.mark.parametrize("tp", (1, 2))
def test_plain_models_are_taken(engine: str, model: ModelFacts, tp: int) -> None:
    result = evaluate(model, engine, tp)
    assert (result.verdict, result.ok, result.blockers) == ("ok", True, ())


def test_plain_artifact_is_taken() -> None:
    assert [evaluate(artifact(), "w4pack", tp).verdict for tp in (1, 2)] == ["ok", "ok"]


def test_an_artifact_is_taken_by_vllm_with_the_plugin_and_says_so() -> None:
    for tp in (1, 2):
        result = evaluate(artifact(), "vllm", tp)
        assert (result.verdict, [n.rule for n in result.notes]) == ("ok", ["vllm.plugin"])


def test_a_packed_head_of_a_model_that_is_called_tied_is_taken_as_it_is() -> None:
    model = artifact((*block("marlin"), PACKED_HEAD), CONFIG | {"tie_word_embeddings": True})
    assert evaluate(model, "vllm", 1).verdict == "ok"


@pytest.mark.parametrize("bits", (4, 8))
def test_experts_that_differ_are_taken(bits: int) -> None:
    found = evaluate(artifact(changed(EXPERTS, "experts.1.w2", bits=bits), MIXTRAL), "vllm", 1)
    assert (found.verdict, "vllm.plugin-experts" in {n.rule for n in found.notes}) == ("ok", bits == 8)


def test_unequal_parts_of_a_fused_layer_are_no_reason_to_refuse_an_artifact() -> None:
    parts = changed(block("marlin"), "q_proj", group_size=32, act_order="groups")
    assert evaluate(artifact(without(parts, "v_proj")), "vllm", 1).ok


def test_the_worst_verdict_wins_and_slow_counts_as_ok() -> None:
    slow = evaluate(awq(block("awq"), zero_point=False), "vllm", 1)
    assert (slow.verdict, slow.ok) == ("slow", True)
    wrong = evaluate(gptq(block(sym=False)), "vllm", 1)
    assert (wrong.verdict, wrong.ok) == ("wrong", False)
    both = evaluate(gptq(block(sym=False, group_size=64)), "vllm", 1)
    assert [b.verdict for b in both.blockers][:1] == ["refuses"] and both.verdict == "refuses"
    assert "wrong" in {b.verdict for b in both.blockers}


def test_a_note_leaves_the_verdict_alone() -> None:
    result = evaluate(gptq(config=CONFIG | {"dtype": "bfloat16"}), "vllm", 1)
    assert (result.verdict, result.blockers) == ("ok", ())
    assert {n.rule for n in result.notes} == {"vllm.scale-dtype"}
    assert sum(n.count for n in result.notes) == 7


def test_modules_that_all_break_a_rule_are_one_pattern_and_a_few_are_named() -> None:
    layers = tuple(x for i in range(3) for x in block(index=i))
    every = evaluate(gptq(changed(layers, "o_proj", act_order="groups")), "vllm", 1).blockers
    assert [(b.layer, b.count) for b in every] == [("model.layers.*.self_attn.o_proj", 3)]
    one = changed(layers, "layers.1.self_attn.o_proj", act_order="groups")
    some = evaluate(gptq(one), "vllm", 1).blockers
    assert [(b.layer, b.count) for b in some] == [("model.layers.1.self_attn.o_proj", 1)]


def test_an_order_that_is_refused_is_not_also_called_misread() -> None:
    found = evaluate(gptq(block(act_order="groups"), desc_act=True), "vllm", 1).blockers
    assert [b.rule for b in found] == ["vllm.desc-act"]


def test_fused_module_is_named_with_its_parts() -> None:
    """F13: q_proj at another group size than k and v."""
    uneven = changed(block(), "q_proj", group_size=32)
    found = evaluate(gptq(uneven, dynamic={".*q_proj": {"group_size": 32}}), "vllm", 1)
    hit = next(b for b in found.blockers if b.rule == "vllm.uneven-fused")
    assert hit.layer == "model.layers.0.self_attn.qkv_proj"
    assert hit.found == "q_proj 4 bit g32 sym, k_proj/v_proj 4 bit g128 sym"
    assert not found.ok
    artifact_of_it = artifact(changed(block("marlin"), "q_proj", group_size=32))
    assert evaluate(artifact_of_it, "w4pack", 1).ok


def test_dynamic_rules_are_looked_up_under_fused_names() -> None:
    model = gptq(block(group_size=64), dynamic={"+:.*": {"group_size": 64}})
    assert evaluate(model, "vllm", 1).ok
    only_up = gptq(
        changed(changed(block(), "gate_proj", bits=8), "up_proj", bits=8), dynamic={".*up_proj": {"bits": 8}}
    )
    assert evaluate(only_up, "vllm", 1).ok  # `.*up_proj` also matches gate_up_proj
    assert not evaluate(only_up, "transformers", 1).ok  # and transformers ignores `dynamic`


# --- tensor parallelism


def test_key_and_value_are_repeated_past_their_heads() -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    k_proj = layer("model.layers.0.self_attn.k_proj", 1024, 128)
    assert max_tp(k_proj, CONFIG | heads) == 8
    assert max_tp(k_proj, CONFIG | heads | {"num_key_value_heads": 8}) == 8  # 16 columns are two words
    thin = layer("model.layers.0.self_attn.k_proj", 1024, 32)
    assert max_tp(thin, CONFIG | heads | {"num_key_value_heads": 8}) == 4  # 4 columns are half a word
    assert max_tp(thin, CONFIG | heads) == 8


def test_repeated_heads_are_whole_on_a_rank_for_check_too() -> None:
    """Two heads of 64 at TP 4: 64 columns on a rank, not 32."""
    rules = {(b.layer, b.rule) for b in evaluate(artifact(), "w4pack", 4).blockers}
    assert rules == {("model.layers.0.self_attn.o_proj", "w4pack.k-tile")}


def test_max_tp_by_role() -> None:
    assert max_tp(layer("m.down_proj", 640, 256), CONFIG) == 1  # 5 groups
    assert max_tp(layer("m.down_proj", 640, 256, group_size=-1), CONFIG) == 8
    assert max_tp(layer("m.down_proj", 1024, 256, act_order="groups"), CONFIG) == 1
    assert max_tp(layer("m.down_proj", 1024, 256, act_order="trivial"), CONFIG) == 8
    assert max_tp(layer("m.up_proj", 1024, 256, act_order="groups"), CONFIG) == 8
    assert max_tp(layer("m.up_proj", 640, 72), CONFIG) == 1  # 9 words
    assert max_tp(layer("m.gate", 640, 8), CONFIG) == 8  # routers are repeated
    assert max_tp(layer("m.strange", 512, 1024), CONFIG) == 4  # must fit both ways


def test_one_group_is_whole_on_every_rank() -> None:
    model = gptq(changed(block(group_size=-1), "down_proj", in_features=640), group_size=-1)
    assert evaluate(model, "vllm", 2).ok
    one_group = changed(block(), "o_proj", in_features=128, group_size=-1)  # K = 128 under a label of 128
    assert evaluate(gptq(one_group), "vllm", 1).ok
    assert "vllm.k-split" in {b.rule for b in evaluate(gptq(one_group), "vllm", 2).blockers}


def test_expert_group_is_halved_by_the_fallback() -> None:
    """Intermediate size 768 in g128 at TP 4: 192 holds one and a half groups, or three of 64."""
    moe = gptq(experts(inner=768), MIXTRAL)
    assert [evaluate(moe, "vllm", tp).verdict for tp in (1, 2, 4)] == ["ok", "ok", "slow"]


# --- robustness, speed, the page


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "settings",
    (
        {},
        {"quant_method": 7},
        {"quant_method": "gptq", "bits": "4", "dynamic": {"(": {}, "a": None}},
        {"quant_method": "gptq", "bits": None, "group_size": [], "sym": "yes", "dynamic": []},
        {"quant_method": "awq", "modules_to_not_convert": {"a": 1}, "version": 3},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": None, "b": {"targets": None, "weights": 3}},
            "ignore": "lm_head",
            "transform_config": {"config_groups": {"x": {"apply": "input"}}},
        },
        {"quant_method": "auto-round", "extra_config": {"[": {}, "a": 1}, "packing_format": None},
    ),
)
def test_nonsense_in_the_settings_never_raises(engine: str, settings: dict[str, object]) -> None:
    model = facts(block(), settings, {"architectures": "Llama", "num_attention_heads": "four", "dtype": 3})
    result = evaluate(model, engine, 2)
    assert result.verdict in ("ok", "refuses", "wrong", "slow")
    suggest([result], model)


def test_like_modules_are_looked_at_once() -> None:
    layers = tuple(x for i in range(80) for x in block(index=i))
    model = survey(gptq(layers), fused=True)
    assert len(model.kinds) == 7  # rules run once for each, not 560 times
    assert sum(len(k.names) for k in model.kinds) == 560


def test_versions() -> None:
    assert {e: engine_version(e) for e in ENGINES} == {
        "vllm": "0.32.0",
        "sglang": "0.5.23",
        "transformers": "5.24.0",
        "w4pack": "artifact 1",
    }


def test_the_reference_page_is_current() -> None:
    page = ROOT / "docs" / "reference" / "engine-rules.md"
    assert page.read_text(encoding="utf-8") == render_markdown()
