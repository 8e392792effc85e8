"""What is suggested where an engine does not take a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_models import (
    CONFIG,
    HEAD,
    MIXTRAL,
    NARROW,
    ORDERED,
    artifact,
    auto_round,
    awq,
    block,
    changed,
    compressed,
    ct,
    experts,
    gptq,
)

from w4pack.convert.core.facts import ModelFacts
from w4pack.convert.engines.rules import evaluate, suggest


def advice(model: ModelFacts, engine: str, *sizes: int) -> str | None:
    """Ask as ``check`` does."""
    return suggest([evaluate(model, engine, tp) for tp in sizes or (1,)], model)


CONVERT = "w4pack convert SRC OUT --to "
ACT_DOWN = changed(block(), "down_proj", act_order="groups")
ACT_ALL = block(act_order="groups")
ADVICE = (
    ("real order in down_proj only", "vllm", gptq(ACT_DOWN, desc_act=True), "gptq"),
    ("real order everywhere", "vllm", gptq(ACT_ALL, desc_act=True), "marlin"),
    ("order dropped silently", "vllm", gptq(ACT_ALL), "marlin"),
    ("label without order", "vllm", gptq(desc_act=True), "gptq"),
    ("block-constant map", "vllm", gptq(block(act_order="block")), "gptq"),
    ("asymmetric GPTQ", "vllm", gptq(block(sym=False), sym=False), "awq"),
    ("asymmetric GPTQ", "sglang", gptq(block(sym=False), sym=False), "awq"),
    ("labelled asymmetric, zeros all 8", "vllm", gptq(sym=False), "gptq"),
    ("gemv", "vllm", awq(block("awq-gemv", sym=False), version="gemv"), "awq"),
    ("AWQ marlin", "transformers", awq(block("awq-marlin"), version="marlin"), "awq"),
    ("AWQ 8 bit", "vllm", awq(block("awq", bits=8), bits=8), "gptq"),
    ("group 256", "vllm", gptq(block(group_size=256), group_size=256), "gptq"),
    ("group 16", "vllm", gptq(block(group_size=16), group_size=16), "compressed-tensors"),
    ("packing", "vllm", auto_round(packing_format="auto_round:gptqmodel"), "gptq"),
    ("packing, asymmetric", "vllm", auto_round(block(sym=False), sym=False), "awq"),
    ("actorder", "vllm", ct(ACT_ALL, quant=compressed(actorder="group")), "marlin"),
    ("legacy", "vllm", gptq(block("marlin-legacy"), checkpoint_format="marlin"), "gptq"),
    ("experts in GPTQ form", "transformers", gptq(experts(), MIXTRAL), "compressed-tensors"),
    ("quantized head", "transformers", gptq((*block(), HEAD), lm_head=True), "compressed-tensors"),
    (
        "asymmetric packed",
        "transformers",
        ct(block("compressed-tensors", sym=False), quant=compressed(sym=False)),
        "gptq",
    ),
    (
        "asymmetric experts",
        "transformers",
        awq(experts("awq", sym=False), MIXTRAL),
        "compressed-tensors --widen",
    ),
    ("not an artifact", "w4pack", gptq(ACT_ALL, desc_act=True), "marlin"),
    ("artifact in an engine", "sglang", artifact(), "gptq"),
)


@pytest.mark.parametrize(
    ("about", "engine", "model", "target"), ADVICE, ids=[f"{a}-{e}" for a, e, _, _ in ADVICE]
)
def test_suggestion(about: str, engine: str, model: ModelFacts, target: str) -> None:
    assert advice(model, engine) == CONVERT + target


def test_no_suggestion_where_none_is_needed_or_none_helps() -> None:
    assert advice(gptq(), "vllm") is None
    assert advice(artifact(), "vllm") is None
    assert advice(gptq(rotation="hadamard"), "vllm") is None
    online = {"quant_method": "w4pack", "online": [{"kind": "hadamard"}]}
    assert advice(replace(artifact(), quant_config=online), "vllm") is None
    assert advice(gptq(block(ambiguous_zeros=2), sym=False), "vllm") is None
    assert advice(gptq(config=CONFIG | NARROW), "vllm", 4) is None


def test_act_order_under_tensor_parallelism_is_folded_for_the_artifact() -> None:
    assert advice(artifact(ORDERED), "w4pack", 1, 2) == CONVERT + "marlin --fold-act-order"
    both = changed(ORDERED, "o_proj", act_order="groups")
    assert advice(artifact(both), "w4pack", 1, 2) == CONVERT + "marlin --regroup"


def test_padding_is_suggested_for_the_sizes_asked_for() -> None:
    odd = changed(
        changed(changed(block(), "down_proj", in_features=640), "up_proj", out_features=640),
        "gate_proj",
        out_features=640,
    )
    assert advice(gptq(odd), "vllm", 1) is None
    assert advice(gptq(odd), "vllm", 1, 2) == CONVERT + "gptq --pad-for-tp 2"
