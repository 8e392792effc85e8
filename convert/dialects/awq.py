"""AWQ blocks, as AutoAWQ, llm-awq, GPTQModel and AutoRound's ``auto_awq`` export write them.

``modules_to_not_convert`` holds substrings of module names.
"""

from collections.abc import Mapping
from typing import Any

from w4pack.convert.core import families
from w4pack.convert.dialects import Claims, ModuleClaim, TargetModel, reading
from w4pack.convert.dialects.rules import common_scheme, with_fused

METHODS = ("awq", "awq_marlin", "auto_awq", "auto-awq")

VERSIONS = {
    "gemm": "gemm",
    "gemv": "gemv",
    "gemv_fast": "gemv_fast",
    "marlin": "marlin",
    "llm-awq": "gemv_fast",
}
KNOWN_KEYS = frozenset((
    "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format", "checkpoint_format",
    "backend", "modules_to_not_convert", "lm_head", "sym", "desc_act", "pack_dtype", "meta", "dynamic",
    "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "true_sequential", "damp_percent",
    "autoround_version", "provider", "data_type", "to_quant_block_names", "block_name_to_quantize", "iters",
    "nsamples", "seqlen", "enable_quanted_input", "low_gpu_mem_usage", "enable_minmax_tuning", "lr",
    "minmax_lr", "scale_dtype", "gradient_accumulate_steps", "enable_norm_bias_tuning", "act_bits",
    "act_group_size", "act_sym", "act_dynamic", "act_data_type", "super_bits", "super_group_size",
    "sparsity_config", "model_name_or_path", "model_file_base_name",
))  # fmt: skip


def claims(config: Mapping[str, Any]) -> Claims:
    """Parse an AWQ block. Never raises."""
    default = ModuleClaim(
        bits=reading.integer(config, "bits", "w_bit"),
        group_size=reading.group_size(config, "group_size", "q_group_size"),
        sym=_sym(config),
        desc_act=False,
    )
    skipped = reading.strings(config.get("modules_to_not_convert"))
    lm_head = reading.boolean(config, "lm_head")
    refusals = reading.forward_keys(config, KNOWN_KEYS)

    def for_module(name: str) -> ModuleClaim | None:
        if families.is_router(name) or (families.is_lm_head(name) and not lm_head):
            return None
        return None if any(part in name for part in skipped) else default

    label = _label(config)
    return Claims(
        method="awq",
        label=label,
        for_module=for_module,
        writes_g_idx=False,
        lm_head=lm_head,
        refusals=refusals,
        dropped=reading.unknown_keys(config, KNOWN_KEYS, refusals),
        unsupported=_unsupported(label, default.bits),
    )


def _sym(config: Mapping[str, Any]) -> bool | None:
    """``zero_point: true`` says that zeros are stored, not that they differ from the midpoint."""
    if reading.boolean(config, "zero_point") is False:
        return True
    return reading.boolean(config, "sym")


def _label(config: Mapping[str, Any]) -> str | None:
    if (reading.text(config, "backend") or "").lower() == "llm-awq":
        return "gemv_fast"
    label = reading.text(config, "version", "checkpoint_format", "format")
    return VERSIONS.get(label.lower(), label.lower()) if label else None


def _unsupported(label: str | None, bits: int | None) -> str | None:
    if label is not None and label not in VERSIONS:
        return f"AWQ layout `{label}` (known: {', '.join(VERSIONS)})"
    return reading.odd_bits(bits)


def write(model: TargetModel) -> dict[str, Any]:
    """Return the block for an awq target: one scheme, symmetric layers with explicit zero points."""
    base = common_scheme(model.layers)
    block: dict[str, Any] = {
        "quant_method": "awq",
        "bits": base.bits,
        "group_size": base.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": _left_out(model),
    }
    if any(families.is_lm_head(name) for name in model.layers):
        block["lm_head"] = True
    return block


def _left_out(model: TargetModel) -> list[str]:
    """Return full names, since engines look for them as substrings, and the fused names of whole sets."""
    names = with_fused(model.dense_linears, (*model.layers, *model.dense_linears))
    hits = set(clashes(model))
    kept = (name for name in names if name not in hits or not families.is_router(name))
    return sorted(kept, key=families.natural_key)


def clashes(model: TargetModel) -> tuple[str, ...]:
    """Return dense modules whose name is part of a quantized one's: a list of substrings would exclude both.

    A router among them can be left out of the list (engines never quantize routers); anything else cannot be
    expressed for an awq target. ``mlp.gate`` and ``mlp.gate_proj`` of one layer clash, of two layers they
    do not.
    """
    everything = (*model.layers, *model.dense_linears)
    quantized = with_fused(model.layers, everything)
    parents: dict[str, list[str]] = {}
    for name in quantized:
        parents.setdefault(families.split_name(name)[0], []).append(name)
    found = []
    for name in with_fused(model.dense_linears, everything):
        near = parents.get(families.split_name(name)[0], ())
        if any(other.startswith(name) for other in near):
            found.append(name)
    return tuple(sorted(found, key=families.natural_key))
