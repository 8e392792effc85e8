"""What the output of a plan holds and says: its tensors' sizes, its config, the facts engines would find."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from w4pack import __version__
from w4pack.convert import dialects, formats
from w4pack.convert.core.facts import DenseFacts, LayerFacts, ModelFacts
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.files.tensorfile import tensor_nbytes
from w4pack.convert.planning.decisions import DensePlan, LayerPlan
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.source import online
from w4pack.convert.source.detect import Source

EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "wpe",
    "embed_in",
    "word_embeddings",
    "embed_positions",
    "tok_embeddings",
)


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


def stored_size(layout: str, scheme: QuantScheme) -> tuple[int, int]:
    """Return (stored in_features, stored out_features): more than the real ones only where a layout pads."""
    pad = getattr(formats.get(layout), "stored_size", None)
    if pad is None:
        return scheme.in_features, scheme.out_features
    return pad(scheme.in_features), pad(scheme.out_features)


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
