"""vLLM 0.32.0: read from its code, and run on a CPU where a row says so.

GPTQ asks for Marlin's types and groups before any kernel is chosen; which kernel then takes what is in
``kernels``.
"""

from collections.abc import Iterator

from w4pack.convert.engines import checks, kernels, plugin
from w4pack.convert.engines.checks import Hit, key
from w4pack.convert.engines.model import Kind, Model
from w4pack.convert.engines.plugin import LOWER
from w4pack.convert.engines.table import Engine, Finding, Rule

VERSION = "0.32.0"

_LAYOUT = {"gptq": ("gptq",), "awq": ("awq",), "compressed-tensors": ("compressed-tensors",)}
_METHODS = ("gptq", "awq", "compressed-tensors", "auto-round")


def method(model: Model, tp: int) -> Iterator[Finding]:
    """A quantization method without a reader."""
    if model.facts.quant_config is not None and model.labels.method not in _METHODS:
        found = model.labels.method or "none"
        yield Finding(key(model, "quant_method"), "gptq, awq, compressed-tensors or auto-round", found)


def _extra_file(model: Model, tp: int) -> Iterator[Finding]:
    """Weight files that nothing names, in a folder without an index: all of them are loaded."""
    files = model.facts.files
    if "model.safetensors.index.json" in files or not model.facts.weight_files:
        return
    for name in files:
        if name.endswith(".safetensors") and "/" not in name and name not in model.facts.weight_files:
            yield Finding(name, "only weight files of the model", "a file that is loaded too")


def layout_for(model: Model) -> tuple[str, ...]:
    """Return the tensor layout that the config makes an engine expect."""
    if model.labels.method == "auto-round":
        return ("awq",) if "awq" in model.labels.packing else ("gptq",)
    return _LAYOUT.get(model.labels.method, ())


def layout(model: Model, kind: Kind, tp: int) -> Hit:
    """Tensors of another layout than the settings make the engine expect."""
    expected = layout_for(model)
    return checks.layout_is(kind, *expected) if expected else None


def _gptq_keys(model: Model, tp: int) -> Iterator[Finding]:
    return checks.missing_keys(model, ("bits",), ("group_size",), ("desc_act",), ("sym",))


def awq_keys(model: Model, tp: int) -> Iterator[Finding]:
    """Keys that AWQ settings must have."""
    return checks.missing_keys(model, ("w_bit", "bits"), ("q_group_size", "group_size"), ("zero_point",))


def gptq_type(model: Model, tp: int) -> Iterator[Finding]:
    """Bits and symmetry without a Marlin type, in the global settings."""
    bits, sym = model.quant.get("bits"), model.quant.get("sym")
    if bits is not None and sym is not None and not (bits in (4, 8) and sym):
        yield Finding(
            key(model, "bits", "sym"), "4 or 8 bit, sym true", f"bits {bits}, sym {str(sym).lower()}"
        )


def _gptq_type_of_module(model: Model, kind: Kind, tp: int) -> Hit:
    label = kind.label
    if (
        not model.quant.get("dynamic")
        or not label.quantized
        or label.sym is not False
        or not model.quant.get("sym")
    ):
        return None
    return "sym true in every `dynamic` rule", "a rule with sym false"


def desc_act(model: Model, tp: int) -> Iterator[Finding]:
    """Act-order in the settings, where a group size makes it mean something."""
    if model.quant.get("desc_act") and model.quant.get("group_size") != -1:
        yield Finding(key(model, "desc_act"), "false, or group size -1", "true")


def _dynamic_desc_act(model: Model, tp: int) -> Iterator[Finding]:
    rules = model.quant.get("dynamic")
    base, group = model.quant.get("desc_act"), model.quant.get("group_size")
    for pattern, values in rules.items() if isinstance(rules, dict) else ():
        if str(pattern).startswith("-:") or not isinstance(values, dict):
            continue
        if values.get("desc_act", base and group != -1) and values.get("group_size", group) != -1:
            yield Finding(key(model, "dynamic"), "no rule with desc_act true", checks.short(pattern))


def awq_bits(model: Model, tp: int) -> Iterator[Finding]:
    """AWQ of other bits than 4."""
    bits = checks.value_of(model, "w_bit", "bits")
    if bits is not None and bits != 4:
        yield Finding(key(model, "bits"), "4", str(bits))


def packing(model: Model, tp: int) -> Iterator[Finding]:
    """AutoRound packings without a reader."""
    if model.labels.packing not in ("auto_round:auto_gptq", "auto_round:auto_awq"):
        expected = "auto_round:auto_gptq or auto_round:auto_awq"
        yield Finding(key(model, "packing_format"), expected, model.labels.packing)


def _autoround_asym(model: Model, kind: Kind, tp: int) -> Hit:
    if "gptq" not in model.labels.packing or not kind.label.quantized or kind.label.sym is not False:
        return None
    return "sym true for GPTQ packing", "sym false"


def actorder(model: Model, kind: Kind, tp: int) -> Hit:
    """Act-order in a compressed-tensors scheme (``weight`` and ``static`` are orders that left no map)."""
    if kind.label.actorder in ("group", "dynamic", "true"):
        return "actorder null, weight or static", f"actorder {kind.label.actorder}"
    return None


def sparsity(model: Model, tp: int) -> Iterator[Finding]:
    """Sparse compressed-tensors files."""
    value = model.quant.get("sparsity_config")
    if isinstance(value, dict) and value.get("targets"):
        yield Finding(
            key(model, "sparsity_config"), "no sparse weights", checks.short(value.get("format", value))
        )


def _rotation(model: Model, tp: int) -> Iterator[Finding]:
    return checks.present(model, "rotation", "rotation_config", "spinquant_config")


def _transform_split(model: Model, tp: int) -> Iterator[Finding]:
    if tp > 1:
        yield from checks.run_time_transforms(model)


def _transform(model: Model, tp: int) -> Iterator[Finding]:
    if tp == 1:
        yield from checks.run_time_transforms(model)


def _map_dropped(model: Model, kind: Kind, tp: int) -> Hit:
    if kind.layer.layout == "compressed-tensors" or not checks.real_order(kind) or kind.label.desc_act:
        return None
    return "rows in natural order, k // group_size", "a real g_idx, which is dropped at load"


def _map_unknown(model: Model, kind: Kind, tp: int) -> Hit:
    if kind.layer.layout != "compressed-tensors" or kind.layer.act_order == "none":
        return None
    return "no weight_g_idx", "a weight_g_idx tensor: no such parameter"


def zeros_ignored(model: Model, kind: Kind, tp: int) -> Hit:
    """Real zero points in tensors that a symmetric kernel never reads."""
    if kind.layer.sym or kind.layer.layout != "gptq" or kind.label.sym is not True:
        return None
    return (
        f"every zero point {1 << (kind.layer.bits - 1)}, as `sym: true` says",
        "other zero points, which are ignored",
    )


def _no_zero_point(model: Model, kind: Kind, tp: int) -> Hit:
    if model.quant.get("zero_point") is not False or kind.layer.sym:
        return None
    return "zero_point true", "zero_point false over real zero points: the CPU kernel assumes 8"


def _slow_zero_point(model: Model, kind: Kind, tp: int) -> Hit:
    if model.quant.get("zero_point") is not False or not kind.layer.sym:
        return None
    return "zero_point true", "zero_point false: Marlin has no such type, the old AWQ kernel runs"


def ambiguous(model: Model, kind: Kind, tp: int) -> Hit:
    """Stored 15 (255) under a v1 label: engines read nibble + 1, some writers meant another zero."""
    count = kind.layer.ambiguous_zeros
    if not count:
        return None
    top = (1 << kind.layer.bits) - 1
    return (
        f"no stored zero of {top}",
        f"{count} of them: read as {top + 1}, which the writer may not have meant",
    )


def _gptq_group(model: Model, kind: Kind, tp: int) -> Hit:
    return checks.group_listed(kind) if layout_for(model) == ("gptq",) and not kind.expert else None


def _awq_group(model: Model, kind: Kind, tp: int) -> Hit:
    hit = checks.group_listed(kind) if layout_for(model) == ("awq",) and not kind.expert else None
    if hit is None or kind.group % 32:
        return None
    return hit[0], f"{hit[1]}: the old AWQ kernel runs"


def _awq_group_odd(model: Model, kind: Kind, tp: int) -> Hit:
    hit = checks.group_listed(kind) if layout_for(model) == ("awq",) and not kind.expert else None
    return None if hit is None or kind.group % 32 == 0 else hit


def _k_split(model: Model, kind: Kind, tp: int) -> Hit:
    if (
        kind.expert
        and model.labels.method != "compressed-tensors"
        and kernels.halved_group(model, kind, tp) is not None
    ):
        return None
    return checks.k_split(model, kind, tp)


def n_split(model: Model, kind: Kind, tp: int) -> Hit:
    """N per rank in whole words, where something is packed along N."""
    along_n = kind.layer.layout in ("gptq", "awq") or not kind.layer.sym
    return checks.n_split(model, kind, tp, checks.pack_factor(kind) if along_n else 1)


def _pads(model: Model, kind: Kind, tp: int) -> Hit:
    k, n = model.per_rank(kind, tp)
    if (
        kind.expert
        or kind.lm_head
        or kind.group not in checks.MARLIN_GROUPS
        or (k % 128 == 0 and n % 64 == 0)
    ):
        return None
    if n % 128 == 0 and k % 64 == 0:
        return None  # Marlin's other tile: 64 x 128
    return (
        "K a multiple of 128, N of 64: Marlin's tile",
        f"K % 128 = {k % 128:g}, N % 64 = {n % 64:g}: padded at load",
    )


def _moe_slow(model: Model, kind: Kind, tp: int) -> Hit:
    if not kind.expert or layout_for(model) == ("compressed-tensors",):
        return None
    reason = kernels.moe_marlin(model, kind, tp)
    if reason is None or kernels.halved_group(model, kind, tp) is None:
        return None
    return "an expert shape for Marlin", f"{reason}: the Triton kernel runs"


def _moe_no_kernel(model: Model, kind: Kind, tp: int) -> Hit:
    if not kind.expert or layout_for(model) == ("compressed-tensors",):
        return None
    reason = kernels.moe_marlin(model, kind, tp)
    if reason is None or kernels.halved_group(model, kind, tp) is not None:
        return None
    return (
        "an expert kernel",
        f"Marlin: {reason}; Triton: no group of 32 or more divides hidden size and I/{tp}",
    )


def _moe_ct(model: Model, kind: Kind, tp: int) -> Hit:
    if not kind.expert or layout_for(model) != ("compressed-tensors",):
        return None
    hidden, inner = kernels.expert_shape(model, kind, tp)
    group = kind.group
    if group > 0 and (hidden % group or inner % group):
        return f"hidden size and I/{tp} multiples of {group}", f"{hidden}, {inner}"
    if not kind.layer.sym and (hidden % 8 or 2 * inner % 8):
        return "hidden size and 2 I multiples of 8 with zero points", f"{hidden}, {2 * inner}"
    return None


def _labelled_dense(model: Model, kind: Kind, tp: int) -> Hit:
    return checks.labelled_dense(kind)


def dense_labelled(model: Model, tp: int) -> Iterator[Finding]:
    """Dense linears that the config says are quantized (GPTQ finds them by dtype and is not asked)."""
    method = model.labels.method
    if method == "awq" and not model.quant.get("modules_to_not_convert"):
        return
    odd = [n for n in model.dense_linears if model.labels.of(n).quantized and model.facts.layers]
    if odd:
        yield Finding(odd[0], "quantized tensors, as the config says", "a 16-bit weight", len(odd))


RULES = (
    Rule(
        "vllm.no-config", "refuses", "config files", "loads as a plain model; the quantized tensors have no "
        "parameter", "convert: every target writes the settings", whole=checks.no_settings, run=True,
    ),
    Rule(
        "vllm.settings-file", "refuses", "config.json", "quantize_config.json is read only under "
        "--quantization", "convert --to gptq writes both files", whole=checks.settings_file, run=True,
    ),
    Rule(
        "vllm.method", "refuses", "quant_method", "unknown quantization method (marlin, bitsandbytes, gguf, "
        "hqq are gone)", "convert --to gptq, awq or compressed-tensors",
        whole=method, run=True,
    ),
    Rule(
        "vllm.extra-file", "refuses", "files", "without an index every *.safetensors is loaded; its tensors "
        "have no parameter", "convert: copies the model's files only", whole=_extra_file, run=True,
    ),
    Rule(
        "vllm.gptq-keys", "refuses", "bits, group_size, desc_act, sym", "a missing key is an error",
        "convert --to gptq", whole=_gptq_keys, methods=("gptq",), run=True,
    ),
    Rule(
        "vllm.gptq-type", "refuses", "bits, sym", "no GPTQ type but 4 and 8 bit symmetric",
        "convert --to awq or compressed-tensors; --to gptq if every zero is the midpoint", whole=gptq_type,
        methods=("gptq",), run=True,
    ),
    Rule(
        "vllm.dynamic-type", "refuses", "dynamic", "the same, for one rule",
        "convert --to compressed-tensors", test=_gptq_type_of_module, methods=("gptq",), run=True,
    ),
    Rule(
        "vllm.desc-act", "refuses", "desc_act, group_size", "activation ordering was removed",
        "convert: drops a trivial order, folds down_proj's, keeps the rest in the artifact or with --regroup",
        whole=desc_act, methods=("gptq",), run=True,
    ),
    Rule(
        "vllm.dynamic-desc-act", "refuses", "dynamic", "the same, for one rule", "as vllm.desc-act",
        whole=_dynamic_desc_act, methods=("gptq",), run=True,
    ),
    Rule(
        "vllm.awq-keys", "refuses", "bits, group_size, zero_point", "a missing key is an error",
        "convert --to awq", whole=awq_keys, methods=("awq",), run=True,
    ),
    Rule(
        "vllm.awq-bits", "refuses", "bits", "AWQ is 4 bit", "convert --to compressed-tensors",
        whole=awq_bits, methods=("awq",), run=True,
    ),
    Rule(
        "vllm.packing", "refuses", "packing_format", "no reader for that packing",
        "convert --to gptq (symmetric), awq or compressed-tensors", whole=packing, methods=("auto-round",),
        run=True,
    ),
    Rule(
        "vllm.auto-round-asym", "refuses", "sym", "GPTQ packing is symmetric only, each linear raises",
        "convert --to awq or compressed-tensors", test=_autoround_asym, methods=("auto-round",), run=True,
    ),
    Rule(
        "vllm.actorder", "refuses", "actorder", "activation ordering was removed", "as vllm.desc-act",
        test=actorder, methods=("compressed-tensors",), run=True,
    ),
    Rule(
        "vllm.sparsity", "refuses", "sparsity_config", "sparse formats were removed",
        "no target keeps the sparsity", whole=sparsity, methods=("compressed-tensors",), run=True,
    ),
    Rule(
        "vllm.rotation", "wrong", "rotation, rotation_config, spinquant_config",
        "the key is ignored without a message; online transforms are missing", "none in a stock engine",
        whole=_rotation, run=True,
    ),
    Rule(
        "vllm.transform-split", "refuses", "transform_config", "online transforms run on one GPU only",
        "TP 1", whole=_transform_split, methods=("compressed-tensors",),
    ),
    Rule(
        "vllm.transform", "note", "transform_config", "the engine applies the transforms at run time",
        "none: no target of a stock engine carries them", whole=_transform, methods=("compressed-tensors",),
    ),
    Rule(
        "vllm.heads", "refuses", "attention heads", "heads cannot be split unevenly", LOWER,
        whole=checks.heads,
    ),
    Rule(
        "vllm.partial-fused", "refuses", "parts of qkv_proj, gate_up_proj",
        "some but not all shards are quantized", "none that is lossless: the quantized parts would have to "
        "become dense", whole=checks.partial_fused, run=True,
    ),
    Rule(
        "vllm.uneven-fused", "refuses", "schemes of the parts of a fused module",
        "one scheme is used for all parts", "split groups where that makes the parts alike",
        whole=checks.uneven_fused,
    ),
    Rule(
        "vllm.expert-names", "refuses", "names of experts", "the class maps other names",
        "convert: writes the names the class maps", whole=checks.expert_names,
    ),
    Rule(
        "vllm.dense-labelled", "refuses", "dense linears", "the 16-bit weight has no parameter",
        "convert: every target lists what stays dense", whole=dense_labelled,
        methods=("awq", "compressed-tensors", "auto-round"), run=True,
    ),
    Rule(
        "vllm.layout", "refuses", "tensor layout", "tensors have no parameter, or another shape (labels such "
        "as `version` and `checkpoint_format` are not read)", "convert --to awq or gptq", test=layout,
        run=True,
    ),
    Rule(
        "vllm.shape", "refuses", "bits, group_size against the tensors",
        "parameters get other shapes than the tensors", "convert: the tensors decide",
        test=lambda m, k, tp: checks.shapes_as_labelled(k), run=True,
    ),
    Rule(
        "vllm.lm-head", "refuses", "lm_head", "the head is built dense, its tensors have no parameter",
        "convert: names the head", test=lambda m, k, tp: checks.lm_head_label(k),
    ),
    Rule(
        "vllm.labelled-dense", "refuses", "quantized modules the config leaves out",
        "built dense, tensors have no parameter", "convert: the tensors decide", test=_labelled_dense,
        run=True,
    ),
    Rule(
        "vllm.map-dropped", "wrong", "g_idx", "every *.g_idx is dropped without a message",
        "convert --to gptq or compressed-tensors where the order folds, --to marlin, or --regroup",
        test=_map_dropped, run=True,
    ),
    Rule(
        "vllm.map-unknown", "refuses", "weight_g_idx", "no such parameter", "as vllm.desc-act",
        test=_map_unknown, run=True,
    ),
    Rule(
        "vllm.zeros-ignored", "wrong", "zero points under sym true", "qzeros are never read",
        "convert --to awq or compressed-tensors", test=zeros_ignored, run=True,
    ),
    Rule(
        "vllm.no-zero-point", "wrong", "zero points under zero_point false",
        "the CPU kernel assumes 8 (CUDA falls back to a slow kernel that reads them)", "convert --to awq",
        test=_no_zero_point, methods=("awq",), run=True,
    ),
    Rule(
        "vllm.slow-zero-point", "slow", "zero_point false", "no Marlin type for 4 bit without zeros",
        "convert --to awq", test=_slow_zero_point, methods=("awq",),
    ),
    Rule(
        "vllm.ambiguous-zeros", "wrong", "stored zeros of 15 under v1",
        "the engine reads other zeros than some writers meant", "convert with --zero-reading", test=ambiguous,
    ),
    Rule(
        "vllm.gptq-group", "refuses", "group_size", "Marlin is the only GPTQ kernel",
        "convert --to gptq splits multiples of 32; 16: --to compressed-tensors in float16", test=_gptq_group,
        methods=("gptq", "auto-round"), run=True,
    ),
    Rule(
        "vllm.awq-group", "slow", "group_size", "falls back to the old AWQ kernel",
        "convert --to awq splits groups", test=_awq_group, methods=("awq", "auto-round"),
    ),
    Rule(
        "vllm.awq-group-odd", "refuses", "group_size", "the old AWQ kernel wants multiples of 32, at the "
        "first call", "--to compressed-tensors in float16", test=_awq_group_odd,
        methods=("awq", "auto-round"),
    ),
    Rule(
        "vllm.no-kernel", "refuses", "bits, zeros, group, shape per rank, dtype",
        "no kernel takes the module", "split groups, float16, or --to awq", test=kernels.no_kernel,
        methods=("compressed-tensors",),
    ),
    Rule(
        "vllm.slow-kernel", "slow", "bits, zeros, group, shape per rank, dtype",
        "only a slower kernel, or one that only some GPUs have", "split groups", test=kernels.slow_kernel,
        methods=("compressed-tensors",),
    ),
    Rule(
        "vllm.k-split", "refuses", "K per rank, group size", "a group straddles two ranks",
        f"split groups, {LOWER}, or convert with --pad-for-tp", test=_k_split,
    ),
    Rule(
        "vllm.n-split", "refuses", "N per rank", "a word holds columns of two ranks", LOWER,
        test=n_split,
    ),
    Rule(
        "vllm.moe-slow", "slow", "expert shapes", "Marlin's expert kernel does not take them", LOWER,
        test=_moe_slow, methods=("gptq", "awq", "auto-round"),
    ),
    Rule(
        "vllm.moe-no-kernel", "refuses", "expert shapes", "no expert kernel takes them",
        f"{LOWER}, or convert with --pad-for-tp", test=_moe_no_kernel, methods=("gptq", "awq", "auto-round"),
    ),
    Rule(
        "vllm.moe-ct", "refuses", "expert shapes", "groups must divide hidden and intermediate size",
        f"{LOWER}, or convert with --pad-for-tp", test=_moe_ct, methods=("compressed-tensors",),
    ),
    Rule(
        "vllm.scale-dtype", "note", "scale dtype, run dtype", "scales are copied into the run dtype",
        "--dtype of the scales", test=lambda m, k, tp: checks.scale_dtype(m, k), run=True,
    ),
    Rule(
        "vllm.pads", "note", "K and N per rank", "Marlin pads odd shapes at load", "none needed", test=_pads,
    ),
)  # fmt: skip

ENGINE = Engine("vllm", VERSION, RULES, plugin.RULES)
