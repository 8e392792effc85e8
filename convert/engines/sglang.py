"""SGLang 0.5.23: read from its code (it needs a GPU to run)."""

from collections.abc import Iterator

from w4pack.convert.engines import checks, kernels, vllm
from w4pack.convert.engines.checks import Hit, key
from w4pack.convert.engines.model import Kind, Model
from w4pack.convert.engines.table import Engine, Finding, Rule

VERSION = "0.5.23"


def _gptq_override(model: Model, tp: int) -> Iterator[Finding]:
    yield from checks.missing_keys(model, ("bits",), ("group_size",), ("sym",), ("desc_act",))
    yield from vllm.gptq_type(model, tp)
    group = model.quant.get("group_size")
    if group is not None and group not in checks.MARLIN_GROUPS:
        yield Finding(key(model, "group_size"), "-1, 32, 64 or 128", checks.short(group))


def _marlin_label(model: Model, tp: int) -> Iterator[Finding]:
    if model.quant.get("is_marlin_format") or model.quant.get("checkpoint_format") == "marlin":
        yield Finding(key(model, "checkpoint_format"), "gptq or gptq_v2", "marlin")


def _rotation(model: Model, tp: int) -> Iterator[Finding]:
    yield from checks.present(model, "rotation", "rotation_config", "spinquant_config")
    yield from checks.run_time_transforms(model)


def _map_dropped(model: Model, kind: Kind, tp: int) -> Hit:
    if kind.layer.layout != "gptq" or not checks.real_order(kind) or kind.label.desc_act:
        return None
    return "a sorted g_idx, as `desc_act: false` says", "a real g_idx, replaced by an empty tensor"


def _gptq_shape(model: Model, kind: Kind, tp: int) -> Hit:
    """Marlin's shape without padding, for dense linears."""
    if kind.expert or kind.lm_head or kind.layer.layout == "awq":
        return None
    k, n = model.per_rank(kind, tp)
    if n % 64 == 0 and k % 128 == 0:
        return None
    return (
        "K per rank a multiple of 128, N of 64",
        f"K % 128 = {checks.count(k % 128)}, N % 64 = {checks.count(n % 64)}",
    )


def _awq_slow(model: Model, kind: Kind, tp: int) -> Hit:
    if kind.expert or kind.layer.layout != "awq":
        return None
    k, n = model.per_rank(kind, tp)
    group = checks.group_listed(kind)
    if group is None and n % 64 == 0 and k % 128 == 0:
        return None
    found = group[1] if group else f"K % 128 = {checks.count(k % 128)}, N % 64 = {checks.count(n % 64)}"
    return "a shape for Marlin", f"{found}: the old AWQ kernel runs, in float16"


def _awq_zero_point(model: Model, kind: Kind, tp: int) -> Hit:
    if model.quant.get("zero_point") is not False:
        return None
    return "zero_point true", "zero_point false: Marlin has no such type"


def _k_split(model: Model, kind: Kind, tp: int) -> Hit:
    if kind.layer.act_order == "groups" and kind.label.desc_act and not kind.expert:
        return None  # scales lie whole on every rank, rows may come from any group
    return checks.k_split(model, kind, tp)


def _ct_asym(model: Model, kind: Kind, tp: int) -> Hit:
    if kind.layer.sym or kind.layer.bits == 4 or kind.layer.layout != "compressed-tensors":
        return None
    return "4 bit, where there are zero points", f"{kind.layer.bits} bit"


def _ct_group(model: Model, kind: Kind, tp: int) -> Hit:
    return checks.group_listed(kind) if kind.layer.layout == "compressed-tensors" else None


def _moe(model: Model, kind: Kind, tp: int) -> str | None:
    hidden, inner = kernels.expert_shape(model, kind, tp)
    if hidden % 128:
        return f"hidden % 128 = {hidden % 128}"
    unit = max(64, kind.group)
    return f"I/{tp} % {unit} = {inner % unit}" if inner % unit else None


def _moe_slow(model: Model, kind: Kind, tp: int) -> Hit:
    if not kind.expert or kind.label.desc_act:
        return None
    reason = _moe(model, kind, tp)
    return ("an expert shape for Marlin", f"{reason}: the Triton kernel runs") if reason else None


def _moe_act_order(model: Model, kind: Kind, tp: int) -> Hit:
    if not kind.expert or not kind.label.desc_act:
        return None
    reason = _moe(model, kind, tp)
    return ("an expert shape for Marlin: the other kernel has no act-order", reason) if reason else None


LOWER = "sglang.launch_server with a lower --tp-size"

RULES = (
    Rule(
        "sglang.no-config", "wrong", "config files", "loaders only log names without a parameter: weights "
        "stay uninitialised", "convert: every target writes the settings", whole=checks.no_settings,
    ),
    Rule(
        "sglang.method", "refuses", "quant_method", "unknown quantization method",
        "convert --to gptq, awq or compressed-tensors", whole=vllm.method,
    ),
    Rule(
        "sglang.gptq-type", "refuses", "bits, sym, group_size, desc_act",
        "gptq_marlin does not take it, plain gptq is not registered on CUDA",
        "convert --to awq or compressed-tensors; --to gptq splits groups", whole=_gptq_override,
        methods=("gptq",),
    ),
    Rule(
        "sglang.marlin-label", "refuses", "checkpoint_format, is_marlin_format",
        "no marlin method, and the label blocks gptq_marlin", "convert --to gptq", whole=_marlin_label,
        methods=("gptq",),
    ),
    Rule(
        "sglang.awq-keys", "refuses", "bits, group_size, zero_point", "a missing key is an error",
        "convert --to awq", whole=vllm.awq_keys, methods=("awq",),
    ),
    Rule(
        "sglang.awq-bits", "refuses", "bits", "Marlin has no 8 bit with zeros",
        "convert --to compressed-tensors (symmetric)", whole=vllm.awq_bits, methods=("awq",),
    ),
    Rule(
        "sglang.packing", "refuses", "packing_format", "no reader for that packing",
        "convert --to gptq, awq or compressed-tensors", whole=vllm.packing, methods=("auto-round",),
    ),
    Rule(
        "sglang.rotation", "wrong", "rotation, rotation_config, spinquant_config, transform_config",
        "the key is ignored; online transforms are missing", "none in a stock engine", whole=_rotation,
    ),
    Rule(
        "sglang.sparsity", "refuses", "sparsity_config", "sparse formats are not read",
        "no target keeps the sparsity", whole=vllm.sparsity, methods=("compressed-tensors",),
    ),
    Rule(
        "sglang.actorder", "refuses", "actorder", "compressed-tensors 0.20 refuses the key at parse time",
        "as vllm.desc-act", test=vllm.actorder, methods=("compressed-tensors",),
    ),
    Rule(
        "sglang.heads", "refuses", "attention heads", "heads cannot be split unevenly", LOWER,
        whole=checks.heads,
    ),
    Rule(
        "sglang.partial-fused", "refuses", "parts of qkv_proj, gate_up_proj",
        "parts of a fused module must be alike", "none that is lossless", whole=checks.partial_fused,
    ),
    Rule(
        "sglang.uneven-fused", "refuses", "schemes of the parts of a fused module",
        "one scheme is used for all parts", "split groups where that makes the parts alike",
        whole=checks.uneven_fused,
    ),
    Rule(
        "sglang.expert-names", "wrong", "names of experts", "names without a parameter are only logged: "
        "experts stay uninitialised", "convert: writes the names the class maps", whole=checks.expert_names,
    ),
    Rule(
        "sglang.dense-labelled", "wrong", "dense linears", "nothing is found by dtype: the module is built "
        "quantized and stays uninitialised", "convert: every target lists what stays dense",
        whole=vllm.dense_labelled,
    ),
    Rule(
        "sglang.layout", "wrong", "tensor layout", "names without a parameter are only logged, other shapes "
        "raise", "convert --to awq or gptq", test=vllm.layout,
    ),
    Rule(
        "sglang.shape", "refuses", "bits, group_size against the tensors",
        "parameters get other shapes than the tensors", "convert: the tensors decide",
        test=lambda m, k, tp: checks.shapes_as_labelled(k),
    ),
    Rule(
        "sglang.lm-head", "wrong", "lm_head", "the head is built dense and stays uninitialised",
        "convert: names the head", test=lambda m, k, tp: checks.lm_head_label(k),
    ),
    Rule(
        "sglang.labelled-dense", "wrong", "quantized modules the config leaves out",
        "built dense, stays uninitialised", "convert: the tensors decide",
        test=lambda m, k, tp: checks.labelled_dense(k),
    ),
    Rule(
        "sglang.map-dropped", "wrong", "g_idx under desc_act false", "g_idx is replaced by an empty tensor",
        "convert --to gptq or compressed-tensors where the order folds, --to marlin, or --regroup",
        test=_map_dropped,
    ),
    Rule(
        "sglang.zeros-ignored", "wrong", "zero points under sym true", "qzeros are never read",
        "convert --to awq or compressed-tensors", test=vllm.zeros_ignored,
    ),
    Rule(
        "sglang.ambiguous-zeros", "wrong", "stored zeros of 15 under v1",
        "the engine reads other zeros than some writers meant", "convert with --zero-reading",
        test=vllm.ambiguous,
    ),
    Rule(
        "sglang.awq-zero-point", "slow", "zero_point false", "no Marlin type for 4 bit without zeros",
        "convert --to awq", test=_awq_zero_point, methods=("awq",),
    ),
    Rule(
        "sglang.shape-tile", "refuses", "K and N per rank", "dense linears are not padded: the repack kernel "
        "fails", f"--to awq (falls back to another kernel), convert with --pad-for-tp for the MLP, {LOWER}",
        test=_gptq_shape, methods=("gptq", "compressed-tensors", "auto-round"),
    ),
    Rule(
        "sglang.awq-slow", "slow", "K, N per rank, group", "falls back to the old AWQ kernel",
        f"split groups, {LOWER}", test=_awq_slow, methods=("awq", "auto-round"),
    ),
    Rule(
        "sglang.ct-asym", "refuses", "bits, zero points", "Marlin has zero points for 4 bit only",
        "--widen is for 4 bit; lower precision cannot be exact", test=_ct_asym,
        methods=("compressed-tensors",),
    ),
    Rule(
        "sglang.ct-group", "refuses", "group_size", "Marlin is the only kernel",
        "convert: splits multiples of 32", test=_ct_group, methods=("compressed-tensors",),
    ),
    Rule(
        "sglang.k-split", "refuses", "K per rank, group size", "a group straddles two ranks",
        f"split groups, {LOWER}, or convert with --pad-for-tp", test=_k_split,
    ),
    Rule(
        "sglang.n-split", "refuses", "N per rank", "a word holds columns of two ranks", LOWER,
        test=vllm.n_split,
    ),
    Rule(
        "sglang.moe-slow", "slow", "expert shapes", "Marlin's expert kernel does not take them", LOWER,
        test=_moe_slow,
    ),
    Rule(
        "sglang.moe-act-order", "refuses", "expert shapes under desc_act",
        "the other expert kernel has no act-order", "convert --to gptq where the order folds",
        test=_moe_act_order,
    ),
    Rule(
        "sglang.scale-dtype", "note", "scale dtype, run dtype", "scales are copied into the run dtype",
        "--dtype of the scales", test=lambda m, k, tp: checks.scale_dtype(m, k),
    ),
)  # fmt: skip

ENGINE = Engine("sglang", VERSION, RULES)
