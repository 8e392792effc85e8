"""Engine rules: each row with a model that breaks it and the nearest one that does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from engine_models import (
    AWQ,
    CONFIG,
    EXPERTS,
    GPTQ,
    HEAD,
    MIXTRAL,
    NARROW,
    ORDERED,
    PACKED_HEAD,
    artifact,
    auto_round,
    awq,
    block,
    changed,
    compressed,
    ct,
    dense,
    experts,
    facts,
    gptq,
    online,
    without,
)

from w4pack.convert.core.facts import ModelFacts, Warning_
from w4pack.convert.engines.rules import ENGINES, evaluate
from w4pack.convert.engines.table import Rule


@dataclass(frozen=True)
class Case:
    """``bad`` breaks the rule at ``tp``; ``good`` is as near as can be and does not."""

    rule: str
    bad: ModelFacts
    good: ModelFacts
    tp: int = 1


def but(settings: dict[str, object], *keys: str) -> dict[str, object]:
    """Leave keys out."""
    return {k: v for k, v in settings.items() if k not in keys}


def named(model: ModelFacts, *files: str, weights: tuple[str, ...] | None = None) -> ModelFacts:
    """Give a model other files."""
    return replace(model, files=files, weight_files=weights or model.weight_files)


def tied(**settings: object) -> ModelFacts:
    """Return a compressed-tensors model whose head is the embedding."""
    model = ct(quant=compressed() | settings)
    return replace(model, dense=tuple(d for d in model.dense if not d.name.startswith("lm_head")))


ROTATED = {"config_groups": {"R4": {"apply": [{"location": "input", "targets": ["re:.*down_proj"]}]}}}
FOLDED = {"config_groups": {"R1": {"apply": [{"location": "weight_input", "targets": ["Linear"]}]}}}
TARGETS_HEAD = {"group_0": {"targets": ["Linear", "lm_head"], "weights": {"num_bits": 4, "group_size": 128}}}
W8_ASYM = {"bits": 8, "sym": False}
G16_CT = block("compressed-tensors", group_size=16)
SPLIT_MIX = changed(block("compressed-tensors"), "q_proj", group_size=64)
Q_DENSE = without(block(), "q_proj")
DOWN_DENSE = without(block(), "down_proj")
LOST = dense("model.layers.0.self_attn.q_proj")
LOST_DOWN = dense("model.layers.0.mlp.down_proj")
KEPT = ["lm_head", "model.layers.0.mlp.down_proj"]
QWEN = MIXTRAL | {"architectures": ["Qwen3MoeForCausalLM"]}
# K per rank 256 = 2 * 128, and 320 = 2.5 * 128 (but 10 * 32)
ODD_DOWN = changed(block(), "down_proj", in_features=640)
FINE_DOWN = changed(block(group_size=32), "down_proj", in_features=640)

VLLM = (
    Case("vllm.no-config", facts(block(), None), facts((), None)),
    Case("vllm.settings-file", replace(gptq(), quant_file="quantize_config.json"), gptq()),
    Case(
        "vllm.extra-file",
        named(gptq(), "model.safetensors", "spare.safetensors"),
        named(gptq(), "model.safetensors", "spare.safetensors", "model.safetensors.index.json"),
    ),
    Case("vllm.method", gptq(quant_method="marlin"), gptq(quant_method="gptq_marlin")),
    Case(
        "vllm.gptq-keys",
        facts(block(), but(GPTQ, "desc_act")),
        facts(block(), but(GPTQ, "checkpoint_format")),
    ),
    Case("vllm.gptq-type", gptq(sym=False), gptq(block(bits=8), bits=8)),
    Case("vllm.gptq-type", gptq(block(bits=3), bits=3), gptq()),
    Case(
        "vllm.dynamic-type",
        gptq(dynamic={"+:.*gate_up_proj": {"sym": False}}),
        gptq(dynamic={"+:.*gate_up_proj": {"sym": True}}),
    ),
    Case("vllm.desc-act", gptq(desc_act=True), gptq(block(group_size=-1), desc_act=True, group_size=-1)),
    Case(
        "vllm.dynamic-desc-act",
        gptq(dynamic={"+:.*o_proj": {"desc_act": True}}),
        gptq(dynamic={"-:.*lm_head": {"desc_act": True}, "+:.*o_proj": {"desc_act": False}}),
    ),
    Case(
        "vllm.awq-keys", facts(block("awq"), but(AWQ, "zero_point")), facts(block("awq"), but(AWQ, "version"))
    ),
    Case("vllm.awq-bits", awq(block("awq", bits=8), bits=8), awq()),
    Case(
        "vllm.packing",
        auto_round(packing_format="auto_round:gptqmodel"),
        auto_round(block("awq"), packing_format="auto_round:auto_awq"),
    ),
    Case(
        "vllm.auto-round-asym",
        auto_round(block(sym=False, act_order="none"), sym=False),
        auto_round(block("awq", sym=False), sym=False, packing_format="auto_round:auto_awq"),
    ),
    Case("vllm.actorder", ct(quant=compressed(actorder="group")), ct(quant=compressed(actorder="static"))),
    Case(
        "vllm.sparsity",
        ct(quant=compressed() | {"sparsity_config": {"targets": ["Linear"], "format": "sparse-24"}}),
        ct(quant=compressed() | {"sparsity_config": {}}),
    ),
    Case("vllm.rotation", gptq(rotation="hadamard"), gptq(rotation=None)),
    Case(
        "vllm.transform-split",
        ct(quant=compressed() | {"transform_config": ROTATED}),
        ct(quant=compressed() | {"transform_config": FOLDED}),
        tp=2,
    ),
    Case(
        "vllm.transform",
        ct(quant=compressed() | {"transform_config": ROTATED}),
        ct(quant=compressed() | {"transform_config": FOLDED}),
    ),
    Case(
        "vllm.heads",
        gptq(config=CONFIG | NARROW),
        gptq(config=CONFIG | NARROW | {"num_attention_heads": 8}),
        tp=4,
    ),
    Case(
        "vllm.partial-fused",
        facts(Q_DENSE, GPTQ, dense_facts=LOST),
        facts(DOWN_DENSE, GPTQ, dense_facts=LOST_DOWN),
    ),
    Case(
        "vllm.uneven-fused",
        ct(SPLIT_MIX),
        ct(changed(block("compressed-tensors"), "down_proj", group_size=64)),
    ),
    Case("vllm.expert-names", gptq(experts(), QWEN), gptq(experts(), MIXTRAL)),
    Case(
        "vllm.dense-labelled",
        facts(without(block("awq"), "down_proj"), AWQ, dense_facts=LOST_DOWN),
        facts(
            without(block("awq"), "down_proj"), AWQ | {"modules_to_not_convert": KEPT}, dense_facts=LOST_DOWN
        ),
    ),
    Case("vllm.layout", awq(block("awq-gemv"), version="gemv"), awq(version="gemv")),
    Case(
        "vllm.layout",
        gptq(block("marlin-legacy"), checkpoint_format="marlin"),
        gptq(checkpoint_format="marlin"),
    ),
    Case("vllm.shape", gptq(block(group_size=64)), gptq(block(group_size=64), group_size=64)),
    Case("vllm.shape", gptq(block(bits=8)), gptq(block(bits=8), bits=8)),
    Case("vllm.lm-head", gptq((*block(), HEAD)), gptq((*block(), HEAD), lm_head=True)),
    Case("vllm.labelled-dense", gptq(dynamic={"-:.*down_proj": {}}), gptq(dynamic={"-:.*router": {}})),
    Case("vllm.map-dropped", gptq(block(act_order="groups")), gptq(block(act_order="trivial"))),
    Case("vllm.map-dropped", gptq(block(act_order="block")), gptq(block(act_order="none"))),
    Case(
        "vllm.map-unknown",
        ct(block("compressed-tensors", act_order="groups")),
        ct(block("compressed-tensors", act_order="none")),
    ),
    Case("vllm.zeros-ignored", gptq(block(sym=False)), gptq(block(sym=True))),
    Case("vllm.no-zero-point", awq(zero_point=False), awq(block("awq"), zero_point=False)),
    Case("vllm.slow-zero-point", awq(block("awq"), zero_point=False), awq(block("awq"))),
    Case("vllm.ambiguous-zeros", gptq(block(ambiguous_zeros=3)), gptq(block(ambiguous_zeros=0))),
    Case("vllm.gptq-group", gptq(block(group_size=256), group_size=256), gptq()),
    Case("vllm.awq-group", awq(block("awq", group_size=256), group_size=256), awq()),
    Case(
        "vllm.awq-group-odd",
        awq(block("awq", group_size=16), group_size=16),
        awq(block("awq", group_size=32), group_size=32),
    ),
    Case(
        "vllm.no-kernel",
        ct(G16_CT, CONFIG | {"dtype": "bfloat16"}, compressed(16)),
        ct(G16_CT, quant=compressed(16)),
    ),
    Case("vllm.slow-kernel", ct(G16_CT, quant=compressed(16)), ct()),
    Case(
        "vllm.slow-kernel",
        ct(block("compressed-tensors", **W8_ASYM), quant=compressed(**W8_ASYM)),
        ct(block("compressed-tensors", sym=False), quant=compressed(sym=False)),
    ),
    Case("vllm.k-split", gptq(ODD_DOWN), gptq(FINE_DOWN, group_size=32), tp=2),
    Case(
        "vllm.n-split",
        gptq(changed(block(), "gate_proj", out_features=520)),
        gptq(changed(block(), "gate_proj", out_features=528)),
        tp=2,
    ),
    Case(
        "vllm.moe-slow",
        gptq(experts(hidden=192, group_size=32), MIXTRAL, group_size=32),
        gptq(experts(), MIXTRAL),
    ),
    Case(
        "vllm.moe-no-kernel",
        gptq(experts(inner=1416), MIXTRAL),
        gptq(experts(inner=1408), MIXTRAL),
    ),
    Case(
        "vllm.moe-ct",
        ct(experts("compressed-tensors", inner=768), MIXTRAL),
        ct(experts("compressed-tensors", inner=1024), MIXTRAL),
        tp=4,
    ),
    Case("vllm.scale-dtype", gptq(config=CONFIG | {"dtype": "bfloat16"}), gptq()),
    Case("vllm.pads", gptq(changed(block(), "up_proj", out_features=528)), gptq()),
)

SGLANG = (
    Case("sglang.no-config", facts(block(), None), facts((), None)),
    Case("sglang.method", gptq(quant_method="hqq"), gptq()),
    Case("sglang.gptq-type", gptq(sym=False), gptq()),
    Case(
        "sglang.gptq-type",
        gptq(block(group_size=16), group_size=16),
        gptq(block(group_size=32), group_size=32),
    ),
    Case("sglang.gptq-type", facts(block(), but(GPTQ, "sym")), gptq()),
    Case("sglang.marlin-label", gptq(is_marlin_format=True), gptq(checkpoint_format="gptq_v2")),
    Case(
        "sglang.awq-keys",
        facts(block("awq"), but(AWQ, "zero_point")),
        facts(block("awq"), but(AWQ, "version")),
    ),
    Case("sglang.awq-bits", awq(block("awq", bits=8), bits=8), awq()),
    Case("sglang.packing", auto_round(packing_format="auto_round"), auto_round()),
    Case("sglang.rotation", gptq(rotation_config={"kind": "hadamard"}), gptq(rotation_config={})),
    Case(
        "sglang.rotation",
        ct(quant=compressed() | {"transform_config": ROTATED}),
        ct(quant=compressed() | {"transform_config": FOLDED}),
    ),
    Case(
        "sglang.sparsity",
        ct(quant=compressed() | {"sparsity_config": {"targets": ["Linear"]}}),
        ct(quant=compressed() | {"sparsity_config": {}}),
    ),
    Case("sglang.actorder", ct(quant=compressed(actorder="group")), ct(quant=compressed(actorder="weight"))),
    Case("sglang.heads", gptq(config=CONFIG | NARROW), gptq(), tp=4),
    Case("sglang.partial-fused", facts(Q_DENSE, GPTQ, dense_facts=LOST), gptq()),
    Case("sglang.uneven-fused", ct(SPLIT_MIX), ct()),
    Case("sglang.expert-names", gptq(experts(), QWEN), gptq(experts(), MIXTRAL)),
    Case(
        "sglang.dense-labelled",
        facts(DOWN_DENSE, GPTQ, dense_facts=LOST_DOWN),
        facts(DOWN_DENSE, GPTQ | {"dynamic": {"-:.*down_proj": {}}}, dense_facts=LOST_DOWN),
    ),
    Case("sglang.layout", awq(block("awq-gemv-fast"), version="gemv_fast"), awq()),
    Case("sglang.shape", gptq(block(group_size=64)), gptq()),
    Case("sglang.lm-head", gptq((*block(), HEAD)), gptq((*block(), HEAD), lm_head=True)),
    Case("sglang.labelled-dense", gptq(dynamic={"-:.*down_proj": {}}), gptq()),
    Case(
        "sglang.map-dropped", gptq(block(act_order="groups")), gptq(block(act_order="groups"), desc_act=True)
    ),
    Case("sglang.zeros-ignored", gptq(block(sym=False)), gptq()),
    Case("sglang.ambiguous-zeros", gptq(block(ambiguous_zeros=1)), gptq()),
    Case("sglang.awq-zero-point", awq(block("awq"), zero_point=False), awq(block("awq"))),
    Case(
        "sglang.shape-tile",
        gptq(changed(block(), "up_proj", out_features=544)),
        gptq(changed(block(), "up_proj", out_features=576)),
    ),
    Case("sglang.awq-slow", awq(changed(block("awq"), "up_proj", out_features=544)), awq()),
    Case(
        "sglang.ct-asym",
        ct(block("compressed-tensors", **W8_ASYM), quant=compressed(**W8_ASYM)),
        ct(block("compressed-tensors", sym=False), quant=compressed(sym=False)),
    ),
    Case("sglang.ct-group", ct(G16_CT, quant=compressed(16)), ct()),
    Case("sglang.k-split", gptq(ODD_DOWN), gptq(), tp=2),
    Case(
        "sglang.k-split",
        gptq(ODD_DOWN),
        gptq(changed(ODD_DOWN, "_proj", act_order="groups"), desc_act=True),
        tp=2,
    ),
    Case(
        "sglang.n-split",
        gptq(changed(block(), "gate_proj", out_features=520)),
        gptq(),
        tp=2,
    ),
    Case("sglang.moe-slow", gptq(experts(inner=1056), MIXTRAL), gptq(experts(inner=1024), MIXTRAL)),
    Case(
        "sglang.moe-act-order",
        gptq(experts(inner=1056, act_order="groups"), MIXTRAL, desc_act=True),
        gptq(experts(inner=1024, act_order="groups"), MIXTRAL, desc_act=True),
    ),
    Case("sglang.scale-dtype", gptq(block(scale_dtype="BF16")), gptq()),
)

TRANSFORMERS = (
    Case("transformers.no-config", facts(block(), None), facts((), None)),
    Case("transformers.settings-file", replace(gptq(), quant_file="quantize_config.json"), gptq()),
    Case("transformers.method", gptq(quant_method="marlin"), gptq()),
    Case("transformers.artifact", artifact(), gptq()),
    Case(
        "transformers.stray-file",
        named(
            gptq(),
            "model.safetensors",
            "model.safetensors.index.json",
            "a.safetensors",
            weights=("a.safetensors",),
        ),
        named(gptq(), "model.safetensors.index.json", "a.safetensors", weights=("a.safetensors",)),
    ),
    Case(
        "transformers.weight-files",
        named(gptq(), "gptq_model-4bit-128g.safetensors", weights=("gptq_model-4bit-128g.safetensors",)),
        gptq(),
    ),
    Case("transformers.gptq-format", gptq(checkpoint_format="exllama"), gptq(is_marlin_format=True)),
    Case("transformers.gptq-format", gptq(checkpoint_format="bitblas"), gptq(checkpoint_format="marlin")),
    Case("transformers.awq-version", awq(block("awq-marlin"), version="marlin"), awq(version="gemm")),
    Case("transformers.auto-round", auto_round(), gptq()),
    Case("transformers.rotation", gptq(spinquant_config={"r1": True}), gptq()),
    Case(
        "transformers.sparsity",
        ct(quant=compressed() | {"sparsity_config": {"targets": ["Linear"]}}),
        ct(quant=compressed() | {"sparsity_config": {}}),
    ),
    Case(
        "transformers.actorder",
        ct(quant=compressed(actorder="group")),
        ct(quant=compressed(actorder="static")),
    ),
    Case(
        "transformers.gptq-dense",
        facts(DOWN_DENSE, GPTQ | {"dynamic": {"-:.*down_proj": {}}}, dense_facts=LOST_DOWN),
        facts(
            DOWN_DENSE,
            GPTQ
            | {
                "modules_in_block_to_quantize": [
                    [n.removeprefix("model.layers.0.")] for n in (x.name for x in DOWN_DENSE)
                ]
            },
            dense_facts=LOST_DOWN,
        ),
    ),
    Case(
        "transformers.awq-dense",
        facts(without(block("awq"), "down_proj"), AWQ, dense_facts=LOST_DOWN),
        facts(
            without(block("awq"), "down_proj"), AWQ | {"modules_to_not_convert": KEPT}, dense_facts=LOST_DOWN
        ),
    ),
    Case("transformers.dense-head", ct(quant=compressed() | {"ignore": []}), ct()),
    Case("transformers.tied-head", tied(ignore=[]), tied(ignore=["lm_head"])),
    Case(
        "transformers.channel-asym",
        gptq(block(group_size=-1, sym=False), group_size=-1, sym=False),
        gptq(block(sym=False), sym=False),
    ),
    Case(
        "transformers.dynamic",
        gptq(changed(block(), "o_proj", group_size=64), dynamic={".*o_proj": {"group_size": 64}}),
        gptq(dynamic={"router": {"group_size": 64}}),
    ),
    Case(
        "transformers.unlisted",
        gptq(modules_in_block_to_quantize=[["mlp.up_proj"]]),
        gptq(modules_in_block_to_quantize=None),
    ),
    Case("transformers.random-experts", gptq(experts(), MIXTRAL), ct(experts("compressed-tensors"), MIXTRAL)),
    Case(
        "transformers.random-experts",
        awq(experts("awq"), MIXTRAL),
        ct(experts("compressed-tensors"), MIXTRAL),
    ),
    Case(
        "transformers.expert-names",
        ct(experts("compressed-tensors"), QWEN),
        ct(experts("compressed-tensors"), MIXTRAL),
    ),
    Case("transformers.random-head", gptq((*block(), HEAD), lm_head=True), gptq()),
    Case(
        "transformers.head-unnamed",
        ct((*block("compressed-tensors"), replace(HEAD, layout="compressed-tensors"))),
        ct(
            (*block("compressed-tensors"), replace(HEAD, layout="compressed-tensors")),
            quant=compressed() | {"config_groups": TARGETS_HEAD, "ignore": []},
        ),
    ),
    Case("transformers.layout", awq(version="gemv"), awq(block("awq-gemv", sym=False), version="gemv")),
    Case("transformers.layout", gptq(block("marlin-legacy")), gptq()),
    Case("transformers.shape", gptq(block(group_size=64)), gptq()),
    Case(
        "transformers.labelled-dense",
        awq(modules_to_not_convert=["down_proj"]),
        awq(modules_to_not_convert=["lm_head"]),
    ),
    Case("transformers.zeros-ignored", gptq(block(sym=False)), gptq(block(sym=False), sym=False)),
    Case("transformers.ambiguous-zeros", gptq(block(ambiguous_zeros=1)), gptq()),
    Case(
        "transformers.ct-asym",
        ct(block("compressed-tensors", sym=False), quant=compressed(sym=False)),
        ct(),
    ),
    Case(
        "transformers.group",
        gptq(block(group_size=48), group_size=48),
        gptq(block(group_size=16), group_size=16),
    ),
    Case("transformers.group", awq(block("awq", group_size=256), group_size=256), awq()),
    Case("transformers.n-pack", gptq(changed(block(), "up_proj", out_features=516)), gptq()),
    Case("transformers.scale-dtype", gptq(block(scale_dtype="BF16")), gptq()),
)
OTHER_EXPERT = changed(EXPERTS, "experts.1.w2", bits=8)
DENSE_EXPERT = dense("model.layers.0.block_sparse_moe.experts.1.w2")
W4PACK = (
    Case("w4pack.layout", gptq(), artifact()),
    Case("w4pack.group", artifact(block("marlin", group_size=16)), artifact(block("marlin", group_size=-1))),
    Case("w4pack.heads", artifact(config=CONFIG | NARROW), artifact(), tp=4),
    Case(
        "w4pack.n-tile",
        artifact(changed(block("marlin"), "up_proj", out_features=576)),
        artifact(changed(block("marlin"), "up_proj", out_features=640)),
        tp=2,
    ),
    Case(
        "w4pack.k-tile",
        artifact(changed(block("marlin"), "down_proj", in_features=640)),
        artifact(changed(block("marlin"), "down_proj", in_features=640, group_size=64)),
        tp=2,
    ),
    Case(
        "w4pack.k-order",
        artifact(ORDERED),
        artifact(changed(block("marlin"), "up_proj", act_order="groups")),
        tp=2,
    ),
    Case(
        "w4pack.online",
        replace(artifact(), unfit=(Warning_("head-size", "head_dim", "64", "72"),)),
        artifact(),
    ),
    Case("w4pack.online-split", online(block=512), online(block=256), tp=2),
    Case(
        "w4pack.partial-experts",
        replace(artifact(without(EXPERTS, "experts.1.w2"), MIXTRAL), dense=DENSE_EXPERT),
        artifact(EXPERTS, MIXTRAL),
    ),
    Case(
        "w4pack.online-experts",
        replace(artifact(OTHER_EXPERT, MIXTRAL), quant_config=online(block=256).quant_config),
        artifact(OTHER_EXPERT, MIXTRAL),
    ),
)
PLUGIN = (
    Case("vllm.plugin", artifact(), gptq()),
    Case("vllm.plugin-layout", artifact(block("gptq", act_order="none")), artifact()),
    Case(
        "vllm.plugin-online",
        replace(artifact(), quant_config={"quant_method": "w4pack", "online": [{"kind": "hadamard"}]}),
        replace(artifact(), quant_config={"quant_method": "w4pack", "online": []}),
    ),
    Case("vllm.plugin-group", artifact(block("marlin", group_size=16)), artifact()),
    Case("vllm.plugin-heads", artifact(config=CONFIG | NARROW), artifact(), tp=4),
    Case(
        "vllm.plugin-n-tile",
        artifact(changed(block("marlin"), "up_proj", out_features=576)),
        artifact(changed(block("marlin"), "up_proj", out_features=640)),
        tp=2,
    ),
    Case(
        "vllm.plugin-head-tile",  # 300 columns are padded to 320: 160 a rank; 330 to 384: 192
        artifact((*block("marlin"), replace(PACKED_HEAD, out_features=300))),
        artifact((*block("marlin"), replace(PACKED_HEAD, out_features=330))),
        tp=2,
    ),
    Case(
        "vllm.plugin-k-tile",
        artifact(changed(block("marlin"), "down_proj", in_features=640)),
        artifact(changed(block("marlin"), "down_proj", in_features=640, group_size=64)),
        tp=2,
    ),
    Case(
        "vllm.plugin-k-order",
        artifact(ORDERED),
        artifact(changed(block("marlin"), "up_proj", act_order="groups")),
        tp=2,
    ),
    Case(
        "vllm.plugin-expert-names",
        artifact(tuple(replace(x, name=x.name.replace("block_sparse_moe", "mlp")) for x in EXPERTS), MIXTRAL),
        artifact(EXPERTS, MIXTRAL),
    ),
    Case(
        "vllm.plugin-experts",
        artifact(OTHER_EXPERT, MIXTRAL),
        artifact(changed(EXPERTS, ".w2", bits=8), MIXTRAL),
    ),
    Case(
        "vllm.plugin-partial-experts",
        replace(artifact(without(EXPERTS, "experts.1.w2"), MIXTRAL), dense=DENSE_EXPERT),
        artifact(EXPERTS, MIXTRAL),
    ),
    Case("vllm.plugin-lora-experts", artifact(EXPERTS, MIXTRAL), artifact()),
)

CASES = VLLM + SGLANG + TRANSFORMERS + W4PACK + PLUGIN


def all_rules() -> list[Rule]:
    """Return the rules of every engine, those of plugins too."""
    return [rule for engine in ENGINES.values() for rule in (*engine.rules, *engine.artifact)]


def broken(model: ModelFacts, rule: str, tp: int) -> list[str]:
    """Return the verdicts with which ``rule`` is reported."""
    result = evaluate(model, rule.partition(".")[0], tp)
    return [b.verdict for b in (*result.blockers, *result.notes) if b.rule == rule]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.rule)
def test_a_rule_finds_what_breaks_it_and_lets_the_nearest_case_pass(case: Case) -> None:
    expected = {r.id: r.verdict for r in all_rules()}[case.rule]
    found = broken(case.bad, case.rule, case.tp)
    assert found and set(found) == {expected}
    assert broken(case.good, case.rule, case.tp) == []


def test_every_rule_has_a_case() -> None:
    assert {r.id for r in all_rules()} == {c.rule for c in CASES}


def test_rules_have_unique_names_and_one_test() -> None:
    rules = all_rules()
    assert len({r.id for r in rules}) == len(rules)
    assert all((r.test is None) != (r.whole is None) for r in rules)
    assert all(r.id.startswith(e.name + ".") for e in ENGINES.values() for r in (*e.rules, *e.artifact))
