"""Decisions about values: scales in a dtype the target stores, biases, settings left behind."""

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from w4pack.convert.core import dtypes, families, params
from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import Refused, SourceError, W4PackError
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.planning.decisions import LayerPlan, State
from w4pack.convert.source.layers import SourceLayer


def carried_settings(state: State) -> None:
    """Say which settings only the source's own dialect can carry."""
    claims = state.source.claims
    if claims is None or claims.method == state.target.dialect:
        return
    for key, value in (claims.carried or {}).items():
        state.warnings.append(
            Warning_(
                "setting-dropped",
                f"{state.source.quant_file}: {key}",
                f"a target that carries it ({claims.method})",
                f"{str(value)[:80]}; dropped",
            )
        )


def _scale_tensor(layer: SourceLayer) -> TensorInfo:
    return next(t for s, t in layer.tensors.items() if s in ("scales", "s", "weight_scale"))


def scales(state: State) -> None:
    """Check that scales are finite, and choose the dtype in which each layer's are stored."""
    for name, layer in state.layers.items():
        info = _scale_tensor(layer)
        values = state.source.checkpoint.read(info.name)
        bad = dtypes.nonfinite(values, info.dtype)
        if bad.any():
            first = [int(i) for i in next(zip(*bad.nonzero(), strict=True))]
            state.problems.append(
                SourceError(
                    "a scale is not a finite number",
                    code="nonfinite-scale",
                    where=f"{info.name}{first}",
                    expected="finite scales",
                    found=f"{int(bad.sum())} of {values.size} not finite",
                )
            )
            continue
        try:
            tag = _stored_tag(values, info, state)
            state.plans[name] = replace(
                state.plans[name], scheme=replace(state.plans[name].scheme, scale_dtype=tag)
            )
        except W4PackError as err:
            state.problems.append(err)


def _stored_tag(values: NDArray[Any], info: TensorInfo, state: State) -> str:
    """Return the tag under which scales are stored in the output; the source's where the target takes it."""
    if info.dtype in state.target.scale_dtypes:
        return info.dtype
    for tag in state.target.scale_dtypes:
        if params.exact_in(values, info.dtype, tag):
            return tag
    tag = state.target.scale_dtypes[0]
    if state.options.round_scales and not params.rounding_loses_a_scale(values, info.dtype, tag):
        return tag
    group, column, value = params.first_inexact(values, info.dtype, tag)
    taken = " or ".join(dtypes.TORCH_NAMES[t] for t in state.target.scale_dtypes)
    raise Refused(
        f"{dtypes.TORCH_NAMES[info.dtype]} scales do not fit {taken} exactly",
        code="scale-dtype",
        where=f"{info.name}[{group}, {column}]",
        expected=f"scales that {taken} holds bit for bit",
        found=repr(value),
        hint="`--round-scales` rounds them (reported, not lossless; still refused where a scale would become "
        "0 or infinite), `--to dense` computes from them as they are",
    )


def is_rounded(name: str, plan: LayerPlan, state: State) -> bool:
    """Tell whether ``--round-scales`` changes a scale of this layer."""
    source_tag = state.layers[name].scheme.scale_dtype
    if plan.action == "dense" or plan.scheme.scale_dtype == source_tag or not state.options.round_scales:
        return False
    values = state.source.checkpoint.read(_scale_tensor(state.layers[name]).name)
    return not params.exact_in(values, source_tag, plan.scheme.scale_dtype)


def biases(state: State) -> None:
    """Compare biases with the architecture: none may be missing; extra ones are kept, left out or refused."""
    for name, layer in state.layers.items():
        expected = families.has_bias(state.source.config, name)
        if layer.bias is None:
            if expected:
                state.problems.append(
                    SourceError(
                        "a bias is missing",
                        code="missing-tensor",
                        where=f"{name}.bias",
                        expected="a bias, as the model's architecture has one here",
                        found="none",
                    )
                )
        elif expected is False:
            _extra_bias(name, layer.bias, state)


def _extra_bias(name: str, info: TensorInfo, state: State) -> None:
    if not state.source.checkpoint.read(info.name).view("u1").any():
        state.dropped.append(info.name)
        del state.dense[info.name]
    elif not state.target.extra_bias and state.target.layout is not None:
        state.problems.append(
            Refused(
                "the architecture has no bias here, so engines would not apply it",
                code="extra-bias",
                where=info.name,
                expected="no bias, or one of zeros",
                found="values that are not zero",
                hint="`--to marlin` keeps and applies it",
            )
        )
