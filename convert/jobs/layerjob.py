"""One layer's work: its small tensors, made whole, and the map by which its codes are made block by block.

``execute`` writes what this module makes, ``verify`` compares what was written with it: both see the same
values, and neither knows a format.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert import formats
from w4pack.convert.core.order import natural_group, sorted_rows
from w4pack.convert.core.params import PADDING, Reorder, transform
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.jobs.codes import CodeMap, CodeReader
from w4pack.convert.planning.decisions import LayerPlan
from w4pack.convert.source import orders
from w4pack.convert.source.layers import SourceLayer
from w4pack.convert.source.orders import ORDER_SUFFIXES, group_of_act_perm


@dataclass(frozen=True, slots=True, eq=False)
class LayerJob:
    """Everything that is needed to write one layer.

    params  of the output, natural order, with the plan's padding (not the artifact's own)
    codes   how codes are made; its ``out`` is the output's scheme
    """

    plan: LayerPlan
    layer: SourceLayer
    source_params: GroupParams
    params: GroupParams
    codes: CodeMap
    layout: str | None


def group_map(checkpoint: Checkpoint, layer: SourceLayer) -> NDArray[np.int32] | None:
    """Return the group map of a layer's natural rows, or None where they are in order."""
    if layer.order.kind in ("none", "trivial"):
        return None
    scheme = layer.scheme
    if "act_perm" in layer.tensors:
        info = layer.tensors["act_perm"]
        return group_of_act_perm(checkpoint.read(info.name), scheme.in_features, scheme.group_size, info.name)
    info = next(layer.tensors[s] for s in ORDER_SUFFIXES if s in layer.tensors)
    return orders.normalise(checkpoint.read(info.name), scheme.in_features, scheme.groups, info.name)


def stored_place(checkpoint: Checkpoint, layer: SourceLayer) -> NDArray[np.int32] | None:
    """Return where each natural row is stored, for layouts that store rows sorted; None: in place."""
    if "act_perm" not in layer.tensors:
        return None
    perm = checkpoint.read(layer.tensors["act_perm"].name)
    place = np.empty(perm.shape[0], np.int32)
    place[perm] = np.arange(perm.shape[0], dtype=np.int32)
    return place


def read_small(checkpoint: Checkpoint, layer: SourceLayer) -> dict[str, NDArray[Any]]:
    """Read every tensor of a layer but its codes and its order: local suffix -> array."""
    skip = (*ORDER_SUFFIXES, "act_perm")
    return {s: checkpoint.read(t.name) for s, t in layer.small().items() if s not in skip}


def source_params(checkpoint: Checkpoint, layer: SourceLayer) -> GroupParams:
    """Decode a layer's scales and zero points, with its group map."""
    plain = replace(layer.scheme, act_order=False)
    decoded: GroupParams = layer.module.decode_params(read_small(checkpoint, layer), plain, layer.zeros.kind)
    return GroupParams(decoded.scales, decoded.zeros, group_map(checkpoint, layer))


def row_map(group: NDArray[np.int32] | None, plan: LayerPlan, in_features: int) -> NDArray[np.int32] | None:
    """Return the source row of each output row, or None: in order (cut or padded at the end)."""
    if plan.rows == "natural" or group is None:
        return None
    rows = np.full(plan.scheme.in_features, PADDING, np.int32)
    rows[:in_features] = sorted_rows(group)
    return rows


def column_map(
    order: NDArray[np.int32] | None, halves: int, available: int, wanted: int
) -> NDArray[np.int32] | None:
    """Return the source column of each output column, PADDING where there is none; None: in order.

    order   permutation of one half's columns, or None
    halves  2 where gate and up are stacked along N: each half is permuted and padded by itself
    """
    if order is None and (halves == 1 or available == wanted):
        return None
    half, size = available // halves, wanted // halves
    within = order if order is not None else np.arange(half, dtype=np.int32)
    cols = np.full(wanted, PADDING, np.int32)
    for h in range(halves):
        cols[h * size : h * size + half] = within + h * half
    return cols


def job_of(
    checkpoint: Checkpoint, layers: Mapping[str, SourceLayer], plan: LayerPlan, layout: str | None
) -> LayerJob:
    """Prepare a layer of ``layers``: read its small tensors and work out the output's."""
    layer = layers[plan.source]
    scheme = layer.scheme
    params = source_params(checkpoint, layer)
    rows = row_map(params.group, plan, scheme.in_features)
    order = fold_order(checkpoint, layers, plan.cols_from)
    cols = column_map(order, plan.halves, scheme.out_features, plan.scheme.out_features)
    out = plan.scheme
    keeps_map = plan.action != "pack" and params.group is not None
    out_group = _padded_group(params.group, rows, out) if keeps_map and params.group is not None else None
    dense_like = replace(out, group_size=scheme.group_size, act_order=False) if plan.action != "pack" else out
    moved = params if out.bits != scheme.bits and plan.action == "pack" else None
    kept = (
        params if moved is None else replace(params, zeros=None)
    )  # widened: zero points move into the codes
    made = transform(kept, scheme, dense_like, Reorder(rows, cols), out_group)
    if out.act_order and rows is not None:
        made = GroupParams(made.scales, made.zeros, _regrouped(rows, out))
    zeros = _padded_zeros(made, dense_like, layout if plan.action == "pack" else None)
    reader = CodeReader(checkpoint, layer, stored_place(checkpoint, layer))
    codes = CodeMap(reader, dense_like, rows, cols, zeros, made.group if keeps_map else None, moved=moved)
    return LayerJob(plan, layer, params, made, codes, layout if plan.action != "dense" else None)


def fold_order(
    checkpoint: Checkpoint, layers: Mapping[str, SourceLayer], down: str | None
) -> NDArray[np.int32] | None:
    """Return the permutation that a fold moves into a down projection's producers, or None."""
    if down is None:
        return None
    group = group_map(checkpoint, layers[down])
    return sorted_rows(group) if group is not None else None


def _padded_group(
    group: NDArray[np.int32], rows: NDArray[np.int32] | None, out: QuantScheme
) -> NDArray[np.int32]:
    """Return the group of each output row, 0 for padding: for outputs that keep the source's groups."""
    if rows is not None:
        return np.where(rows == PADDING, 0, group[rows]).astype(np.int32)
    padded = np.zeros(out.in_features, np.int32)
    padded[: group.shape[0]] = group
    return padded


def _regrouped(rows: NDArray[np.int32], out: QuantScheme) -> NDArray[np.int32]:
    """Return the group map of natural rows for an output whose sorted rows fall into equal groups."""
    group = np.empty(out.in_features, np.int32)
    group[rows] = natural_group(out.in_features, out.group_size)
    return group


def _padded_zeros(params: GroupParams, scheme: QuantScheme, layout: str | None) -> NDArray[np.uint8]:
    """Return zero points over the stored extent: what padded codes are set to."""
    pad_params = getattr(formats.get(layout), "pad_params", None) if layout is not None else None
    if pad_params is not None:  # only the artifact pads
        padded: NDArray[np.uint8] = pad_params(params, scheme)[1]
        return padded
    if params.zeros is not None and not scheme.sym:
        return params.zeros
    return np.full((scheme.groups, scheme.out_features), scheme.midpoint, np.uint8)
