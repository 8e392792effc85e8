"""Plans the rotated 16-bit model: which tensors are made anew, which travel as they are, what is told.

The rotation itself (which matrices, which steps for which tensor) is planned by ``convert.rotate``.
"""

from collections.abc import Mapping
from typing import Literal, cast

from w4pack.convert.core import dtypes, families
from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import Refused, name_some
from w4pack.convert.planning.decisions import Decisions, DensePlan
from w4pack.convert.planning.heads import refuse_two_heads
from w4pack.convert.planning.online import refuse_other_targets
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.rotate.plan import RotationPlan, plan_rotation
from w4pack.convert.source.detect import Source


def rotation_of(source: Source, options: ConvertOptions) -> RotationPlan:
    """Return the rotation that the options ask for. Raises what ``plan_rotation`` raises."""
    mode = cast("Literal['offline', 'full']", options.rotate)
    tensors = source.checkpoint.tensors
    return plan_rotation(source.config, tensors, mode, seed=options.seed, parts=options.tp or 1)


def decide_rotation(
    source: Source, options: ConvertOptions
) -> tuple[Decisions, RotationPlan, Mapping[str, str]]:
    """Decide for every tensor of a 16-bit model that is rotated.

    Returns (decisions, rotation, name -> dtype tag of each tensor that is made anew). Raises Refused for a
    quantized source, for a head that contradicts the config, and for online transforms in a target that
    cannot carry them.
    """
    if source.problems:
        raise Refused.together(source.problems)
    refuse_packed(source)
    refuse_other_targets(options)
    plan = rotation_of(source, options)
    refuse_two_heads(source)
    dense = [DensePlan(t.name, t.name, t.shape) for t in source.dense if t.name not in plan.added]
    infos = source.checkpoint.tensors
    dense += [DensePlan(start, name, infos[start].shape) for name, start in plan.added.items()]
    dense.sort(key=lambda d: families.natural_key(d.name))
    forced = None if options.dtype is None else dtypes.TAG_OF_NAME[options.dtype]
    made = {d.name: _tag(infos[d.source].dtype, forced) for d in dense if d.name in plan.steps}
    if forced is not None:
        made |= {d.name: forced for d in dense if infos[d.source].dtype in dtypes.FLOAT_TAGS}
    warnings = (*stale(source), *plan.warnings, *_untied(source, plan))
    return Decisions((), tuple(dense), (), plan.config_changes, warnings, False), plan, made


def _tag(source: str, forced: str | None) -> str:
    return source if forced is None else forced


def refuse_packed(source: Source) -> None:
    """Raise Refused for a source with quantized linears: rotation and quantization begin at 16 bit."""
    if not source.layers:
        return
    first = source.layers[0]
    raise Refused(
        "the source is quantized already",
        code="already-quantized",
        where=first.name,
        expected="a checkpoint of 16-bit weights",
        found=f"{first.layout}, {first.scheme.label()}",
        hint=f"`w4pack convert {source.checkpoint.store.label} OUT --to dense` makes a 16-bit model of it; "
        "the error of its quantization stays",
    )


def stale(source: Source) -> tuple[Warning_, ...]:
    """Warn of quantization settings beside weights that are not packed."""
    if source.quant_config is None:
        return ()
    return (
        Warning_(
            "stale-config",
            f"{source.quant_file}: quantization settings",
            "none, as every weight is 16 bit",
            f"{source.quant_config.get('quant_method', 'some')}; left out of the output",
        ),
    )


def _untied(source: Source, plan: RotationPlan) -> list[Warning_]:
    infos = source.checkpoint.tensors
    new = [(head, infos[table]) for head, table in plan.added.items() if head not in infos]
    return [
        Warning_(
            "untied",
            head,
            f"stored once, tied to {info.name}",
            f"the final norm's gain moves into it: stored apart, {info.nbytes:,} bytes more",
        )
        for head, info in new
    ]


def describe(value: Mapping[str, object]) -> list[str]:
    """Return the lines of a recorded rotation: each kind once, with its order and factors."""
    rotations = value.get("rotations")
    lines: dict[str, list[object]] = {}
    for r in rotations if isinstance(rotations, list) else []:
        times = f" ({r['n'] // r['block']} blocks)" if r["block"] != r["n"] else ""
        factors = " x ".join(str(m) for m, _ in r["factors"])
        lines.setdefault(f"{r['kind'].upper()} {r['n']} = {factors}{times}", []).append(r["layer"])
    left = value.get("left_out")
    without = (
        [f"no {item['site'].upper()}: {item['reason']}" for item in left] if isinstance(left, list) else []
    )
    return [line + _where(layers) for line, layers in lines.items()] + without


def _where(layers: list[object]) -> str:
    if layers == [None]:
        return ", the whole model"
    return f", {len(layers)} layers" if len(layers) > 1 else f", layer {name_some([str(layers[0])])}"
