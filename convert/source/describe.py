"""What `inspect` prints: format, scheme of every layer, sizes, ties, maximal tensor parallelism, oddities."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from w4pack.convert.core.facts import LayerFacts, ModelFacts, bits_per_weight
from w4pack.convert.dialects.online import Online
from w4pack.convert.engines.cuts import Cut, cut
from w4pack.convert.errors import name_some
from w4pack.convert.events import size_text, warning_fields
from w4pack.convert.formats import FORMATS
from w4pack.convert.source import online_shown

SCHEMA = 1


def describe(facts: ModelFacts, path: str, records: Online) -> dict[str, Any]:
    """Return the object of ``inspect --json``. ``records``: what an artifact's runtime does, if anything."""
    ranks = cut(facts)
    layers = [_layer(layer, ranks) for layer in facts.layers]
    weights = sum(layer.in_features * layer.out_features for layer in facts.layers)
    return {
        "schema": SCHEMA,
        "path": path,
        "format": overall_format(facts),
        "evidence": facts.evidence,
        "bytes_read": facts.bytes_read,
        "bytes": facts.total_bytes,
        "parameters": weights + sum(_count(t.shape) for t in facts.dense),
        "bits_per_weight": bits_per_weight(sum(f.nbytes for f in facts.layers), weights) if layers else None,
        "max_tp": ranks.most if layers else None,
        "tp_limits": [{"where": f.where, "expected": f.expected, "found": f.found} for f in ranks.limits],
        "layers": layers,
        "other": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in facts.dense],
        "tied": tied(facts),
        "online": online_shown.to_json(records) if records else None,
        "warnings": [dict(warning_fields(w)) for w in (*facts.warnings, *facts.unfit)],
    }


def _layer(layer: LayerFacts, ranks: Cut) -> dict[str, Any]:
    return {
        "name": layer.name,
        "format": layer.layout,
        "bits": layer.bits,
        "group_size": layer.group_size,
        "sym": layer.sym,
        "act_order": layer.act_order,
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "stored_in": layer.stored_in,
        "stored_out": layer.stored_out,
        "scale_dtype": layer.scale_dtype,
        "bias": layer.bias,
        "max_tp": ranks.modules[layer.name],
    }


def overall_format(facts: ModelFacts) -> str:
    """Return the layout most layers have, or ``dense``."""
    if not facts.layers:
        return "dense"
    return Counter(layer.layout for layer in facts.layers).most_common(1)[0][0]


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def tied(facts: ModelFacts) -> list[str]:
    """Return the names that the config ties to one another and that are stored."""
    if facts.config.get("tie_word_embeddings") is not True:
        return []
    return [t.name for t in facts.dense if t.name.endswith(("embed_tokens.weight", "lm_head.weight"))]


def text(value: Mapping[str, Any]) -> str:
    """Return the human form of ``describe``'s object."""
    layers = value["layers"]
    kinds = Counter(_kind(layer) for layer in layers)
    leaves = {kind: _leaves(layer for layer in layers if _kind(layer) == kind) for kind in kinds}
    lines = [
        f"path      {value['path']}",
        f"format    {FORMATS.get(value['format'], ('', 'plain tensors'))[1]}",
    ]
    lines.append(
        f"size      {size_text(value['bytes'])}, {_parameters(value['parameters'])}"
        + (f", {value['bits_per_weight']} bits per quantized weight" if layers else "")
    )
    for index, (kind, count) in enumerate(kinds.most_common()):
        lines.append(f"{'layers' if index == 0 else '':<10}{count} x {kind}: {leaves[kind]}")
    orders = Counter(layer["act_order"] for layer in layers)
    if layers:
        lines.append("order     " + ", ".join(f"{name} in {count}" for name, count in sorted(orders.items())))
        lines.append(f"max TP    {_tp_line(value)}")
        padded = [
            layer["name"]
            for layer in layers
            if (layer["stored_in"], layer["stored_out"]) != (layer["in_features"], layer["out_features"])
        ]
        lines.append(f"padded    {len(padded)} layers" if padded else "padded    none")
    dtypes = Counter(item["dtype"] for item in value["other"])
    lines.append(
        "other     "
        + (", ".join(f"{count} tensors {dtype}" for dtype, count in dtypes.most_common()) or "none")
    )
    running = online_shown.lines(value["online"]) if value["online"] else []
    lines += [f"{'' if i else 'online':<10}{line}" for i, line in enumerate(running)]
    if value["tied"]:
        lines.append(f"tied      {', '.join(value['tied'])}")
    lines.append(f"evidence  {value['evidence']}: {size_text(value['bytes_read'])} read")
    return "\n".join(lines)


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f} B parameters" if count >= 1e8 else f"{count / 1e6:.2f} M parameters"


def _leaves(layers: Iterable[Mapping[str, Any]]) -> str:
    """Return the last names of some layers, each once, in the order of the file."""
    return name_some(list(dict.fromkeys(layer["name"].rpartition(".")[2] for layer in layers)), 8)


def _kind(layer: Mapping[str, Any]) -> str:
    group = "per channel" if layer["group_size"] == -1 else f"g{layer['group_size']}"
    return f"{layer['bits']} bit {group} {'sym' if layer['sym'] else 'asym'}, {layer['scale_dtype']} scales"


def _tp_line(value: Mapping[str, Any]) -> str:
    """Return the most ranks, and the modules or config keys that forbid more."""
    places = (limit["where"].rpartition(": ")[2].rpartition(".")[2] for limit in value["tp_limits"])
    limiting = sorted(set(places))
    return f"{value['max_tp'] or 'none'}" + (f" (limited by {', '.join(limiting)})" if limiting else "")
