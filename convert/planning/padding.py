"""``--pad-for-tp``: a larger intermediate size, exactly: zero columns in gate and up, idle rows in down."""

import math
from collections.abc import Sequence
from dataclasses import replace

from w4pack.convert.core import families
from w4pack.convert.core.scheme import ONE_GROUP
from w4pack.convert.errors import Refused
from w4pack.convert.planning.decisions import State

UNPADDED = (
    "without `--pad-for-tp` it is converted; `w4pack check OUT --tp 1,2,4,8` says how far it can be cut"
)
PAD_TILE = 128  # in_features per rank that every engine's kernels take


def pad_for_tp(state: State) -> None:
    """Pad the intermediate size of every MLP so that each rank gets whole tiles and groups."""
    ranks = state.options.pad_for_tp
    if ranks is None:
        return
    if not state.mlps:
        state.problems.append(
            Refused(
                "no MLP was found whose intermediate size could be padded",
                code="pad-for-tp",
                where="--pad-for-tp",
                expected="gate_proj, up_proj and down_proj (or w1, w3, w2)",
                found="none",
                hint=UNPADDED,
            )
        )
        return
    by_key: dict[str, list[families.IntermediateSet]] = {}
    for mlp in state.mlps:
        key = _pad_key(mlp, state)
        if key is not None:
            by_key.setdefault(key.path[0], []).append(mlp)
    for name, mlps in by_key.items():
        _pad_sets(name, mlps, ranks, state)


def _in_features(module: str, state: State) -> int:
    if module in state.layers:
        return state.layers[module].scheme.in_features
    return state.dense[f"{module}.weight"].shape[1]


def _pad_key(mlp: families.IntermediateSet, state: State) -> families.SizeKey | None:
    """Return the config key of an MLP's intermediate size; a problem if none, or if padding is not exact."""
    size = _in_features(mlp.down, state)
    key = families.intermediate_size(state.source.config, mlp.kind)
    between = families.between(state.source.checkpoint.tensors, mlp)
    if key is None or key.value * key.times != size or len(key.path) != 1 or key.times != 1:
        found = "no such key" if key is None else f"{'.'.join(key.path)} = {key.value}"
        state.problems.append(
            Refused(
                "no key of config.json can be changed to a padded intermediate size",
                code="pad-for-tp",
                where=mlp.down,
                expected=f"a key that holds {size}",
                found=found,
                hint=UNPADDED,
            )
        )
        return None
    if between:
        state.problems.append(
            Refused(
                "a tensor between the matrices of an MLP forbids padding",
                code="pad-for-tp",
                where=between[0],
                expected="gate, up and down alone",
                found="another reader of the intermediate activation",
                hint=UNPADDED,
            )
        )
        return None
    return key


def _pad_sets(key: str, mlps: Sequence[families.IntermediateSet], ranks: int, state: State) -> None:
    unit = PAD_TILE
    for mlp in mlps:
        size = state.plans[mlp.down].scheme.group_size if mlp.down in state.plans else ONE_GROUP
        unit = math.lcm(unit, size) if size != ONE_GROUP else unit
    size = _in_features(mlps[0].down, state)
    padded = -(-size // (ranks * unit)) * ranks * unit
    if padded == size:
        return
    state.config_changes[key] = padded
    for mlp in mlps:
        _pad_module(mlp.down, padded, None, state)
        for producer in mlp.producers:
            _pad_module(
                producer, None, padded * (2 if mlp.halved else 1), state, halves=2 if mlp.halved else 1
            )


def _pad_module(
    module: str, in_features: int | None, out_features: int | None, state: State, halves: int = 1
) -> None:
    if module in state.plans:
        scheme = state.plans[module].scheme
        scheme = replace(
            scheme,
            in_features=in_features or scheme.in_features,
            out_features=out_features or scheme.out_features,
        )
        state.note(module, f"padded for TP {state.options.pad_for_tp}", scheme=scheme, halves=halves)
    weight, bias = f"{module}.weight", f"{module}.bias"
    if weight in state.dense:
        rows, cols = state.dense[weight].shape
        state.dense[weight] = replace(
            state.dense[weight], shape=(out_features or rows, in_features or cols), halves=halves
        )
    if bias in state.dense and out_features:
        state.dense[bias] = replace(state.dense[bias], shape=(out_features,), halves=halves)
