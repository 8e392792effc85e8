"""What happens to every layer: kept, re-ordered, folded, split, padded, left in 16 bit, or refused, and why.

Decisions are made for the whole model at once, because layers depend on each other: q/k/v and gate/up need
one scheme, the order of a down projection can move into the columns of gate and up, and a padded
intermediate size changes three layers and the config. All problems are collected, so that a refusal names
every one of them.
"""

from dataclasses import replace

from w4pack.convert.core import dtypes, families
from w4pack.convert.core.facts import Warning_
from w4pack.convert.dialects import w4pack
from w4pack.convert.errors import Refused, quantize_hint
from w4pack.convert.planning.contents import biases, carried_settings, is_rounded, scales
from w4pack.convert.planning.decisions import Action, Decisions, DensePlan, LayerPlan, State
from w4pack.convert.planning.effects import without_effect
from w4pack.convert.planning.fitting import equalise, expressible, group_sizes, one_scheme, shapes, symmetry
from w4pack.convert.planning.heads import tied_head
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.ordering import orders_of_rows
from w4pack.convert.planning.padding import pad_for_tp
from w4pack.convert.planning.quantize_options import named_by
from w4pack.convert.planning.targets import TARGETS, Target
from w4pack.convert.source.detect import Source
from w4pack.convert.source.online import unlike_written


def decide(source: Source, options: ConvertOptions) -> Decisions:
    """Decide for every layer and tensor. Raises one error that carries every problem found."""
    if source.problems:
        raise Refused.together(source.problems)
    if not source.layers:
        raise Refused(
            "nothing to convert: no quantized layer was found",
            code="nothing-to-convert",
            where=source.checkpoint.store.label,
            expected="GPTQ, AWQ, compressed-tensors, AutoRound or Marlin tensors",
            found=f"{len(source.dense)} plain tensors",
            hint=_unpacked(source, options),
        )
    _refuse_online(source)
    state = _start(source, options)
    for step in STEPS:
        step(state)
    if state.problems:
        raise Refused.together(state.problems)
    _refuse_if_nothing_packed(state)
    _rename(state)
    return _finish(state)


def _unpacked(source: Source, options: ConvertOptions) -> str:
    """Return the way on from a checkpoint without packed layers."""
    label = source.checkpoint.store.label
    matrices = [t for t in source.dense if len(t.shape) == 2]
    if not matrices or any(t.dtype not in dtypes.FLOAT_TAGS for t in matrices):
        return f"`w4pack inspect {label}` says what it holds"
    if options.to == "dense":
        return "its weights are what `--to dense` writes already; `--rotate offline` rotates them"
    return quantize_hint(label, options.to)


def _refuse_online(source: Source) -> None:
    """An artifact whose runtime does more than multiply is that artifact alone: nothing else can say so."""
    problems = list(unlike_written(source))
    if problems:  # the records that forbid it may be gone
        raise Refused.together(problems)
    own = source.claims is not None and source.claims.method == "w4pack"
    records = w4pack.run_time(source.quant_config or {}) if own else ()
    if records:
        raise Refused(
            "the source needs a runtime that applies its online transforms and quantizers",
            code="online-transforms",
            where=f"{source.quant_file}: online",
            expected="an artifact without `online` records",
            found=f"{len(records)} records",
            hint="convert the 16-bit model that it was made from again",
        )


def _start(source: Source, options: ConvertOptions) -> State:
    target = TARGETS[options.to]
    layers = {layer.name: layer for layer in source.layers}
    action: Action = "dense" if target.layout is None else "pack"
    plans = {
        name: LayerPlan(name, name, action, replace(layer.scheme, act_order=False))
        for name, layer in layers.items()
    }
    dense = {t.name: DensePlan(t.name, t.name, t.shape) for t in source.dense}
    for layer in source.layers:
        if layer.bias is not None:
            dense[layer.bias.name] = DensePlan(layer.bias.name, layer.bias.name, layer.bias.shape)
    weights = {
        t.name.removesuffix(".weight")
        for t in source.dense
        if t.name.endswith(".weight") and len(t.shape) == 2
    }
    mlps = families.intermediate_sets({*layers, *weights})
    return State(source, options, target, layers, plans, dense, mlps)


def _ignored(state: State) -> None:
    """Leave in 16 bit what the user names. Raises UsageError for a pattern that names nothing."""
    for pattern in state.options.ignore:
        for name in named_by(pattern, state.plans, "--ignore"):
            state.leave(name, f"named by --ignore {pattern}")


def _heads(state: State) -> None:
    for name in state.layers:
        if families.is_lm_head(name) and not state.target.head and state.target.layout is not None:
            state.leave(name, f"{state.target.name} has no quantized lm_head that engines load")


def _refuse_if_nothing_packed(state: State) -> None:
    if state.target.layout is None or any(True for _ in state.packed()):
        return
    reasons = sorted({p.reason or "" for p in state.plans.values()})
    others = ", ".join(t for t in TARGETS if t not in (state.target.name, "marlin-legacy"))
    raise Refused(
        f"no layer can stay packed as {state.target.name}",
        code="nothing-packed",
        where=next(iter(state.plans)),
        expected=_taken(state.target),
        found=reasons[0],
        hint=f"try another target ({others}) with `--dry-run`; `--to dense` always works",
    )


def _taken(target: Target) -> str:
    groups = "/".join(str(g) for g in target.groups) if target.groups else "any that divides in_features"
    return f"group size {groups}"


def _rename(state: State) -> None:
    architectures = state.source.config.get("architectures") or ()
    names = [a for a in architectures if isinstance(a, str)] if isinstance(architectures, list) else []
    renamed = 0
    for name, plan in state.plans.items():
        state.plans[name] = replace(plan, name=families.rename_experts(names, name))
        renamed += state.plans[name].name != name
    for tensor, dense in state.dense.items():
        state.dense[tensor] = replace(dense, name=families.rename_experts(names, tensor))
    if renamed:
        example = next(p for p in state.plans.values() if p.name != p.source)
        state.warnings.append(
            Warning_(
                "expert-names",
                f"{renamed} expert layers, e.g. {example.source}",
                f"names that {names[0]} maps",
                f"others; written as {example.name}",
            )
        )


def _finish(state: State) -> Decisions:
    lossless = state.target.layout is not None and all(p.action == "pack" for p in state.plans.values())
    rounded = [n for n, p in state.plans.items() if is_rounded(n, p, state)]
    if rounded:
        state.warnings.append(
            Warning_(
                "scales-rounded",
                f"{len(rounded)} layers, e.g. {rounded[0]}",
                "scales kept bit for bit",
                "rounded, as `--round-scales` asks",
            )
        )
    state.warnings += without_effect(state, rounded=bool(rounded))
    return Decisions(
        tuple(state.plans.values()),
        tuple(state.dense.values()),
        tuple(state.dropped),
        state.config_changes,
        tuple(state.warnings),
        lossless and not rounded,
    )


# Order matters: values before orders, orders before groups, and what a config can express last.
STEPS = (
    tied_head,
    carried_settings,
    scales,
    biases,
    _ignored,
    _heads,
    orders_of_rows,
    pad_for_tp,
    group_sizes,
    symmetry,
    shapes,
    equalise,
    one_scheme,
    expressible,
)
