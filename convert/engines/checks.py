"""Tests that rows of several engines share. Each returns ``(expected, found)``, findings, or nothing."""

from collections import defaultdict
from collections.abc import Iterator
from math import lcm

from w4pack.convert.core.families import expert_index, natural_key, rename_experts, split_name
from w4pack.convert.engines.labels import first
from w4pack.convert.engines.model import Kind, Model, pattern_of
from w4pack.convert.engines.table import Finding

Hit = tuple[str, str] | None

MARLIN_GROUPS = (-1, 32, 64, 128)
PAD_TP = 8  # padding is offered for the largest tensor-parallel size that `check` is asked for


def key(model: Model, *names: str) -> str:
    """Name a key of the quantization settings as messages do: ``config.json: quantization_config.sym``."""
    file = model.facts.quant_file or "config.json"
    inside = "quantization_config." if file == "config.json" else ""
    return f"{file}: " + ", ".join(inside + n for n in names)


def count(size: float) -> str:
    """Format a size that may be fractional."""
    return f"{size:g}" if size == int(size) else f"{size:.2f}"


# --- whole model


def no_settings(model: Model, tp: int) -> Iterator[Finding]:
    """Quantized tensors without any quantization settings."""
    if model.facts.layers and model.facts.quant_config is None:
        yield Finding(
            "config.json", "quantization_config", f"none, with {len(model.facts.layers)} quantized modules"
        )


def settings_file(model: Model, tp: int) -> Iterator[Finding]:
    """Settings that lie only in a file the engine does not read by itself."""
    file = model.facts.quant_file
    if model.facts.quant_config is not None and file not in (None, "config.json"):
        yield Finding("config.json", "quantization_config", f"only {file}")


def missing_keys(model: Model, *alternatives: tuple[str, ...]) -> Iterator[Finding]:
    """Keys of which none of the accepted spellings is present."""
    for names in alternatives:
        if not any(name in model.quant for name in names):
            yield Finding(key(model, names[-1]), " or ".join(f"`{n}`" for n in names), "no such key")


def present(model: Model, *names: str) -> Iterator[Finding]:
    """Keys with a non-empty value that change the forward pass."""
    for name in names:
        value = model.quant.get(name)
        if value:
            yield Finding(key(model, name), "no such key: it changes the forward pass", short(value))


def short(value: object, limit: int = 60) -> str:
    """Return ``value`` as text of at most ``limit`` characters."""
    text = str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def run_time_transforms(model: Model) -> Iterator[Finding]:
    """Transforms of a compressed-tensors file that act at run time (those on weights are folded already)."""
    transforms = model.quant.get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    places = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        for step in (group.get("apply") or ()) if isinstance(group, dict) else ():
            place = step.get("location") if isinstance(step, dict) else None
            if isinstance(place, str) and not place.startswith("weight_"):
                places.add(place)
    if places:
        yield Finding(key(model, "transform_config"), "transforms of weights only", ", ".join(sorted(places)))


def heads(model: Model, tp: int) -> Iterator[Finding]:
    """Attention heads that do not come out even."""
    total = model.number("num_attention_heads", "n_head")
    if total and total % tp:
        yield Finding("config.json: num_attention_heads", f"a multiple of {tp}", str(total))
    kv = model.number("num_key_value_heads")
    if kv and max(kv, tp) % min(kv, tp):
        yield Finding("config.json: num_key_value_heads", f"a divisor or multiple of {tp}", str(kv))


def partial_fused(model: Model, tp: int) -> Iterator[Finding]:
    """Fused modules of which only some parts are quantized."""
    for item in model.uneven:
        if item.partial:
            yield Finding(item.where, "all parts quantized, or none", item.parts, item.count)


def uneven_fused(model: Model, tp: int) -> Iterator[Finding]:
    """Fused modules whose parts have different schemes."""
    for item in model.uneven:
        if not item.partial:
            yield Finding(item.where, "one scheme for all parts", item.parts, item.count)


def expert_names(model: Model, tp: int) -> Iterator[Finding]:
    """Experts under names that the model class does not map."""
    classes = model.architectures
    odd = [k for k in model.kinds if k.expert and rename_experts(classes, k.layer.name) != k.layer.name]
    if odd:
        total = sum(len(k.names) for k in odd)
        mapped = pattern_of(rename_experts(classes, odd[0].layer.name))
        yield Finding(pattern_of(odd[0].layer.name), mapped, f"{total} modules under other names", total)


def mixed_experts(model: Model, tp: int) -> Iterator[Finding]:
    """Layers of whose experts not all have one scheme."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for layer in model.facts.layers:
        if expert_index(layer.name) is not None:
            parent, leaf = split_name(layer.name)
            scheme = f"{layer.bits} bit g{layer.group_size} {'sym' if layer.sym else 'asym'}"
            scheme += f"{' act-order' * (layer.act_order == 'groups')} {layer.scale_dtype}"
            kinds[f"{split_name(parent.rstrip('.'))[0]}*.{leaf}"].add(scheme)
    mixed = sorted((name for name, found in kinds.items() if len(found) > 1), key=natural_key)
    if mixed:
        found = " and ".join(sorted(kinds[mixed[0]]))
        yield Finding(mixed[0], "one scheme in all experts of a layer", found, len(mixed))


def partial_experts(model: Model, tp: int) -> Iterator[Finding]:
    """Layers of whose experts some are left in 16 bit."""
    for item in model.uneven:
        if item.partial and item.expert:
            yield Finding(item.where, "all experts packed, or none", item.parts, item.count)


def stray_file(model: Model, tp: int) -> Iterator[Finding]:
    """A ``model.safetensors`` beside an index that does not name it."""
    files = model.facts.files
    beside = "model.safetensors" in files and "model.safetensors.index.json" in files
    if beside and "model.safetensors" not in model.facts.weight_files:
        yield Finding("model.safetensors", "only the files that the index names", "a file outside the index")


# --- one kind of modules


def layout_is(kind: Kind, *layouts: str) -> Hit:
    """Tensors that are not of the layout the engine makes parameters for."""
    if kind.layer.layout in layouts:
        return None
    return f"{' or '.join(layouts)} tensors", f"{kind.layer.layout} tensors"


def shapes_as_labelled(kind: Kind) -> Hit:
    """Bits or group size in the config that differ from the tensors: the parameters get other shapes."""
    layer, label = kind.layer, kind.label
    if label.bits is not None and label.bits != layer.bits:
        return f"tensors of {label.bits} bit, as the config says", f"{layer.bits} bit"
    group = label.group_size
    if group is None or not label.quantized:
        return None
    if _groups(group, layer.in_features) != _groups(layer.group_size, layer.in_features):
        return f"group size {group}, as the config says", f"group size {layer.group_size}"
    return None


def _groups(size: int, rows: int) -> int:
    return 1 if size <= 0 else -(-rows // size)


def labelled_dense(kind: Kind) -> Hit:
    """Quantized tensors of a module that the config leaves in 16 bit."""
    if kind.label.quantized or kind.lm_head:
        return None
    return "16-bit weight, as the config says", f"{kind.layer.layout} tensors"


def lm_head_label(kind: Kind) -> Hit:
    """A quantized output head that the config does not name."""
    if kind.lm_head and not kind.label.quantized:
        return "lm_head named in the config (`lm_head: true`, a target, or extra_config)", "not named"
    return None


def group_listed(kind: Kind) -> Hit:
    """Group sizes without a Marlin kernel."""
    if kind.group in MARLIN_GROUPS:
        return None
    return "group size -1, 32, 64 or 128", str(kind.group)


def real_order(kind: Kind) -> bool:
    """Whether dropping g_idx changes the weights."""
    return kind.layer.act_order in ("block", "groups")


def k_split(model: Model, kind: Kind, tp: int) -> Hit:
    """Row-parallel modules whose K per rank is no multiple of the group size."""
    k, group = kind.layer.in_features, kind.group
    if kind.role != "row" or tp == 1:
        return None
    if k % tp:
        return f"K divisible by {tp}", f"K = {k}"
    if group <= 0 or (k // tp) % group == 0:
        return None
    return (
        f"K per rank a multiple of the group size {group}{padding_hint(kind, group)}",
        f"K/{tp} = {k // tp}: {k // tp // group} groups of {group} and {k // tp % group} rows more",
    )


def k_whole(kind: Kind, tp: int, unit: int) -> Hit:
    """Row-parallel modules whose K per rank is no multiple of ``unit``."""
    k = kind.layer.in_features
    if kind.role != "row" or tp == 1 or (k % tp == 0 and (k // tp) % unit == 0):
        return None
    return f"K per rank a multiple of {unit}{padding_hint(kind, lcm(unit, 128))}", f"K/{tp} = {count(k / tp)}"


def k_order(kind: Kind, tp: int) -> Hit:
    """Row-parallel modules that keep an order of rows."""
    if kind.role != "row" or tp == 1 or kind.layer.act_order != "groups":
        return None
    return "no act_perm in a module that is cut along K", "act_perm: its rows lie on all ranks"


def padding_hint(kind: Kind, unit: int) -> str:
    """Say which padded size would allow the largest tensor-parallel size."""
    if kind.layer.name.rpartition(".")[2] not in ("down_proj", "w2"):
        return ""
    units = -(-kind.layer.in_features // (PAD_TP * unit))
    padded = units * PAD_TP * unit
    if padded == kind.layer.in_features:
        return ""
    return f" (K padded to {padded} = {PAD_TP} * {units} * {unit} would allow TP {PAD_TP})"


def n_split(model: Model, kind: Kind, tp: int, unit: int) -> Hit:
    """Column-parallel modules whose N per rank is no multiple of ``unit``. Engines pad vocabularies."""
    n, ways = kind.layer.out_features, model.ways(kind, tp)
    if kind.role != "column" or kind.lm_head:
        return None
    if n % ways or (n // ways) % unit:
        return f"N per rank a multiple of {unit}", f"N/{ways} = {count(n / ways)}"
    return None


def pack_factor(kind: Kind) -> int:
    """Codes in one 32-bit word."""
    return 32 // kind.layer.bits


def scale_dtype(model: Model, kind: Kind) -> Hit:
    """Scales that the run dtype rounds."""
    run, stored = model.dtype, kind.layer.scale_dtype
    if run is None or run == stored or stored not in ("F16", "BF16", "F32"):
        return None
    return (
        f"scales of the run dtype ({run})",
        f"{stored} scales, rounded at load: run in {stored} to keep the numbers",
    )


def value_of(model: Model, *names: str) -> object:
    """Return the first of the named settings."""
    return first(model.quant, *names)
