"""AutoRound's own blocks: ``packing_format`` names the layout, ``extra_config`` the modules that differ.

A module is quantized if its name starts with one of the blocks. ``extra_config`` is looked up by exact name
first, then by pattern (searched for anywhere in the name); 16 bits and more mean that the module was left
alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

from w4pack.convert.core import families, patterns
from w4pack.convert.dialects import Claims, ModuleClaim, reading

METHODS = ("auto-round", "auto_round", "autoround", "intel/auto-round", "inc")

DEFAULT_PACKING = "auto_gptq"
PACKINGS: dict[str, str | None] = {  # packing without its prefix -> how zero points are stored
    "auto_gptq": "v1",
    "gptq": "v1",
    "gptqmodel": "v2",
    "auto_round": "v2",
    "auto_awq": None,
    "awq": None,
}
DENSE_BITS = 16
PATTERN_CHARACTERS = frozenset("*+?^$()[]{}|\\")
KNOWN_KEYS = frozenset((
    "bits", "group_size", "sym", "data_type", "packing_format", "backend", "vllm_backend", "sglang_backend",
    "extra_config", "block_name_to_quantize", "to_quant_block_names", "quant_block_list",
    "autoround_version", "iters", "nsamples", "seqlen", "batch_size", "lr", "minmax_lr",
    "low_gpu_mem_usage", "enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning",
    "gradient_accumulate_steps", "scale_dtype", "dataset", "amp", "not_use_best_mse", "dynamic_max_gap",
    "provider", "lm_head", "act_bits", "act_group_size", "act_sym", "act_dynamic", "act_data_type",
    "super_bits", "super_group_size", "sparsity_config", "modules_to_not_convert", "desc_act",
    "damp_percent", "true_sequential", "enable_alg_ext", "supported_types",
))  # fmt: skip


def claims(config: Mapping[str, Any]) -> Claims:
    """Parse an AutoRound block. Never raises."""
    label = reading.text(config, "packing_format", "backend", "vllm_backend", "sglang_backend")
    packing = _packing(label)
    refusals = reading.forward_keys(config, KNOWN_KEYS) + _extra_refusals(config)
    for_module, unread = _finder(config)
    return Claims(
        method="auto-round",
        label=label or f"auto_round:{DEFAULT_PACKING}",
        for_module=for_module,
        zero_kind=PACKINGS.get(packing),
        writes_g_idx=False,
        lm_head=for_module("lm_head") is not None,
        refusals=refusals,
        dropped=reading.unknown_keys(config, KNOWN_KEYS, refusals) + unread,
        unsupported=_unsupported(config, packing, label),
    )


def _packing(label: str | None) -> str:
    """Strip the prefix: ``auto_round:auto_gptq``, ``autoround:gptq:exllamav2`` ..."""
    if label is None:
        return DEFAULT_PACKING
    head, _, rest = label.lower().partition(":")
    if head.replace("-", "_") not in ("auto_round", "autoround"):
        return head.replace("-", "_")
    return rest.split(":")[0] if rest else "auto_round"


def _claim(config: Mapping[str, Any]) -> ModuleClaim:
    return ModuleClaim(
        bits=reading.integer(config, "bits"),
        group_size=reading.group_size(config, "group_size"),
        sym=reading.boolean(config, "sym"),
        desc_act=False,
    )


def _finder(config: Mapping[str, Any]) -> tuple[Callable[[str], ModuleClaim | None], reading.Pairs]:
    default = _claim(config)
    extra = reading.table(config, "extra_config")
    blocks = reading.strings(config.get("block_name_to_quantize") or config.get("to_quant_block_names"))
    skipped = reading.strings(config.get("modules_to_not_convert"))
    rules, unread = _rules(extra)

    def for_module(name: str) -> ModuleClaim | None:
        if name in extra:
            return _changed(default, reading.table(extra, name))
        if families.is_router(name) or any(part in name for part in skipped):
            return None
        inside = any(name.startswith(block) for block in blocks) if blocks else not families.is_lm_head(name)
        for match, values in rules:
            if match(name):
                return _changed(default, values) if inside or "bits" in values else None
        return default if inside else None

    return for_module, unread


def _changed(default: ModuleClaim, values: Mapping[str, Any]) -> ModuleClaim | None:
    own = _claim(values)
    bits = default.bits if own.bits is None else own.bits
    if bits is not None and bits >= DENSE_BITS:
        return None
    return ModuleClaim(
        bits=bits,
        group_size=default.group_size if own.group_size is None else own.group_size,
        sym=default.sym if own.sym is None else own.sym,
        desc_act=False,
    )


def _rules(
    extra: Mapping[str, Any],
) -> tuple[tuple[tuple[patterns.Matcher, Mapping[str, Any]], ...], reading.Pairs]:
    rules = []
    unread = []
    for key in extra:
        if not PATTERN_CHARACTERS.intersection(key):
            continue
        match = patterns.searcher(key)
        if match is None:
            unread.append(("extra_config", f"unreadable pattern {reading.shown(key)}"))
        else:
            rules.append((match, reading.table(extra, key)))
    return tuple(rules), tuple(unread)


def _extra_refusals(config: Mapping[str, Any]) -> reading.Pairs:
    extra = reading.table(config, "extra_config")
    found: reading.Pairs = ()
    for key in extra:
        found += reading.forward_keys(reading.table(extra, key), KNOWN_KEYS, f"extra_config.{key}.")
    return found


def _unsupported(config: Mapping[str, Any], packing: str, label: str | None) -> str | None:
    if packing not in PACKINGS:
        return f"AutoRound packing `{label}` (known: {', '.join(f'auto_round:{name}' for name in PACKINGS)})"
    kind = reading.text(config, "data_type")
    if kind is not None and kind.lower() != "int":
        return f"AutoRound data type `{kind}` (known: int)"
    return reading.odd_bits(reading.integer(config, "bits"))
