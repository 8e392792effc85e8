"""From the artifact back to its source: tensors, names, config, side files; proved before anything appears.

The artifact's manifest says how each layer was written; small tensors that cannot be made again are in it
whole. What was lossy (re-quantized, dequantized, rounded) cannot go back, and is refused by name.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack import __version__
from w4pack.convert import formats
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.errors import Refused, VerifyError
from w4pack.convert.files.checkpoint import Checkpoint, open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.shards import index_json, new_tensor
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.jobs import manifest, sidefiles, work
from w4pack.convert.jobs.codes import CodeMap, CodeReader, blocks
from w4pack.convert.jobs.identity import source_files
from w4pack.convert.jobs.layerjob import column_map, source_params, stored_place
from w4pack.convert.jobs.outfiles import OutFiles
from w4pack.convert.jobs.places import tell_discarded
from w4pack.convert.jobs.rebuild import (
    LayerRecord,
    group_of,
    inverse,
    kept_array,
    rebuild_small,
    source_columns,
)
from w4pack.convert.jobs.records import DenseRecord, Records, records_of
from w4pack.convert.jobs.running import Running
from w4pack.convert.jobs.staged import run_plan
from w4pack.convert.jobs.verify import refuse_damaged
from w4pack.convert.jobs.writing import write_file
from w4pack.convert.planning.making import placed
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Op, OutTensor, Plan
from w4pack.convert.source import orders
from w4pack.convert.source.detect import Source
from w4pack.convert.source.layers import SourceLayer
from w4pack.convert.source.zeros import ZeroReading

TARGET = "unpack"


def unpack_plan(records: Records, checkpoint: Checkpoint, *, strict: bool) -> Plan:
    """Plan every tensor of the source's form. ``strict``: the plan holds the artifact's sha256."""
    tensors: list[TensorInfo] = []
    groups: dict[str, str] = {}
    ops: list[Op] = []
    for item in records.dense:
        info = checkpoint.tensors[item.name]
        tensors.append(new_tensor(item.source, info.dtype, item.source_shape))
        same = item.rows_from is None and tuple(item.source_shape) == info.shape
        ops.append(Op("copy" if same else "dense", item.name, (item.source,)))
    for gone in records.dropped:
        tensors.append(new_tensor(gone.name, gone.dtype, gone.shape))
        ops.append(Op("zeros", gone.name, (gone.name,)))
    for name, rec in records.layers.items():
        kept = (rec.codes, *rec.small)
        tensors += [new_tensor(f"{rec.name}.{k.suffix}", k.dtype, k.shape) for k in kept]
        groups.update({f"{rec.name}.{k.suffix}": rec.name for k in kept} | {f"{rec.name}.bias": rec.name})
        ops.append(Op("layer", name, tuple(f"{rec.name}.{k.suffix}" for k in kept)))
    return Plan(
        version=__version__,
        target=TARGET,
        options={},
        origin=None,
        files=source_files(checkpoint, strict=strict),
        layers=(),
        dense=(),
        dropped=(),
        config_changes={},
        quant_config=None,
        tensors=placed(tensors, ConvertOptions(), groups),
        ops=tuple(ops),
        lossless=True,
        source_bytes=sum(t.nbytes for t in checkpoint.tensors.values()),
    )


class UnpackRecipe:
    """Does the operations of an unpack plan."""

    def __init__(self, records: Records, checkpoint: Checkpoint) -> None:
        self.records = records
        self.checkpoint = checkpoint
        self.dense = {item.name: item for item in records.dense}

    def start(self, op: Op, out: OutFiles) -> work.OpRun:
        """See ``work.Recipe``."""
        run = work.OpRun(op, [])
        target = out.tensors[op.outputs[0]]
        if op.kind == "copy":
            run.tasks = work.copy_tasks(self.checkpoint, op.source, out, target, run.report)
        elif op.kind == "zeros":
            run.tasks = work.zero_tasks(out, target)
        elif op.kind == "dense":
            run.tasks = [lambda: out.write(target, 0, self._dense(self.dense[op.source], target))]
        else:
            run.tasks = self._layer(op.source, out)
        return run

    def _dense(self, item: DenseRecord, target: OutTensor) -> NDArray[Any]:
        order = self.records.order_of(item.rows_from)
        values = self.checkpoint.read(item.name)
        rows = column_map(order, item.halves, target.shape[0], values.shape[0])
        back = None if rows is None else inverse(rows, target.shape[0])
        return work.reordered(values, back, target.shape)

    def _layer(self, name: str, out: OutFiles) -> list[work.Task]:
        rec = self.records.layers[name]
        small, code_map = self.parts(name)
        return work.pack_tasks(code_map, rec.layout, out, rec.name, small)

    def parts(self, name: str) -> tuple[dict[str, NDArray[Any]], CodeMap]:
        """Return the source's small tensors and the map of its codes, from the artifact's layer ``name``."""
        rec = self.records.layers[name]
        layer = self.records.made[name]
        params = source_params(self.checkpoint, layer)
        order = self.records.order_of(rec.name) if rec.rows == "sorted" else None
        cols = source_columns(rec, self.records.order_of(rec.cols_from), layer.scheme.out_features)
        small = rebuild_small(rec, params, layer.scheme, order, cols)
        small |= {k.suffix: kept_array(k, f"{name}.{k.suffix}") for k in rec.small if k.data is not None}
        wanted = {k.suffix for k in rec.small}
        return {s: a for s, a in small.items() if s in wanted}, self._codes(rec, layer, order, cols, small)

    def _codes(
        self,
        rec: LayerRecord,
        layer: SourceLayer,
        order: NDArray[np.int32] | None,
        cols: NDArray[np.int32] | None,
        small: Mapping[str, NDArray[Any]],
    ) -> CodeMap:
        out = replace(rec.scheme, act_order=False)
        rows = inverse(order, out.in_features) if order is not None else None
        reader = CodeReader(self.checkpoint, layer, stored_place(self.checkpoint, layer))
        restored = None
        if out.bits != layer.scheme.bits:
            decoded = formats.get(rec.layout).decode_params(small, out, rec.zero_kind)
            restored = GroupParams(decoded.scales, decoded.zeros, group_of(rec))
        if "act_perm" in small:  # the source stored its rows sorted
            perm = small["act_perm"]
            rows = perm.astype(np.int32) if rows is None else rows[perm]
        zeros = _fill(formats.get(rec.layout), small, out)
        return CodeMap(reader, out, rows, cols, zeros, None, restored=restored)


def _fill(layout: ModuleType, small: Mapping[str, NDArray[Any]], scheme: QuantScheme) -> NDArray[np.uint8]:
    """Return the zero points that padded codes take, for a layout that pads; elsewhere nothing is padded."""
    if not hasattr(layout, "pad_params"):
        return np.zeros((scheme.groups, scheme.out_features), np.uint8)
    padded: NDArray[np.uint8] = layout.pad_params(layout.decode_params(small, scheme, "plain"), scheme)[1]
    return padded


def prove(records: Records, recipe: UnpackRecipe, folder: Path, hashes: Mapping[str, str]) -> int:
    """Compare what was written with the artifact before it is published. Returns the tensors proved.

    Small and plain tensors are compared with the hashes taken from the source while converting; codes are
    read back through the source's layout and compared with the artifact's, and with the source's own hash
    if the conversion was strict. Raises VerifyError.
    """
    for item in records.dense:
        _same(item.source, item.sha256, hashes[item.source])
    for rec in records.layers.values():
        for kept in (*rec.small, *((rec.codes,) if rec.codes.sha256 else ())):
            _same(f"{rec.name}.{kept.suffix}", kept.sha256, hashes[f"{rec.name}.{kept.suffix}"])
    with open_checkpoint(LocalStore(folder)) as written:
        for name, rec in records.layers.items():
            _prove_codes(recipe.parts(name)[1], rec, written)
    return len(hashes)


def _same(name: str, wanted: str, found: str) -> None:
    if wanted != found:
        raise VerifyError(
            "an unpacked tensor is not the source's", code="hash", where=name, expected=wanted, found=found
        )


def _prove_codes(code_map: CodeMap, rec: LayerRecord, written: Checkpoint) -> None:
    suffixes = {k.suffix: written.tensors[f"{rec.name}.{k.suffix}"] for k in (rec.codes, *rec.small)}
    zeros = ZeroReading("none", sym=True)
    layer = SourceLayer(rec.name, rec.layout, code_map.out, zeros, orders.NO_ORDER, suffixes, None)
    # as stored on both sides: `code_map` has the rows in the order of the file
    back = CodeMap(CodeReader(written, layer, None), code_map.out, None, None, code_map.zeros, None)
    for block in blocks(
        code_map, layer.module.grid(rec.scheme.bits), rec.scheme.in_features, rec.scheme.out_features
    ):
        if not np.array_equal(code_map.words(block), back.words(block)):
            raise VerifyError("unpacked codes differ from the artifact's", code="codes", where=rec.name)


def unpack_source(source: Source, value: Mapping[str, Any], out: Path, running: Running) -> int:
    """Unpack an artifact to ``out``. Returns the number of tensors, all proved."""
    records_of(value, source)  # what cannot go back is refused before it is read for damage
    refuse_damaged(source.checkpoint, value, running.workers)
    if source.problems:
        raise Refused.together(source.problems)
    records = Records(source, value)
    recipe = UnpackRecipe(records, source.checkpoint)
    plan = unpack_plan(records, source.checkpoint, strict=running.strict)

    def write_rest(folder: Path, written: manifest.Written) -> None:
        shards = plan.shards()
        if len(shards) > 1:
            write_file(folder / "model.safetensors.index.json", index_json(shards))
        for name, text in records.configs.items():
            if name != "config.json":
                write_file(folder / name, text.encode("utf-8", "surrogateescape"))
        _copy_side_files(source.checkpoint, folder, set(records.configs))
        write_file(
            folder / "config.json",
            records.configs.get("config.json", "{}\n").encode("utf-8", "surrogateescape"),
        )
        prove(records, recipe, folder, written.hashes)

    tell_discarded(out, running)
    run_plan(plan, recipe, out, running, write_rest)
    return len(plan.tensors)


def _copy_side_files(checkpoint: Checkpoint, folder: Path, configs: set[str]) -> None:
    for name in checkpoint.side_files:
        if name in (manifest.NAME, sidefiles.CARD) or name in configs:
            continue
        sidefiles.copy_file(
            checkpoint, name, folder / (sidefiles.CARD if name == sidefiles.SOURCE_CARD else name)
        )
