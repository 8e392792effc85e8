"""Which products are timed: shapes as given, or every distinct one of an artifact, fused as it is loaded.

Headers only; no tensor is read.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass, replace

from w4pack.convert.core.families import expert_index, split_name
from w4pack.convert.core.scheme import WIDE
from w4pack.convert.errors import UsageError
from w4pack.kernels.artifact import Artifact
from w4pack.kernels.spec import UNIT, LinearSpec

SHAPE = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")
EXPECTED = "NxK: outputs x inputs, from 1 to 999999999 each"


@dataclass(frozen=True, slots=True)
class Shape:
    """One product that is timed: ``spec`` as stored, the dtype of its scales, and the layers that have it.

    act_bits  of activations: 4 or 8 for a product of integers, 16
    layers  name with ``*`` for the numbers of layers and experts -> how many; empty for a shape as given
    """

    spec: LinearSpec
    scale_dtype: str
    act_bits: int = WIDE
    layers: tuple[tuple[str, int], ...] = ()

    @property
    def experts(self) -> bool:
        """Whether some of the layers are experts, which a model multiplies in groups."""
        return any("experts.*" in name for name, _ in self.layers)


def of_text(text: str, bits: int, group_size: int, scale_dtype: str, act_bits: int = WIDE) -> Shape:
    """Return the shape that a text like ``4096x14336`` (N x K: outputs x inputs) gives.

    Raises:
        UsageError: no such text, or sizes off the tile.
    """
    found = SHAPE.fullmatch(text)
    if found is None:
        raise UsageError("no shape", where="--shape", expected=EXPECTED, found=text)
    n, k = int(found[1]), int(found[2])
    if n % UNIT or k % UNIT:
        stored = f"{-(-n // UNIT) * UNIT}x{-(-k // UNIT) * UNIT}"
        raise UsageError(
            f"N and K of a packed layer are multiples of {UNIT}",
            where="--shape",
            found=text,
            hint=f"an artifact stores it padded: --shape {stored}",
        )
    return Shape(LinearSpec(k, n, bits, group_size), scale_dtype, act_bits)


def of_artifact(artifact: Artifact, act_bits: int | None = None) -> list[Shape]:
    """Return the distinct products of an artifact, most columns times rows first.

    q/k/v and gate/up are one product where the loader makes them one. Experts count one by one.

    Args:
        artifact: to time.
        act_bits: 4, 8 or 16, of activations; None: as it was calibrated.

    Raises:
        UsageError: bits that the artifact does not run with.
        Refused: ``online`` records that do not fit the model.
    """
    bits_of = _act_bits(artifact, act_bits)
    counts: dict[tuple[LinearSpec, str, int], Counter[str]] = {}
    for members, spec in _layers(artifact):
        scales = artifact.tensors[f"{members[0]}.weight_scale"].dtype
        key = (_stored(spec), scales, bits_of.get(members[0], WIDE))
        counts.setdefault(key, Counter())[_label(members)] += 1
    shapes = [Shape(*key, tuple(names.items())) for key, names in counts.items()]
    return sorted(shapes, key=lambda shape: -shape.spec.n * shape.spec.k)


def _layers(artifact: Artifact) -> list[tuple[tuple[str, ...], LinearSpec]]:
    """Return (module names, spec) of every product a model makes of its packed layers."""
    from w4pack.kernels.hf import joins  # which layers are joined is the loader's rule; it needs transformers

    fused = [(fusion.members, fusion.spec) for fusion in joins.fusions(artifact.specs, artifact)]
    inside = {name for members, _ in fused for name in members}
    alone = [((name,), spec) for name, spec in artifact.specs.items() if name not in inside]
    return [*fused, *alone]


def _act_bits(artifact: Artifact, asked: int | None) -> dict[str, int]:
    """Return the bits of the activations of each linear that reads quantized ones."""
    from w4pack.kernels.hf import online

    plan = online.plan(artifact, asked, WIDE)  # the cache is no product
    if plan is None:
        return {}
    acts, bits = plan.records.acts, plan.settings.act_bits
    return {name: bits for name, site in plan.at.sites.items() if site in acts}


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


def open_shapes(path: str | os.PathLike[str], act_bits: int | None = None) -> tuple[Artifact, list[Shape]]:
    """Open an artifact and return it with its shapes. Raises as ``open_artifact`` and ``of_artifact``."""
    from w4pack.kernels.artifact import open_artifact

    artifact = open_artifact(path, online=True)
    return artifact, of_artifact(artifact, act_bits)
