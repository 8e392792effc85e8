"""Options that changed nothing: they are told, so that nobody relies on what did not happen."""

from collections.abc import Iterator

from w4pack.convert.core.facts import Warning_
from w4pack.convert.planning.decisions import State
from w4pack.convert.planning.fitting import WIDENED
from w4pack.convert.planning.ordering import FOLDED, REGROUPED
from w4pack.convert.source.claims_check import lets_pass

CODE = "no-effect"


def without_effect(state: State, *, rounded: bool) -> Iterator[Warning_]:
    """Yield a warning for each option that was given and decided nothing. ``rounded``: scales were."""
    options = state.options
    noted = {note for plan in state.plans.values() for note in plan.notes}
    ambiguous = any(layer.zeros.ambiguous for layer in state.source.layers)
    folds = FOLDED in noted
    fitted = state.config_changes or (folds and state.target.order and not options.fold_act_order)
    sizes = "an intermediate size that does not come out even"
    rows = (
        ("--widen", options.widen, WIDENED in noted, "an asymmetric 4-bit layer"),
        ("--regroup", options.regroup, REGROUPED in noted, "an act-order that the target cannot carry"),
        ("--fold-act-order", options.fold_act_order, folds, "a down projection with act-order"),
        ("--round-scales", options.round_scales, rounded, "scales that do not fit exactly"),
        ("--pad-for-tp", options.pad_for_tp, fitted, sizes),
        ("--zero-reading", options.zero_reading, ambiguous, "zero points that can be read in two ways"),
        ("--source-format", options.source_format, _decides_format(state), "GPTQ zero points of no label"),
    )
    for option, given, changed, needs in rows:
        if given and not changed:
            yield Warning_(CODE, option, needs, "none; the option changed nothing")
    for asked in options.ignore_key:
        if not any(lets_pass(asked, key) for key in _forward_keys(state)):
            found = "no such key; the option changed nothing"
            yield Warning_(CODE, f"--ignore-key {asked}", "a key that changes the forward pass", found)


def _decides_format(state: State) -> bool:
    """Tell whether ``--source-format`` says of some zero points what the config does not."""
    said = state.source.claims.zero_kind if state.source.claims else None
    asked = "v2" if state.options.source_format == "gptq_v2" else "v1"
    return said != asked and any(
        layer.layout == "gptq" and layer.zeros.kind in ("v1", "v1-nibble", "v2")
        for layer in state.source.layers
    )


def _forward_keys(state: State) -> tuple[str, ...]:
    claims = state.source.claims
    return () if claims is None or claims.method == "w4pack" else tuple(key for key, _ in claims.refusals)
