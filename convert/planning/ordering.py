"""Decisions about activation order: dropped, kept as ``act_perm``, folded, or re-quantized."""

from dataclasses import replace

from w4pack.convert.core import families
from w4pack.convert.errors import Refused, name_some
from w4pack.convert.planning.decisions import State

FOLDED = "order folded into its producers"  # notes of a layer
REGROUPED = "re-quantized in natural row order"
PORTABLE_WAYS = (
    "`--to marlin` keeps the order; `--regroup` re-quantizes just these layers and reports the error"
)


def orders_of_rows(state: State) -> None:
    """Drop orders that are none, keep or fold real ones, re-quantize or refuse the rest."""
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


def _claims_order(name: str, state: State) -> bool:
    claims = state.source.claims
    claim = claims.for_module(name) if claims else None
    return bool(claim and claim.desc_act)


def _folds(mlp: families.IntermediateSet, state: State) -> bool:
    """Tell whether an order can move into its layer's producers: sizes agree and nothing lies between."""
    rows = state.layers[mlp.down].scheme.in_features * (2 if mlp.halved else 1)
    between = families.between(state.source.checkpoint.tensors, mlp)
    return not between and all(_out_features(p, state) == rows for p in mlp.producers)


def _out_features(module: str, state: State) -> int:
    if module in state.layers:
        return state.layers[module].scheme.out_features
    return state.dense[f"{module}.weight"].shape[0]


def _fold(mlp: families.IntermediateSet, state: State) -> None:
    halves = 2 if mlp.halved else 1
    state.note(mlp.down, FOLDED, rows="sorted")
    for producer in mlp.producers:
        if producer in state.plans:
            state.note(
                producer, "columns follow the order of the down projection", cols_from=mlp.down, halves=halves
            )
        for tensor in (f"{producer}.weight", f"{producer}.bias"):
            if tensor in state.dense:
                state.dense[tensor] = replace(state.dense[tensor], rows_from=mlp.down, halves=halves)


def _uneven(name: str, state: State) -> None:
    if state.options.regroup:
        _regroup(name, state)
        return
    state.problems.append(
        Refused(
            "the groups of a layer have different sizes",
            code="uneven-groups",
            where=f"{name}.g_idx",
            expected=f"{state.layers[name].scheme.group_size} rows in each group",
            found=f"{name_some([str(c) for c in state.layers[name].order.counts])} rows",
            hint="`--to dense` holds it, `--regroup` re-quantizes it and reports the error",
        )
    )


def _unfoldable(name: str, state: State) -> None:
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


def _regroup(name: str, state: State) -> None:
    state.note(
        name,
        REGROUPED,
        action="regroup",
        reason="its act-order fits no target of this kind",
    )
