"""transformers 5.24.0 with gptqmodel 7.7.0, optimum 2.3.0 and compressed-tensors 0.20.1.

It does not shard by these rules (one process): only what loads and what it computes is judged, at any TP.
"""

from collections.abc import Iterator

from w4pack.convert.engines import checks, vllm
from w4pack.convert.engines.checks import Hit, key
from w4pack.convert.engines.labels import targets_of
from w4pack.convert.engines.model import Kind, Model
from w4pack.convert.engines.table import Engine, Finding, Rule

VERSION = "5.24.0"

_METHODS = ("gptq", "awq", "compressed-tensors", "auto-round")
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_AWQ_VERSIONS = ("gemm", "gemv", "gemv_fast", "llm-awq")
_AWQ_LAYOUTS = {"gemm": "awq", "gemv": "awq-gemv", "gemv_fast": "awq-gemv-fast"}


def _method(model: Model, tp: int) -> Iterator[Finding]:
    if model.facts.quant_config is None or model.labels.method in (*_METHODS, "w4pack"):
        return
    yield Finding(
        key(model, "quant_method"),
        "gptq, awq, compressed-tensors or auto-round",
        model.labels.method or "none",
    )


def _artifact(model: Model, tp: int) -> Iterator[Finding]:
    if model.labels.method == "w4pack":
        yield Finding(
            key(model, "quant_method"),
            "a method of stock transformers",
            "w4pack: packed weights of another shape",
        )


def _weight_files(model: Model, tp: int) -> Iterator[Finding]:
    files = model.facts.files
    if files and not any(name in files for name in _WEIGHTS):
        names = ", ".join(model.facts.weight_files[:3]) or "none"
        yield Finding("weight files", "model.safetensors, pytorch_model.bin or an index", names)


def _gptq_format(model: Model, tp: int) -> Iterator[Finding]:
    label = checks.value_of(model, "checkpoint_format", "format")
    if label not in (None, "gptq", "gptq_v2", "marlin"):
        yield Finding(key(model, "checkpoint_format"), "gptq or gptq_v2", checks.short(label))


def _awq_version(model: Model, tp: int) -> Iterator[Finding]:
    version = str(checks.value_of(model, "version", "format", "checkpoint_format") or "gemm").lower()
    if version not in _AWQ_VERSIONS:
        yield Finding(key(model, "version"), ", ".join(_AWQ_VERSIONS), version)


def _dynamic_ignored(model: Model, kind: Kind, tp: int) -> Hit:
    """Modules whose scheme only a ``dynamic`` rule states."""
    if model.labels.method != "gptq" or kind.lm_head or not model.quant.get("dynamic"):
        return None
    return checks.shapes_as_labelled(kind)


def _blocks_listed(model: Model) -> tuple[str, ...]:
    listed = model.quant.get("modules_in_block_to_quantize")
    flat: list[str] = []
    for item in listed if isinstance(listed, (list, tuple)) else ():
        flat += [x for x in (item if isinstance(item, (list, tuple)) else [item]) if isinstance(x, str)]
    return tuple(flat)


def _gptq_dense(model: Model, tp: int) -> Iterator[Finding]:
    """Dense linears inside the decoder blocks, which GPTQ layers replace unless a whole kind is left out."""
    listed = _blocks_listed(model)
    odd = [
        name
        for name in model.dense_linears
        if ".layers." in f".{name}" and (not listed or any(name.endswith(part) for part in listed))
    ]
    if odd and model.facts.layers:
        yield Finding(
            odd[0], "every linear of a block quantized", "a 16-bit weight; `dynamic` is ignored", len(odd)
        )


def _gptq_unlisted(model: Model, kind: Kind, tp: int) -> Hit:
    listed = _blocks_listed(model)
    if not listed or kind.lm_head or any(kind.layer.name.endswith(part) for part in listed):
        return None
    return "listed in modules_in_block_to_quantize", "not listed: stays dense and random"


def _random_experts(model: Model, kind: Kind, tp: int) -> Hit:
    if not kind.expert:
        return None
    return (
        "experts as compressed-tensors",
        f"{model.labels.method} experts: fused in memory, not replaced, random",
    )


def _random_head(model: Model, kind: Kind, tp: int) -> Hit:
    if not kind.lm_head:
        return None
    return "a 16-bit lm_head", "quantized: only layers inside the blocks are replaced, the head is random"


def _head_unnamed(model: Model, kind: Kind, tp: int) -> Hit:
    return checks.lm_head_label(kind)


def _layout(model: Model, kind: Kind, tp: int) -> Hit:
    method = model.labels.method
    if method == "awq":
        version = str(checks.value_of(model, "version", "format", "checkpoint_format") or "gemm").lower()
        layout = _AWQ_LAYOUTS.get(version)
        return checks.layout_is(kind, layout) if layout else None
    expected = vllm.layout_for(model)
    return checks.layout_is(kind, *expected) if expected and method != "w4pack" else None


def _ct_asym(model: Model, kind: Kind, tp: int) -> Hit:
    sym = kind.layer.sym if kind.label.sym is None else kind.label.sym
    if sym or kind.layer.layout != "compressed-tensors":
        return None
    return (
        "symmetric, or load with CompressedTensorsConfig(dequantize=True)",
        "weight_zero_point of another size",
    )


def _v1_zeros(model: Model, kind: Kind, tp: int) -> Hit:
    if kind.layer.layout != "gptq" or kind.layer.sym or kind.label.sym is not True:
        return None
    return "sym false over real zero points", "sym true: symmetric kernels ignore the zero points"


def _channel_asym(model: Model, kind: Kind, tp: int) -> Hit:
    if kind.layer.sym or kind.layer.layout != "gptq" or kind.group > 0:
        return None
    return "groups, or symmetric, or backend torch", "zero points of one group per channel"


def _rotation(model: Model, tp: int) -> Iterator[Finding]:
    return checks.present(model, "rotation", "rotation_config", "spinquant_config")


def _auto_round(model: Model, tp: int) -> Iterator[Finding]:
    if model.labels.method == "auto-round":
        found = "auto-round: read by the package auto-round (0.5 or newer), not judged here"
        yield Finding(key(model, "quant_method"), "gptq, awq or compressed-tensors", found)


def _awq_dense(model: Model, tp: int) -> Iterator[Finding]:
    odd = [n for n in model.dense_linears if n != "lm_head" and model.labels.of(n).quantized]
    if odd and model.facts.layers:
        yield Finding(odd[0], "quantized tensors, as the config says", "a 16-bit weight", len(odd))


def _dense_head(model: Model, tp: int) -> Iterator[Finding]:
    """A dense head under the class target ``Linear``: transformers' head is a Linear."""
    if "lm_head" in model.dense_linears and _head_targeted(model):
        yield Finding("lm_head", "quantized tensors, as the target `Linear` says", "a 16-bit weight")


def _tied_head(model: Model, tp: int) -> Iterator[Finding]:
    """The same where the head is tied to the embedding and has no tensor at all."""
    stored = "lm_head" in model.dense_linears or any(k.lm_head for k in model.kinds)
    if model.facts.layers and not stored and _head_targeted(model):
        yield Finding("lm_head", "lm_head in `ignore`", "the target `Linear`, which takes a tied head too")


def _head_targeted(model: Model) -> bool:
    ignored = model.quant.get("ignore") or ()
    return "Linear" in _targets(model) and not any("lm_head" in str(x) for x in ignored)


def _targets(model: Model) -> frozenset[str]:
    groups = model.quant.get("config_groups")
    rows = [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    return frozenset().union(*(targets_of(g.get("targets"))[0] for g in rows))


def _group(model: Model, kind: Kind, tp: int) -> Hit:
    size = kind.group
    if model.labels.method not in ("gptq", "awq") or size == -1 or size in (16, 32, 64, 128):
        return None
    if model.labels.method == "gptq" and 16 <= size <= 1024 and size & (size - 1) == 0:
        return None
    top = "1024" if model.labels.method == "gptq" else "128"
    return f"group size -1 or a power of two from 16 to {top}", str(size)


def _n_pack(model: Model, kind: Kind, tp: int) -> Hit:
    unit = checks.pack_factor(kind)
    n = kind.layer.out_features
    return (
        (f"N a multiple of {unit}", f"N = {n}") if kind.layer.layout in ("gptq", "awq") and n % unit else None
    )


RULES = (
    Rule(
        "transformers.no-config", "wrong", "config.json", "loads as a plain model with random linears; only "
        "a report is printed", "convert: every target writes the settings", whole=checks.no_settings,
        run=True,
    ),
    Rule(
        "transformers.settings-file", "wrong", "config.json", "other settings files are not read: random "
        "linears", "convert --to gptq writes both files", whole=checks.settings_file, run=True,
    ),
    Rule(
        "transformers.method", "wrong", "quant_method", "an unknown method is skipped with a warning: random "
        "linears", "convert --to gptq, awq or compressed-tensors", whole=_method, run=True,
    ),
    Rule(
        "transformers.artifact", "refuses", "quant_method", "the artifact needs w4pack's runtime",
        "w4pack.register() before from_pretrained; or convert --to gptq, awq or compressed-tensors",
        whole=_artifact,
    ),
    Rule(
        "transformers.stray-file", "wrong", "files", "model.safetensors is taken instead of the index",
        "remove the file", whole=checks.stray_file, run=True,
    ),
    Rule(
        "transformers.weight-files", "refuses", "file names", "no file of a known name",
        "convert: writes usual names", whole=_weight_files, run=True,
    ),
    Rule(
        "transformers.gptq-format", "refuses", "checkpoint_format", "unknown format", "convert --to gptq",
        whole=_gptq_format, methods=("gptq",), run=True,
    ),
    Rule(
        "transformers.awq-version", "refuses", "version", "invalid format", "convert --to awq",
        whole=_awq_version, methods=("awq",), run=True,
    ),
    Rule(
        "transformers.auto-round", "note", "quant_method", "loaded by another package",
        "convert --to gptq, awq or compressed-tensors", whole=_auto_round,
    ),
    Rule(
        "transformers.rotation", "wrong", "rotation, rotation_config, spinquant_config", "the key is ignored",
        "none in a stock engine", whole=_rotation, methods=("gptq", "awq"), run=True,
    ),
    Rule(
        "transformers.sparsity", "wrong", "sparsity_config", "the key is ignored: sparse tensors have other "
        "names", "no target keeps the sparsity", whole=vllm.sparsity, methods=("compressed-tensors",),
        run=True,
    ),
    Rule(
        "transformers.actorder", "refuses", "actorder", "compressed-tensors 0.20 has no activation ordering",
        "as vllm.desc-act", test=vllm.actorder, methods=("compressed-tensors",), run=True,
    ),
    Rule(
        "transformers.gptq-dense", "refuses", "dense linears in a block",
        "they are replaced all the same; the kernel fails at the first call",
        "convert --to awq or compressed-tensors", whole=_gptq_dense, methods=("gptq",), run=True,
    ),
    Rule(
        "transformers.awq-dense", "wrong", "dense linears", "replaced by a quantized layer without tensors",
        "convert: lists what stays dense", whole=_awq_dense, methods=("awq", "compressed-tensors"), run=True,
    ),
    Rule(
        "transformers.dense-head", "wrong", "lm_head, targets", "the head counts as Linear",
        "convert: lists lm_head", whole=_dense_head, methods=("compressed-tensors",),
    ),
    Rule(
        "transformers.tied-head", "refuses", "lm_head, targets", "a tied head counts as Linear and loses its "
        "weight", "convert: lists lm_head", whole=_tied_head, methods=("compressed-tensors",), run=True,
    ),
    Rule(
        "transformers.channel-asym", "wrong", "zero points of one group per channel",
        "gptqmodel's fused kernel, first on a CPU, misreads them (its torch kernel does not)",
        "convert --to awq", test=_channel_asym, methods=("gptq",), run=True,
    ),
    Rule(
        "transformers.dynamic", "refuses", "dynamic", "`dynamic` is ignored: one scheme for the whole model",
        "convert --to compressed-tensors", test=_dynamic_ignored, methods=("gptq",), run=True,
    ),
    Rule(
        "transformers.unlisted", "wrong", "modules_in_block_to_quantize", "the module stays a random Linear",
        "convert --to gptq", test=_gptq_unlisted, methods=("gptq",), run=True,
    ),
    Rule(
        "transformers.random-experts", "wrong", "experts in gptq or awq form",
        "experts are Parameters, not replaced: random, no error", "convert --to compressed-tensors "
        "(symmetric)", test=_random_experts, methods=("gptq", "awq"), run=True,
    ),
    Rule(
        "transformers.expert-names", "wrong", "names of experts", "the class maps other names: random "
        "experts, no error", "convert: writes the names the class maps", whole=checks.expert_names,
        methods=("compressed-tensors",), run=True,
    ),
    Rule(
        "transformers.random-head", "wrong", "a quantized lm_head", "only layers inside the blocks are "
        "replaced: random head", "convert --to compressed-tensors", test=_random_head,
        methods=("gptq", "awq"), run=True,
    ),
    Rule(
        "transformers.head-unnamed", "wrong", "a quantized lm_head", "no target names it: random head",
        "convert --to compressed-tensors", test=_head_unnamed, methods=("compressed-tensors",),
    ),
    Rule(
        "transformers.layout", "refuses", "tensor layout", "parameters of another name or shape",
        "convert --to gptq or awq", test=_layout, run=True,
    ),
    Rule(
        "transformers.shape", "refuses", "bits, group_size against the tensors",
        "parameters get other shapes", "convert: the tensors decide",
        test=lambda m, k, tp: None if m.quant.get("dynamic") else checks.shapes_as_labelled(k), run=True,
    ),
    Rule(
        "transformers.labelled-dense", "wrong", "quantized modules the config leaves out",
        "stays a random Linear", "convert: the tensors decide",
        test=lambda m, k, tp: checks.labelled_dense(k), methods=("awq", "compressed-tensors"), run=True,
    ),
    Rule(
        "transformers.zeros-ignored", "wrong", "zero points under sym true",
        "the symmetric Marlin kernel, first on a GPU, ignores them (kernels on a CPU read them)",
        "convert --to gptq (v2), awq", test=_v1_zeros,
    ),
    Rule(
        "transformers.ambiguous-zeros", "wrong", "stored zeros of 15 under v1",
        "Optimum adds on whole words, other readers per field", "convert with --zero-reading",
        test=vllm.ambiguous,
    ),
    Rule(
        "transformers.ct-asym", "refuses", "zero points in compressed-tensors",
        "size mismatch of weight_zero_point since 5.23 with compressed-tensors 0.20",
        "convert --to awq or gptq, or load with dequantize=True", test=_ct_asym,
        methods=("compressed-tensors",), run=True,
    ),
    Rule(
        "transformers.group", "refuses", "group_size", "no kernel takes it",
        "convert: splits multiples of 32", test=_group,
    ),
    Rule(
        "transformers.n-pack", "refuses", "N", "columns do not fill a word", "--to compressed-tensors",
        test=_n_pack,
    ),
    Rule(
        "transformers.scale-dtype", "note", "scale dtype, run dtype", "scales are created in the run dtype",
        "dtype of the scales", test=lambda m, k, tp: checks.scale_dtype(m, k), methods=("gptq", "awq"),
    ),
)  # fmt: skip

ENGINE = Engine("transformers", VERSION, RULES)
