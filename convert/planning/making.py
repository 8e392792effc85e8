"""Makes the plan of a conversion: decisions about layers become tensors, their places, and operations."""

from collections.abc import Mapping
from typing import Any, Literal, cast

from w4pack import __version__
from w4pack.convert.core import dtypes
from w4pack.convert.core.facts import Warning_
from w4pack.convert.files.shards import new_tensor, plan_shards
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.planning.decide import decide
from w4pack.convert.planning.decisions import LayerPlan
from w4pack.convert.planning.limits import limits
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.output import layer_specs, planned_facts, target_settings
from w4pack.convert.planning.plan import Op, OutTensor, Plan, SourceFile
from w4pack.convert.planning.rotation import decide_rotation
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.source.detect import Source


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


def _carried(source: Source, options: ConvertOptions) -> Mapping[str, Any]:
    """Return the settings that a target of the source's own dialect takes over."""
    if source.claims is None or source.claims.method != TARGETS[options.to].dialect:
        return {}
    return source.claims.carried or {}
