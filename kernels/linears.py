"""Packed layers as targets: alone, fused, as stacked experts, and the part of a rank (tensor parallelism).

Each function returns suffix -> target (``weight``, ``weight_scale``, ...) for one layer that will exist. A
rank holds columns (``axis="out"``) or rows (``axis="in"``) of a layer. The slice of an artifact is the
artifact of the slice, if it follows tiles and groups: columns in multiples of 64, rows in multiples of
lcm(64, group size).

Fused layers are columns of one weight; with a cut each part is cut first, as engines do.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

from w4pack.convert.errors import Refused
from w4pack.kernels import spec as specs_of
from w4pack.kernels.artifact import Artifact
from w4pack.kernels.placement import Range, Target, concat, rest, stack, take
from w4pack.kernels.spec import UNIT, LinearSpec

Targets = dict[str, Target]


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's share: columns (``out``) or rows (``in``) of the layer, ``rank`` of ``size`` equal parts."""

    axis: Literal["out", "in"]
    rank: int
    size: int


def cut_spec(module: str, spec: LinearSpec, cut: Cut | None) -> LinearSpec:
    """Return what a rank holds of a layer. Padding lies with the last rank.

    Raises Refused, naming the layer, if the parts do not follow tiles and groups, and for rows of a layer
    with an act-order: every rank would need inputs of the others.
    """
    if cut is None or cut.size == 1:
        return spec
    start, stop = _stored_range(module, spec, cut)
    if cut.axis == "out":
        held = min(stop, spec.out_features) - start
        return replace(spec, out_features=held, stored_in=spec.k, stored_out=stop - start)
    held = min(stop, spec.in_features) - start
    return replace(spec, in_features=held, stored_in=stop - start, stored_out=spec.n)


def alone(artifact: Artifact, module: str, cut: Cut | None = None) -> Targets:
    """Return a packed layer, or a rank's part of it.

    The bias of a layer cut along its rows comes whole: one rank adds it. Raises as ``cut_spec``.
    """
    spec, infos = artifact.specs[module], artifact.parts(module)
    if cut is None or cut.size == 1:
        return {suffix: take(info) for suffix, info in infos.items()}
    start, stop = _stored_range(module, spec, cut)
    cuts = out_cuts(spec, start, stop) if cut.axis == "out" else in_cuts(spec, start, stop)
    return {suffix: take(info, cuts.get(suffix)) for suffix, info in infos.items()}


def side_by_side(
    artifact: Artifact, modules: Sequence[str], cut: Cut | None = None, *, same_order: bool = False
) -> Targets:
    """Return packed layers as one; its spec is ``artifact.fused(modules)``, cut if need be.

    same_order  the layers' ``act_perm`` were compared and are equal: the first one serves all
    Raises Refused for layers that do not fit beside each other; as ``cut_spec``.
    """
    specs = [cut_spec(module, artifact.specs[module], cut) for module in modules]
    if (
        specs_of.fuse(specs, same_order=same_order) is None
        or artifact.fused(modules, same_order=same_order) is None
    ):
        raise Refused(
            "layers cannot be fused",
            code="fuse",
            where=", ".join(modules),
            expected="the same input, bits, groups, symmetry, order, dtypes, and no padding in between",
            found="; ".join(map(_told, specs)),
        )
    parts = [alone(artifact, module, cut) for module in modules]
    return {
        suffix: first if suffix == "act_perm" else concat([p[suffix] for p in parts], len(first.shape) - 1)
        for suffix, first in parts[0].items()
    }


def stacked(experts: Sequence[Mapping[str, Target]]) -> Targets:
    """Return equal layers (of ``alone`` or ``side_by_side``) with the expert as first dimension."""
    return {suffix: stack([expert[suffix] for expert in experts]) for suffix in experts[0]}


def named(module: str, targets: Mapping[str, Target]) -> Targets:
    """Return the targets under ``module.suffix``."""
    return {f"{module}.{suffix}": target for suffix, target in targets.items()}


def others(artifact: Artifact, modules: Iterable[str], targets: Mapping[str, Target]) -> Targets:
    """Return whole targets for every tensor that is not of ``modules`` and that no target takes from."""
    done = {f"{module}.{suffix}" for module in modules for suffix in artifact.specs[module].shapes()}
    left = {name: info for name, info in artifact.tensors.items() if name not in done}
    return rest(left, targets.values())


# ---------------------------------------------------------------- tensor parallelism


def _stored_range(module: str, spec: LinearSpec, cut: Cut) -> Range:
    """Return the stored columns or rows of a rank."""
    if not 0 <= cut.rank < cut.size:
        raise ValueError(f"rank {cut.rank} of {cut.size}")
    rows = cut.axis == "in"
    if rows and spec.act_order:
        raise Refused(
            "a layer with an act-order cannot be cut along its rows",
            code="tensor-parallel",
            where=module,
            expected="no act_perm: a rank's rows take inputs of all ranks",
            found=f"TP {cut.size}",
            hint="w4pack convert SOURCE OUT --fold-act-order, or --regroup",
        )
    stored = spec.k if rows else spec.n
    unit = UNIT if not rows or spec.group_size <= 0 else lcm(UNIT, spec.group_size)
    share, left = divmod(stored, cut.size)
    if left or share % unit:
        what = "rows" if rows else "columns"
        raise Refused(
            f"a layer cannot be cut into equal parts of whole {'groups' if rows else 'tiles'}",
            code="tensor-parallel",
            where=module,
            expected=f"a multiple of {unit} {what} on each rank",
            found=f"{stored} {what} on {cut.size} ranks",
            hint="fewer ranks, or w4pack convert SOURCE OUT --pad-for-tp " + str(cut.size),
        )
    return cut.rank * share, (cut.rank + 1) * share


def out_cuts(spec: LinearSpec, start: int, stop: int) -> dict[str, dict[int, Range]]:
    """Return suffix -> dimension -> range of the stored columns from ``start`` to ``stop``, whole tiles."""
    words, zeros = spec.bits / 2, spec.bits / 32  # of one column, in a row of the tensor
    return {
        "weight": {1: (int(start * words), int(stop * words))},
        "weight_scale": {1: (start, stop)},
        "weight_zero_point": {1: (int(start * zeros), int(stop * zeros))},
        "bias": {0: (start, min(stop, spec.out_features))},
    }


def in_cuts(spec: LinearSpec, start: int, stop: int) -> dict[str, dict[int, Range]]:
    """Return suffix -> dimension -> range of the stored rows from ``start`` to ``stop``, whole groups."""
    cuts: dict[str, dict[int, Range]] = {"weight": {0: (start // 16, stop // 16)}}
    if spec.group_size > 0:
        groups = {0: (start // spec.group_size, stop // spec.group_size)}
        cuts |= {"weight_scale": groups, "weight_zero_point": groups}
    return cuts


def _told(spec: LinearSpec) -> str:
    kind = "symmetric" if spec.sym else "zero points"
    order = ", act-order" if spec.act_order else ""
    bias = ", bias" if spec.bias else ""
    return f"{spec.k} x {spec.n}, {spec.bits} bit, g {spec.group_size}, {kind}{order}{bias}"
