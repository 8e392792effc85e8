"""The plan: every byte of the output and where it comes from, fixed from headers and small tensors alone.

Dry run, estimate, execution, resume, verification and unpacking read this one value. It is plain data: it
goes to JSON and back, and its digest identifies the job.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, cast

from w4pack import __version__
from w4pack.convert import dialects, formats
from w4pack.convert.core import dtypes
from w4pack.convert.core.facts import DenseFacts, LayerFacts, ModelFacts, Warning_
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.files.shards import Shard, new_tensor, place, plan_shards
from w4pack.convert.files.tensorfile import TensorInfo, tensor_nbytes
from w4pack.convert.planning.decide import decide
from w4pack.convert.planning.decisions import DensePlan, LayerPlan
from w4pack.convert.planning.limits import limits
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.record import from_plain, to_plain
from w4pack.convert.planning.rotation import decide_rotation
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.source import online
from w4pack.convert.source.detect import Source

FORMAT_VERSION = 1
DISK_BASE = 1 << 20  # bytes for small files
DISK_PER_TENSOR = 2048  # bytes for a tensor in headers, manifest and journal
EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "wpe",
    "embed_in",
    "word_embeddings",
    "embed_positions",
    "tok_embeddings",
)


@dataclass(frozen=True, slots=True)
class OutTensor:
    """One tensor of the output: dtype tag, shape, shard file, offset in it and size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """One step: ``copy`` a tensor's bytes, rebuild a ``dense`` tensor, write ``zeros``, make a ``layer``, or
    make a tensor of the ``rotated`` model.

    source   name of a tensor (copy, dense), of a module (layer), or of the tensor itself (rotated)
    outputs  names of the tensors it makes
    """

    kind: Literal["copy", "dense", "zeros", "layer", "rotated"]
    source: str
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Identity of one source file.

    header  sha256 of a weight file's first bytes, of every other file's whole content
    sha256  of the whole file, only with ``--strict``
    """

    name: str
    size: int
    header: str
    sha256: str | None


@dataclass(frozen=True)
class Plan:
    """Everything that decides the output's bytes.

    options         those that differ from their defaults
    origin          Hub id and revision, or None for a folder (a local path is never recorded)
    quant_config    the block that replaces the source's, or None
    config_changes  other top-level keys of config.json that change
    rotation        the rotations of the weights, with their digests; None: they are not rotated
    quantization    what decides the codes beside the options (calibration, device); None: none are chosen
    """

    version: str
    target: str
    options: Mapping[str, Any]
    origin: Mapping[str, str] | None
    files: tuple[SourceFile, ...]
    layers: tuple[LayerPlan, ...]
    dense: tuple[DensePlan, ...]
    dropped: tuple[str, ...]
    config_changes: Mapping[str, Any]
    quant_config: Mapping[str, Any] | None
    tensors: tuple[OutTensor, ...]
    ops: tuple[Op, ...]
    lossless: bool
    source_bytes: int
    rotation: Mapping[str, Any] | None = None
    quantization: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        value: dict[str, Any] = to_plain(self)
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Plan":
        """Rebuild a plan. Raises ValueError on anything but the result of ``to_json``."""
        return from_plain(cls, value)

    @cached_property
    def digest(self) -> str:
        """sha256 over the plan's JSON, item by item: equal digests mean equal bytes from equal source data.

        Hashes of source files are left out: a run with ``--strict`` is the same job as one without.
        """
        sha = hashlib.sha256()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "files":
                value = tuple(replace(f, sha256=None) for f in value)
            sha.update(f"\n{field.name}".encode())
            for item in value if isinstance(value, tuple) else (value,):
                sha.update(b"\n" + json.dumps(to_plain(item), sort_keys=True, separators=(",", ":")).encode())
        return sha.hexdigest()

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the output needs at most: tensors, headers, and the records of manifest and journal."""
        return self.output_bytes + DISK_BASE + DISK_PER_TENSOR * len(self.tensors)

    def shards(self) -> list[Shard]:
        """Rebuild the shard files with their headers."""
        by_file: dict[str, list[TensorInfo]] = {}
        for t in self.tensors:
            by_file.setdefault(t.shard, []).append(
                TensorInfo(t.name, t.dtype, t.shape, t.shard, t.offset, t.nbytes)
            )
        return [place(name, infos) for name, infos in by_file.items()]


def layer_specs(
    plan: LayerPlan, target_layout: str | None, dense_tag: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return suffix -> (dtype, shape) of the tensors a layer becomes."""
    scheme = plan.scheme
    if plan.action == "dense" or target_layout is None:
        return {"weight": (dense_tag, (scheme.out_features, scheme.in_features))}
    specs: dict[str, tuple[str, tuple[int, ...]]] = formats.get(target_layout).specs(scheme)
    return specs


def packed_bytes(scheme: QuantScheme, layout: str) -> int:
    """Return the bytes of a linear in a layout: all its tensors, padding included, but for the bias."""
    specs: dict[str, tuple[str, tuple[int, ...]]] = formats.get(layout).specs(scheme)
    return sum(tensor_nbytes(dtype, shape) for dtype, shape in specs.values())


def placed(
    tensors: list[TensorInfo], options: ConvertOptions, groups: Mapping[str, str]
) -> tuple[OutTensor, ...]:
    """Return where each tensor lies: shards of the size that is asked for, those of a group in one."""
    shards = plan_shards(tensors, options.max_shard_size, groups)
    return tuple(
        OutTensor(i.name, i.dtype, i.shape, s.name, i.offset, i.nbytes) for s in shards for i in s.tensors
    )


def make_plan(
    source: Source, options: ConvertOptions, origin: Mapping[str, str] | None, files: tuple[SourceFile, ...]
) -> tuple[Plan, tuple[Warning_, ...]]:
    """Plan a conversion. Returns the plan and every warning. Raises the refusals, all of them at once."""
    options.check()
    rotation, made = None, cast("Mapping[str, str]", {})
    if options.rotate == "none":
        decisions = decide(source, options)
    else:
        decisions, rotation, made = decide_rotation(source, options)
    target = TARGETS[options.to]
    tensors: list[TensorInfo] = []
    groups: dict[str, str] = {}
    ops: list[Op] = []
    infos = source.checkpoint.tensors
    for dense in decisions.dense:
        info = infos[dense.source]
        if dense.name in made:
            tensors.append(new_tensor(dense.name, made[dense.name], dense.shape))
            ops.append(Op("rotated", dense.name, (dense.name,)))
            continue
        tensors.append(new_tensor(dense.name, info.dtype, dense.shape))
        kind: Literal["copy", "dense"] = "copy" if dense.is_copy and dense.shape == info.shape else "dense"
        ops.append(Op(kind, dense.source, (dense.name,)))
    for layer in decisions.layers:
        names = []
        for suffix, (dtype, shape) in layer_specs(
            layer, target.layout, dense_tag(source, layer, options)
        ).items():
            names.append(f"{layer.name}.{suffix}")
            tensors.append(new_tensor(names[-1], dtype, shape))
        groups.update(dict.fromkeys([*names, f"{layer.name}.bias"], layer.name))
        ops.append(Op("layer", layer.source, tuple(names)))
    outputs = placed(tensors, options, groups)
    place_of = {t.name: (t.shard, t.offset) for t in outputs}
    ops.sort(key=lambda op: min(place_of[name] for name in op.outputs))
    plan = Plan(
        version=__version__,
        target=options.to,
        options=options.chosen(),
        origin=origin,
        files=files,
        layers=decisions.layers,
        dense=decisions.dense,
        dropped=decisions.dropped,
        config_changes=_config_changes(source, options, decisions.config_changes),
        quant_config=target_settings(decisions.layers, decisions.dense, options, _carried(source, options)),
        tensors=outputs,
        ops=tuple(ops),
        lossless=decisions.lossless,
        source_bytes=sum(t.nbytes for t in infos.values()),
        rotation=None if rotation is None else rotation.to_json(),
    )
    return plan, (*source.warnings, *decisions.warnings, *limits(options, planned_facts(source, plan)))


def dense_tag(source: Source, layer: LayerPlan, options: ConvertOptions) -> str:
    """Return the dtype tag of a dequantized layer: ``--dtype``, else the model's dtype, else the scales'."""
    if options.dtype is not None:
        return dtypes.TAG_OF_NAME[options.dtype]
    for key in ("dtype", "torch_dtype"):
        named = source.config.get(key)
        if isinstance(named, str) and named in dtypes.TAG_OF_NAME:
            return dtypes.TAG_OF_NAME[named]
    return layer.scheme.scale_dtype


def _config_changes(source: Source, options: ConvertOptions, sizes: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = dict(sizes)
    if options.to == "dense" and options.dtype is not None:
        for key in ("dtype", "torch_dtype"):
            if key in source.config:
                changes[key] = options.dtype
        if not any(key in source.config for key in ("dtype", "torch_dtype")):
            changes["dtype"] = options.dtype
    return changes


def stored_size(layout: str, scheme: QuantScheme) -> tuple[int, int]:
    """Return (stored in_features, stored out_features): more than the real ones only where a layout pads."""
    pad = getattr(formats.get(layout), "stored_size", None)
    if pad is None:
        return scheme.in_features, scheme.out_features
    return pad(scheme.in_features), pad(scheme.out_features)


def _carried(source: Source, options: ConvertOptions) -> Mapping[str, Any]:
    """Return the settings that a target of the source's own dialect takes over."""
    if source.claims is None or source.claims.method != TARGETS[options.to].dialect:
        return {}
    return source.claims.carried or {}


def target_settings(
    layers: tuple[LayerPlan, ...],
    dense: tuple[DensePlan, ...],
    options: ConvertOptions,
    carried: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of the output, None for a target without one."""
    target = TARGETS[options.to]
    if target.layout is None or target.dialect is None:
        return None
    packed = {p.name: p.scheme for p in layers if p.action != "dense"}
    left = [p.name for p in layers if p.action == "dense"]
    plain = [
        d.name.removesuffix(".weight") for d in dense if d.name.endswith(".weight") and len(d.shape) == 2
    ]
    linears = [n for n in plain if n.rpartition(".")[2] not in EMBEDDINGS]
    stored = {n: stored_size(target.layout, s) for n, s in packed.items()}
    padded = {
        n: size for n, size in stored.items() if size != (packed[n].in_features, packed[n].out_features)
    }
    model = dialects.TargetModel(packed, tuple(sorted({*left, *linears})), padded, carried, __version__)
    dialect = dialects.get(target.dialect)
    block: dict[str, Any] = (
        dialect.write_legacy_marlin(model) if target.layout == "marlin-legacy" else dialect.write(model)
    )
    return block


def output_config(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return config.json of the output: the source's keys in their order, changed where the plan says so."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if key == "compression_config":
            continue
        if key == "quantization_config":
            if plan.quant_config is not None:
                result[key] = dict(plan.quant_config)
        else:
            result[key] = plan.config_changes.get(key, value)
    if plan.quant_config is not None and "quantization_config" not in result:
        result["quantization_config"] = dict(plan.quant_config)
    for key, value in plan.config_changes.items():
        result.setdefault(key, value)
    return result


def planned_facts(source: Source, plan: Plan) -> ModelFacts:
    """Describe the output as if it lay in a folder: engine rules are applied to it before it is written."""
    return facts_of(source.config, plan)


def facts_of(config: Mapping[str, Any], plan: Plan) -> ModelFacts:
    """Describe the output of a plan; ``config``: the source's config.json."""
    target = TARGETS[plan.target]
    stored_as = {t.name: t.dtype for t in plan.tensors}
    layers, dense = [], [DenseFacts(d.name, stored_as[d.name], d.shape) for d in plan.dense]
    biases = {d.name for d in plan.dense if d.name.endswith(".bias")}
    for p in plan.layers:
        if p.action == "dense" or target.layout is None:
            dense.append(
                DenseFacts(
                    f"{p.name}.weight", p.scheme.scale_dtype, (p.scheme.out_features, p.scheme.in_features)
                )
            )
            continue
        s = p.scheme
        stored = stored_size(target.layout, s)
        layers.append(
            LayerFacts(
                p.name,
                target.layout,
                s.bits,
                s.group_size,
                s.sym,
                "groups" if s.act_order else "none",
                s.in_features,
                s.out_features,
                *stored,
                s.scale_dtype,
                f"{p.name}.bias" in biases,
                nbytes=packed_bytes(s, target.layout),
            )
        )
    files = ("config.json", *sorted({t.shard for t in plan.tensors}))
    facts = ModelFacts(
        config=output_config(config, plan),
        quant_config=plan.quant_config,
        quant_file="config.json" if plan.quant_config else None,
        layers=tuple(layers),
        dense=tuple(dense),
        total_bytes=plan.output_bytes,
        files=files,
        weight_files=files[1:],
    )
    return replace(facts, unfit=online.shown(online.planned_problems(facts)))
