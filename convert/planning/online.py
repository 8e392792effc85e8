"""What an artifact says of its runtime: transforms, quantizers of activations and of the cache, clip ratios.

Made from the options, the plan of the rotation and the ratios that were found; see ``dialects.online`` for
the records and who reads them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from w4pack.convert.core.scheme import WIDE
from w4pack.convert.dialects.online import ACT_SITES
from w4pack.convert.errors import Refused
from w4pack.convert.files.tensorfile import TensorInfo, tensor_nbytes
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.rotate.accounting import Model, account
from w4pack.convert.rotate.architecture import find
from w4pack.convert.rotate.folding import head_size
from w4pack.convert.rotate.plan import RotationPlan
from w4pack.convert.source.online_places import guide_of, refuse_architecture

Table = Mapping[int, float]  # bits -> clip ratio
ONLINE_TARGET = "marlin"
CLIPS_LATER = "searched on the calibration text when the run starts"  # what a plan says of ratios to be found


def runs_online(options: ConvertOptions) -> bool:
    """Tell whether the options ask for a model whose runtime does more than multiply."""
    asked = options.quantize
    bits = (WIDE, WIDE) if asked is None else (asked.act_bits, asked.kv_bits)
    return options.rotate == "full" or bits != (WIDE, WIDE)


def refuse_other_targets(options: ConvertOptions) -> None:
    """Raise Refused if the target cannot say what its runtime has to do."""
    asked = options.quantize
    found = [
        *(["transforms (R3, across heads, R4)"] if options.rotate == "full" else []),
        *([f"{asked.act_bits}-bit activations"] if asked and asked.act_bits != WIDE else []),
        *([f"a {asked.kv_bits}-bit cache"] if asked and asked.kv_bits != WIDE else []),
    ]
    if not found or (options.to == ONLINE_TARGET and asked is not None):
        return
    raise Refused(
        "the target cannot carry what has to run online",
        code="online-transforms",
        where=f"--to {options.to}",
        expected="`--to marlin` with `--quantize`: w4pack's own artifact, which its runtime reads",
        found=", ".join(found),
        hint="`--rotate offline` without `--act-bits` and `--kv-bits` keeps the model one of its class",
    )


def model_of(config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Model:
    """Return a model with the place of every linear. Raises Refused for a class that the runtime lacks."""
    architecture = find(config)
    model = account(architecture, config, infos)
    refuse_architecture(architecture)
    return model


def records(
    options: ConvertOptions,
    model: Model,
    rotation: RotationPlan | None,
    acts: Mapping[str, Table],
    keys: Table,
    values: Table,
    *,
    guided: bool = False,
) -> list[dict[str, Any]]:
    """Return the ``online`` records of an artifact.

    acts    site -> clip ratios; ``keys`` and ``values``: those of the cache
    guided  each layer has a guide of its keys

    Raises Refused for layers whose heads differ in size.
    """
    asked = options.quantize
    if asked is None:
        raise ValueError("nothing is quantized")
    made: list[dict[str, Any]] = [] if rotation is None else [dict(record) for record in rotation.online]
    if asked.sym:  # integer products take no zero points: activations stay 16 bit
        made += [
            {
                "kind": "act_quant",
                "site": site,
                "bits": asked.act_bits,
                "clip": _plain(acts[site]),
                "symmetric": True,
            }
            for site in ACT_SITES
        ]
    made.append(
        {
            "kind": "kv_quant",
            "bits": {"k": asked.kv_bits, "v": asked.kv_bits},
            "clip": {"k": _plain(keys), "v": _plain(values)},
            "group": _head(model),
            **({"guide": True} if guided else {}),
        }
    )
    return made


def with_ratios(
    online: Iterable[Mapping[str, Any]], acts: Mapping[str, Table], keys: Table, values: Table
) -> list[dict[str, Any]]:
    """Return ``records`` with other clip ratios; the arguments are those of ``records``."""
    made = []
    for record in online:
        changed = dict(record)
        if record["kind"] == "act_quant":
            changed["clip"] = _plain(acts[record["site"]])
        elif record["kind"] == "kv_quant":
            changed["clip"] = {"k": _plain(keys), "v": _plain(values)}
        made.append(changed)
    return made


def guides(model: Model) -> dict[str, TensorInfo]:
    """Return the header of each layer's guide of keys, by name.

    Raises Refused for layers whose heads differ in size.
    """
    shape = (2, model.kv_heads, _head(model))
    names = [guide_of(layer) for layer in model.layers]
    return {name: TensorInfo(name, "F32", shape, "", 0, tensor_nbytes("F32", shape)) for name in names}


def _plain(table: Table) -> dict[str, float]:
    return {str(bits): float(ratio) for bits, ratio in sorted(table.items())}


def _head(model: Model) -> int:
    sizes = {head_size(model, layer): layer.index for layer in model.layers}
    if len(sizes) == 1:
        return next(iter(sizes))
    raise Refused(
        "the layers have heads of different sizes, and the cache one layout",
        code="online-architecture",
        where=", ".join(f"layer {index}" for index in sizes.values()),
        expected="one head size",
        found=", ".join(map(str, sizes)),
        hint="nothing runs online without `--rotate full`, `--act-bits` and `--kv-bits`",
    )
