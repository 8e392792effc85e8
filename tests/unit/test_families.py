"""Model families: roles, fused sets, MLPs, expert names, config keys, biases."""

from typing import Any

import pytest

from w4pack.convert.core import families
from w4pack.convert.core.architectures import BIASES, EXPERT_SPELLINGS

LAYER = "model.layers.0."


def test_natural_order_takes_numbers_as_numbers() -> None:
    names = ["m.10.b", "m.2.b", "m.2.a", "lm_head", "m.2"]
    assert sorted(names, key=families.natural_key) == ["lm_head", "m.2", "m.2.a", "m.2.b", "m.10.b"]


def test_natural_order_of_hostile_names() -> None:
    names = ["m." + "9" * 6000, "m." + "8" * 6000, "m.\u0663", "m.1", "1", "", "m.01"]
    ordered = sorted(names, key=families.natural_key)
    assert ordered == sorted(reversed(names), key=families.natural_key)
    assert ordered[:4] == ["", "1", "m.01", "m.1"]


@pytest.mark.parametrize(
    ("module", "role"),
    [
        ("self_attn.q_proj", "column"),
        ("mlp.gate_up_proj", "column"),
        ("fc1", "column"),
        ("self_attn.o_proj", "row"),
        ("block_sparse_moe.experts.3.w2", "row"),
        ("mlp.gate", "router"),
        ("block_sparse_moe.gate", "router"),
        ("feed_forward.router", "router"),
        ("mlp.gate.wg", "router"),
        ("mlp.router.classifier", "router"),
        ("mlp.shared_expert_gate", "replicated"),
        ("self_attn.kv_a_proj_with_mqa", "replicated"),
        ("self_attn.kv_b_proj", "column"),
        ("mlp.unheard_of", "other"),
    ],
)
def test_role(module: str, role: str) -> None:
    assert families.role(LAYER + module) == role


def test_small_gates_count_as_routers_and_projections_do_not() -> None:
    routers = ["block_sparse_moe.gate", "mlp.gate", "mlp.shared_expert_gate", "mlp.router"]
    assert all(families.is_router(LAYER + name) for name in routers)
    assert not any(families.is_router(LAYER + name) for name in ("mlp.gate_proj", "mlp.experts.1.gate_proj"))


def test_names_without_a_parent() -> None:
    assert families.role("lm_head") == "lm_head"
    assert families.role("") == "other"
    assert families.split_name("lm_head") == ("", "lm_head")


def test_fused_sets() -> None:
    attention = [LAYER + f"self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")]
    experts = [
        LAYER + f"mlp.experts.{e}.{leaf}" for e in range(11) for leaf in ("down_proj", "gate_proj", "up_proj")
    ]
    sets = {fused.name: fused for fused in families.fused_sets([*experts, *attention])}
    assert sets[LAYER + "self_attn.qkv_proj"].members == tuple(attention[:3])
    assert sets[LAYER + "mlp.experts.10.gate_up_proj"].kind == "gate_up"
    assert sets[LAYER + "mlp.experts"].members == tuple(experts)
    assert len(sets) == 1 + 11 + 1


def test_latent_attention_is_not_fused_with_one_member() -> None:
    assert families.fused_sets([LAYER + "self_attn.q_proj", LAYER + "self_attn.kv_b_proj"]) == ()


@pytest.mark.parametrize(
    ("parent", "leaves", "down", "kind", "halved"),
    [
        ("mlp.", ("gate_proj", "up_proj"), "down_proj", "mlp", False),
        ("mlp.experts.7.", ("gate_proj", "up_proj"), "down_proj", "expert", False),
        ("block_sparse_moe.experts.7.", ("w1", "w3"), "w2", "expert", False),
        ("mlp.shared_expert.", ("gate_proj", "up_proj"), "down_proj", "shared_expert", False),
        ("mlp.shared_experts.", ("gate_proj", "up_proj"), "down_proj", "shared_expert", False),
        ("mlp.", ("gate_up_proj",), "down_proj", "mlp", True),
        ("mlp.", ("up_proj",), "down_proj", "mlp", False),
        ("mlp.", ("fc1",), "fc2", "mlp", False),
        ("", ("fc1",), "fc2", "mlp", False),
        ("mlp.", ("dense_h_to_4h",), "dense_4h_to_h", "mlp", False),
    ],
)
def test_intermediate_sets(parent: str, leaves: tuple[str, ...], down: str, kind: str, halved: bool) -> None:
    producers = tuple(LAYER + parent + leaf for leaf in leaves)
    (found,) = families.intermediate_sets([LAYER + parent + down, *producers, LAYER + "self_attn.q_proj"])
    assert (found.down, found.producers) == (LAYER + parent + down, producers)
    assert (found.kind, found.halved) == (kind, halved)


def test_no_set_without_all_producers() -> None:
    assert families.intermediate_sets([LAYER + "mlp.down_proj", LAYER + "mlp.gate_proj"]) == ()
    assert families.intermediate_sets([LAYER + "self_attn.c_proj"]) == ()


def test_what_stands_between_the_halves_of_an_mlp() -> None:
    names = [LAYER + f"mlp.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
    (mlp,) = families.intermediate_sets(names)
    harmless = [f"{name}.{suffix}" for name in names for suffix in ("qweight", "scales", "g_idx", "bias")]
    harmless += [LAYER + "input_layernorm.weight", LAYER + "self_attn.q_norm.weight", "model.norm.weight"]
    assert families.between(harmless, mlp) == ()
    harmful = [
        LAYER + "mlp.act.scales",
        LAYER + "mlp.down_proj.lora_A.weight",
        LAYER + "mlp.ffn_sub_norm.weight",
    ]
    assert set(families.between([*harmless, *harmful], mlp)) == set(harmful)


def test_a_decoder_layer_is_not_taken_for_an_mlp() -> None:
    (mlp,) = families.intermediate_sets([LAYER + "fc1", LAYER + "fc2"])
    assert (
        families.between([LAYER + "final_layer_norm.weight", LAYER + "self_attn_layer_norm.weight"], mlp)
        == ()
    )


@pytest.mark.parametrize(
    "source", ["mlp.experts.3.gate_proj", "block_sparse_moe.experts.3.gate_proj", "mlp.experts.3.w1"]
)
@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("MixtralForCausalLM", "block_sparse_moe.experts.3.w1"),
        ("Qwen3MoeForCausalLM", "mlp.experts.3.gate_proj"),
        ("UnheardOfForCausalLM", None),
    ],
)
def test_expert_names(source: str, architecture: str, expected: str | None) -> None:
    expected = source if expected is None else expected
    assert families.rename_experts([architecture], LAYER + source) == LAYER + expected
    tensor = families.rename_experts([architecture], LAYER + source + ".qweight")
    assert tensor == f"{LAYER}{expected}.qweight"


@pytest.mark.parametrize(
    ("architecture", "source", "expected"),
    [
        ("MixtralForCausalLM", "mlp.gate.weight", "block_sparse_moe.gate.weight"),
        ("MixtralForCausalLM", "mlp.experts.0.up_proj", "block_sparse_moe.experts.0.w3"),
        ("MixtralForCausalLM", "mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w2"),
        ("PhimoeForCausalLM", "mlp.router.weight", "block_sparse_moe.gate.weight"),
        ("Qwen2MoeForCausalLM", "block_sparse_moe.gate.weight", "mlp.gate.weight"),
        ("Qwen2MoeForCausalLM", "mlp.shared_expert.gate_proj", "mlp.shared_expert.gate_proj"),
        ("Qwen2MoeForCausalLM", "mlp.shared_expert_gate.weight", "mlp.shared_expert_gate.weight"),
        ("DeepseekV3ForCausalLM", "mlp.gate_proj.weight", "mlp.gate_proj.weight"),
        ("MixtralForCausalLM", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
        ("MixtralForCausalLM", "self_attn.q_proj", "self_attn.q_proj"),
    ],
)
def test_routers_and_neighbours(architecture: str, source: str, expected: str) -> None:
    assert families.rename_experts([architecture], LAYER + source) == LAYER + expected


def test_renaming_twice_changes_nothing_more() -> None:
    for architecture in EXPERT_SPELLINGS:
        for source in ("mlp.experts.3.w1", "block_sparse_moe.experts.3.up_proj", "mlp.gate"):
            once = families.rename_experts([architecture], LAYER + source)
            assert families.rename_experts([architecture], once) == once


@pytest.mark.parametrize(
    ("config", "kind", "expected"),
    [
        ({"intermediate_size": 512}, "mlp", (("intermediate_size",), 512, 1)),
        ({"intermediate_size": 512}, "expert", (("intermediate_size",), 512, 1)),
        (
            {"intermediate_size": 512, "moe_intermediate_size": 64},
            "expert",
            (("moe_intermediate_size",), 64, 1),
        ),
        (
            {"intermediate_size": 512, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
            "shared_expert",
            (("shared_expert_intermediate_size",), 96, 1),
        ),
        (
            {"moe_intermediate_size": 64, "n_shared_experts": 2},
            "shared_expert",
            (("moe_intermediate_size",), 64, 2),
        ),
        (
            {"text_config": {"intermediate_size": 7}, "intermediate_size": 9},
            "mlp",
            (("text_config", "intermediate_size"), 7, 1),
        ),
        ({"intermediate_size": "512"}, "mlp", None),
        ({"intermediate_size": True}, "mlp", None),
        ({"text_config": 3}, "mlp", None),
    ],
)
def test_intermediate_size_keys(config: dict[str, Any], kind: families.MlpKind, expected: Any) -> None:
    found = families.intermediate_size(config, kind)
    assert (None if found is None else (found.path, found.value, found.times)) == expected


def test_biases_that_are_certain_and_that_are_not() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"]}
    assert families.has_bias(qwen, LAYER + "self_attn.q_proj") is True
    assert families.has_bias(qwen, LAYER + "self_attn.o_proj") is False
    assert families.has_bias(qwen, "visual.blocks.0.attn.qkv") is None
    llama = {"architectures": ["LlamaForCausalLM"], "mlp_bias": True}
    assert families.has_bias(llama, LAYER + "mlp.down_proj") is True
    assert families.has_bias(llama, LAYER + "self_attn.o_proj") is False
    assert families.has_bias({"architectures": ["UnheardOf"]}, LAYER + "mlp.down_proj") is None


# ---- against the classes themselves -------------------------------------------------------------

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "n_layer": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32, "first_k_dense_replace": 1, "pad_token_id": 0, "n_group": 1,
    "topk_group": 1, "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1, "moe_k": 2, "moe_num_experts": 4,
    "moe_topk": 2, "num_dense_layers": 1,
}  # fmt: skip


def small_config(architecture: str, **more: Any) -> Any:
    """Return a tiny config object of a class that transformers knows by this name; skip if it does not."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, architecture, None)
    if model_class is None or model_class.config_class is None:
        pytest.skip(f"this transformers has no {architecture}")
    config_class = model_class.config_class
    default = config_class()
    known = {key: value for key, value in SMALL.items() if hasattr(default, key)}
    return config_class(**known, **{key: value for key, value in more.items() if hasattr(default, key)})


def bias_keys(architecture: str) -> list[str]:
    """Return the config keys that a row depends on."""
    row = BIASES[architecture]
    rules = (row.qkv, row.out, row.mlp, row.head, row.latent, row.up_qkv)
    return sorted({rule[0] for rule in rules if not isinstance(rule, bool)})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", [name for name in BIASES if name.endswith("LM")])
def test_biases_equal_the_built_model(architecture: str) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    model_class = getattr(transformers, architecture, None)
    seen = 0
    for values in ({}, *({key: value} for key in bias_keys(architecture) for value in (True, False))):
        config = small_config(architecture, **values)
        with torch.device("meta"):
            model = model_class(config)
        saved = {**config.to_dict(), "architectures": [architecture]}
        for name, module in model.named_modules():
            claimed = families.has_bias(saved, name)
            if isinstance(module, torch.nn.Linear) and claimed is not None:
                assert claimed == (module.bias is not None), (name, values)
                seen += 1
    assert seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", sorted(EXPERT_SPELLINGS))
def test_expert_names_equal_what_the_class_writes(architecture: str, tmp_path: Any) -> None:
    pytest.importorskip("torch")
    import transformers
    from safetensors import safe_open

    config = small_config(architecture)
    getattr(transformers, architecture)(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        names = [name for name in file.keys() if ".experts." in name]  # noqa: SIM118
    assert names
    foreign = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    foreign |= {long: short for short, long in foreign.items()}
    for name in names:
        assert families.rename_experts([architecture], name) == name
        block, leaf, end = name.rsplit(".", 2)
        other = f"{block}.{foreign[leaf]}.{end}"
        assert families.rename_experts([architecture], other) == name
