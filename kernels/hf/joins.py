"""Which packed layers become one in memory: q/k/v and gate/up side by side, experts in stacks.

Joining is decided from specs, dtypes and act-orders before the tensors are there, so that a loader can place
them at once. Layers that differ in any of these stay apart, and compute the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from w4pack.convert.core.families import FusedSet, expert_index, fused_sets
from w4pack.convert.errors import Refused
from w4pack.kernels import orders
from w4pack.kernels.artifact import Artifact
from w4pack.kernels.experts import ExpertParts, MixedExperts, PackedExperts, StackedLinear, stacked
from w4pack.kernels.hf.skeleton import GATE_UP_DOWN, Skeleton, replace
from w4pack.kernels.modules import FusedLinear, side_by_side
from w4pack.kernels.spec import LinearSpec

Row = tuple[str, ...]  # of an expert: its gate, up and down, as in the file
Scheme = tuple[tuple[LinearSpec, str], ...]  # of a row: of each layer its spec and the dtype of its scales
OTHER_INPUTS = ("cross_attn", "crossattention", "encoder_attn")  # q reads another tensor than k and v


@dataclass(frozen=True, slots=True)
class Fusion:
    """Packed modules, as in the file, that lie side by side in one ``FusedLinear`` of ``spec``."""

    members: tuple[str, ...]
    spec: LinearSpec


@dataclass(frozen=True, slots=True)
class Stack:
    """One layer of all experts: a row of modules side by side for each expert, all of ``spec``."""

    rows: tuple[tuple[str, ...], ...]
    spec: LinearSpec


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """The stacks of experts that are alike, by their numbers: gate and up, together or apart, and down."""

    experts: tuple[int, ...]
    gate_up: tuple[Stack, ...]
    down: Stack

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All of them, down last."""
        return (*self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """The experts at ``path`` in the model: of one kind, or of several that differ in their schemes."""

    path: str
    kinds: tuple[ExpertKind, ...]

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All stacks, kind after kind."""
        return tuple(stack for kind in self.kinds for stack in kind.stacks)


@dataclass(frozen=True, slots=True)
class Joins:
    """Everything that is joined in a model."""

    fusions: tuple[Fusion, ...]
    experts: tuple[ExpertStacks, ...]


def find(skeleton: Skeleton) -> Joins:
    """Return what can be joined in a model whose packed layers are in place.

    Raises:
        Refused: experts of one layer that differ in their schemes, in an artifact with online records.
    """
    stacks = tuple(
        _stacks(path, skeleton)
        for path, module in skeleton.model.named_modules()
        if isinstance(module, ExpertParts)
    )
    rows = [row for layer in stacks for stack in layer.stacks for row in stack.rows]
    inside = {name for row in rows for name in row}
    loose = [name for name in skeleton.paths if name not in inside]
    return Joins(fusions(loose, skeleton.artifact), stacks)


def fusions(modules: Iterable[str], artifact: Artifact) -> tuple[Fusion, ...]:
    """Return the sets among ``modules`` that lie side by side: q/k/v and gate/up that are alike."""
    found = (_fusion(group, artifact) for group in fused_sets(modules) if group.kind != "experts")
    return tuple(fusion for fusion in found if fusion is not None)


def _fusion(group: FusedSet, artifact: Artifact) -> Fusion | None:
    if any(part in group.name for part in OTHER_INPUTS):
        return None
    spec = _row_spec(group.members, artifact)
    return None if spec is None else Fusion(group.members, spec)


def _row_spec(members: tuple[str, ...], artifact: Artifact) -> LinearSpec | None:
    """Return the spec of modules side by side; None if they must stay apart."""
    ordered = all(artifact.specs[name].act_order for name in members)
    same = ordered and len({artifact.read(artifact.tensors[f"{name}.act_perm"]) for name in members}) == 1
    return artifact.fused(members, same_order=same)


# ---- experts ---------------------------------------------------------------------------------------


def _stacks(path: str, skeleton: Skeleton) -> ExpertStacks:
    by_place = {place: name for name, place in skeleton.paths.items() if place.startswith(f"{path}.")}
    count = len({expert_index(place) for place in by_place})
    leaves = {place.rpartition(".")[2] for place in by_place}
    known = next(known for known in GATE_UP_DOWN if set(known) == leaves)
    rows = [tuple(by_place[f"{path}.{expert}.{leaf}"] for leaf in known) for expert in range(count)]
    artifact, alike = skeleton.artifact, dict[Scheme, list[int]]()
    for expert, row in enumerate(rows):
        alike.setdefault(tuple(_scheme(name, artifact) for name in row), []).append(expert)
    if len(alike) > 1 and artifact.quant.get("online"):
        raise _differ(path, rows, artifact)
    return ExpertStacks(path, tuple(_kind(experts, rows, artifact) for experts in alike.values()))


def _scheme(name: str, artifact: Artifact) -> tuple[LinearSpec, str]:
    return artifact.specs[name], artifact.tensors[f"{name}.weight_scale"].dtype


def _differ(path: str, rows: Sequence[Row], artifact: Artifact) -> Refused:
    kinds = [{_words(*_scheme(name, artifact)) for name in column} for column in zip(*rows, strict=True)]
    leaf, found = next((leaf, found) for leaf, found in enumerate(kinds) if len(found) > 1)
    return Refused(
        "the experts of a layer are packed in different ways, which does not run with online records",
        code="experts-mixed",
        where=f"{path}.*.{rows[0][leaf].rpartition('.')[2]}",
        expected="the same bits, groups, symmetry and scale dtype in every expert of a layer",
        found=" and ".join(sorted(found)),
        hint="convert the 16-bit model again, with one scheme for all experts",
    )


def _words(spec: LinearSpec, dtype: str) -> str:
    kind = "sym" if spec.sym else "asym"
    return f"{spec.bits} bit g{spec.group_size} {kind}{' act-order' if spec.act_order else ''} {dtype}"


def _kind(experts: Sequence[int], rows: Sequence[Row], artifact: Artifact) -> ExpertKind:
    """Return the stacks of experts that are alike."""

    def stack(*leaves: int) -> Stack | None:
        taken = tuple(tuple(rows[expert][leaf] for leaf in leaves) for expert in experts)
        specs = {_row_spec(row, artifact) for row in taken}
        spec = specs.pop()
        return None if spec is None or specs else Stack(taken, spec)

    together = stack(0, 1)
    gate_up = (together,) if together is not None else (stack(0), stack(1))
    *first, down = (one for one in (*gate_up, stack(2)) if one is not None)
    return ExpertKind(tuple(experts), tuple(first), down)


# ---- joining ---------------------------------------------------------------------------------------

Tensors = Mapping[str, torch.Tensor]


def join(skeleton: Skeleton, joins: Joins) -> None:
    """Join layers that have been filled, copying their tensors: set by set, so that one set is held twice.

    Layers that a device map has put on different cards stay apart.
    """
    for fusion in joins.fusions:
        parts = [skeleton.layer(name) for name in fusion.members]
        if len({part.weight.device for part in parts}) == 1:
            FusedLinear(fusion.spec, parts, side_by_side(parts))
    for layer in joins.experts:
        place_experts(skeleton, layer, [_copied(skeleton, s) for s in layer.stacks])


def _copied(skeleton: Skeleton, stack: Stack) -> Tensors:
    return stacked([[skeleton.layer(name) for name in row] for row in stack.rows])


def place_experts(skeleton: Skeleton, layer: ExpertStacks, tensors: Sequence[Tensors]) -> None:
    """Put the stacked experts in the place of their parts; ``tensors`` for each of the layer's stacks."""
    act_fn = skeleton.model.get_submodule(layer.path).act_fn
    stacks = map(StackedLinear, (stack.spec for stack in layer.stacks), tensors)
    made = []
    for kind in layer.kinds:
        *gate_up, down = islice(stacks, len(kind.stacks))
        made.append((kind.experts, PackedExperts(gate_up, down, act_fn)))
    replace(skeleton.model, layer.path, MixedExperts(made) if len(made) > 1 else made[0][1])


def check_orders(model: nn.Module) -> None:
    """Check that every act-order is one, on its device: a kernel reads where it points.

    Raises:
        SourceError: an ``act_perm`` that is no permutation of the layer's inputs.
    """
    perms = {name: tensor for name, tensor in model.named_parameters() if name.endswith("act_perm")}
    orders.check(perms)
