"""The 16-bit model that a quantization starts from, rotated or not: from names and headers, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from w4pack.convert.core import dtypes
from w4pack.convert.core.facts import Warning_
from w4pack.convert.core.families import natural_key
from w4pack.convert.errors import Refused
from w4pack.convert.files.tensorfile import TensorInfo, tensor_nbytes
from w4pack.convert.planning.heads import refuse_two_heads
from w4pack.convert.planning.online import refuse_other_targets
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.quantize_options import QuantizeOptions
from w4pack.convert.planning.quantizing import ModelTensors
from w4pack.convert.planning.rotation import decide_rotation, refuse_packed, stale
from w4pack.convert.rotate.plan import RotationPlan
from w4pack.convert.source.detect import Source


@dataclass(frozen=True, slots=True)
class Unquantized:
    """A source that can be quantized. ``rotation``: what is done to it first, or None."""

    model: ModelTensors
    rotation: RotationPlan | None
    warnings: tuple[Warning_, ...]


def unquantized(source: Source, options: ConvertOptions) -> Unquantized:
    """Look at a source that is to be quantized.

    Raises Refused for one that is quantized already or cannot be rotated as asked, and for a target that
    cannot carry what the options ask for.
    """
    refuse_other_targets(options)  # of the options alone, so it comes before anything is looked at
    warnings = refuse_quantized(source)
    changes: Mapping[str, Any] = {}
    infos, rotation = dict(source.checkpoint.tensors), None
    if options.rotate == "none":
        refuse_two_heads(source)
    else:
        decided, rotation, _ = decide_rotation(source, options)
        changes, warnings = rotation.config_changes, decided.warnings
        infos |= {new: _like(infos[start], new) for new, start in rotation.added.items()}
        infos = {name: infos[name] for name in sorted(infos, key=natural_key)}
        asked = options.quantize
        if asked is not None and asked.method == "rtn" and asked.group_size != -1:
            warnings += (_rotated_rtn(),)
    total = sum(t.nbytes for t in source.checkpoint.tensors.values())
    record = None if rotation is None else rotation.to_json()
    return Unquantized(ModelTensors(source.config, changes, infos, total, record), rotation, warnings)


def _like(info: TensorInfo, name: str) -> TensorInfo:
    return TensorInfo(name, info.dtype, info.shape, "", 0, tensor_nbytes(info.dtype, info.shape))


def asked_of(options: ConvertOptions) -> QuantizeOptions:
    """Return the options of quantization, where it is known that there are some."""
    if options.quantize is None:
        raise ValueError("nothing is to be quantized")
    return options.quantize


def as_recorded(options: ConvertOptions, text: str | None = None) -> ConvertOptions:
    """Return the options as a plan records them: of calibration text its name (``text``) or its file's."""
    asked = asked_of(options)
    if text is None and asked.calibration is not None:
        text = Path(asked.calibration).name
    return replace(options, quantize=replace(asked, calibration=text))


def refuse_quantized(source: Source) -> tuple[Warning_, ...]:
    """Raise Refused for a source whose weights are not 16 bit; warn of settings that say otherwise."""
    refuse_packed(source)
    wide = [t for t in source.dense if len(t.shape) >= 2]
    strange = [t for t in wide if t.dtype not in dtypes.FLOAT_TAGS]
    if strange:
        method = (source.quant_config or {}).get("quant_method", "no quantization config")
        raise Refused(
            "the source's weights are not 16 bit",
            code="already-quantized",
            where=strange[0].name,
            expected="float16, bfloat16 or float32",
            found=f"{strange[0].dtype} ({method})",
            hint="quantize the checkpoint that it was made from",
        )
    if source.quant_config is None and source.problems:
        raise Refused.together(source.problems)
    return stale(source)


def _rotated_rtn() -> Warning_:
    return Warning_(
        "rotated-rtn",
        "--rotate with --quantize rtn",
        "`--quantize gptq`",
        "rounding to nearest in groups, which often loses more on a rotated model than on the plain one",
    )
