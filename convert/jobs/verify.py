"""Proof of an output: every tensor there, every hash right, every number finite, and equal to its source.

Comparing with a source does not repeat the packing: the output is decoded by its own layout and the source
by its own, and the two meet as codes, zero points, scales and group maps.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert import formats
from w4pack.convert.core import bitpack, dtypes
from w4pack.convert.core.dequant import dequantize
from w4pack.convert.core.order import natural_map
from w4pack.convert.core.params import index_map
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.errors import VerifyError, name_some
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.store import chunks, digest
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.jobs import work
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
from w4pack.convert.jobs.sidefiles import CARD
from w4pack.convert.planning.decisions import DensePlan, LayerPlan
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Op, Plan, make_plan
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.source.detect import Source, read_source
from w4pack.convert.source.layers import SourceLayer
from w4pack.convert.source.reading import DetectOptions

ERROR_TOLERANCE = 1e-6  # relative; between the error a conversion reported and the one measured again


@dataclass(frozen=True, slots=True)
class Failure:
    """One tensor that is not what it should be."""

    tensor: str
    kind: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a verification. ``compared``: output tensors compared with the source; 0 without one."""

    path: str
    against: str | None
    lossless: bool
    tensors: int
    compared: int
    failures: tuple[Failure, ...]

    @property
    def ok(self) -> bool:
        """Claim: nothing is wrong."""
        return not self.failures


def check_output(checkpoint: Checkpoint, value: Mapping[str, Any], threads: int) -> list[Failure]:
    """Compare an output's tensors with its manifest: presence, dtype, shape, hash; and that all is finite."""
    wanted: Mapping[str, Mapping[str, Any]] = value["tensors"]
    failures = [
        Failure(n, "extra", "no such tensor", "a tensor the manifest does not name")
        for n in checkpoint.tensors
        if n not in wanted
    ]
    failures += [
        Failure(n, "missing", f"{wanted[n]['dtype']} {wanted[n]['shape']}", "nothing")
        for n in wanted
        if n not in checkpoint.tensors
    ]
    present = [n for n in wanted if n in checkpoint.tensors]
    failures += _check_files(checkpoint, value["files"])
    with ThreadPoolExecutor(threads) as pool:
        for found in pool.map(lambda n: _check_tensor(checkpoint, checkpoint.tensors[n], wanted[n]), present):
            failures += found
    return failures


def refuse_damaged(checkpoint: Checkpoint, value: Mapping[str, Any], threads: int) -> None:
    """Raise VerifyError unless every tensor and side file is what the manifest says: nothing else proves it.

    The files that people edit on purpose (config, index, card) are left to ``verify``.
    """
    kept = set(checkpoint.side_files) - {CARD}
    found = check_output(checkpoint, value, threads)
    wrong = [f for f in found if f.kind != "nonfinite" and (f.kind != "file" or f.tensor in kept)]
    if wrong:
        raise VerifyError(
            "the artifact is damaged" if value["target"] == "marlin" else "the output of w4pack is damaged",
            code="damaged",
            where=name_some([f.tensor for f in wrong]),
            expected=wrong[0].expected,
            found=wrong[0].found,
            hint=f"w4pack verify {checkpoint.label}",
        )


def _check_files(checkpoint: Checkpoint, wanted: Mapping[str, str]) -> list[Failure]:
    """Compare config.json, index and side files with their hashes: they decide what the tensors mean."""
    store, failures = checkpoint.store, []
    for name, sha in wanted.items():
        if name not in store.files():
            failures.append(Failure(name, "missing", "a file of the output", "nothing"))
            continue
        blob = store.blob(name)
        found = digest(chunks(blob.read_into, blob.size))
        if found != sha:
            failures.append(Failure(name, "file", sha, found))
    return failures


def _check_tensor(checkpoint: Checkpoint, info: TensorInfo, wanted: Mapping[str, Any]) -> list[Failure]:
    if info.dtype != wanted["dtype"] or list(info.shape) != wanted["shape"]:
        return [
            Failure(
                info.name, "shape", f"{wanted['dtype']} {wanted['shape']}", f"{info.dtype} {list(info.shape)}"
            )
        ]
    sha, bad, first = hashlib.sha256(), 0, None
    for offset, data in checkpoint.chunks(info):
        sha.update(data)
        if info.dtype in dtypes.FLOAT_TAGS:
            item = dtypes.numpy_dtype(info.dtype)
            marks = np.flatnonzero(dtypes.nonfinite(np.frombuffer(data, item), info.dtype))
            if marks.size and first is None:
                first = offset // item.itemsize + int(marks[0])
            bad += marks.size
    failures = []
    if sha.hexdigest() != wanted["sha256"]:
        failures.append(Failure(info.name, "hash", wanted["sha256"], sha.hexdigest()))
    if bad:
        index = [int(i) for i in np.unravel_index(first or 0, info.shape)] if info.shape else []
        failures.append(
            Failure(info.name, "nonfinite", "finite values", f"{bad} not finite, the first at {index}")
        )
    return failures


# ---- against a source -------------------------------------------------------------------------------------


class Comparison:
    """An output beside its source, compared layer by layer and tensor by tensor."""

    def __init__(self, output: Source, source: Source, plan: Plan, value: Mapping[str, Any]) -> None:
        self.output, self.source, self.plan, self.value = output, source, plan, value
        self.layers = {layer.name: layer for layer in source.layers}
        self.made = {layer.name: layer for layer in output.layers}
        self.layout = TARGETS[plan.target].layout

    def run(self, threads: int) -> tuple[int, list[Failure]]:
        """Return (tensors compared, failures)."""
        plans = {p.source: p for p in self.plan.layers}
        dense = {d.source: d for d in self.plan.dense}
        failures: list[Failure] = []

        def one(op: Op) -> list[Failure]:
            missing = [n for n in op.outputs if n not in self.output.checkpoint.tensors]
            if missing:
                return [Failure(n, "missing", f"made from {op.source}", "nothing") for n in missing]
            return self._layer(plans[op.source]) if op.kind == "layer" else self._dense(dense[op.source])

        with ThreadPoolExecutor(threads) as pool:
            for found in pool.map(one, self.plan.ops):
                failures += found
        planned = {t.name for t in self.plan.tensors}
        failures += [
            Failure(n, "extra", "no such tensor", "a tensor that the source does not give")
            for n in self.output.checkpoint.tensors
            if n not in planned
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
            first = _first_difference(theirs, info, ours, made)
            if first is None:
                return []
            others = f"others from byte {first} on"
            return [Failure(plan.name, "bytes", f"the bytes of {plan.source}", others)]
        order = fold_order(theirs, self.layers, plan.rows_from)
        rows = column_map(order, plan.halves, info.shape[0], plan.shape[0])
        wanted = work.reordered(theirs.read(plan.source), rows, plan.shape)
        return _same_bits(plan.name, "bytes", wanted, ours.read(plan.name))

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


def _first_difference(one: Checkpoint, info: TensorInfo, other: Checkpoint, twin: TensorInfo) -> int | None:
    """Return the first byte in which two tensors of one size differ, or None."""
    for (offset, a), (_, b) in zip(one.chunks(info), other.chunks(twin), strict=True):
        if a != b:
            return offset + int(np.flatnonzero(np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8))[0])
    return None


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


def verify_output(
    checkpoint: Checkpoint,
    value: Mapping[str, Any],
    source: Source | None,
    label: str,
    against: str | None,
    threads: int,
) -> Proof:
    """Verify an output of w4pack, and compare it with its source if one is given."""
    failures = check_output(checkpoint, value, threads)
    compared = 0
    if source is not None:
        options = ConvertOptions.from_chosen(dict(value["options"]))
        plan, _ = make_plan(source, options, None, ())
        output = read_source(checkpoint, DetectOptions())
        for problem in output.problems:
            failures.append(
                Failure(
                    problem.where or label,
                    "unreadable",
                    problem.expected or "",
                    problem.found or problem.what,
                )
            )
        compared, more = Comparison(output, source, plan, value).run(threads)
        failures += more
    return Proof(
        label, against, bool(value["lossless"]), len(value["tensors"]), compared, tuple(_once(failures))
    )


def _once(failures: list[Failure]) -> list[Failure]:
    seen: dict[tuple[str, str], Failure] = {}
    for item in failures:
        seen.setdefault((item.tensor, item.kind), item)
    return list(seen.values())


def compare_plain(checkpoint: Checkpoint, source: Checkpoint, label: str, against: str) -> Proof:
    """Compare two checkpoints tensor by tensor, byte by byte: what `unpack` gave back. Shards may differ."""
    failures = [
        Failure(n, "missing", "a tensor of the source", "nothing")
        for n in source.tensors
        if n not in checkpoint.tensors
    ]
    failures += [
        Failure(n, "extra", "no such tensor", "a tensor")
        for n in checkpoint.tensors
        if n not in source.tensors
    ]
    for name in sorted(set(source.tensors) & set(checkpoint.tensors)):
        a, b = source.tensors[name], checkpoint.tensors[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            failures.append(
                Failure(name, "shape", f"{a.dtype} {list(a.shape)}", f"{b.dtype} {list(b.shape)}")
            )
        elif _first_difference(source, a, checkpoint, b) is not None:
            failures.append(Failure(name, "bytes", f"the bytes of {against}", "others"))
    for name in {**source.raw, **checkpoint.raw}:
        if source.raw.get(name) != checkpoint.raw.get(name):
            failures.append(Failure(name, "file", f"the file of {against}", "another, or none"))
    return Proof(
        label,
        against,
        True,
        len(checkpoint.tensors),
        len(set(source.tensors) & set(checkpoint.tensors)),
        tuple(failures),
    )
