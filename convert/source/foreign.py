"""Tensors of other quantization methods: recognised by name and dtype, and refused with their method named.

A tensor that merely has an odd dtype travels like any other; what is refused is a weight that cannot be
understood without companions (block scales, codebooks, transforms) that no layout here reads.
"""

from collections.abc import Mapping

from w4pack.convert import formats
from w4pack.convert.errors import FROM_16_BIT, Refused, SourceError, W4PackError, name_some
from w4pack.convert.files.tensorfile import TensorInfo

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]

# companion suffix -> the method it gives away
COMPANIONS: dict[str, str] = {
    "weight_scale_inv": "block FP8",
    "absmax": "bitsandbytes",
    "weight.absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "SCB": "bitsandbytes 8 bit",
    "W_q": "HQQ",
    "weight_global_scale": "NVFP4",
    "pre_quant_scale": "ModelOpt INT4 AWQ",
    "q_perm": "EXL2",
    "q_scale_max": "EXL2",
    "trellis": "EXL3",
    "suh": "EXL3",
    "codebooks": "AQLM",
    "centroids": "VPTQ",
    "Qidxs": "QuIP#",
    "theta": "ParoQuant",
    "channel_scales": "ParoQuant",
    "s_channel": "QQQ",
    "s_group": "QQQ",
    "bitmask": "sparse-24",
    "scale_packed": "marlin-24",
    "input_scale": "quantized activations",
}
PACKED_3D = "_packed"
STORED_DTYPES = ("I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I32", "I16")
SCALE_NAMES = ("weight_scale", "weight_scale_inv", "scale", "SCB", "absmax", "weight.absmax", "input_scale")


def _shape_text(info: tuple[str, tuple[int, ...]]) -> str:
    return f"{info[0]} {list(info[1])}"


def foreign_companions(layout: str, local: Mapping[str, TensorInfo]) -> list[TensorInfo]:
    """Return tensors of a quantized module that its layout does not have (bias and stray workspace aside)."""
    known = {"bias", "workspace", *formats.get(layout).SUFFIXES}
    return [info for suffix, info in local.items() if suffix not in known]


def codes_missing(name: str, shapes: Shapes) -> W4PackError | None:
    """Describe a module that has scales or zero points of a known layout, but no codes."""
    for suffix, needs in (
        ("qzeros", "qweight"),
        ("g_idx", "qweight"),
        ("weight_shape", "weight_packed"),
        ("weight_zero_point", "weight_packed"),
    ):
        if suffix in shapes and needs not in shapes and "weight" not in shapes:
            return SourceError(
                f"`{needs}` is missing",
                code="missing-tensor",
                where=f"{name}.{needs}",
                expected=f"`{needs}` beside {', '.join(sorted(shapes))}",
                found="none",
            )
    return None


def unreadable(name: str, shapes: Shapes) -> W4PackError:
    """Describe a module whose tensors look quantized and fit no layout."""
    for suffix, method in COMPANIONS.items():
        if suffix in shapes:
            return Refused(
                f"`{name}` is quantized with {method}, which w4pack does not read",
                code="method-unknown",
                where=f"{name}.{suffix}",
                expected="GPTQ, AWQ, compressed-tensors pack-quantized, AutoRound or Marlin tensors",
                found=_shape_text(shapes[suffix]),
                hint=FROM_16_BIT,
            )
    found = ", ".join(f"{s} {_shape_text(v)}" for s, v in shapes.items())
    return Refused(
        "the tensors of a quantized layer fit no layout that w4pack reads",
        code="layout-unknown",
        where=name,
        expected=f"one of {', '.join(formats.FORMATS)}",
        found=found,
        hint=FROM_16_BIT,
    )


def foreign_weight(name: str, local: Mapping[str, TensorInfo]) -> W4PackError | None:
    """Return a refusal if a module without a known layout holds a weight that needs companions to be read."""
    fused = [s for s in local if s.endswith(PACKED_3D) and s != "weight_packed"]
    if fused:
        info = local[fused[0]]
        return Refused(
            "fused quantized experts are not a known layout",
            code="layout-unknown",
            where=info.name,
            expected="one 2-D linear per expert",
            found=f"{info.dtype} {list(info.shape)}",
            hint=FROM_16_BIT,
        )
    blocks = [s for s in local if s.endswith("_blocks") and s[: -len("_blocks")] + "_scales" in local]
    if blocks:
        info = local[blocks[0]]
        return Refused(
            "MXFP4 experts are not read",
            code="method-unknown",
            where=info.name,
            found=f"{info.dtype} {list(info.shape)}",
            hint=FROM_16_BIT,
        )
    if any(s in local for s in ("W_q", "trellis", "q_perm", "codebooks", "Qidxs", "centroids")):
        return unreadable(name, {s: (t.dtype, t.shape) for s, t in local.items()})
    weight = local.get("weight")
    if weight is None or weight.dtype not in STORED_DTYPES:
        return None
    scales = [s for s in SCALE_NAMES if s in local]
    if not scales:
        return None
    return Refused(
        f"a weight of {weight.dtype} with `{name_some(scales)}` is another kind of quantization",
        code="method-unknown",
        where=weight.name,
        expected="4 or 8 bit integers packed in int32, with scales",
        found=f"{weight.dtype} {list(weight.shape)} beside {name}.{scales[0]}",
        hint=FROM_16_BIT,
    )
