"""Which products are timed: shapes as given, or every distinct one of an artifact, fused as it is loaded.

Headers only; no tensor is read.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass, replace

from w4pack.convert.core.families import expert_index, split_name
from w4pack.convert.errors import UsageError
from w4pack.kernels.artifact import Artifact
from w4pack.kernels.spec import UNIT, LinearSpec

SHAPE = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class Shape:
    """One product that is timed: ``spec`` as stored, the dtype of its scales, and the layers that have it.

    layers  name with ``*`` for the numbers of layers and experts -> how many; empty for a shape as given
    """

    spec: LinearSpec
    scale_dtype: str
    layers: tuple[tuple[str, int], ...] = ()

    @property
    def experts(self) -> bool:
        """Whether some of the layers are experts, which a model multiplies in groups."""
        return any("experts.*" in name for name, _ in self.layers)


def of_text(text: str, bits: int, group_size: int, scale_dtype: str) -> Shape:
    """Return the shape that a text like ``4096x14336`` (N x K: outputs x inputs) gives.

    Raises:
        UsageError: no such text, or sizes off the tile.
    """
    found = SHAPE.fullmatch(text)
    if found is None:
        raise UsageError("no shape", where="--shape", expected="NxK: outputs x inputs", found=text)
    n, k = int(found[1]), int(found[2])
    if n % UNIT or k % UNIT:
        stored = f"{-(-n // UNIT) * UNIT}x{-(-k // UNIT) * UNIT}"
        raise UsageError(
            f"N and K of a packed layer are multiples of {UNIT}",
            where="--shape",
            found=text,
            hint=f"an artifact stores it padded: --shape {stored}",
        )
    return Shape(LinearSpec(k, n, bits, group_size), scale_dtype)


def of_artifact(artifact: Artifact) -> list[Shape]:
    """Return the distinct products of an artifact, most columns times rows first.

    q/k/v and gate/up are one product where the loader makes them one. Experts count one by one.
    """
    counts: dict[tuple[LinearSpec, str], Counter[str]] = {}
    for members, spec in _layers(artifact):
        scales = artifact.tensors[f"{members[0]}.weight_scale"].dtype
        counts.setdefault((_stored(spec), scales), Counter())[_label(members)] += 1
    shapes = [Shape(spec, scales, tuple(names.items())) for (spec, scales), names in counts.items()]
    return sorted(shapes, key=lambda shape: -shape.spec.n * shape.spec.k)


def _layers(artifact: Artifact) -> list[tuple[tuple[str, ...], LinearSpec]]:
    """Return (module names, spec) of every product a model makes of its packed layers."""
    from w4pack.kernels.hf import joins  # which layers are joined is the loader's rule; it needs transformers

    fused = [(fusion.members, fusion.spec) for fusion in joins.fusions(artifact.specs, artifact)]
    inside = {name for members, _ in fused for name in members}
    alone = [((name,), spec) for name, spec in artifact.specs.items() if name not in inside]
    return [*fused, *alone]


def _stored(spec: LinearSpec) -> LinearSpec:
    """Return what decides the time: sizes as stored, no bias. An act-order keeps the width it gathers."""
    inputs = spec.in_features if spec.act_order else spec.k
    return replace(
        spec, in_features=inputs, out_features=spec.n, bias=False, stored_in=spec.k, stored_out=spec.n
    )


def _label(members: tuple[str, ...]) -> str:
    """Return ``model.layers.*.mlp.gate_proj+up_proj`` for the members of a fused layer."""
    parent, _ = split_name(members[0])
    leaves = "+".join(split_name(name)[1] for name in members)
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", parent + leaves)


def count_of_experts(artifact: Artifact) -> int:
    """Return how many packed linears belong to experts."""
    return sum(expert_index(name) is not None for name in artifact.specs)


def open_shapes(path: str | os.PathLike[str]) -> tuple[Artifact, list[Shape]]:
    """Open an artifact and return it with its shapes. Raises as ``open_artifact``."""
    from w4pack.kernels.artifact import open_artifact

    artifact = open_artifact(path)
    return artifact, of_artifact(artifact)
