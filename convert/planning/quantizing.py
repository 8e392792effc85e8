"""The plan of a 16-bit checkpoint that becomes a quantized one.

Made from names and headers alone: which linears there are, what scheme each gets, what stays and why.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from w4pack import __version__
from w4pack.convert import formats
from w4pack.convert.core import families
from w4pack.convert.core.facts import Warning_, bits_per_weight
from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.errors import Refused, W4PackError
from w4pack.convert.files.shards import new_tensor
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.planning.decisions import DensePlan, LayerPlan
from w4pack.convert.planning.limits import limits
from w4pack.convert.planning.making import placed
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.output import facts_of, layer_specs, packed_bytes, target_settings
from w4pack.convert.planning.plan import Op, Plan, SourceFile
from w4pack.convert.planning.quantize_options import LEFT, QuantizeOptions, named_by, read_rule
from w4pack.convert.planning.targets import TARGETS, Target

FLOATS = ("F16", "BF16", "F32")
DECODER = re.compile(r"(?P<prefix>.*\.(?:layers|h|blocks)\.(?P<index>\d+)\.)(?P<rest>.+)\.weight")


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """What is quantized: names and headers of a 16-bit model, rotated or not.

    config          config.json of the source
    config_changes  top-level keys that the output changes, e.g. a head that is no longer tied
    infos           tensor name -> header
    source_bytes    of all tensors of the source
    rotation        what the plan records of a rotation, or None
    online          records of what the artifact's runtime does
    """

    config: Mapping[str, Any]
    config_changes: Mapping[str, Any]
    infos: Mapping[str, TensorInfo]
    source_bytes: int
    rotation: Mapping[str, Any] | None = None
    online: Sequence[Mapping[str, Any]] = ()


def linears_of(infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the linears of the decoder layers by module name; without routers and what holds no weight."""
    found = {}
    for name, info in infos.items():
        match = DECODER.fullmatch(name)
        if match is None or len(info.shape) != 2 or info.dtype not in FLOATS or 0 in info.shape:
            continue
        module = name.removesuffix(".weight")
        if families.role(module) in ("column", "row", "replicated") and not families.is_router(module):
            found[module] = info
    return found


def layer_index(module: str) -> int:
    """Return the number of the decoder layer that a linear belongs to."""
    match = DECODER.fullmatch(f"{module}.weight")
    if match is None:
        raise ValueError(f"{module} lies in no decoder layer")
    return int(match["index"])


def plan_quantization(
    model: ModelTensors,
    options: ConvertOptions,
    *,
    origin: Mapping[str, str] | None,
    files: tuple[SourceFile, ...],
    record: Mapping[str, Any],
    schemes: Mapping[str, QuantScheme] | None = None,
) -> tuple[Plan, tuple[Warning_, ...]]:
    """Plan the quantization of a model.

    record   what decides bytes beside the options: calibration tokens, device
    schemes  module name -> scheme, where they were chosen by measurement (``bpw``)

    Returns the plan, and warnings of what it falls short of. Raises Refused for a target that cannot hold the
    scheme, all problems at once; UsageError for patterns that name nothing.
    """
    settings, target = options.quantize, TARGETS[options.to]
    if settings is None or target.layout is None:
        raise ValueError("quantization needs options and a target with a layout")
    layers = _layers(model, options, settings, target, schemes or {})
    kept = tuple(layer for layer in layers if layer.action != "dense")
    dense = _dense(model, kept)
    tensors, ops, groups = _outputs(model, dense, kept, target.layout)
    nbytes = sum(packed_bytes(layer.scheme, target.layout) for layer in kept)
    plan = Plan(
        version=__version__,
        target=options.to,
        options=options.chosen(),
        origin=origin,
        files=files,
        layers=kept,
        dense=dense,
        dropped=(),
        config_changes=model.config_changes,
        quant_config=_settings(kept, dense, options, model.online),
        tensors=placed(tensors, options, groups),
        ops=tuple(ops),
        lossless=False,
        source_bytes=model.source_bytes,
        rotation=model.rotation,
        quantization={
            **record,
            "bits_per_weight": bits_per_weight(nbytes, sum(_weights(p.scheme) for p in kept)),
            "left_in_16_bit": {layer.name: layer.reason for layer in layers if layer.action == "dense"},
        },
    )
    return plan, limits(options, facts_of(model.config, plan))


def _dense(model: ModelTensors, kept: tuple[LayerPlan, ...]) -> tuple[DensePlan, ...]:
    """Return every tensor that stays as it is."""
    renamed = _renamer(model.config)
    packed = {f"{layer.source}.weight" for layer in kept}
    return tuple(
        DensePlan(name, renamed(name), info.shape) for name, info in model.infos.items() if name not in packed
    )


def _outputs(
    model: ModelTensors, dense: tuple[DensePlan, ...], kept: tuple[LayerPlan, ...], layout: str
) -> tuple[list[TensorInfo], list[Op], dict[str, str]]:
    """Return the tensors of the output, what makes them, and for each that belongs to a linear its name."""
    tensors: list[TensorInfo] = []
    groups: dict[str, str] = {}
    ops: list[Op] = []
    for item in dense:
        tensors.append(new_tensor(item.name, model.infos[item.source].dtype, item.shape))
        ops.append(Op("copy", item.source, (item.name,)))
    for layer in kept:
        names = []
        for suffix, (dtype, shape) in layer_specs(layer, layout, "").items():
            names.append(f"{layer.name}.{suffix}")
            tensors.append(new_tensor(names[-1], dtype, shape))
        groups.update(dict.fromkeys([*names, f"{layer.name}.bias"], layer.name))
        ops.append(Op("layer", layer.source, tuple(names)))
    return tensors, ops, groups


def _weights(scheme: QuantScheme) -> int:
    return scheme.in_features * scheme.out_features


def _settings(
    kept: tuple[LayerPlan, ...],
    dense: tuple[DensePlan, ...],
    options: ConvertOptions,
    online: Sequence[Mapping[str, Any]],
) -> dict[str, Any] | None:
    block = target_settings(kept, dense, options, {})
    if block is not None and online:
        block["online"] = [dict(record) for record in online]
    return block


def _renamer(config: Mapping[str, Any]) -> Callable[[str], str]:
    classes = families.architectures(config)
    return lambda name: families.rename_experts(classes, name)


# ---- the scheme of each linear -------------------------------------------------------------------------


def _layers(
    model: ModelTensors,
    options: ConvertOptions,
    settings: QuantizeOptions,
    target: Target,
    chosen: Mapping[str, QuantScheme],
) -> list[LayerPlan]:
    linears = linears_of(model.infos)
    if not linears:
        raise Refused(
            "nothing to quantize: no linear of a decoder layer was found",
            code="nothing-to-convert",
            expected="2-D weights such as `model.layers.0.self_attn.q_proj.weight` in 16 bit",
            found=f"{len(model.infos)} tensors",
            hint="`w4pack inspect SRC` lists the tensors that there are",
        )
    bits, reasons = _bits_of(linears, options, settings)
    renamed = _renamer(model.config)
    problems: list[W4PackError] = []
    plans: list[LayerPlan] = []
    for name, info in linears.items():
        scheme = chosen.get(name) or _scheme(info, bits.get(name, settings.bits), settings, target)
        plan = LayerPlan(name, renamed(name), "quantize", scheme)
        reason = reasons.get(name)
        if reason is None:
            obstacle = formats.get(target.layout or "").limits(scheme)
            if obstacle is not None and obstacle.is_shape:
                reason = f"{obstacle.rule}: {obstacle.found}"
            elif obstacle is not None:
                problems.append(_cannot_hold(name, obstacle, target))
        plans.append(plan if reason is None else replace(plan, action="dense", reason=reason))
    plans = _one_scheme(plans, target, problems)
    if problems:
        raise Refused.together(problems)
    if all(p.action == "dense" for p in plans):
        raise Refused(
            f"no linear can be quantized to {target.name}",
            code="nothing-packed",
            where=plans[0].name,
            found=plans[0].reason,
            hint="`--to marlin` pads every shape; what `--ignore` and `--module-bits` name stays as it is",
        )
    return plans


def default_schemes(model: ModelTensors, options: ConvertOptions) -> dict[str, QuantScheme]:
    """Return linear -> scheme for those that no rule gives bits to or leaves out."""
    settings, target = options.quantize, TARGETS[options.to]
    if settings is None:
        raise ValueError("quantization needs options")
    linears = linears_of(model.infos)
    bits, reasons = _bits_of(linears, options, settings)
    free = {n: info for n, info in linears.items() if n not in bits and n not in reasons}
    return {n: _scheme(info, settings.bits, settings, target) for n, info in free.items()}


def fixed_schemes(model: ModelTensors, options: ConvertOptions) -> dict[str, QuantScheme]:
    """Return linear -> scheme for those that a rule gives bits to."""
    settings, target = options.quantize, TARGETS[options.to]
    if settings is None:
        raise ValueError("quantization needs options")
    linears = linears_of(model.infos)
    bits, reasons = _bits_of(linears, options, settings)
    fixed = {n: count for n, count in bits.items() if n not in reasons}
    return {n: _scheme(linears[n], count, settings, target) for n, count in fixed.items()}


def _bits_of(
    linears: Mapping[str, TensorInfo], options: ConvertOptions, settings: QuantizeOptions
) -> tuple[dict[str, int], dict[str, str]]:
    """Return bits by name where a rule says them, and the reason for every linear that stays as it is."""
    bits: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for rule in settings.module_bits:
        pattern, value = read_rule(rule)
        for name in named_by(pattern, linears, "--module-bits"):
            if value == LEFT:
                reasons[name] = f"named by --module-bits {rule}"
            else:
                bits[name] = value
    for pattern in options.ignore:
        for name in named_by(pattern, linears, "--ignore"):
            reasons[name] = f"named by --ignore {pattern}"
    return bits, reasons


def scale_dtype(info: TensorInfo, target: Target) -> str:
    """Return the tag under which a linear's scales are stored: the weights' own where the target takes it."""
    return info.dtype if info.dtype in target.scale_dtypes else target.scale_dtypes[0]


def _scheme(info: TensorInfo, bits: int, settings: QuantizeOptions, target: Target) -> QuantScheme:
    outs, ins = info.shape
    size = settings.group_size
    if size != ONE_GROUP and ins % size and not target.ragged:
        size = next((s for s in (128, 64, 32) if s < size and ins % s == 0), size)
    return QuantScheme(bits, size, settings.sym, False, ins, outs, scale_dtype(info, target))


def _one_scheme(plans: list[LayerPlan], target: Target, problems: list[W4PackError]) -> list[LayerPlan]:
    """Give all linears the smallest group size of any, for targets that know one scheme for all."""
    packed = [p for p in plans if p.action != "dense"]
    if not target.one_scheme or len({(p.scheme.bits, p.scheme.group_size) for p in packed}) < 2:
        return plans
    if len({p.scheme.bits for p in packed}) > 1:
        problems.append(
            Refused(
                f"{target.name} has one width for all linears",
                code="target-cannot-carry",
                where=packed[0].name,
                hint="`--to marlin`, `--to gptq` and `--to compressed-tensors` carry several",
            )
        )
        return plans
    least = min(p.scheme.group_size for p in packed if p.scheme.group_size != ONE_GROUP)
    return [
        replace(p, scheme=replace(p.scheme, group_size=least)) if p.action != "dense" else p for p in plans
    ]


def _cannot_hold(name: str, obstacle: formats.Obstacle, target: Target) -> Refused:
    others = " or ".join(f"`--to {t}`" for t in obstacle.targets if t != target.name)
    return Refused(
        obstacle.rule,
        code="target-cannot-carry",
        where=name,
        expected=obstacle.expected,
        found=obstacle.found,
        hint=f"{others} can" if others else None,
    )
