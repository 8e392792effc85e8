"""What a rank holds of a layer that an engine builds: parts of the file's modules, and what runs as one.

An engine fuses q/k/v and gate/up into one layer and asks each rank for some columns of every part, or some
rows. The file has the parts as modules of their own, each with its own scheme. A *part* is a rank's share of
one module; a *run* is a row of parts that can be one weight. Parts that differ in bits, groups, symmetry or
order, or that have padded columns in between, stay apart: one product each. Pure arithmetic, from headers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from w4pack.convert.errors import Refused, SourceError
from w4pack.kernels import linears
from w4pack.kernels import spec as specs_of
from w4pack.kernels.linears import Cut
from w4pack.kernels.placement import Range
from w4pack.kernels.spec import UNIT, LinearSpec

Cuts = Mapping[int, Range]
Order = Callable[[str], bytes | None]  # module -> its act_perm, if it is known before loading
SUFFIXES = ("weight", "weight_scale", "weight_zero_point", "act_perm")  # the engine holds biases itself


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of a tensor-parallel group."""

    index: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's share of one module.

    module   in the file
    shard    number of the part in the engine's fused layer
    spec     of the share; None: a module left in 16 bit
    whole    of the module; None as ``spec``
    columns  stored columns of the module; rows: stored rows. Of a 16-bit module: outputs and inputs
    scales   safetensors dtype of the scales
    """

    module: str
    shard: int
    spec: LinearSpec | None
    whole: LinearSpec | None
    columns: Range
    rows: Range
    scales: str = "F16"

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.columns[1] - self.columns[0] if self.spec is None else self.spec.out_features

    def source(self, suffix: str) -> Cuts:
        """Return which part of the module's tensor the share is: dimension -> range."""
        if self.whole is None:
            return {0: self.columns, 1: self.rows}
        cuts: dict[int, Range] = {}
        if self.columns != (0, self.whole.n):
            cuts |= linears.out_cuts(self.whole, *self.columns).get(suffix, {})
        if self.rows != (0, self.whole.k):
            cuts |= linears.in_cuts(self.whole, *self.rows).get(suffix, {})
        return cuts


@dataclass(frozen=True, slots=True)
class Run:
    """Parts side by side in one weight of ``spec``; None: one part in 16 bit, (outputs, inputs).

    experts  of a stack: the rank's numbers of the experts in it, in their order; None: no stack
    """

    spec: LinearSpec | None
    parts: tuple[Part, ...]
    scales: str = "F16"
    experts: Sequence[int] | None = None

    @property
    def width(self) -> int:
        """Columns of the output."""
        return sum(part.width for part in self.parts)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return suffix -> shape of the tensors of the run, without the bias."""
        stack = () if self.experts is None else (len(self.experts),)
        if self.spec is None:
            (part,) = self.parts
            return {"weight": (*stack, part.width, part.rows[1] - part.rows[0])}
        return {s: (*stack, *shape) for s, shape in self.spec.shapes().items() if s in SUFFIXES}

    def share(self, tensor: Any, expert: int | None) -> Any | None:
        """Return the part of the run's tensor that an expert, or no expert, fills; None: it has none here."""
        if expert is None or self.experts is None:
            return tensor
        return tensor[self.experts.index(expert)] if expert in self.experts else None

    def target(self, suffix: str, part: Part) -> Cuts:
        """Return where in the run's tensor a part lies: dimension -> range."""
        if self.spec is None or part.spec is None:
            return {}
        start = sum(p.spec.n for p in self.parts[: self.parts.index(part)] if p.spec is not None)
        held = part.columns[1] - part.columns[0]  # of an output head the last columns may not be in the file
        return linears.out_cuts(self.spec, start, start + held).get(suffix, {})


# ---- parts -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an engine asks of a layer: inputs on this rank, outputs of each part on this rank."""

    name: str
    inputs: int
    outputs: tuple[int, ...]


def packed(module: str, shard: int, spec: LinearSpec, wanted: Wanted, rank: Rank, scales: str) -> Part:
    """Return the share of a packed module that is part ``shard`` of a layer.

    How many ranks share the module follows from the sizes: a key/value head that several ranks repeat is
    cut less often than there are ranks.

    Raises:
        Refused: a cut through tiles or groups, rows of a layer with an act-order.
        SourceError: a module of other sizes than the engine's.
    """
    columns = _ways(module, spec, wanted, spec.out_features, wanted.outputs[shard], rank)
    rows = _ways(module, spec, wanted, spec.in_features, wanted.inputs, rank)
    if columns > 1 and rows > 1:
        raise _sizes(module, spec, wanted)
    held, kept = spec, ((0, spec.n), (0, spec.k))
    if columns > 1:
        held, start = _cut(module, spec, Cut("out", _index(rank, columns), columns))
        kept = ((start, start + held.n), kept[1])
    if rows > 1:
        held, start = _cut(module, spec, Cut("in", _index(rank, rows), rows))
        kept = (kept[0], (start, start + held.k))
    if (held.out_features, held.in_features) != (wanted.outputs[shard], wanted.inputs):
        raise Refused(  # padding lies in the middle of what the ranks share
            "the ranks' shares of a layer do not follow its tiles",
            code="tensor-parallel",
            where=module,
            expected=f"{wanted.inputs} -> {wanted.outputs[shard]} on each rank, in multiples of {UNIT}",
            found=f"{spec.in_features} -> {spec.out_features}, stored as {spec.k} x {spec.n}",
            hint=f"fewer ranks, or w4pack convert SOURCE OUT --pad-for-tp {rank.size}",
        )
    return Part(module, shard, replace(held, bias=False), spec, *kept, scales)


def _ways(module: str, spec: LinearSpec, wanted: Wanted, whole: int, share: int, rank: Rank) -> int:
    ways, left = divmod(whole, share) if share else (0, 1)
    if left or ways < 1 or rank.size % ways:
        raise _sizes(module, spec, wanted)
    return ways


def _index(rank: Rank, ways: int) -> int:
    """Return which of ``ways`` shares a rank holds: neighbours hold the same one."""
    return rank.index // (rank.size // ways)


def _cut(module: str, spec: LinearSpec, cut: Cut) -> tuple[LinearSpec, int]:
    held = linears.cut_spec(module, spec, cut)
    return held, cut.rank * (held.n if cut.axis == "out" else held.k)


def _sizes(module: str, spec: LinearSpec, wanted: Wanted) -> SourceError:
    outputs = " + ".join(map(str, wanted.outputs))
    return SourceError(
        "a packed layer has other sizes than the engine's",
        code="tensor-mismatch",
        where=module,
        expected=f"{wanted.inputs} -> {outputs} on this rank, in {wanted.name}",
        found=f"{spec.in_features} -> {spec.out_features} in all",
    )


def dense(module: str, shard: int, shape: tuple[int, int], wanted: Wanted, rank: Rank) -> Part:
    """Return the share of a module left in 16 bit, (outputs, inputs) in the file, beside packed ones."""
    spec = LinearSpec(shape[1], shape[0])
    columns = _ways(module, spec, wanted, shape[0], wanted.outputs[shard], rank)
    rows = _ways(module, spec, wanted, shape[1], wanted.inputs, rank)
    out, into = _index(rank, columns) * wanted.outputs[shard], _index(rank, rows) * wanted.inputs
    return Part(module, shard, None, None, (out, out + wanted.outputs[shard]), (into, into + wanted.inputs))


def head(module: str, spec: LinearSpec, wanted: Wanted, rank: Rank, scales: str) -> Part:
    """Return the share of an output head. Engines pad vocabularies: what lies past the file's columns is
    zero, and is cut from the logits by the engine.

    Raises:
        Refused: a share that does not follow tiles.
        SourceError: a head with other inputs, or more outputs, than the engine's.
    """
    (share,) = wanted.outputs
    if wanted.inputs != spec.in_features or share * rank.size < spec.out_features:
        raise _sizes(module, spec, wanted)
    if share % UNIT:
        raise Refused(
            "the ranks' shares of the output head do not follow its tiles",
            code="tensor-parallel",
            where=module,
            expected=f"a multiple of {UNIT} rows of the padded vocabulary on each rank",
            found=f"{share}",
            hint="fewer ranks, or w4pack convert SOURCE OUT --ignore lm_head",
        )
    start = min(rank.index * share, spec.n)
    columns = (start, min(start + share, spec.n))
    held = replace(spec, out_features=share, stored_in=spec.k, stored_out=share, bias=False)
    return Part(module, 0, held, spec, columns, (0, spec.k), scales)


def fused_in_file(
    module: str, spec: LinearSpec, sections: Sequence[int], wanted: Wanted, rank: Rank, scales: str
) -> tuple[Part, ...]:
    """Return the parts of a module that the file itself holds fused, ``sections`` columns each.

    Raises:
        Refused: several ranks and a section that does not end at a tile.
        SourceError: as ``packed``.
    """
    if sum(sections) != spec.out_features:
        raise _sizes(module, spec, wanted)
    if sum(wanted.outputs) == spec.out_features:
        whole = Wanted(wanted.name, wanted.inputs, (spec.out_features,))
        return (packed(module, 0, spec, whole, rank, scales),)
    found, start = [], 0
    for shard, size in enumerate(sections):
        one = replace(spec, out_features=size, stored_in=spec.k, stored_out=size)
        if size % UNIT:
            raise Refused(
                "the parts of a fused layer do not end at its tiles",
                code="tensor-parallel",
                where=module,
                expected=f"parts of a multiple of {UNIT} columns",
                found=", ".join(map(str, sections)),
                hint="one rank",
            )
        part = packed(module, shard, one, wanted, rank, scales)
        columns = (start + part.columns[0], start + part.columns[1])
        found.append(replace(part, whole=spec, columns=columns))
        start += size
    return tuple(found)


# ---- runs ------------------------------------------------------------------------------------------


def runs(parts: Iterable[Part], order: Order) -> tuple[Run, ...]:
    """Return parts in rows that can be one weight each.

    Parts with an act-order are one only where it is known to be the same: ``order`` may not know it yet.
    """
    found: list[Run] = []
    for part in parts:
        last = found[-1] if found else None
        joined = None if last is None else _joined(last, part, order)
        if joined is None:
            found.append(Run(part.spec, (part,), part.scales))
        else:
            found[-1] = joined
    return tuple(found)


def _joined(run: Run, part: Part, order: Order) -> Run | None:
    specs = [p.spec for p in (*run.parts, part) if p.spec is not None]
    if len(specs) <= len(run.parts) or run.scales != part.scales:
        return None
    fused = specs_of.fuse(specs, same_order=_same_order(run.parts[0], part, order))
    return None if fused is None else Run(fused, (*run.parts, part), run.scales)


def _same_order(first: Part, part: Part, order: Order) -> bool:
    ordered = all(p.spec is not None and p.spec.act_order for p in (first, part))
    if not ordered or part.module == first.module:
        return ordered
    known = order(first.module)
    return known is not None and known == order(part.module)
