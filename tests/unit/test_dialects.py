"""Config dialects, reading: what real blocks claim, what is refused, and that nonsense never raises."""

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w4pack.convert import dialects
from w4pack.convert.dialects import ModuleClaim, gptq, others
from w4pack.convert.errors import Refused

DOWN = "model.layers.0.mlp.down_proj"


def claims_of(block: Mapping[str, Any]) -> dialects.Claims:
    """Find the dialect of a block and read it."""
    module = dialects.find_dialect(block)
    assert module is not None
    claims: dialects.Claims = module.claims(block)
    return claims


# ---- files of the real tools --------------------------------------------------------------------


def settings_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    block = config.get("quantization_config")
    return block if block is not None else json.loads((folder / "quantize_config.json").read_text())


def truth(text: Any) -> Any:
    """Undo the strings in which meta.json keeps numbers and flags."""
    if not isinstance(text, str):
        return text
    if text in ("True", "False"):
        return text == "True"
    if text.startswith("{"):
        return ast.literal_eval(text)
    return int(text) if text.lstrip("-").isdigit() else text


def recorded_scheme(meta: Mapping[str, Any]) -> ModuleClaim | None:
    """Return what the maker of a fixture says of every module; None where modules differ."""
    scheme = {key: truth(value) for key, value in meta["scheme"].items()}
    if "config_groups" in scheme:
        groups = list(scheme["config_groups"].values())
        weights = groups[0]["weights"]
        group = -1 if weights["strategy"] == "channel" else weights["group_size"]
        order = weights.get("actorder") == "group"
        alone = ModuleClaim(weights["num_bits"], group, weights["symmetric"], order)
        return alone if len(groups) == 1 else None
    if "dynamic" in scheme or "layer_config" in scheme:
        return None
    bits = scheme.get("bits", scheme.get("w_bit"))
    group = scheme.get("group_size", scheme.get("q_group_size"))
    return ModuleClaim(bits, group, scheme.get("sym"), scheme.get("desc_act"))


@pytest.mark.shared
def test_every_fixture_claims_what_its_maker_recorded(shared: Path) -> None:
    checked = 0
    for meta_file in sorted((shared / "fixtures").glob("*/meta.json")):
        meta = json.loads(meta_file.read_text())
        if "scheme" not in meta:
            continue
        claims = claims_of(settings_of(meta_file.parent))
        recorded = recorded_scheme(meta)
        for name in meta["modules"]:
            claim = claims.for_module(name)
            assert claim is not None, (meta["name"], name)
            if recorded is None or name == "lm_head":
                continue  # mixed ones have a test of their own
            where = (meta["name"], name)
            assert (claim.bits, claim.group_size) == (recorded.bits, recorded.group_size), where
            assert claim.sym in (None, recorded.sym) or recorded.sym is None, where
            assert claim.desc_act in (None, recorded.desc_act or False), where
            checked += 1
        assert bool(claims.refusals) == bool(meta.get("must_refuse")), meta["name"]
    assert checked > 900


@pytest.mark.shared
def test_every_fixture_leaves_out_what_is_dense(shared: Path) -> None:
    checked = 0
    for meta_file in sorted((shared / "fixtures").glob("*/meta.json")):
        meta = json.loads(meta_file.read_text())
        weights = meta_file.parent / "model.safetensors"
        if not weights.exists() or "scheme" not in meta or meta.get("must_refuse"):
            continue
        claims = claims_of(settings_of(meta_file.parent))
        for name, entry in header_of(weights).items():
            linear = name.endswith(".weight") and len(entry["shape"]) == 2 and "embed" not in name
            if linear:
                assert claims.for_module(name.removesuffix(".weight")) is None, (meta["name"], name)
                checked += 1
    assert checked > 60


def header_of(file: Path) -> dict[str, Any]:
    """Read a safetensors header, without our own reader."""
    with file.open("rb") as raw:
        size = int.from_bytes(raw.read(8), "little")
        header: dict[str, Any] = json.loads(raw.read(size))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


@pytest.mark.shared
def test_mixed_fixtures_module_by_module(shared: Path) -> None:
    def claim(folder: str, module: str) -> ModuleClaim | None:
        return claims_of(settings_of(shared / "fixtures" / folder)).for_module(module)

    dynamic = "gptqmodel-w4g32-dynamic-llama"
    assert claim(dynamic, "model.layers.0.mlp.down_proj") == ModuleClaim(8, 64, True, False)
    assert claim(dynamic, "model.layers.1.self_attn.o_proj") == ModuleClaim(4, 64, True, True)
    assert claim(dynamic, "model.layers.1.mlp.gate_proj") is None
    assert claim(dynamic, "model.layers.0.mlp.gate_proj") == ModuleClaim(4, 32, True, False)
    assert claim("gptqmodel-w4g64-lmhead-llama", "lm_head") == ModuleClaim(8, 32, True, False)
    mixed = "autoround-native-mixed-llama"
    assert claim(mixed, "model.layers.0.mlp.down_proj") == ModuleClaim(8, 64, True, False)
    assert claim(mixed, "model.layers.1.mlp.up_proj") == ModuleClaim(4, 64, False, False)
    assert claim(mixed, "model.layers.1.self_attn.o_proj") is None
    assert claim(mixed, "lm_head") is None
    groups = "llmcompressor-mixed-groups-llama"
    assert claim(groups, "model.layers.0.self_attn.q_proj") == ModuleClaim(8, -1, True, False)
    assert claim(groups, DOWN) == ModuleClaim(4, 32, False, False)
    assert claim(groups, "lm_head") is None
    assert claim("llmcompressor-w4g32-ignore-llama", DOWN) is None
    assert claim("llmcompressor-w4g32-sym-actgroup-llama", DOWN) == ModuleClaim(4, 32, True, True)
    assert claim("llmcompressor-w4g64-sym-actstatic-llama", DOWN) == ModuleClaim(4, 64, True, False)


# ---- GPTQ ---------------------------------------------------------------------------------------

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def test_first_rule_wins_and_order_matters() -> None:
    rules = {".*down_proj": {"bits": 8}, "-:.*": {}}
    claims = claims_of({**GPTQ, "dynamic": rules})
    assert claims.for_module(DOWN) == ModuleClaim(8, 128, True, False)
    assert claims.for_module("model.layers.0.mlp.up_proj") is None
    turned = claims_of({**GPTQ, "dynamic": dict(reversed(rules.items()))})
    assert turned.for_module(DOWN) is None


@pytest.mark.parametrize(
    ("more", "label", "zeros"),
    [
        ({}, None, "v1"),
        ({"checkpoint_format": "gptq"}, "gptq", "v1"),
        ({"format": "gptq_v2"}, "gptq_v2", "v2"),
        ({"checkpoint_format": "gptq_v2", "format": "gptq"}, "gptq_v2", "v2"),
        ({"is_marlin_format": True}, "marlin", None),
        ({"checkpoint_format": "marlin"}, "marlin", None),
        ({"quant_method": "marlin"}, "marlin", None),
        ({"quant_method": "gptq_marlin"}, None, "v1"),
    ],
)
def test_gptq_labels(more: dict[str, Any], label: str | None, zeros: str | None) -> None:
    claims = claims_of({**GPTQ, **more})
    assert (claims.method, claims.label, claims.zero_kind, claims.unsupported) == ("gptq", label, zeros, None)


def test_two_labels_that_differ_are_told() -> None:
    claims = claims_of({**GPTQ, "checkpoint_format": "gptq_v2", "format": "gptq"})
    assert [key for key, _ in claims.dropped] == ["format"]


@pytest.mark.parametrize("label", ["qqq", "gptq_p", "bitblas"])
def test_layouts_close_to_gptq_are_named(label: str) -> None:
    reason = claims_of({**GPTQ, "checkpoint_format": label}).unsupported
    assert reason is not None and label in reason and "gptq_v2" in reason


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_other_bits_are_named(bits: int) -> None:
    for block in ({**GPTQ, "bits": bits}, {"quant_method": "awq", "w_bit": bits, "version": "gemm"}):
        reason = claims_of(block).unsupported
        assert reason is not None and str(bits) in reason


@pytest.mark.parametrize("bits", [4, 8])
def test_four_and_eight_bits_are_read(bits: int) -> None:
    assert claims_of({**GPTQ, "bits": bits}).unsupported is None


def test_old_key_names() -> None:
    old = claims_of({"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"})
    assert (old.method, old.label) == ("awq", "gemm")
    assert old.for_module(DOWN) == ModuleClaim(4, 64, None, False)
    plain = claims_of({"wbits": 4, "group_size": 128})
    assert plain.method == "gptq" and plain.for_module(DOWN) == ModuleClaim(4, 128, None, None)


def test_producers() -> None:
    assert claims_of({**GPTQ, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}).word_zeros
    assert claims_of({**GPTQ, "meta": {"quantizer": "gptqmodel:1.0"}}).word_zeros
    assert not claims_of({**GPTQ, "meta": {"quantizer": ["w4pack:0.1"]}}).word_zeros
    assert not claims_of(GPTQ).word_zeros
    assert claims_of(GPTQ).writes_g_idx
    assert not claims_of({**GPTQ, "autoround_version": "0.16.1"}).writes_g_idx


def test_lists_of_what_is_quantized() -> None:
    inside = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]]
    claims = claims_of({**GPTQ, "modules_in_block_to_quantize": inside})
    assert claims.for_module("model.layers.3.mlp.down_proj") is not None
    assert claims.for_module("model.layers.3.self_attn.v_proj") is None
    assert claims_of(GPTQ).for_module("lm_head") is None
    assert claims_of({**GPTQ, "lm_head": True}).for_module("lm_head") is not None
    assert claims_of(GPTQ).for_module("model.layers.0.mlp.gate") is None
    assert claims_of(GPTQ).for_module("model.layers.0.mlp.gate_proj") is not None


# ---- AWQ, AutoRound, compressed-tensors ---------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "label"),
    [
        ({"version": "GEMM"}, "gemm"),
        ({"version": "gemv_fast"}, "gemv_fast"),
        ({"version": "marlin"}, "marlin"),
        ({"backend": "llm-awq"}, "gemv_fast"),
        ({"checkpoint_format": "gemm"}, "gemm"),
        ({}, None),
    ],
)
def test_awq_versions(block: dict[str, Any], label: str | None) -> None:
    claims = claims_of({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, **block})
    assert (claims.label, claims.unsupported, claims.writes_g_idx) == (label, None, False)


def test_unknown_awq_version_is_named() -> None:
    reason = claims_of({"quant_method": "awq", "version": "exllama"}).unsupported
    assert reason is not None and "exllama" in reason and "gemv_fast" in reason


@pytest.mark.parametrize(
    ("packing", "zeros", "read"),
    [
        ("auto_round:auto_gptq", "v1", True),
        ("auto_round:gptqmodel", "v2", True),
        ("auto_round", "v2", True),
        ("auto_round:auto_awq", None, True),
        ("autoround:auto_gptq", "v1", True),
        (None, "v1", True),
        ("auto_round:llm_compressor", None, False),
        ("auto_round:fp8_static", None, False),
        ("auto_round:nvfp4_e2m1", None, False),
    ],
)
def test_autoround_packings(packing: str | None, zeros: str | None, read: bool) -> None:
    block = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "packing_format": packing,
    }
    claims = claims_of(block)
    assert (claims.zero_kind, claims.unsupported is None, claims.writes_g_idx) == (zeros, read, False)


def test_autoround_blocks_and_extra_config() -> None:
    block = {
        "quant_method": "intel/auto-round", "bits": 4, "group_size": 128, "sym": True,
        "block_name_to_quantize": "model.layers, visual.blocks",
        "extra_config": {
            "lm_head": {"bits": 8},
            "model.layers.1.mlp.up_proj": {"bits": 16},
            ".*layers\\.2\\..*": {"group_size": 32},
            "down_proj$": {"bits": 16},
            "(": {"bits": 8},
        },
    }  # fmt: skip
    claims = claims_of(block)
    assert claims.for_module("lm_head") == ModuleClaim(8, 128, True, False)
    assert claims.lm_head is True
    assert claims.for_module("model.layers.1.mlp.up_proj") is None
    assert claims.for_module("model.layers.2.mlp.up_proj") == ModuleClaim(4, 32, True, False)
    assert claims.for_module("model.layers.1.mlp.down_proj") is None
    assert claims.for_module("visual.blocks.0.attn.proj") == ModuleClaim(4, 128, True, False)
    assert claims.for_module("audio.blocks.0.attn.proj") is None
    assert any("(" in value for _, value in claims.dropped)


def ct_block(**more: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    block = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    return {**block, "ignore": ["lm_head"], **more}


def test_exact_names_rank_before_patterns_before_classes() -> None:
    block = ct_block()
    base = block["config_groups"]["g"]
    for number, (key, target) in enumerate([("p", r"re:.*layers\.0\."), ("x", DOWN)]):
        weights = {**base["weights"], "group_size": 32 << (2 * number)}
        block["config_groups"][key] = {**base, "targets": [target], "weights": weights}
    claims = claims_of(block)
    sizes = {
        name: claims.for_module(name) for name in (DOWN, "model.layers.0.mlp.up_proj", "model.layers.1.x")
    }
    assert [claim.group_size for claim in sizes.values() if claim] == [128, 32, 64]


def test_ignore_is_exact_or_a_pattern() -> None:
    claims = claims_of(ct_block(ignore=["lm_head", "model.layers.1.mlp", r"re:.*\.2\.mlp\.down"]))
    assert claims.for_module("lm_head") is None
    assert claims.for_module("model.layers.1.mlp.up_proj") is not None
    assert claims.for_module("model.layers.2.mlp.down_proj") is None


@pytest.mark.parametrize(
    "label", ["int-quantized", "float-quantized", "nvfp4-pack-quantized", "marlin-24", "naive-quantized"]
)
def test_other_compressed_formats_are_named(label: str) -> None:
    reason = claims_of(ct_block(format=label)).unsupported
    assert reason is not None and label in reason
    assert claims_of(ct_block(format="mixed-precision")).unsupported is None


@pytest.mark.parametrize(
    ("key", "value"), [("type", "float"), ("strategy", "tensor"), ("strategy", "block"), ("num_bits", 3)]
)
def test_other_weights_are_named(key: str, value: Any) -> None:
    block = ct_block()
    block["config_groups"]["g"]["weights"][key] = value
    reason = claims_of(block).unsupported
    assert reason is not None and str(value) in reason


def test_cache_scheme_is_carried() -> None:
    scheme = {"num_bits": 8, "type": "float"}
    claims = claims_of(ct_block(kv_cache_scheme=scheme))
    assert claims.carried == {"kv_cache_scheme": scheme}
    assert claims.refusals == ()
    assert not claims_of(ct_block(kv_cache_scheme=None)).carried


# ---- what changes the forward pass --------------------------------------------------------------


def transforms(*locations: Any) -> dict[str, Any]:
    return {
        "config_groups": {"R": {"type": "hadamard", "apply": [{"location": place} for place in locations]}}
    }


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({**GPTQ, "rotation": "hadamard"}, "rotation"),
        ({**GPTQ, "adapter": {"name": "lora"}}, "adapter"),
        ({**GPTQ, "activation": {"bits": 8}}, "activation"),
        ({**GPTQ, "act_bits": 8}, "act_bits"),
        ({**GPTQ, "my_smooth_scales": [1]}, "my_smooth_scales"),
        ({**GPTQ, "online_hadamard": True}, "online_hadamard"),
        ({**GPTQ, "dynamic": {".*": {"adapter": {"r": 4}}}}, "dynamic..*.adapter"),
        ({"quant_method": "awq", "lora_path": "x"}, "lora_path"),
        ({"quant_method": "auto-round", "super_bits": 6}, "super_bits"),
        ({"quant_method": "auto-round", "rotation_config": {"a": 1}}, "rotation_config"),
        ({"quant_method": "auto-round", "spinquant_config": {"a": 1}}, "spinquant_config"),
        ({"quant_method": "auto-round", "act_bits": 4}, "act_bits"),
        (ct_block(transform_config=transforms("weight_input", "input")), "transform_config"),
        (ct_block(transform_config=transforms("q_attn")), "transform_config"),
        (ct_block(transform_config=transforms(None)), "transform_config"),
        (ct_block(transform_config={"what": 1}), "transform_config"),
        (ct_block(transform_config="x"), "transform_config"),
        (ct_block(sparsity_config={"targets": ["Linear"]}), "sparsity_config.targets"),
        (ct_block(input_activations={"num_bits": 8}), "input_activations"),
    ],
)
def test_forward_changing_keys_are_refused_by_name(block: dict[str, Any], key: str) -> None:
    assert [name for name, _ in claims_of(block).refusals] == [key]


@pytest.mark.parametrize(
    "block",
    [
        {**GPTQ, "rotation": None, "adapter": {}, "activation": "", "act_bits": 16, "act_group_aware": True},
        {**GPTQ, "meta": {"fallback": {"smooth": None}, "rotation": None}},
        {
            "quant_method": "auto-round",
            "act_bits": 16,
            "super_bits": None,
            "act_sym": True,
            "act_data_type": "float",
        },
        ct_block(transform_config=transforms("weight_input", "weight_output"), sparsity_config={}),
        ct_block(transform_config={}),
        ct_block(transform_config=None),
    ],
)
def test_the_nearest_harmless_blocks_are_accepted(block: dict[str, Any]) -> None:
    assert claims_of(block).refusals == ()


def test_group_activations_are_refused_with_their_group() -> None:
    block = ct_block()
    block["config_groups"]["g"]["input_activations"] = {"num_bits": 8}
    assert [key for key, _ in claims_of(block).refusals] == ["config_groups.g.input_activations"]


def test_other_unknown_keys_get_a_line() -> None:
    for base in (GPTQ, ct_block(), {"quant_method": "awq"}, {"quant_method": "auto-round"}):
        claims = claims_of({**base, "foo_scheme": {"a": 1}, "empty": None})
        assert [key for key, _ in claims.dropped] == ["foo_scheme"]
        assert claims.refusals == ()


# ---- methods ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "method"),
    [
        ({"quant_method": "GPTQ"}, "gptq"),
        ({"method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "compressed_tensors"}, "compressed-tensors"),
        ({"config_groups": {}}, "compressed-tensors"),
        ({"packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 1}, "auto-round"),
        ({"is_marlin_format": True}, "gptq"),
        ({"quant_method": None, "bits": 4, "group_size": 128}, "gptq"),
        ({"quant_method": "w4pack"}, "w4pack"),
    ],
)
def test_dialects_are_found(block: dict[str, Any], method: str) -> None:
    assert claims_of(block).method == method


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"quant_method": "fp8"}, "FP8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True, "bits": 4, "group_size": 3}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quantization": {"quant_algo": "W4A16_AWQ"}}, "ModelOpt W4A16_AWQ"),
        ({"quant_method": "brand-new"}, "brand-new"),
    ],
)
def test_other_methods_are_named(block: dict[str, Any], name: str) -> None:
    assert dialects.find_dialect(block) is None
    assert others.other_method(block) == name
    error = dialects.unknown_method(block, "config.json")
    assert isinstance(error, Refused) and error.found == name and error.exit_code == 3


def test_an_empty_block_names_no_method() -> None:
    assert dialects.find_dialect({}) is None
    assert others.other_method({}) is None


# ---- nonsense -----------------------------------------------------------------------------------

KEYS = st.sampled_from([
    "bits", "group_size", "sym", "desc_act", "dynamic", "config_groups", "ignore", "targets", "weights",
    "modules", "meta", "quantizer", "modules_to_not_convert", "extra_config", "packing_format",
    "version", "format", "online", "checkpoint_format", "transform_config", "apply", "location",
    "sparsity_config", "artifact_version", "backend", "block_name_to_quantize",
    "modules_in_block_to_quantize", "kv_cache_scheme", "is_marlin_format", "lm_head", "g", "act_bits",
    "rotation", "actorder", "strategy", "kind", "producer", "layout", "zero_point", "method",
])  # fmt: skip
TEXTS = st.one_of(st.sampled_from(["", "re:(", "gptq", "-:(", "a,b", "8"]), st.text(max_size=5))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


@given(block=st.dictionaries(KEYS, JSON, max_size=8), method=st.sampled_from(sorted(dialects.DIALECTS)))
def test_nonsense_never_raises(block: dict[str, Any], method: str) -> None:
    dialects.find_dialect(block)
    others.other_method(block)
    claims = dialects.get(method).claims({**block, "quant_method": method})
    for name in (DOWN, "lm_head", "", "a" * 300, "model.layers.0.mlp.gate"):
        claims.for_module(name)
    for key, value in (*claims.refusals, *claims.dropped):
        assert isinstance(key, str) and isinstance(value, str)


def test_settings_in_a_safetensors_header() -> None:
    metadata = {
        "format": "pt",
        "gptq_bits": "4",
        "gptq_group_size": "-1",
        "gptq_desc_act": "False",
        "gptq_sym": "True",
    }
    block = gptq.from_metadata({**metadata, "gptq_is_marlin_format": "True"})
    assert block is not None
    claims = claims_of(block)
    assert (claims.label, claims.for_module(DOWN)) == ("marlin", ModuleClaim(4, -1, True, False))
    assert gptq.from_metadata({"format": "pt"}) is None
