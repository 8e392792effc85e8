"""GPTQ blocks, as AutoGPTQ, GPTQModel, Optimum and AutoRound's ``auto_gptq`` export write them.

``dynamic`` maps patterns to overrides; the first pattern that matches a module name wins, ``-:`` leaves the
module unquantized. Engines look rules up under *fused* names too, so the rules written here match both.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from w4pack.convert.core import families, patterns
from w4pack.convert.dialects import Claims, ModuleClaim, TargetModel, reading
from w4pack.convert.dialects.rules import anchored, common_scheme, with_fused

METHODS = ("gptq", "gptq_marlin", "auto_gptq", "auto-gptq", "marlin")

_BLOCK = re.compile(r"(?P<block>.*?\.\d+)\.(?P<rest>.+)")  # a decoder layer and what lies in it

FORMATS = {"gptq": "v1", "gptq_v2": "v2", "marlin": None}  # label -> how zero points are stored
KNOWN_KEYS = frozenset((
    "bits", "w_bit", "wbits", "group_size", "q_group_size", "groupsize", "desc_act", "sym",
    "checkpoint_format", "format", "is_marlin_format", "static_groups", "act_group_aware",
    "true_sequential", "damp_percent", "damp_auto_increment", "mse", "gptaq", "foem", "lm_head", "dynamic",
    "modules_in_block_to_quantize", "inside_layer_modules", "block_name_to_quantize",
    "to_quant_block_names", "module_name_preceding_first_block", "modules_to_not_convert", "pack_dtype",
    "meta", "version", "model_name_or_path", "model_file_base_name", "model_seqlen", "dataset", "tokenizer",
    "batch_size", "pad_token_id", "use_cuda_fp16", "use_exllama", "exllama_config", "max_input_length",
    "cache_block_outputs", "disable_exllama", "backend", "autoround_version", "provider", "data_type",
    "iters", "nsamples", "seqlen", "low_gpu_mem_usage", "enable_minmax_tuning", "enable_quanted_input",
    "lr", "minmax_lr", "scale_dtype", "gradient_accumulate_steps", "enable_norm_bias_tuning", "act_bits",
    "act_group_size", "act_sym", "act_dynamic", "act_data_type", "super_bits", "super_group_size",
    "sparsity_config",
))  # fmt: skip


def claims(config: Mapping[str, Any]) -> Claims:
    """Parse a GPTQ block. Never raises."""
    label, clash = _label(config)
    default = module_claim(config)
    rules, unread = _rules(reading.table(config, "dynamic"))
    refusals = reading.forward_keys(config, KNOWN_KEYS) + _rule_refusals(config)
    lm_head = reading.boolean(config, "lm_head")
    return Claims(
        method="gptq",
        label=label,
        for_module=_lookup(config, default, rules, lm_head),
        zero_kind=FORMATS.get(label or "gptq"),
        writes_g_idx=not is_autoround(config) and label != "marlin",
        word_zeros=_word_zeros(config),
        lm_head=lm_head,
        refusals=refusals,
        dropped=clash + unread + reading.unknown_keys(config, KNOWN_KEYS, refusals),
        unsupported=_unsupported(config, label),
    )


METADATA = "gptq_"  # auto-gptq <= 0.7.1 keeps settings in the safetensors header, as strings with this prefix


def from_metadata(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the block that a safetensors header's metadata tells of, or None. For files without any JSON."""
    words: dict[str, Any] = {"True": True, "False": False, "true": True, "false": False}
    block: dict[str, Any] = {}
    for key, value in metadata.items():
        if key.startswith(METADATA):
            number = value.removeprefix("-").isdecimal() and len(value) < 10
            block[key.removeprefix(METADATA)] = int(value) if number else words.get(value, value)
    return {"quant_method": "gptq", **block} if "bits" in block else None


def module_claim(config: Mapping[str, Any]) -> ModuleClaim:
    """Read bits, group size, symmetry and order from a block or a rule, old spellings included."""
    return ModuleClaim(
        bits=reading.integer(config, "bits", "w_bit", "wbits"),
        group_size=reading.group_size(config, "group_size", "q_group_size", "groupsize"),
        sym=reading.boolean(config, "sym"),
        desc_act=reading.boolean(config, "desc_act"),
    )


def override(base: ModuleClaim, changed: ModuleClaim) -> ModuleClaim:
    """Return ``base`` with the values that ``changed`` sets."""
    return ModuleClaim(
        bits=base.bits if changed.bits is None else changed.bits,
        group_size=base.group_size if changed.group_size is None else changed.group_size,
        sym=base.sym if changed.sym is None else changed.sym,
        desc_act=base.desc_act if changed.desc_act is None else changed.desc_act,
    )


def is_autoround(config: Mapping[str, Any]) -> bool:
    """Return True for blocks written by AutoRound, which never stores a g_idx."""
    return "autoround_version" in config or reading.text(config, "provider") == "auto-round"


def _label(config: Mapping[str, Any]) -> tuple[str | None, reading.Pairs]:
    """Return the layout label, and a note if two keys differ; transformers lets ``checkpoint_format`` win."""
    first = reading.text(config, "checkpoint_format")
    second = reading.text(config, "format")
    if reading.boolean(config, "is_marlin_format") or reading.text(config, "quant_method") == "marlin":
        return "marlin", ()
    if first and second and first.lower() != second.lower():
        return first.lower(), (
            ("format", f"{reading.shown(second)}, but checkpoint_format is {reading.shown(first)}"),
        )
    label = first or second
    return (label.lower() if label else None), ()


def _unsupported(config: Mapping[str, Any], label: str | None) -> str | None:
    if label is not None and label not in FORMATS:
        return f"GPTQ layout `{label}` (known: {', '.join(FORMATS)})"
    dtype = reading.text(config, "pack_dtype")
    if dtype is not None and dtype != "int32":
        return f"pack_dtype `{dtype}` (known: int32)"
    return reading.odd_bits(module_claim(config).bits)


def _word_zeros(config: Mapping[str, Any]) -> bool:
    """Return True if ``meta.quantizer`` names gptqmodel, which subtracts one from whole words."""
    makers = reading.table(config, "meta").get("quantizer")
    return any(maker.lower().startswith("gptqmodel") for maker in reading.strings(makers))


Rule = tuple[patterns.Matcher, Mapping[str, Any] | None]


def _rules(dynamic: Mapping[str, Any]) -> tuple[tuple[Rule, ...], reading.Pairs]:
    """Compile ``dynamic``; unreadable patterns are named instead."""
    rules: list[Rule] = []
    unread = []
    for key in dynamic:
        negative = key.startswith("-:")
        pattern = key[2:] if key.startswith(("-:", "+:")) else key
        match = patterns.matcher(pattern)
        if match is None:
            unread.append(("dynamic", f"unreadable pattern {reading.shown(pattern)}"))
        else:
            rules.append((match, None if negative else reading.table(dynamic, key)))
    return tuple(rules), tuple(unread)


def _rule_refusals(config: Mapping[str, Any]) -> reading.Pairs:
    dynamic = reading.table(config, "dynamic")
    found: reading.Pairs = ()
    for key in dynamic:
        found += reading.forward_keys(reading.table(dynamic, key), KNOWN_KEYS, f"dynamic.{key}.")
    return found


def _lookup(
    config: Mapping[str, Any], default: ModuleClaim, rules: tuple[Rule, ...], lm_head: bool | None
) -> Callable[[str], ModuleClaim | None]:
    inside = reading.strings(config.get("modules_in_block_to_quantize") or config.get("inside_layer_modules"))
    skipped = reading.strings(config.get("modules_to_not_convert"))
    blocks = reading.strings(config.get("to_quant_block_names")) if is_autoround(config) else ()

    def for_module(name: str) -> ModuleClaim | None:
        head = families.is_lm_head(name)
        if (head and not lm_head) or families.is_router(name):
            return None
        for match, values in rules:
            if match(name):
                return None if values is None else override(default, module_claim(values))
        if any(part in name for part in skipped):
            return None
        if head:
            return default
        if inside and not any(name.endswith(part) for part in inside):
            return None
        if blocks and not any(name.startswith(block) for block in blocks):
            return None
        return default

    return for_module


# ---- writing -------------------------------------------------------------------------------------


def zero_kind(model: TargetModel) -> str:
    """Return how *all* zero points of a written model are stored: one label stands for the whole file.

    ``v1`` if every layer is symmetric; ``v2`` otherwise, also for the symmetric layers of a mixed model.
    """
    return "v1" if all(scheme.sym for scheme in model.layers.values()) else "v2"


def write(model: TargetModel) -> dict[str, Any]:
    """Return the block for a gptq target; the same content belongs into quantize_config.json."""
    base = common_scheme(model.layers)
    label = "gptq" if zero_kind(model) == "v1" else "gptq_v2"
    block: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": base.bits,
        "group_size": base.group_size,
        "desc_act": False,
        "sym": base.sym,
        "checkpoint_format": label,
        "format": label,
        "pack_dtype": "int32",
        "lm_head": any(families.is_lm_head(name) for name in model.layers),
        "true_sequential": True,
        "meta": {"quantizer": [f"w4pack:{model.version}"]},
    }
    rules = _dynamic(model)
    if rules:
        block["dynamic"] = rules
    inside = _inside_blocks(model)
    if inside:
        block["modules_in_block_to_quantize"] = inside
    return block


def write_legacy_marlin(model: TargetModel) -> dict[str, Any]:
    """Return the block for a marlin-legacy target. All layers must be 4 bit, symmetric, of one group size."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": common_scheme(model.layers).group_size,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "marlin",
        "is_marlin_format": True,
    }


def _dynamic(model: TargetModel) -> dict[str, dict[str, Any]]:
    """Return the rules: one set of patterns per way in which modules differ from the default."""
    base = common_scheme(model.layers)
    sets: dict[tuple[tuple[str, int], ...] | None, list[str]] = {}
    if model.dense_linears:
        sets[None] = list(model.dense_linears)
    for name in sorted(model.layers, key=families.natural_key):
        scheme = model.layers[name]
        values = {"bits": scheme.bits, "group_size": scheme.group_size, "sym": scheme.sym}
        default = {"bits": base.bits, "group_size": base.group_size, "sym": base.sym}
        changed = tuple((key, value) for key, value in values.items() if value != default[key])
        if changed:
            sets.setdefault(changed, []).append(name)
    everything = (*model.layers, *model.dense_linears)
    rules: dict[str, dict[str, Any]] = {}
    for differs, names in sets.items():
        sign = "-:" if differs is None else "+:"
        for pattern in anchored(with_fused(names, everything)):
            rules[sign + pattern] = dict(differs or ())
    return rules


def _inside_blocks(model: TargetModel) -> list[list[str]] | None:
    """Return block-relative names, if a kind of projection is dense in every block and nothing else differs.

    Engines that ignore ``dynamic`` can express just that. Experts cannot be told so: their linears are not
    modules there.
    """
    schemes = {(scheme.bits, scheme.group_size, scheme.sym) for scheme in model.layers.values()}
    blocks: dict[str, list[str]] = {}
    for name in model.layers:
        found = _BLOCK.fullmatch(name)
        if found is None or families.expert_index(name) is not None:
            return None
        blocks.setdefault(found["block"], []).append(found["rest"])
    kinds = {frozenset(names) for names in blocks.values()}
    left = [found for name in model.dense_linears if (found := _BLOCK.fullmatch(name))]
    everywhere = {found["block"] for found in left} <= set(blocks)
    if len(schemes) != 1 or len(kinds) != 1 or not left or not everywhere:
        return None
    inside = sorted(next(iter(kinds)), key=families.natural_key)
    if any(found["rest"].endswith(tuple(inside)) for found in left):
        return None  # matched as suffixes: a dense module would be taken for a quantized one
    return _in_sets(inside)


def _in_sets(names: list[str]) -> list[list[str]]:
    """Put what is fused into one list, in the order of the fused parts; anything else into one of its own."""
    sets = [list(fused.members) for fused in families.fused_sets(names)]
    alone = [[name] for name in names if not any(name in members for members in sets)]
    return sorted([*sets, *alone], key=lambda members: names.index(min(members, key=names.index)))
