"""An output beside its source, compared by value: codes, zero points, scales, group maps, plain bytes.

Comparing does not repeat the packing: the output is decoded by its own layout and the source by its own, and
the two meet as codes, zero points, scales and group maps.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert import formats
from w4pack.convert.core import bitpack, dtypes
from w4pack.convert.core.dequant import dequantize
from w4pack.convert.core.order import natural_map
from w4pack.convert.core.params import index_map
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.store import Blob, chunks
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.jobs import rotated, work
from w4pack.convert.jobs.codes import Block, CodeMap, CodeReader, blocks
from w4pack.convert.jobs.layerjob import (
    LayerJob,
    column_map,
    fold_order,
    group_map,
    job_of,
    source_params,
    stored_place,
)
from w4pack.convert.planning.decisions import DensePlan, LayerPlan
from w4pack.convert.planning.plan import Op, Plan
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.source.detect import Source
from w4pack.convert.source.layers import SourceLayer

if TYPE_CHECKING:
    from w4pack.convert.rotate.rotated import Rotated

ERROR_TOLERANCE = 1e-6  # relative; between the error a conversion reported and the one measured again


@dataclass(frozen=True, slots=True)
class Failure:
    """One tensor or file that is not what it should be; ``tensor`` is its name."""

    tensor: str
    kind: str
    expected: str
    found: str


class Comparison:
    """An output beside its source, compared layer by layer and tensor by tensor."""

    def __init__(self, output: Source, source: Source, plan: Plan, value: Mapping[str, Any]) -> None:
        self.output, self.source, self.plan, self.value = output, source, plan, value
        self.layers = {layer.name: layer for layer in source.layers}
        self.made = {layer.name: layer for layer in output.layers}
        self.layout = TARGETS[plan.target].layout
        self.planned = {t.name: t for t in plan.tensors}

    def run(self, threads: int) -> tuple[int, list[Failure]]:
        """Return (tensors compared, failures)."""
        plans = {p.source: p for p in self.plan.layers}
        dense = {d.source: d for d in self.plan.dense}
        failures: list[Failure] = []

        def one(op: Op) -> list[Failure]:
            missing = [n for n in op.outputs if n not in self.output.checkpoint.tensors]
            if missing:
                return [Failure(n, "missing", f"made from {op.source}", "nothing") for n in missing]
            if op.kind == "rotated":
                return self._rotated(op.source)
            return self._layer(plans[op.source]) if op.kind == "layer" else self._dense(dense[op.source])

        workers = threads if self.plan.rotation is None else 1  # a rotated tensor is made as a whole
        with ThreadPoolExecutor(workers) as pool:
            for found in pool.map(one, self.plan.ops):
                failures += found
        failures += [
            Failure(n, "extra", "no such tensor", "a tensor that the source does not give")
            for n in self.output.checkpoint.tensors
            if n not in self.planned
        ]
        return sum(len(op.outputs) for op in self.plan.ops), failures

    def _dense(self, plan: DensePlan) -> list[Failure]:
        ours, theirs = self.output.checkpoint, self.source.checkpoint
        info, made = theirs.tensors[plan.source], ours.tensors[plan.name]
        if made.dtype != info.dtype or made.shape != plan.shape:
            return [
                Failure(
                    plan.name, "shape", f"{info.dtype} {list(plan.shape)}", f"{made.dtype} {list(made.shape)}"
                )
            ]
        if plan.is_copy and plan.shape == info.shape:
            first = first_difference(theirs, info, ours, made)
            if first is None:
                return []
            others = f"others from byte {first} on"
            return [Failure(plan.name, "bytes", f"the bytes of {plan.source}", others)]
        order = fold_order(theirs, self.layers, plan.rows_from)
        rows = column_map(order, plan.halves, info.shape[0], plan.shape[0])
        wanted = work.reordered(theirs.read(plan.source), rows, plan.shape)
        return _same_bits(plan.name, "bytes", wanted, ours.read(plan.name))

    def _rotated(self, name: str) -> list[Failure]:
        """Make a tensor of the rotated model again."""
        planned = self.planned[name]
        made = self.output.checkpoint.tensors[name]
        if (made.dtype, made.shape) != (planned.dtype, planned.shape):
            wanted = f"{planned.dtype} {list(planned.shape)}"
            return [Failure(name, "shape", wanted, f"{made.dtype} {list(made.shape)}")]
        again = rotated.carrier(self.model, planned)
        found = rotated.difference(again, self.output.checkpoint.read(name), planned.dtype)
        return [] if found is None else [Failure(name, "weights", *found)]

    @cached_property
    def model(self) -> "Rotated":
        """The rotated model, from the source."""
        return rotated.rotated_model(self.source, self.plan)

    def _layer(self, plan: LayerPlan) -> list[Failure]:
        job = job_of(self.source.checkpoint, self.layers, plan, self.layout)
        if plan.action == "dense" or self.layout is None:
            return self._weights(job)
        layer = self.made.get(plan.name)
        if layer is None:
            return [Failure(plan.name, "missing", "a quantized layer", "none")]
        if plan.action == "regroup":
            return self._regrouped(job, layer)
        return compare_packed(job, self.output.checkpoint, layer)

    def _weights(self, job: LayerJob) -> list[Failure]:
        """Compare a dequantized layer with the product computed again, rounded once."""
        name, out = f"{job.plan.name}.weight", self.output.checkpoint
        tag = out.tensors[name].dtype
        grid = formats.Grid("weight", tag, 1, 1, 1, 1, 1)
        for block in blocks(
            job.codes, grid, job.codes.out.in_features, job.codes.out.out_features, work.DENSE_CODES
        ):
            wanted = source_weights(job, block, tag)
            found = out.rect(name, slice(block.n0, block.n1), slice(block.k0, block.k1))
            failures = _same_bits(name, "weights", wanted, found)
            if failures:
                return failures
        return []

    def _regrouped(self, job: LayerJob, layer: SourceLayer) -> list[Failure]:
        """Measure a re-quantized layer's error again and compare it with the reported one."""
        reported = self.value["layers"].get(job.plan.name, {}).get("relative_error")
        measured = measured_error(job, self.output.checkpoint, layer)
        if reported is None or abs(measured - reported) > ERROR_TOLERANCE * max(measured, reported):
            return [Failure(job.plan.name, "error", f"relative error {reported}, as reported", f"{measured}")]
        return []


def first_difference(one: Checkpoint, info: TensorInfo, other: Checkpoint, twin: TensorInfo) -> int | None:
    """Return the first byte in which two tensors of one size differ, or None."""
    for (offset, a), (_, b) in zip(one.chunks(info), other.chunks(twin), strict=True):
        if a != b:
            return offset + int(np.flatnonzero(np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8))[0])
    return None


def compare_files(wanted: Mapping[str, str], output: Checkpoint, source: Checkpoint) -> list[Failure]:
    """Compare files that travel byte for byte. ``wanted``: name in the output -> name in the source."""
    failures = []
    for name, original in wanted.items():
        if name not in output.store.files():
            failures.append(Failure(name, "missing", f"a copy of the source's {original}", "nothing"))
        elif not _same_file(output.store.blob(name), source.store.blob(original)):
            failures.append(Failure(name, "file", f"the bytes of the source's {original}", "others"))
    return failures


def _same_file(one: Blob, other: Blob) -> bool:
    if one.size != other.size:
        return False
    pairs = zip(chunks(one.read_into, one.size), chunks(other.read_into, other.size), strict=True)
    return all(a == b for (_, a), (_, b) in pairs)


def source_weights(job: LayerJob, block: Block, tag: str) -> NDArray[Any]:
    """Return the weights (N, K) of a block straight from the source's own codes and parameters.

    Nothing that the conversion worked out is used but the maps of rows and columns; padding weighs nothing.
    """
    scheme, params = job.layer.scheme, job.source_params
    rows = index_map(job.codes.rows, job.codes.out.in_features, scheme.in_features)[block.k0 : block.k1]
    cols = index_map(job.codes.cols, job.codes.out.out_features, scheme.out_features)[block.n0 : block.n1]
    real_rows, real_cols = np.flatnonzero(rows >= 0), np.flatnonzero(cols >= 0)
    made = np.zeros((cols.size, rows.size), dtypes.numpy_dtype(tag))
    if real_rows.size and real_cols.size:
        k, n = rows[real_rows], cols[real_cols]
        codes = bitpack.unpack_rows(job.codes.reader.words(k, n), scheme.bits, k.size)
        group = params.group if params.group is not None else natural_map(scheme)
        zeros = None if params.zeros is None else params.zeros[:, n]
        columns = GroupParams(params.scales[:, n], zeros, group[k])
        made[np.ix_(real_cols, real_rows)] = dequantize(codes, columns, scheme, tag).T
    return made


def compare_packed(job: LayerJob, checkpoint: Checkpoint, layer: SourceLayer) -> list[Failure]:
    """Compare one packed layer: scheme, scales, zero points, group map, then every code."""
    wanted, found = job.plan.scheme, layer.scheme
    same_groups = wanted.groups == found.groups
    if (wanted.bits, wanted.in_features, wanted.out_features) != (
        found.bits,
        found.in_features,
        found.out_features,
    ) or not same_groups:
        return [Failure(layer.name, "scheme", wanted.label(), found.label())]
    params = source_params(checkpoint, layer)
    failures = _same_bits(f"{layer.name} scales", "scales", job.params.scales, params.scales)
    failures += _same_bits(
        f"{layer.name} zeros", "zeros", _explicit(job.params, wanted), _explicit(params, found)
    )
    if wanted.act_order:
        failures += _same_bits(f"{layer.name} group map", "order", job.params.group, params.group)
    elif group_map(checkpoint, layer) is not None:
        failures.append(Failure(layer.name, "order", "rows in natural order", "a group map"))
    return failures + _same_codes(job, checkpoint, layer)


def _same_codes(job: LayerJob, checkpoint: Checkpoint, layer: SourceLayer) -> list[Failure]:
    """Compare codes in the output's natural row order."""
    source_map = replace(job.codes, rows=None) if job.plan.scheme.act_order else job.codes
    reader = CodeReader(checkpoint, layer, stored_place(checkpoint, layer))
    made = CodeMap(reader, layer.scheme, None, None, job.codes.zeros, None)
    for block in blocks(source_map, reader.grid, layer.scheme.in_features, layer.scheme.out_features):
        wanted, found = source_map.words(block), made.words(block)
        if not np.array_equal(wanted, found):
            row, col = (int(i[0]) for i in np.nonzero(wanted != found))
            per = 32 // layer.scheme.bits
            count = int((wanted != found).sum())
            place = f"row {block.k0 + row * per}, column {block.n0 + col}"
            return [
                Failure(
                    f"{layer.name} codes",
                    "codes",
                    f"word {int(wanted[row, col]):#010x} at {place}",
                    f"{int(found[row, col]):#010x}; {count} words differ in this block",
                )
            ]
    return []


def _explicit(params: GroupParams, scheme: QuantScheme) -> NDArray[Any]:
    if params.zeros is None:
        return np.full(params.scales.shape, scheme.midpoint, np.uint8)
    return params.zeros


def _same_bits(
    name: str, kind: str, wanted: NDArray[Any] | None, found: NDArray[Any] | None
) -> list[Failure]:
    """Compare two arrays bit for bit; report the count, the first place and both values."""
    if wanted is None or found is None or wanted.shape != found.shape or wanted.dtype != found.dtype:
        return [Failure(name, kind, _shape(wanted), _shape(found))]
    a, b = np.ascontiguousarray(wanted), np.ascontiguousarray(found)
    if a.tobytes() == b.tobytes():
        return []
    width = a.dtype.itemsize
    differ = np.flatnonzero(
        (a.view(np.uint8).reshape(-1, width) != b.view(np.uint8).reshape(-1, width)).any(axis=1)
    )
    first = int(differ[0])
    index = [int(i) for i in np.unravel_index(first, a.shape)]
    return [
        Failure(
            name,
            kind,
            f"{a.reshape(-1)[first]} at {index}",
            f"{b.reshape(-1)[first]}; {differ.size} of {a.size} differ",
        )
    ]


def _shape(array: NDArray[Any] | None) -> str:
    return "none" if array is None else f"{array.dtype} {list(array.shape)}"


def measured_error(job: LayerJob, checkpoint: Checkpoint, layer: SourceLayer) -> float:
    """Return the relative Frobenius error of a re-quantized layer's weights against the source's."""
    params = source_params(checkpoint, layer)
    reader = CodeReader(checkpoint, layer, stored_place(checkpoint, layer))
    made = CodeMap(reader, layer.scheme, None, None, job.codes.zeros, None)
    lost = norm = 0.0
    width = max(work.DENSE_CODES // layer.scheme.in_features // 64, 1) * 64
    for n0 in range(0, layer.scheme.out_features, width):
        block = Block(0, layer.scheme.in_features, n0, min(n0 + width, layer.scheme.out_features))
        exact = work.weights_of(job.codes, job.params, block, "F32")
        stored = work.weights_of(made, params, block, "F32")
        lost += float(((exact.astype(np.float64) - stored) ** 2).sum())
        norm += float((exact.astype(np.float64) ** 2).sum())
    return float(np.sqrt(lost / norm)) if norm else 0.0
