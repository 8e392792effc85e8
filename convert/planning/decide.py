"""What happens to every layer: kept, re-ordered, folded, split, padded, left in 16 bit, or refused, and why.

Decisions are made for the whole model at once, because layers depend on each other: q/k/v and gate/up need one
scheme, the order of a down projection can move into the columns of gate and up, and a padded intermediate size
changes three layers and the config. All problems are collected, so that a refusal names every one of them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from w4pack.convert import dialects, formats
from w4pack.convert.core import dtypes, families, params
from w4pack.convert.core.facts import Warning_
from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.errors import Refused, SourceError, W4PackError, name_some
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.targets import TARGETS, Target, common_group, fitting_group
from w4pack.convert.source.detect import Source, SourceLayer

Action = Literal["pack", "dense", "regroup"]
PORTABLE_WAYS = (
    "`--to marlin` keeps the order; `--regroup` re-quantizes just these layers and reports the error"
)
PAD_TILE = 128  # in_features per rank that every engine's kernels take


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What becomes of one quantized linear.

    source     its name in the source; ``name`` in the output (experts may be spelled differently)
    action     pack: codes move; dense: dequantized, one rounding; regroup: re-quantized without its order, lossy
    scheme     of the output; for ``dense`` the bits describe the source
    rows       natural, or sorted by the layer's own group map
    cols_from  source name of the down projection whose sorting the output columns follow, or None
    halves     2 where gate and up are stacked along N, else 1
    notes      short phrases for the plan, one per transformation
    reason     why it does not stay packed, for dense and regroup
    """

    source: str
    name: str
    action: Action
    scheme: QuantScheme
    rows: Literal["natural", "sorted"] = "natural"
    cols_from: str | None = None
    halves: int = 1
    notes: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class DensePlan:
    """A tensor outside the quantized linears.

    rows_from  source name of the down projection whose sorting its rows follow, or None
    shape      of the output; larger than the source's where the intermediate size is padded
    """

    source: str
    name: str
    shape: tuple[int, ...]
    rows_from: str | None = None
    halves: int = 1

    @property
    def is_copy(self) -> bool:
        """Claim: the bytes travel as they are (the shape is compared by the planner)."""
        return self.rows_from is None


@dataclass(frozen=True, slots=True)
class Decisions:
    """Everything that was decided. ``dropped`` are all-zero biases; ``config_changes`` top-level keys of config.json."""

    layers: tuple[LayerPlan, ...]
    dense: tuple[DensePlan, ...]
    dropped: tuple[str, ...]
    config_changes: Mapping[str, int]
    warnings: tuple[Warning_, ...]
    lossless: bool


@dataclass(slots=True)
class _State:
    source: Source
    options: ConvertOptions
    target: Target
    layers: dict[str, SourceLayer]
    plans: dict[str, LayerPlan]
    dense: dict[str, DensePlan]
    mlps: tuple[families.IntermediateSet, ...]
    problems: list[W4PackError] = field(default_factory=list)
    warnings: list[Warning_] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    config_changes: dict[str, int] = field(default_factory=dict)

    def note(self, name: str, phrase: str, **changes: Any) -> None:
        """Change a layer's plan and say so in it."""
        plan = self.plans[name]
        self.plans[name] = replace(plan, notes=(*plan.notes, phrase), **changes)

    def leave(self, name: str, reason: str) -> None:
        """Leave a layer in 16 bit."""
        self.plans[name] = replace(self.plans[name], action="dense", reason=reason)

    def packed(self) -> Iterable[LayerPlan]:
        return (p for p in self.plans.values() if p.action != "dense")


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
        )
    state = _start(source, options)
    for step in (
        _tied,
        _carried,
        _scales,
        _biases,
        _heads,
        _orders,
        _pad_for_tp,
        _groups,
        _symmetry,
        _shapes,
        _equalise,
        _one_scheme,
        _expressible,
    ):
        step(state)
    if state.problems:
        raise Refused.together(state.problems)
    _refuse_if_nothing_packed(state)
    _rename(state)
    return _finish(state)


def _start(source: Source, options: ConvertOptions) -> _State:
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
    return _State(source, options, target, layers, plans, dense, mlps)


# ---- what the user should know of the whole model --------------------------------------------------------------


def _tied(state: _State) -> None:
    """Say where a tied head is stored beside the embedding: twice the bytes, or a head that engines never read."""
    config = state.source.config
    if config.get("tie_word_embeddings") is not True or "lm_head.weight" not in state.dense:
        return
    infos = state.source.checkpoint.tensors
    embedding = next((n for n in state.dense if n.endswith("embed_tokens.weight")), None)
    if embedding is None:
        return
    if same_bytes(state.source.checkpoint, infos[embedding], infos["lm_head.weight"]):
        found = f"tied, stored twice, {infos['lm_head.weight'].nbytes} bytes"
        state.warnings.append(Warning_("tied-twice", "lm_head.weight", "stored once, as it is tied", found))
    else:
        state.warnings.append(
            Warning_(
                "tied-differs",
                "lm_head.weight",
                f"the values of {embedding}, as the config ties them",
                "other values; both are kept, engines use the embedding and ignore this head",
            )
        )


def same_bytes(checkpoint: Checkpoint, one: TensorInfo, other: TensorInfo) -> bool:
    """Compare two tensors byte by byte, a few MiB at a time."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    step = 4 << 20
    for offset in range(0, one.nbytes, step):
        a, b = bytearray(min(step, one.nbytes - offset)), bytearray(min(step, one.nbytes - offset))
        checkpoint.read_into(one, offset, memoryview(a))
        checkpoint.read_into(other, offset, memoryview(b))
        if a != b:
            return False
    return True


def _carried(state: _State) -> None:
    """Say which settings only the source's own dialect can carry."""
    claims = state.source.claims
    if claims is None or claims.method == state.target.dialect:
        return
    for key, value in (claims.carried or {}).items():
        state.warnings.append(
            Warning_(
                "setting-dropped",
                f"{state.source.quant_file}: {key}",
                f"a target that carries it ({claims.method})",
                f"{str(value)[:80]}; dropped",
            )
        )


# ---- scales: finite, and in a dtype that the target stores -----------------------------------------------------


def _scale_tensor(layer: SourceLayer) -> TensorInfo:
    return next(t for s, t in layer.tensors.items() if s in ("scales", "s", "weight_scale"))


def _scales(state: _State) -> None:
    for name, layer in state.layers.items():
        info = _scale_tensor(layer)
        values = state.source.checkpoint.read(info.name)
        bad = dtypes.nonfinite(values, info.dtype)
        if bad.any():
            first = [int(i) for i in next(zip(*bad.nonzero(), strict=True))]
            state.problems.append(
                SourceError(
                    "a scale is not a finite number",
                    code="nonfinite-scale",
                    where=f"{info.name}{first}",
                    expected="finite scales",
                    found=f"{int(bad.sum())} of {values.size} not finite",
                )
            )
            continue
        try:
            tag = _stored_tag(values, info, state)
            state.plans[name] = replace(
                state.plans[name], scheme=replace(state.plans[name].scheme, scale_dtype=tag)
            )
        except W4PackError as err:
            state.problems.append(err)


def _stored_tag(values: Any, info: TensorInfo, state: _State) -> str:
    """Return the tag under which scales are stored in the output; the source's where the target takes it."""
    if info.dtype in state.target.scale_dtypes:
        return info.dtype
    for tag in state.target.scale_dtypes:
        if params.exact_in(values, info.dtype, tag):
            return tag
    tag = state.target.scale_dtypes[0]
    if state.options.round_scales and not params.rounding_loses_a_scale(values, info.dtype, tag):
        return tag
    group, column, value = params.first_inexact(values, info.dtype, tag)
    taken = " or ".join(dtypes.TORCH_NAMES[t] for t in state.target.scale_dtypes)
    raise Refused(
        f"{dtypes.TORCH_NAMES[info.dtype]} scales do not fit {taken} exactly",
        code="scale-dtype",
        where=f"{info.name}[{group}, {column}]",
        expected=f"scales that {taken} holds bit for bit",
        found=repr(value),
        hint="`--round-scales` rounds them (reported, not lossless; still refused where a scale would become 0 or infinite), `--to dense` computes from them as they are",
    )


# ---- biases ------------------------------------------------------------------------------------------------------


def _biases(state: _State) -> None:
    for name, layer in state.layers.items():
        expected = families.has_bias(state.source.config, name)
        if layer.bias is None:
            if expected:
                state.problems.append(
                    SourceError(
                        "a bias is missing",
                        code="missing-tensor",
                        where=f"{name}.bias",
                        expected="a bias, as the model's architecture has one here",
                        found="none",
                    )
                )
        elif expected is False:
            _extra_bias(name, layer.bias, state)


def _extra_bias(name: str, info: TensorInfo, state: _State) -> None:
    if not state.source.checkpoint.read(info.name).view("u1").any():
        state.dropped.append(info.name)
        del state.dense[info.name]
    elif not state.target.extra_bias and state.target.layout is not None:
        state.problems.append(
            Refused(
                "the architecture has no bias here, so engines would not apply it",
                code="extra-bias",
                where=info.name,
                expected="no bias, or one of zeros",
                found="values that are not zero",
                hint="`--to marlin` keeps and applies it",
            )
        )


def _heads(state: _State) -> None:
    for name in state.layers:
        if families.is_lm_head(name) and not state.target.head and state.target.layout is not None:
            state.leave(name, f"{state.target.name} has no quantized lm_head that engines load")


# ---- activation order ----------------------------------------------------------------------------------------------


def _orders(state: _State) -> None:
    for name, layer in state.layers.items():
        if layer.order.kind == "block":
            scheme = replace(state.plans[name].scheme, group_size=layer.order.block)
            state.note(
                name, f"block-constant order dropped: groups of {layer.order.block} rows", scheme=scheme
            )
        elif layer.order.kind == "trivial" and _claims_order(name, state):
            state.note(name, "act-order label without act-order dropped")
    ordered = [
        n for n, layer in state.layers.items() if layer.order.is_real and state.plans[n].action == "pack"
    ]
    folds = {mlp.down: mlp for mlp in state.mlps if mlp.down in ordered and _folds(mlp, state)}
    keep = state.target.order and not state.options.fold_act_order
    for name in ordered:
        if state.layers[name].order.kind == "uneven":
            _uneven(name, state)
        elif keep and not (name in folds and state.options.pad_for_tp):
            state.note(
                name,
                "order kept as act_perm",
                rows="sorted",
                scheme=replace(state.plans[name].scheme, act_order=True),
            )
        elif name in folds:
            _fold(folds[name], state)
        elif state.target.order:
            state.note(
                name,
                "order kept as act_perm",
                rows="sorted",
                scheme=replace(state.plans[name].scheme, act_order=True),
            )
        else:
            _unfoldable(name, state)


def _claims_order(name: str, state: _State) -> bool:
    claims = state.source.claims
    claim = claims.for_module(name) if claims else None
    return bool(claim and claim.desc_act)


def _folds(mlp: families.IntermediateSet, state: _State) -> bool:
    """Tell whether a down projection's order can move into its producers: sizes agree and every bias is there to move."""
    rows = state.layers[mlp.down].scheme.in_features * (2 if mlp.halved else 1)
    between = families.between(state.source.checkpoint.tensors, mlp)
    return not between and all(_out_features(p, state) == rows for p in mlp.producers)


def _out_features(module: str, state: _State) -> int:
    if module in state.layers:
        return state.layers[module].scheme.out_features
    return state.dense[f"{module}.weight"].shape[0]


def _fold(mlp: families.IntermediateSet, state: _State) -> None:
    halves = 2 if mlp.halved else 1
    state.note(mlp.down, "order folded into its producers", rows="sorted")
    for producer in mlp.producers:
        if producer in state.plans:
            state.note(
                producer, "columns follow the order of the down projection", cols_from=mlp.down, halves=halves
            )
        for tensor in (f"{producer}.weight", f"{producer}.bias"):
            if tensor in state.dense:
                state.dense[tensor] = replace(state.dense[tensor], rows_from=mlp.down, halves=halves)


def _uneven(name: str, state: _State) -> None:
    if state.options.regroup:
        _regroup(name, state)
        return
    state.problems.append(
        Refused(
            "the groups of a layer have different sizes",
            code="uneven-groups",
            where=f"{name}.g_idx",
            expected=f"{state.layers[name].scheme.group_size} rows in each group",
            found="other counts",
            hint="`--to dense` holds it, `--regroup` re-quantizes it and reports the error",
        )
    )


def _unfoldable(name: str, state: _State) -> None:
    if state.options.regroup:
        _regroup(name, state)
        return
    state.problems.append(
        Refused(
            f"{state.target.name} cannot carry the act-order of a layer",
            code="act-order",
            where=name,
            expected="rows in natural order, or an order that folds into gate and up",
            found="a real permutation in g_idx",
            hint=PORTABLE_WAYS,
        )
    )


def _regroup(name: str, state: _State) -> None:
    state.note(
        name,
        "re-quantized in natural row order",
        action="regroup",
        reason="its act-order fits no target of this kind",
    )


# ---- padding the intermediate size for tensor parallelism -------------------------------------------------------------


def _pad_for_tp(state: _State) -> None:
    ranks = state.options.pad_for_tp
    if ranks is None:
        return
    if not state.mlps:
        state.problems.append(
            Refused(
                "no MLP was found whose intermediate size could be padded",
                code="pad-for-tp",
                where="--pad-for-tp",
                expected="gate_proj, up_proj and down_proj (or w1, w3, w2)",
                found="none",
            )
        )
        return
    by_key: dict[str, list[families.IntermediateSet]] = {}
    for mlp in state.mlps:
        key = _pad_key(mlp, state)
        if key is not None:
            by_key.setdefault(key.path[0], []).append(mlp)
    for name, mlps in by_key.items():
        _pad_sets(name, mlps, ranks, state)


def _in_features(module: str, state: _State) -> int:
    if module in state.layers:
        return state.layers[module].scheme.in_features
    return state.dense[f"{module}.weight"].shape[1]


def _pad_key(mlp: families.IntermediateSet, state: _State) -> families.SizeKey | None:
    """Return the config key that holds this MLP's intermediate size; a problem if none does, or if padding is not exact."""
    size = _in_features(mlp.down, state)
    key = families.intermediate_size(state.source.config, mlp.kind)
    between = families.between(state.source.checkpoint.tensors, mlp)
    if key is None or key.value * key.times != size or len(key.path) != 1 or key.times != 1:
        found = "no such key" if key is None else f"{'.'.join(key.path)} = {key.value}"
        state.problems.append(
            Refused(
                "no key of config.json can be changed to a padded intermediate size",
                code="pad-for-tp",
                where=mlp.down,
                expected=f"a key that holds {size}",
                found=found,
            )
        )
        return None
    if between:
        state.problems.append(
            Refused(
                "a tensor between the matrices of an MLP forbids padding",
                code="pad-for-tp",
                where=between[0],
                expected="gate, up and down alone",
                found="another reader of the intermediate activation",
            )
        )
        return None
    return key


def _pad_sets(key: str, mlps: Sequence[families.IntermediateSet], ranks: int, state: _State) -> None:
    unit = PAD_TILE
    for mlp in mlps:
        size = state.plans[mlp.down].scheme.group_size if mlp.down in state.plans else ONE_GROUP
        unit = math.lcm(unit, size) if size != ONE_GROUP else unit
    size = _in_features(mlps[0].down, state)
    padded = -(-size // (ranks * unit)) * ranks * unit
    if padded == size:
        return
    state.config_changes[key] = padded
    for mlp in mlps:
        _pad_module(mlp.down, padded, None, state)
        for producer in mlp.producers:
            _pad_module(
                producer, None, padded * (2 if mlp.halved else 1), state, halves=2 if mlp.halved else 1
            )


def _pad_module(
    module: str, in_features: int | None, out_features: int | None, state: _State, halves: int = 1
) -> None:
    if module in state.plans:
        scheme = state.plans[module].scheme
        scheme = replace(
            scheme,
            in_features=in_features or scheme.in_features,
            out_features=out_features or scheme.out_features,
        )
        state.note(module, f"padded for TP {state.options.pad_for_tp}", scheme=scheme, halves=halves)
    weight, bias = f"{module}.weight", f"{module}.bias"
    if weight in state.dense:
        rows, cols = state.dense[weight].shape
        state.dense[weight] = replace(
            state.dense[weight], shape=(out_features or rows, in_features or cols), halves=halves
        )
    if bias in state.dense and out_features:
        state.dense[bias] = replace(state.dense[bias], shape=(out_features,), halves=halves)


# ---- groups, symmetry, shapes --------------------------------------------------------------------------------------------


def _groups(state: _State) -> None:
    for name, plan in list(state.plans.items()):
        if plan.action == "dense":
            continue
        size = fitting_group(state.target, plan.scheme.group_size, plan.scheme.in_features)
        if size is None:
            state.leave(name, _group_reason(plan, state.target))
        elif size != plan.scheme.group_size:
            state.note(
                name,
                f"groups of {plan.scheme.group_size} split to {size}",
                scheme=replace(plan.scheme, group_size=size),
            )


def _group_reason(plan: LayerPlan, target: Target) -> str:
    taken = "/".join(str(g) for g in target.groups) if target.groups else "one that divides in_features"
    return f"group size {plan.scheme.group_size} over {plan.scheme.in_features} inputs; {target.name} takes {taken}"


def _symmetry(state: _State) -> None:
    if state.target.layout is None:
        return
    sets = [set(s.members) for s in families.fused_sets(state.plans)]
    if state.target.uniform_sym == "model":
        sets = [set(state.plans)]
    grouped = set().union(*sets) if sets else set()
    for members in [*sets, *({n} for n in state.plans if n not in grouped)]:
        _one_symmetry([n for n in members if state.plans[n].action != "dense"], state)


def _one_symmetry(members: Sequence[str], state: _State) -> None:
    """Make a set of layers symmetric or asymmetric as one: all midpoint, or zero points for all."""
    asymmetric = [n for n in members if not state.layers[n].scheme.sym]
    if asymmetric and state.options.widen:
        for name in members:
            if state.plans[name].scheme.bits == 4:
                state.note(
                    name,
                    "widened to symmetric 8 bit",
                    scheme=replace(state.plans[name].scheme, bits=8, sym=True),
                )
        return
    explicit = state.target.explicit_zero
    for name in members:
        scheme = state.plans[name].scheme
        if scheme.sym and (asymmetric or explicit):
            state.note(
                name, "symmetric written with zero points at the midpoint", scheme=replace(scheme, sym=False)
            )
        elif state.layers[name].scheme.sym and _claims_asymmetric(name, state):
            state.note(name, "zero points all at the midpoint: written as symmetric")


def _claims_asymmetric(name: str, state: _State) -> bool:
    claims = state.source.claims
    claim = claims.for_module(name) if claims else None
    return bool(claim and claim.sym is False)


def _shapes(state: _State) -> None:
    """Ask the layout itself; a shape it cannot hold leaves the layer in 16 bit, a scheme it cannot hold is refused."""
    if state.target.layout is None:
        return
    layout = formats.get(state.target.layout)
    for name, plan in list(state.plans.items()):
        if plan.action == "dense":
            continue
        overflow = state.layers[name].zeros.overflow and plan.action == "pack" and not plan.scheme.sym
        obstacle = layout.obstacle(plan.scheme)
        if overflow:
            _check_overflow(name, state)
        elif obstacle is None:
            continue
        elif obstacle.is_shape:
            state.leave(
                name,
                f"{obstacle.rule}: {state.target.name} wants {obstacle.expected}, found {obstacle.found}",
            )
        else:
            ways = " or ".join(f"`--to {t}`" for t in obstacle.targets)
            state.problems.append(
                Refused(
                    f"{state.target.name} cannot hold a layer: {obstacle.rule}",
                    code="target-cannot-carry",
                    where=name,
                    expected=obstacle.expected,
                    found=obstacle.found,
                    hint=f"{ways} can" if ways else None,
                )
            )


def _check_overflow(name: str, state: _State) -> None:
    layer = state.layers[name]
    tensors = {s: state.source.checkpoint.read(t.name) for s, t in layer.small().items()}
    decoded = layer.module.decode_params(tensors, layer.scheme, layer.zeros.kind)
    try:
        params.check_representable(decoded, state.plans[name].scheme, name)
    except W4PackError as err:
        state.problems.append(err)


def _equalise(state: _State) -> None:
    """Portable targets: engines fuse q/k/v and gate/up, so where one part stays in 16 bit its siblings do too."""
    if state.target.layout is None or state.target.order:
        return
    for fused in families.fused_sets(state.plans):
        left = [n for n in fused.members if state.plans[n].action == "dense"]
        if fused.kind != "experts" and left and len(left) < len(fused.members):
            for name in fused.members:
                if name not in left:
                    state.leave(name, f"fused with {left[0]}, which stays in 16 bit")


def _one_scheme(state: _State) -> None:
    """Targets whose config has one group size for all: split every layer to a common one, which is exact."""
    if not state.target.one_scheme:
        return
    packed = [p for p in state.packed() if p.action == "pack"]
    size = common_group((p.scheme.in_features, p.scheme.group_size) for p in packed) if packed else None
    if packed and (size is None or (state.target.groups is not None and size not in state.target.groups)):
        kinds = sorted({p.scheme.label() for p in packed})
        state.problems.append(
            Refused(
                f"{state.target.name} has one group size for the whole model",
                code="mixed-groups",
                where=packed[0].source,
                expected="groups that can be split to one size",
                found=name_some(kinds),
                hint="`--to compressed-tensors` or `--to marlin` holds mixed schemes",
            )
        )
        return
    for plan in packed:
        if size is not None and plan.scheme.group_size != size:
            state.note(
                plan.source,
                f"groups of {plan.scheme.group_size} split to {size}",
                scheme=replace(plan.scheme, group_size=size),
            )


def _expressible(state: _State) -> None:
    """AWQ names what it leaves out by substrings: refuse a plain layer whose name is part of a quantized one's."""
    if state.target.name != "awq" or state.problems:
        return
    packed = {p.source: p.scheme for p in state.packed()}
    plain = [
        n.removesuffix(".weight")
        for n, d in state.dense.items()
        if n.endswith(".weight") and len(d.shape) == 2
    ]
    model = dialects.TargetModel(packed, tuple(plain), {}, {}, "")
    for name in dialects.get("awq").clashes(model):
        if not families.is_router(name):
            state.problems.append(
                Refused(
                    "an awq config cannot leave out this layer without leaving out another",
                    code="name-clash",
                    where=name,
                    expected="a name that is part of no quantized layer's name",
                    found="a list that engines match by substring",
                    hint="`--to compressed-tensors` names layers exactly",
                )
            )


def _refuse_if_nothing_packed(state: _State) -> None:
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


# ---- names, result ----------------------------------------------------------------------------------------------------------


def _rename(state: _State) -> None:
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


def _finish(state: _State) -> Decisions:
    lossless = state.target.layout is not None and all(p.action == "pack" for p in state.plans.values())
    rounded = [n for n, p in state.plans.items() if _rounded(n, p, state)]
    if rounded:
        state.warnings.append(
            Warning_(
                "scales-rounded",
                f"{len(rounded)} layers, e.g. {rounded[0]}",
                "scales kept bit for bit",
                "rounded, as `--round-scales` asks",
            )
        )
    return Decisions(
        tuple(state.plans.values()),
        tuple(state.dense.values()),
        tuple(state.dropped),
        state.config_changes,
        tuple(state.warnings),
        lossless and not rounded,
    )


def _rounded(name: str, plan: LayerPlan, state: _State) -> bool:
    source_tag = state.layers[name].scheme.scale_dtype
    if plan.action == "dense" or plan.scheme.scale_dtype == source_tag or not state.options.round_scales:
        return False
    values = state.source.checkpoint.read(_scale_tensor(state.layers[name]).name)
    return not params.exact_in(values, source_tag, plan.scheme.scale_dtype)
