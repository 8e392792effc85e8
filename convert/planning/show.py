"""The plan in words: source, result, whether that is lossless, what stays, who takes it, what it needs."""

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from w4pack.convert.core import dtypes
from w4pack.convert.core.facts import ModelFacts, Warning_
from w4pack.convert.dialects.online_reading import parse
from w4pack.convert.errors import name_some
from w4pack.convert.events import size_text, time_text, warning_fields
from w4pack.convert.planning.decisions import LayerPlan
from w4pack.convert.planning.fitting import WIDENED
from w4pack.convert.planning.memory import peak_of
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.rotation import describe
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.source import online_shown
from w4pack.convert.source.detect import Source

TPS = (1, 2, 4, 8)
ENGINES = ("w4pack", "vllm", "sglang", "transformers")
STOCK = ENGINES[1:]
DTYPE_KEYS = ("dtype", "torch_dtype")
RATE = 400 << 20  # bytes of output per second that a plan's time estimate assumes (two cores, a local disk)


def engine_answers(facts: ModelFacts) -> dict[str, list[int]]:
    """Return for each engine the tensor parallelisms at which it takes the planned output."""
    from w4pack.convert.engines import rules

    return {engine: [tp for tp in TPS if rules.evaluate(facts, engine, tp).ok] for engine in ENGINES}


def plan_event(plan: Plan, warnings: Sequence[Warning_], facts: ModelFacts, source: Source) -> dict[str, Any]:
    """Return the fields of the ``plan`` event: the whole plan and what was concluded from it."""
    left = {p.name: p.reason for p in plan.layers if p.action not in ("pack", "quantize")}
    left.update((plan.quantization or {}).get("left_in_16_bit", {}))
    return {
        "digest": plan.digest,
        "source": source_line(source),
        "target": plan.target,
        "lossless": plan.lossless,
        "bytes_read": plan.source_bytes,
        "bytes_written": plan.output_bytes,
        "bytes_added": plan.output_bytes - plan.source_bytes,
        "memory": peak_of(plan),
        "disk": plan.disk_bytes,
        "shards": len({t.shard for t in plan.tensors}),
        "left_in_16_bit": left if TARGETS[plan.target].layout else {},
        "notes": notes(plan),
        "left_out": [
            {"name": n, "bytes": size, "reason": why} for n, size, why in source.checkpoint.left_out
        ],
        "engines": engine_answers(facts),
        "warnings": [dict(warning_fields(w)) for w in warnings],
        "plan": plan.to_json(),
    }


def source_line(source: Source) -> str:
    """Return the source in one line: format, schemes, act-order."""
    if not source.layers:
        return _plain_line(source)
    kinds = Counter(
        (layer.layout, layer.scheme.bits, layer.scheme.group_size, layer.scheme.sym)
        for layer in source.layers
    )
    (layout, bits, group, sym), _ = kinds.most_common(1)[0]
    ordered = sum(layer.order.is_real for layer in source.layers)
    group_text = "per channel" if group == -1 else f"g{group}"
    more = f" (and {len(kinds) - 1} other schemes)" if len(kinds) > 1 else ""
    zeros = Counter(layer.zeros.kind for layer in source.layers).most_common(1)[0][0]
    version = f" {zeros}" if layout == "gptq" and zeros in ("v1", "v2") else ""
    return (
        f"{layout}{version}, {bits} bit, {group_text}, {'symmetric' if sym else 'asymmetric'}{more}, "
        f"act-order in {ordered} of {len(source.layers)} layers"
    )


def _plain_line(source: Source) -> str:
    """Return a 16-bit source in one line: dtypes, number of tensors."""
    kinds = Counter(info.dtype for info in source.dense)
    named = ", ".join(dtypes.TORCH_NAMES.get(tag, tag) for tag, _ in kinds.most_common(3))
    return f"no quantized layers: {_count(len(source.dense), 'tensor')}, {named}"


def notes(plan: Plan) -> dict[str, int]:
    """Return every kind of transformation with the number of layers it touches."""
    counts: Counter[str] = Counter()
    for layer in plan.layers:
        counts.update(layer.notes)
    if plan.dropped:
        counts["all-zero biases that the architecture lacks left out"] = len(plan.dropped)
    return dict(counts)


def text(event: Mapping[str, Any], plan: Plan, out: Path, *, verbose: bool = False) -> str:
    """Return the human form of the plan; ``verbose`` adds a line for every quantized linear."""
    packed = [p for p in plan.layers if p.action in ("pack", "quantize")]
    target = TARGETS[plan.target]
    shards = f"{event['shards']} shard{'s' if event['shards'] > 1 else ''}"
    written = f"{size_text(event['bytes_written'])} in {shards} ({_signed(event['bytes_added'])})"
    lines = [
        f"source    {event['source']}    {size_text(event['bytes_read'])}",
        f"target    {_target_text(plan)}    {written}",
        f"lossless  {_lossless(plan)}",
        f"as is     {_as_is(plan)}",
        f"padded    {_padded(event, packed, plan)}",
    ]
    lines += [
        f"{'layers' if i == 0 else '':<10}{count} x {note}"
        for i, (note, count) in enumerate(event["notes"].items())
    ]
    lines += _left(event["left_in_16_bit"])
    lines += [f"{'rotated' if i == 0 else '':<10}{line}" for i, line in enumerate(_rotated(plan))]
    lines += [f"{'online' if i == 0 else '':<10}{line}" for i, line in enumerate(_online(plan))]
    lines += [f"config    {key}: {value}" for key, value in plan.config_changes.items()]
    lines += [
        f"left out  {item['name']} ({size_text(item['bytes'])}): {item['reason']}"
        for item in event["left_out"]
    ]
    if verbose:
        lines += [_layer_line(layer) for layer in plan.layers]
    if target.note:
        lines.append(f"note      {target.note}")
    elif target.layout not in (None, "marlin") and not any(event["engines"][e] for e in STOCK):
        lines.append(
            "note      no stock engine takes this output; `w4pack check OUT` says why, and what they take"
        )
    lines.append("engines   " + "   ".join(_engine(name, tps) for name, tps in event["engines"].items()))
    lines.append(f"needs     {_needs(plan, event, out)}")
    return "\n".join(lines)


def _rotated(plan: Plan) -> list[str]:
    return [] if plan.rotation is None else describe(plan.rotation)


def _online(plan: Plan) -> list[str]:
    records = (plan.quant_config or {}).get("online")
    later = (plan.quantization or {}).get("clips")
    return online_shown.lines(online_shown.to_json(parse(records)), later) if records else []


def _layer_line(layer: LayerPlan) -> str:
    """Return one layer: name, shape, what it becomes and how."""
    shape = f"{layer.scheme.in_features} -> {layer.scheme.out_features}"
    made = layer.scheme.label() if layer.action != "dense" else "16 bit"
    more = "; ".join([*layer.notes, *([layer.reason] if layer.reason else [])])
    return f"          {layer.name}  {shape}  {made}{f'  ({more})' if more else ''}"


def _as_is(plan: Plan) -> str:
    """Name the large tensors outside the quantized linears, and count the small ones by kind."""
    made = {op.source for op in plan.ops if op.kind == "rotated"}
    kept = [d for d in plan.dense if d.name not in made]
    named = [d.name.removesuffix(".weight") for d in kept if len(d.shape) >= 2 and d.name.endswith(".weight")]
    counts = Counter(_kind(d.name) for d in kept if not (len(d.shape) >= 2 and d.name.endswith(".weight")))
    parts = [name_some(named)] if named else []
    return ", ".join([*parts, *(f"{count} {kind}" for kind, count in sorted(counts.items()))]) or "nothing"


def _kind(name: str) -> str:
    if name.endswith(".bias"):
        return "biases"
    return "norms" if "norm" in name else "other tensors"


def _needs(plan: Plan, event: Mapping[str, Any], out: Path) -> str:
    free = shutil.disk_usage(_existing(out)).free
    seconds = f"about {time_text(max(event['bytes_written'] / RATE, 1))}"
    # The time of a model's computation depends on the machine and the text; after one layer it is known.
    time = seconds if plan.quantization is None else "the time left is told layer by layer"
    return (
        f"{size_text(event['disk'])} disk at {out} ({size_text(free)} free), "
        f"{_memory(plan, event['memory'])}, {time}"
    )


def _memory(plan: Plan, nbytes: int) -> str:
    """Return what a job takes, in the words of the lines that tell it while the job runs."""
    if (plan.quantization or {}).get("device") == "cuda":
        return f"about {size_text(nbytes)} memory, host and card together, libraries included"
    return f"at most {size_text(nbytes)} memory, libraries included"


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def _signed(nbytes: int) -> str:
    if nbytes == 0:
        return "same size"
    return f"{'+' if nbytes > 0 else '-'}{size_text(abs(nbytes))}"


def _lossless(plan: Plan) -> str:
    if plan.lossless and any(WIDENED in layer.notes for layer in plan.layers):
        return "yes: every weight is kept bit for bit; widened layers have other codes for the same weights"
    if plan.lossless:
        return (
            "yes: codes, zeros, scales and order are kept bit for bit (`w4pack verify --against` proves it)"
        )
    if plan.quantization is not None:
        bits = plan.quantization["bits_per_weight"]
        return f"no: {_count(len(plan.layers), 'linear')} quantized, {bits:g} bits per weight in the file"
    if plan.rotation is not None:
        return "no: gains are folded and weights rotated in float64, each rounded once"
    if plan.target == "dense":
        return "no: each weight is the exact product, rounded once"
    lossy = sum(p.action != "pack" for p in plan.layers)
    if not lossy:
        return "no: scales are rounded"
    return f"no: {_count(lossy, 'layer')} not kept bit for bit; the others are"


def _padded(event: Mapping[str, Any], packed: Iterable[Any], plan: Plan) -> str:
    from w4pack.convert.planning.output import stored_size

    layout = TARGETS[plan.target].layout
    if layout is None:
        return "none"
    names = [
        p.name
        for p in packed
        if stored_size(layout, p.scheme) != (p.scheme.in_features, p.scheme.out_features)
    ]
    parts = [
        f"{key} to {value}, with zero weights"
        for key, value in plan.config_changes.items()
        if key not in DTYPE_KEYS and plan.rotation is None
    ]
    if names:
        parts.append(
            f"{_count(len(names), 'layer')} to multiples of 64, with zero weights: {name_some(names)}"
        )
    return "; ".join(parts) or "none"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _target_text(plan: Plan) -> str:
    return "marlin artifact 1" if plan.target == "marlin" else plan.target


def _left(left: Mapping[str, str | None]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason or "", []).append(name)
    return [
        f"{'not kept' if i == 0 else '':<10}{name_some(names)}: {reason}"
        for i, (reason, names) in enumerate(reasons.items())
    ]


def _engine(name: str, tps: Sequence[int]) -> str:
    return f"{name} TP {','.join(map(str, tps))}" if tps else f"{name} no"
