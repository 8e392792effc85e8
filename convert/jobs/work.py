"""Operations of a plan as pieces of work: lists of small tasks that any thread may run, in any order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from w4pack.convert import formats
from w4pack.convert.core import bitpack, dtypes, rtn
from w4pack.convert.core.dequant import dequantize
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.errors import Refused
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.store import CHUNK
from w4pack.convert.jobs.codes import Block, CodeMap, blocks
from w4pack.convert.jobs.layerjob import LayerJob, column_map, fold_order
from w4pack.convert.jobs.outfiles import OutFiles
from w4pack.convert.planning.decisions import DensePlan
from w4pack.convert.planning.output import stored_size
from w4pack.convert.planning.plan import Op, OutTensor
from w4pack.convert.source.detect import Source

DENSE_CODES = 1 << 20  # codes per dequantized block: 4 MiB of float32

Task = Callable[[], None]


class Packer(Protocol):
    """Packs canonical words into Marlin tiles in numpy's place, with the same bytes. Safe in threads."""

    device: str

    def __call__(self, words: NDArray[np.uint32], bits: int) -> NDArray[np.int32]:
        """Pack words (K*bits/32, N) to tiles (K/16, N*bits/2); K % 16 == 0, N % 64 == 0."""
        ...


def packs_tiles(layout: ModuleType) -> bool:
    """Tell whether a layout's codes are Marlin tiles, which a ``Packer`` can make."""
    return bool(getattr(layout, "TILES", False))


def pack_words(
    layout: ModuleType, words: NDArray[np.uint32], bits: int, packer: Packer | None
) -> NDArray[Any]:
    """Pack words in a layout's form: tiles by ``packer``, if one is given, all else by the layout itself."""
    if packer is not None and packs_tiles(layout):
        return packer(words, bits)
    packed: NDArray[Any] = layout.pack(words, bits)
    return packed


@dataclass(slots=True)
class OpRun:
    """One operation being done. ``report`` collects what the manifest and the report need of it."""

    op: Op
    tasks: list[Task]
    report: dict[str, Any] = field(default_factory=dict)


class Recipe(Protocol):
    """What an executor needs to know of a job: how to do one operation."""

    def start(self, op: Op, out: OutFiles) -> OpRun:
        """Read the small inputs of ``op`` and return its tasks."""
        ...


def copy_tasks(
    checkpoint: Checkpoint, source: str, out: OutFiles, target: OutTensor, report: dict[str, Any]
) -> list[Task]:
    """Copy a tensor's bytes, and count values that are not finite on the way."""
    info = checkpoint.tensors[source]
    item = dtypes.numpy_dtype(info.dtype)
    lock = Lock()

    def chunk(offset: int) -> None:
        data = np.empty(min(CHUNK, info.nbytes - offset), np.uint8)
        checkpoint.read_into(info, offset, data.data)
        if info.dtype in dtypes.FLOAT_TAGS:
            bad = int(dtypes.nonfinite(data.view(item), info.dtype).sum())
            if bad:
                with lock:
                    report["nonfinite"] = report.get("nonfinite", 0) + bad
        out.write(target, offset, data)

    return [partial(chunk, offset) for offset in range(0, info.nbytes, CHUNK)] or [lambda: None]


def dense_tasks(source: Source, plan: DensePlan, out: OutFiles, target: OutTensor) -> list[Task]:
    """Rebuild a tensor outside the quantized linears: rows re-ordered, sizes padded with zeros."""
    checkpoint = source.checkpoint
    info = checkpoint.tensors[plan.source]
    layers = {layer.name: layer for layer in source.layers}

    def whole() -> None:
        order = fold_order(checkpoint, layers, plan.rows_from)
        rows = column_map(order, plan.halves, info.shape[0], plan.shape[0])
        out.write(target, 0, reordered(checkpoint.read(plan.source), rows, plan.shape))

    return [whole]


def reordered(values: NDArray[Any], rows: NDArray[np.int32] | None, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return ``values``, rows taken by ``rows`` (PADDING: zeros), cut or padded with zeros to ``shape``."""
    made = np.zeros(shape, values.dtype)
    cut = tuple(slice(0, min(have, want)) for have, want in zip(values.shape[1:], shape[1:], strict=True))
    if rows is None:
        kept = (slice(0, min(values.shape[0], shape[0])), *cut)
        made[kept] = values[kept]
    else:
        real = rows >= 0
        into: tuple[Any, ...] = (real, *cut)
        whole = (slice(None), *cut)
        made[into] = values[rows[real]][whole]
    return made


def pack_tasks(
    code_map: CodeMap,
    layout_name: str,
    out: OutFiles,
    name: str,
    small: Mapping[str, NDArray[Any]],
    packer: Packer | None = None,
) -> list[Task]:
    """Write a layer that stays packed: its small tensors, then its codes block by block."""
    layout, scheme = formats.get(layout_name), code_map.out
    grid = layout.grid(scheme.bits)
    target = out.tensors[f"{name}.{grid.suffix}"]
    direct = None if packer else direct_path(code_map.reader.layer.module, layout, scheme.bits)

    def small_tensors() -> None:
        for suffix, array in small.items():
            out.write(out.tensors[f"{name}.{suffix}"], 0, array)

    def codes(block: Block) -> None:
        stored = code_map.stored(block) if direct is not None else None
        packed = (
            direct(stored)
            if direct is not None and stored is not None
            else pack_words(layout, code_map.words(block), scheme.bits, packer)
        )
        row, col = _place(grid, block.k0, block.n0)
        out.write_rect(target, row, col, _inside(target, row, col, packed))

    rows, cols = stored_size(layout_name, scheme)
    return [small_tensors, *(partial(codes, block) for block in blocks(code_map, grid, rows, cols))]


def _inside(target: OutTensor, row: int, col: int, packed: NDArray[Any]) -> NDArray[Any]:
    """Cut what only fills the last word: rows past K, which no tensor holds."""
    return packed[: target.shape[0] - row, : target.shape[1] - col]


def _place(grid: formats.Grid, k: int, n: int) -> tuple[int, int]:
    """Return (row, column) in the stored tensor of the block that starts at code (k, n)."""
    along_k, along_n = k // grid.k_unit * grid.k_elems, n // grid.n_unit * grid.n_elems
    return (along_k, along_n) if grid.k_axis == 0 else (along_n, along_k)


def direct_path(
    source: ModuleType, target: ModuleType, bits: int
) -> Callable[[NDArray[Any]], NDArray[Any]] | None:
    """Return a function from stored blocks of ``source`` straight to tiles, where both layouts have one.

    Half the time of going through canonical words for AWQ; a test holds both to the same bytes.
    """
    if bits == 4 and packs_tiles(target):
        found: Callable[[NDArray[Any]], NDArray[Any]] | None = getattr(source, "to_tiles", None)
        return found
    return None


def dense_layer_tasks(job: LayerJob, out: OutFiles, target: OutTensor, report: dict[str, Any]) -> list[Task]:
    """Write a layer as a plain matrix (N, K): the product rounded once to the tensor's dtype.

    Weights that are too small for it and become 0 are counted in the report.
    """
    code_map, tag = job.codes, target.dtype
    scheme = code_map.out
    grid = formats.Grid("weight", tag, 1, 1, 1, 1, 1)
    flushes = tag == "F16" and _may_flush(job.params, scheme)
    lock = Lock()

    def one(block: Block) -> None:
        weights = dense_block(job, block, tag)
        if tag == "F16" and bool(dtypes.nonfinite(weights, tag).any()):
            raise Refused(
                "a weight is too large for float16",
                code="overflow",
                where=target.name,
                expected="|(q - z) * scale| below 65520",
                found="a larger product",
                hint="`--dtype bfloat16` holds it, and so do the packed targets",
            )
        if flushes:
            exact = dense_block(job, block, "F32")
            lost = int(((weights == 0) & (exact != 0)).sum())
            with lock:
                report["flushed"] = report.get("flushed", 0) + lost
        out.write_rect(target, block.n0, block.k0, weights)

    found = blocks(code_map, grid, scheme.in_features, scheme.out_features, DENSE_CODES)
    return [partial(one, block) for block in found]


def _may_flush(params: GroupParams, scheme: QuantScheme) -> bool:
    """Whether a scale is so small that one step of it is 0 in float16."""
    scales = np.abs(dtypes.to_f32(params.scales, scheme.scale_dtype))
    return bool(((scales > 0) & (scales <= dtypes.FLUSHED_F16)).any())


def dense_block(job: LayerJob, block: Block, tag: str) -> NDArray[Any]:
    """Return the weights (N, K) of a block, rounded once to ``tag``."""
    return np.ascontiguousarray(weights_of(job.codes, job.params, block, tag).T)


def weights_of(code_map: CodeMap, params: GroupParams, block: Block, tag: str) -> NDArray[Any]:
    """Return the weights (K, N) of a block, rounded once to ``tag``."""
    codes = bitpack.unpack_rows(code_map.words(block), code_map.out.bits, block.k1 - block.k0)
    zeros = None if params.zeros is None else params.zeros[:, block.n0 : block.n1]
    columns = GroupParams(params.scales[:, block.n0 : block.n1], zeros, params.group)
    return dequantize(codes, columns, code_map.out, tag, block.k0)


def regroup_tasks(
    job: LayerJob, out: OutFiles, report: dict[str, Any], packer: Packer | None = None
) -> list[Task]:
    """Re-quantize a layer in natural row order, a band of columns at a time; scales come last."""
    if job.layout is None:
        raise ValueError("a packed layer needs a layout")
    layout, scheme = formats.get(job.layout), job.plan.scheme
    grid = layout.grid(scheme.bits)
    target = out.tensors[f"{job.plan.name}.{grid.suffix}"]
    quantizer = replace(scheme, sym=True) if job.layer.scheme.sym else scheme
    scales = np.empty((scheme.groups, scheme.out_features), dtypes.numpy_dtype(scheme.scale_dtype))
    zeros = np.full(scales.shape, scheme.midpoint, np.uint8)
    sums = np.zeros(2)

    def whole() -> None:
        width = max(DENSE_CODES // scheme.in_features // 64, 1) * 64
        for n0 in range(0, scheme.out_features, width):
            band = Block(0, scheme.in_features, n0, min(n0 + width, scheme.out_features))
            found = rtn.quantize(weights_of(job.codes, job.params, band, "F32"), quantizer)
            scales[:, band.n0 : band.n1] = found.scales
            if found.zeros is not None:
                zeros[:, band.n0 : band.n1] = found.zeros
            sums[:] += (found.squared_error, found.squared_norm)
            words = bitpack.pack_rows(found.codes, scheme.bits)
            packed = pack_words(layout, words, scheme.bits, packer)
            row, col = _place(grid, 0, n0)
            out.write_rect(target, row, col, _inside(target, row, col, packed))
        params = GroupParams(scales, None if scheme.sym else zeros, None)
        for suffix, array in layout.encode_params(params, scheme).items():
            out.write(out.tensors[f"{job.plan.name}.{suffix}"], 0, array)
        report["relative_error"] = float(np.sqrt(sums[0] / sums[1])) if sums[1] else 0.0

    return [whole]


def zero_tasks(out: OutFiles, target: OutTensor) -> list[Task]:
    """Write a tensor of zero bytes."""
    return [lambda: out.write(target, 0, np.zeros(target.nbytes, np.uint8))]


def encoded(job: LayerJob) -> dict[str, NDArray[Any]]:
    """Return the small tensors of a packed layer in the target's form, scales in their stored dtype."""
    if job.layout is None:
        raise ValueError("a packed layer needs a layout")
    made: dict[str, NDArray[Any]] = formats.get(job.layout).encode_params(job.params, job.plan.scheme)
    return made
