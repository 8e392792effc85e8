"""Decisions that fit schemes to a target: group sizes, symmetry, shapes, and what its config can express."""

from collections.abc import Sequence
from dataclasses import replace

from w4pack.convert import dialects, formats
from w4pack.convert.core import families, params
from w4pack.convert.errors import Refused, W4PackError
from w4pack.convert.planning.decisions import LayerPlan, State
from w4pack.convert.planning.targets import Target, common_group, fitting_group, splits_to

WIDENED = "widened to symmetric 8 bit"  # note of a layer


def group_sizes(state: State) -> None:
    """Split groups to a size the target takes; a layer without one stays in 16 bit."""
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
    found = f"group size {plan.scheme.group_size} over {plan.scheme.in_features} inputs"
    return f"{found}; {target.name} takes {taken}"


def symmetry(state: State) -> None:
    """Make every set that must be symmetric or asymmetric as one so, or widen it to symmetric 8 bit."""
    if state.target.layout is None:
        return
    sets = [set(s.members) for s in families.fused_sets(state.plans)]
    if state.target.uniform_sym == "model":
        sets = [set(state.plans)]
    grouped = set().union(*sets) if sets else set()
    for members in [*sets, *({n} for n in state.plans if n not in grouped)]:
        _one_symmetry([n for n in members if state.plans[n].action != "dense"], state)


def _one_symmetry(members: Sequence[str], state: State) -> None:
    """Make a set of layers symmetric or asymmetric as one: all midpoint, or zero points for all."""
    asymmetric = [n for n in members if not state.layers[n].scheme.sym]
    if asymmetric and state.options.widen:
        _widen(members, state)
        asymmetric = [n for n in asymmetric if not state.plans[n].scheme.sym]
    for name in members:
        scheme = state.plans[name].scheme
        if scheme.sym and (asymmetric or state.target.explicit_zero):
            phrase = "symmetric written with zero points at the midpoint"
            state.note(name, phrase, scheme=replace(scheme, sym=False))
        elif state.layers[name].scheme.sym and _claims_asymmetric(name, state):
            state.note(name, "zero points all at the midpoint: written as symmetric")


def _widen(members: Sequence[str], state: State) -> None:
    """Turn every 4-bit layer of a set to symmetric 8 bit; 8-bit layers keep their zero points."""
    for name in members:
        scheme = state.plans[name].scheme
        if scheme.bits == 4:
            state.note(name, WIDENED, scheme=replace(scheme, bits=8, sym=True))


def _claims_asymmetric(name: str, state: State) -> bool:
    claims = state.source.claims
    claim = claims.for_module(name) if claims else None
    return bool(claim and claim.sym is False)


def shapes(state: State) -> None:
    """Ask the layout itself: a shape it cannot hold leaves a layer in 16 bit, such a scheme is refused."""
    if state.target.layout is None:
        return
    for name, plan in list(state.plans.items()):
        if plan.action == "dense":
            continue
        overflow = state.layers[name].zeros.overflow and plan.action == "pack" and not plan.scheme.sym
        obstacle = formats.obstacle(state.target.layout, plan.scheme)
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


def _check_overflow(name: str, state: State) -> None:
    layer = state.layers[name]
    tensors = {s: state.source.checkpoint.read(t.name) for s, t in layer.small().items()}
    decoded = layer.module.decode_params(tensors, layer.scheme, layer.zeros.kind)
    try:
        params.check_representable(decoded, state.plans[name].scheme, name)
    except W4PackError as err:
        state.problems.append(err)


def equalise(state: State) -> None:
    """Leave the siblings of a 16-bit q/k/v or gate/up part in 16 bit too: engines fuse them."""
    if state.target.layout is None or state.target.order:
        return
    for fused in families.fused_sets(state.plans):
        left = [n for n in fused.members if state.plans[n].action == "dense"]
        if fused.kind != "experts" and left and len(left) < len(fused.members):
            for name in fused.members:
                if name not in left:
                    state.leave(name, f"fused with {left[0]}, which stays in 16 bit")


def one_scheme(state: State) -> None:
    """Targets whose config has one group size for all: split every layer to a common one, which is exact.

    Layers that cannot be split to the size that keeps the most weights stay in 16 bit.
    """
    if not state.target.one_scheme:
        return
    packed = [p for p in state.packed() if p.action == "pack"]
    sizes = [(p.scheme.in_features, p.scheme.group_size) for p in packed]
    taken = state.target.groups
    size = common_group(sizes) if packed else None
    if size is None or (taken is not None and size not in taken):
        size = _most_kept(packed, taken)
    for plan in packed:
        if plan.scheme.group_size == size:
            continue
        if size is not None and splits_to(plan.scheme.in_features, plan.scheme.group_size, size):
            phrase = f"groups of {plan.scheme.group_size} split to {size}"
            state.note(plan.source, phrase, scheme=replace(plan.scheme, group_size=size))
        else:
            reason = f"group size {plan.scheme.group_size} cannot be split to {size}"
            state.leave(plan.source, f"{reason}, and {state.target.name} has one for the whole model")


def _most_kept(packed: Sequence[LayerPlan], taken: tuple[int, ...] | None) -> int | None:
    """Return the group size to which layers with the most weights can be brought, the larger one on a tie."""
    weights: dict[int, int] = {}
    for size in {p.scheme.group_size for p in packed}:
        if taken is None or size in taken:
            fits = (
                p.scheme
                for p in packed
                if p.scheme.group_size == size or splits_to(p.scheme.in_features, p.scheme.group_size, size)
            )
            weights[size] = sum(s.in_features * s.out_features for s in fits)
    return max(weights, key=lambda size: (weights[size], size)) if weights else None


def expressible(state: State) -> None:
    """Refuse, for AWQ, a plain layer whose name is part of a quantized one's: its config names substrings."""
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
