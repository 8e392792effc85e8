"""Config dialects, writing: a written block means what the tensors are.

The engines' own matching rules are written out here, apart from the product's readers, and every written
block is evaluated with them over all module names, in both directions.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.dialects import ModuleClaim, TargetModel, awq, compressed_tensors, gptq, recorded, w4pack
from w4pack.convert.dialects.online_reading import parse

DOWN = "model.layers.0.mlp.down_proj"


@dataclass(frozen=True)
class Case:
    """A model: which modules have which scheme (None: 16 bit)."""

    modules: dict[str, tuple[int, int, bool] | None]

    @property
    def target(self) -> TargetModel:
        layers = {
            name: QuantScheme(s[0], s[1], s[2], False, 256, 128, "F16")
            for name, s in self.modules.items()
            if s
        }
        dense = tuple(name for name, s in self.modules.items() if s is None)
        return TargetModel(layers, dense, {}, {}, "0.1.0")


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fused_names(case: Case) -> dict[str, tuple[str, ...]]:
    """Return what an engine calls its fused modules, with their parts; a layer's experts are one module."""
    out: dict[str, tuple[str, ...]] = {}
    for name in case.modules:
        parent = name.rpartition(".")[0]
        for fused, leaves in FUSED.items():
            parts = tuple(f"{parent}.{leaf}" for leaf in leaves)
            if all(part in case.modules for part in parts):
                out[f"{parent}.{fused}"] = parts
        if ".experts." in name:
            block = name.split(".experts.")[0] + ".experts"
            out[block] = (*out.get(block, ()), name)
    return out


SCHEMES = [(4, 128, True), (4, 32, True), (8, 128, True), (4, 128, False)]
UNITS = [
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
]
EXPERTS = [
    tuple(f"mlp.experts.{e}.{leaf}" for e in (0, 1, 11) for leaf in ("gate_proj", "up_proj", "down_proj"))
]


@st.composite
def cases(draw: st.DrawFn, schemes: int = 4) -> Case:
    """Draw a model of up to 12 layers, dense MLPs or experts, with a head and a vision tower or without."""
    modules: dict[str, tuple[int, int, bool] | None] = {}
    menu = st.sampled_from([*SCHEMES[:1] * 4, *SCHEMES[:schemes], None])
    for layer in draw(st.lists(st.integers(0, 31), min_size=1, max_size=6, unique=True)):
        sparse = draw(st.booleans())
        units = [*UNITS[:2], *(EXPERTS if sparse else UNITS[2:])]
        for unit in units:
            chosen = draw(menu)
            modules |= {f"model.layers.{layer}.{leaf}": chosen for leaf in unit}
        if sparse:
            modules[f"model.layers.{layer}.mlp.gate"] = None
            modules[f"model.layers.{layer}.mlp.shared_expert_gate"] = None
            shared = draw(menu)
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                modules[f"model.layers.{layer}.mlp.shared_expert.{leaf}"] = shared
    if draw(st.booleans()):
        modules |= {f"visual.blocks.{b}.attn.{leaf}": None for b in range(12) for leaf in ("qkv", "proj")}
    modules["model.layers.40.self_attn.o_proj"] = SCHEMES[0]  # one at least is quantized
    if draw(st.booleans()):
        modules["lm_head"] = draw(menu)
    return Case(modules)


Wanted = tuple[int, int, bool] | None


def engine_gptq(block: Mapping[str, Any], name: str) -> Wanted:
    """Answer as vLLM and SGLang do: the first rule that matches, by ``re.match``; the head by its own key."""
    values = dict(block)
    for key, changes in block.get("dynamic", {}).items():
        if re.match(key.removeprefix("-:").removeprefix("+:"), name):
            if key.startswith("-:"):
                return None
            values |= changes
            break
    if name == "lm_head" and not block["lm_head"]:
        return None
    return values["bits"], values["group_size"], values["sym"]


def engine_awq(block: Mapping[str, Any], name: str) -> Wanted:
    """Answer as vLLM and SGLang do: a substring of the list excludes."""
    if any(part in name for part in block["modules_to_not_convert"]):
        return None
    if name == "lm_head" and not block.get("lm_head"):
        return None
    return block["bits"], block["group_size"], True


def engine_awq_transformers(block: Mapping[str, Any], name: str) -> Wanted:
    """Answer as transformers does: the entry at the start, as a pattern, or at the end."""
    hits = (re.match(part, name) or name.endswith(part) for part in block["modules_to_not_convert"])
    return None if any(hits) else (block["bits"], block["group_size"], True)


def engine_ct(block: Mapping[str, Any], name: str) -> Wanted:
    """Answer as compressed-tensors does; every module is a Linear, but the head is known by name only."""

    def hit(entry: str) -> bool:
        return bool(re.match(entry[3:], name)) if entry.startswith("re:") else entry == name

    if any(hit(entry) for entry in block["ignore"]):
        return None
    for rank in (hit, lambda entry: entry == "Linear" and name != "lm_head"):
        for group in block["config_groups"].values():
            if any(rank(entry) for entry in group["targets"]):
                weights = group["weights"]
                size = -1 if weights["strategy"] == "channel" else weights["group_size"]
                return weights["num_bits"], size, weights["symmetric"]
    return None


@given(case=cases())
def test_gptq_blocks_select_exactly_what_is_quantized(case: Case) -> None:
    block = json.loads(json.dumps(gptq.write(case.target)))
    for name, wanted in case.modules.items():
        assert engine_gptq(block, name) == wanted, name
    for name, parts in fused_names(case).items():
        kinds = {case.modules[part] for part in parts}
        if len(kinds) == 1:
            assert engine_gptq(block, name) == kinds.pop(), name
    assert (block["checkpoint_format"] == "gptq_v2") == (not all(s[2] for s in case.modules.values() if s))


@given(case=cases(schemes=1))
def test_awq_blocks_select_exactly_what_is_quantized(case: Case) -> None:
    block = json.loads(json.dumps(awq.write(case.target)))
    assert awq.clashes(case.target) == ()
    for name, wanted in case.modules.items():
        assert engine_awq(block, name) == wanted, name
        assert engine_awq_transformers(block, name) == wanted, name
    for name, parts in fused_names(case).items():
        kinds = {case.modules[part] for part in parts}
        if len(kinds) == 1:
            assert engine_awq(block, name) == kinds.pop(), name


@given(case=cases())
def test_compressed_tensors_blocks_select_exactly_what_is_quantized(case: Case) -> None:
    block = json.loads(json.dumps(compressed_tensors.write(case.target)))
    for name, wanted in case.modules.items():
        assert engine_ct(block, name) == wanted, name


@given(case=cases())
def test_what_is_written_reads_back(case: Case) -> None:
    for module in (gptq, compressed_tensors, w4pack):
        claims = module.claims(json.loads(json.dumps(module.write(case.target))))
        assert (claims.refusals, claims.dropped, claims.unsupported) == ((), (), None)
        for name, wanted in case.modules.items():
            claim = claims.for_module(name)
            assert (claim and (claim.bits, claim.group_size, claim.sym)) == wanted, (module.__name__, name)


def test_router_beside_a_quantized_gate_projection() -> None:
    """A router's name is the beginning of a gate projection's; lists by substring must tell them apart."""
    modules: dict[str, Wanted] = {"model.layers.0.mlp.gate_proj": SCHEMES[0], "model.layers.1.mlp.gate": None}
    modules |= {f"model.layers.1.mlp.experts.{e}.gate_proj": SCHEMES[0] for e in range(2)}
    case = Case(modules)
    block = awq.write(case.target)
    assert block["modules_to_not_convert"] == ["model.layers.1.mlp.gate"]
    assert [name for name in modules if engine_awq(block, name) is None] == ["model.layers.1.mlp.gate"]


def test_names_that_no_awq_list_can_express_are_told() -> None:
    modules = {
        "a.0.mlp.gate": None,
        "a.0.mlp.gate_proj": SCHEMES[0],
        "a.0.in": None,
        "a.0.in_proj": SCHEMES[0],
    }
    target = Case(modules).target
    assert awq.clashes(target) == ("a.0.in", "a.0.mlp.gate")
    assert awq.write(target)["modules_to_not_convert"] == ["a.0.in"]


def llama(layers: int, dense: tuple[str, ...] = (), head: Wanted = None) -> Case:
    leaves = [leaf for unit in UNITS for leaf in unit]
    names = {
        f"model.layers.{n}.{leaf}": None if leaf in dense else SCHEMES[0]
        for n in range(layers)
        for leaf in leaves
    }
    return Case({**names, "lm_head": head})


def test_plain_gptq_block_is_the_documented_one() -> None:
    assert gptq.write(llama(2).target) == {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq", "format": "gptq", "pack_dtype": "int32", "lm_head": False,
        "true_sequential": True, "meta": {"quantizer": ["w4pack:0.1.0"]}, "dynamic": {"-:^lm_head$": {}},
    }  # fmt: skip


def test_plain_awq_block_is_the_documented_one() -> None:
    assert awq.write(llama(2).target) == {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip


def test_plain_compressed_tensors_block_is_the_documented_one() -> None:
    assert compressed_tensors.write(llama(2).target) == {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {
            "targets": ["Linear"], "format": "pack-quantized",
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                        "group_size": 128, "dynamic": False},
            "input_activations": None, "output_activations": None}},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip


def test_legacy_marlin_block() -> None:
    assert gptq.write_legacy_marlin(llama(1).target) == {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
        "checkpoint_format": "marlin", "is_marlin_format": True,
    }  # fmt: skip


def test_rules_are_compact() -> None:
    case = llama(80, dense=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
    rules = gptq.write(case.target)["dynamic"]
    assert len(rules) == 2
    ignored = compressed_tensors.write(case.target)["ignore"]
    assert len(ignored) == 2 and "lm_head" in ignored


def test_a_kind_dense_in_every_block_is_also_told_the_other_way() -> None:
    block = gptq.write(llama(3, dense=("mlp.down_proj",)).target)
    assert block["modules_in_block_to_quantize"] == [
        ["mlp.gate_proj", "mlp.up_proj"],
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
    ]


def test_what_that_list_cannot_tell_is_left_to_the_rules() -> None:
    plain = llama(3)
    one_layer = Case({**plain.modules, "model.layers.1.mlp.down_proj": None})
    other_bits = Case(
        {**llama(3, dense=("mlp.down_proj",)).modules, "model.layers.0.mlp.up_proj": SCHEMES[2]}
    )
    for case in (plain, one_layer, other_bits):
        assert "modules_in_block_to_quantize" not in gptq.write(case.target)


def test_quantized_head_is_named() -> None:
    target = llama(1, head=SCHEMES[0]).target
    assert gptq.write(target)["lm_head"] is True
    assert awq.write(target)["lm_head"] is True
    assert compressed_tensors.write(target)["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]


def test_cache_scheme_survives() -> None:
    target = llama(1).target
    carried = TargetModel(
        target.layers, target.dense_linears, {}, {"kv_cache_scheme": {"num_bits": 8}}, "0.1.0"
    )
    assert compressed_tensors.write(carried)["kv_cache_scheme"] == {"num_bits": 8}


def test_channel_scheme() -> None:
    block = compressed_tensors.write(Case({DOWN: (8, -1, True)}).target)
    weights = block["config_groups"]["group_0"]["weights"]
    assert (weights["strategy"], weights["group_size"], weights["num_bits"]) == ("channel", None, 8)


# ---- the artifact's block -----------------------------------------------------------------------


def artifact() -> dict[str, Any]:
    layers = {
        "a.0.q": QuantScheme(4, 128, True, False, 256, 128, "F16"),
        "a.10.q": QuantScheme(4, 128, True, True, 256, 128, "F16"),
        "a.2.q": QuantScheme(4, 128, True, False, 1000, 4000, "F16"),
        "a.3.q": QuantScheme(8, 64, False, False, 256, 128, "F16"),
        "a.4.q": QuantScheme(4, 128, True, False, 256, 128, "F16"),
    }
    return w4pack.write(
        TargetModel(layers, ("lm_head", "a.10.z", "a.9.z"), {"a.2.q": (1024, 4032)}, {}, "0.1.0")
    )


def test_artifact_block() -> None:
    block = artifact()
    assert list(block) == list(w4pack.KEYS)
    assert block["modules_to_not_convert"] == ["a.9.z", "a.10.z", "lm_head"]
    assert list(block["modules"]) == ["a.2.q", "a.3.q", "a.10.q"]
    assert block["modules"]["a.2.q"] == {
        "bits": 4, "group_size": 128, "sym": True, "act_order": False,
        "in_features": 1000, "out_features": 4000, "stored_in": 1024, "stored_out": 4032,
    }  # fmt: skip
    assert w4pack.sizes_of(block, "a.2.q") == (1000, 4000, 1024, 4032)
    assert w4pack.claims(block).refusals == ()
    assert w4pack.claims(block).for_module("a.10.q") == ModuleClaim(4, 128, True, True)


R4 = {
    "kind": "hadamard", "site": "mlp_mid", "order": 128, "factors": [[128, "sylvester"]], "block": 128,
    "signs": None,
}  # fmt: skip


def test_known_records_are_told_to_those_who_run_nothing() -> None:
    block = {**artifact(), "online": [R4]}
    assert w4pack.claims(block).refusals == ()
    assert w4pack.run_time(block) == (("online.0", "hadamard: runs in w4pack's own loader only"),)
    assert w4pack.run_time(artifact()) == ()


def test_the_digest_of_records_stays_what_artifacts_hold() -> None:
    act = {"kind": "act_quant", "site": "attn_in", "bits": 4, "clip": {"4": 0.9, "8": 1}, "symmetric": True}
    sides = {"bits": {"k": 4, "v": 4}, "clip": {"k": {"4": 1.0}, "v": {"4": 0.95}}}
    r3 = {**R4, "site": "qk", "order": 64, "factors": [[64, "sylvester"]], "block": 64}
    found = recorded.fingerprint(parse([r3, act, {"kind": "kv_quant", **sides, "group": 64}]))
    assert found == "63d97cc54bc6a8627eddb8da1c7faf420747a68ce1a111aa90cbc6ca370d9d16"


def changed(block: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with the value at a path (keys parted by ``/``) replaced; ``...`` removes it."""
    copy: dict[str, Any] = json.loads(json.dumps(block))
    *parents, last = path.split("/")
    place: Any = copy
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "key", "words"),
    [
        ("artifact_version", 2, "artifact_version", ("2", "1")),
        ("artifact_version", True, "artifact_version", ("true", "1")),
        ("artifact_version", ..., "artifact_version", ("null", "1")),
        ("layout", "marlin-32x32", "layout", ("marlin-32x32", "marlin-16x64")),
        ("surprise", 0, "surprise", ("0", "modules_to_not_convert")),
        ("bits", 3, "bits", ("3", "4 or 8")),
        ("bits", True, "bits", ("true", "4 or 8")),
        ("group_size", 0, "group_size", ("0",)),
        ("sym", 1, "sym", ("1",)),
        ("modules", [], "modules", ("object",)),
        ("modules/a.3.q", 3, "modules.a.3.q", ("3", "object")),
        ("modules/a.3.q/extra", 1, "modules.a.3.q.extra", ("1", "stored_in")),
        ("modules/a.3.q/stored_in", "9", "modules.a.3.q.stored_in", ("9",)),
        ("modules/a.3.q/bits", 5, "modules.a.3.q.bits", ("5",)),
        ("modules_to_not_convert", "lm_head", "modules_to_not_convert", ("list",)),
        ("online", {}, "online", ("list",)),
        ("online", [{"kind": "warp"}], "online.0.kind", ("warp", "hadamard")),
        ("online", [{**R4, "site": "nose"}], "online.0.site", ("nose", "mlp_mid")),
        ("online", [{**R4, "seed": 1}], "online.0.seed", ("1", "factors")),
        ("online", [[]], "online.0", ("object",)),
    ],
)
def test_an_artifact_that_is_not_understood(path: str, value: Any, key: str, words: tuple[str, ...]) -> None:
    ((found, text),) = w4pack.claims(changed(artifact(), path, value)).refusals
    assert found == key
    assert all(word in text for word in words)


def test_names_of_towers_are_told_one_by_one() -> None:
    """Engines translate exact names of nested parts to their own, and leave patterns as they are."""
    tower = [f"visual.blocks.{n}.attn.qkv" for n in range(32)]
    target = Case({DOWN: SCHEMES[0], **dict.fromkeys(tower)}).target
    assert compressed_tensors.write(target)["ignore"] == ["lm_head", *tower]


def test_a_tied_head_is_ignored_by_name() -> None:
    """It has no tensor, but the target `Linear` takes its module: transformers would drop its weight."""
    tied = Case({DOWN: SCHEMES[0]}).target
    assert compressed_tensors.write(tied)["ignore"] == ["lm_head"]
    quantized = Case({DOWN: SCHEMES[0], "lm_head": SCHEMES[0]}).target
    assert "lm_head" not in compressed_tensors.write(quantized)["ignore"]
